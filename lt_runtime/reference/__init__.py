"""The semantics of every operation, in NumPy with float64 arithmetic.

It is the oracle of every test, and what runs when operands are NumPy arrays. Results are float64 and unrounded;
the callers round them once, to the operands' type.
"""

from lt_runtime.reference.activations import activate, derivative
from lt_runtime.reference.adamw import AdamWHyper, adamw_update, learning_rate_factor
from lt_runtime.reference.linear import linear_bwd, linear_fwd
from lt_runtime.reference.loss import cross_entropy, mse_loss
from lt_runtime.reference.matmul import MatmulResult, matmul, pack_mask, unpack_mask
from lt_runtime.reference.philox import dropout_mask, dropout_scale, philox4x32

__all__ = [
    "AdamWHyper",
    "MatmulResult",
    "activate",
    "adamw_update",
    "cross_entropy",
    "derivative",
    "dropout_mask",
    "dropout_scale",
    "learning_rate_factor",
    "linear_bwd",
    "linear_fwd",
    "matmul",
    "mse_loss",
    "pack_mask",
    "philox4x32",
    "unpack_mask",
]
