"""The linear layer with its gradients, and matrix products with cuBLASLt's epilogues, in float64."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import Activation
from lt_runtime.reference.activations import Array, activate, derivative

Values: TypeAlias = NDArray[Any]
"""An array of any type of numbers, which is converted to float64."""

_LINEAR: Final = Activation()


class LinearGradients(NamedTuple):
    """dx (M, K), dw (N, K), db (N,), and dz (M, N), the gradient of the pre-activation."""

    dx: Array
    dw: Array
    db: Array
    dz: Array


def linear_fwd(
    x: Values,
    w: Values,
    bias: Values | None = None,
    activation: Activation = _LINEAR,
    dropout: Array | None = None,
    addend: Values | None = None,
) -> tuple[Array, Array]:
    """y = dropout(act(z)) + addend, z = x · wᵀ + bias.

    Args:
        x: (M, K). w: (N, K). bias: (N,).
        dropout: (M, N) factors, as from `dropout_scale`.
        addend: (M, N).

    Returns:
        y and z, both (M, N).
    """
    z = x.astype(np.float64) @ w.astype(np.float64).T
    if bias is not None:
        z = z + bias.astype(np.float64)
    y = activate(z, activation)
    y = y if dropout is None else y * dropout
    return (y if addend is None else y + addend.astype(np.float64)), z


def through_activation(dy: Values, z: Values, activation: Activation, dropout: Array | None = None) -> Array:
    """The gradient dz of the pre-activation z, from the gradient dy of the output dropout(act(z)); all (M, N)."""
    dz = dy.astype(np.float64) * derivative(z, activation)
    return dz if dropout is None else dz * dropout


def linear_bwd(
    dy: Values, x: Values, w: Values, z: Values, activation: Activation = _LINEAR, dropout: Array | None = None
) -> LinearGradients:
    """The gradients of `linear_fwd`, from the gradient dy of its output (M, N) and the pre-activation z (M, N)."""
    dz = through_activation(dy, z, activation, dropout)
    return LinearGradients(dz @ w.astype(np.float64), dz.T @ x.astype(np.float64), dz.sum(axis=0), dz)


class MatmulResult(NamedTuple):
    """D, the auxiliary output and the bias gradient; None for an output that the epilogue does not have.

    The auxiliary output is the pre-activation (…, M, N). ReLU's derivative needs only its sign (see `pack_mask`).
    """

    d: Array
    aux: Array | None
    bias_gradient: Array | None


def matmul(
    a: Values,
    b: Values,
    c: Values | None = None,
    *,
    alpha: float | Array = 1.0,
    beta: float = 0.0,
    epilogue: Epilogue = Epilogue.NONE,
    bias: Values | None = None,
    aux: Values | None = None,
) -> MatmulResult:
    """D = epilogue(α·A·B + β·C + bias).

    Args:
        a: (…, M, K). b: (…, K, N). c: (…, M, N); not read where β is 0.
        bias: (N,), for the epilogues that add a bias.
        aux: (…, M, N): for DGELU the pre-activation, for DRELU any array that is positive where the pre-activation was.

    Returns:
        The outputs. With an activation's derivative, D is the product times act'(aux), and the bias gradient (…, N) is
        the sum of D over M. With BGRADA and BGRADB the bias gradient is the sum of A (…, M) or B (…, N) over K, for
        each product of the batch: an operand that serves all products has equal sums for all.
    """
    product = alpha * (a.astype(np.float64) @ b.astype(np.float64))
    if c is not None and beta != 0:
        product = product + beta * c.astype(np.float64)
    if bias is not None:
        product = product + bias.astype(np.float64)[..., None, :]
    activation = Activation(epilogue.activation)
    if epilogue.is_derivative:
        assert aux is not None
        d = product * derivative(aux, activation)
        return MatmulResult(d, None, d.sum(axis=-2) if epilogue.has_bias_gradient else None)
    sums = None
    if epilogue.sums_operand:
        operand, axis = (a, -1) if epilogue is Epilogue.BGRADA else (b, -2)
        found = operand.astype(np.float64).sum(axis=axis)
        sums = np.broadcast_to(found, (*product.shape[:-2], found.shape[-1]))
    return MatmulResult(activate(product, activation), product if epilogue.has_aux_output else None, sums)


def rows_of(array: Any) -> Any:
    """Reshapes an array (..., N) to a matrix whose rows are all axes but the last; returns None for None."""
    return None if array is None else array.reshape(math.prod(array.shape[:-1]), array.shape[-1])


def pack_mask(positive: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """ReLU's auxiliary output: one bit an element, lowest bit first, with rows padded to 16 bytes.

    Args:
        positive: (…, rows, elements), true where the pre-activation is positive.

    Returns:
        (…, rows, bytes) uint8.
    """
    bits = np.packbits(positive, axis=-1, bitorder="little")
    padding = -bits.shape[-1] % 16
    return np.ascontiguousarray(np.pad(bits, [(0, 0)] * (bits.ndim - 1) + [(0, padding)]))


def unpack_mask(mask: NDArray[np.uint8], elements: int) -> NDArray[np.bool_]:
    """The inverse of `pack_mask`: (…, rows, elements) booleans."""
    return np.unpackbits(mask, axis=-1, count=elements, bitorder="little").astype(np.bool_)
