"""The semantics of every operation, in NumPy with float64 arithmetic.

Tests compare every result with this package, and calls on NumPy arrays run it. Results are float64; the callers round
them once, to the operands' type.
"""

from lt_runtime.reference.activations import activate, derivative
from lt_runtime.reference.fp8 import amax_of, cast_fp8, cast_fp8_rows, fp8_slots, next_fp8_scale, update_fp8_scales
from lt_runtime.reference.gated import gated_bwd, gated_fwd
from lt_runtime.reference.loss import bce_with_logits, cross_entropy, huber_loss, mse_loss
from lt_runtime.reference.norm import layer_norm_fwd, norm_bwd, rms_norm_fwd
from lt_runtime.reference.optimizer import (
    clip_factor,
    gradient_norm,
    learning_rate_factor,
    next_scale,
    rule_update,
    update_in_place,
)
from lt_runtime.reference.philox import dropout_factors, dropout_mask, dropout_scale, philox4x32
from lt_runtime.reference.products import linear_bwd, linear_fwd, matmul, pack_mask, through_activation, unpack_mask
from lt_runtime.reference.rounding import RoundedTensor, round_stochastically, rounding_lanes
