"""The casts of a linear layer's tensors to FP8 in NumPy, with the layer's scales."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lt_runtime.fp8 import Precision, Prologue
from lt_runtime.problem import Philox
from lt_runtime.reference.activations import activate
from lt_runtime.reference.fp8 import AMAX, INVERSE, SCALE, amax_of, cast_fp8, cast_fp8_rows, update_fp8_scales
from lt_runtime.reference.gated import gated_fwd
from lt_runtime.reference.philox import dropout_factors

CastTensor: TypeAlias = tuple[NDArray[np.float64], NDArray[Any], NDArray[Any]]
"""A matrix rounded to FP8, its transpose in FP8, and the scales of the transpose.

The scales are the tensor's slot, see `INVERSE`; with the recipe "rowwise" they are 1 / scale of each of the transpose's
rows.
"""


def after_prologue(prologue: Prologue, x: NDArray[Any], rng: Philox | None) -> NDArray[Any]:
    """dropout(act(x)), or dropout(act(gate) · value) with x = (gate, value), rounded to FP32."""
    y = gated_fwd(x, prologue.activation) if prologue.gated else activate(x.astype(np.float64), prologue.activation)
    factors = dropout_factors(y.shape, prologue.dropout, rng)
    return (y if factors is None else y * factors).astype(np.float32)


def cast_tensor(
    x: NDArray[Any], row: int, precision: Precision, slots: NDArray[Any], history: NDArray[Any]
) -> CastTensor:
    """Casts a layer's tensor, and collects its largest magnitude in its slot.

    If `precision.calibrates`, the scale in the slot is first computed from x.

    Args:
        row: the tensor's row in the slots and in the history of largest magnitudes.
    """
    recipe, slot = precision.recipe, slots[row]
    dtype = recipe.dtypes[row].value
    if recipe.by_rows:
        cast, scales = cast_fp8_rows(x, dtype)
        return cast.astype(np.float64) * scales[:, None], *cast_fp8_rows(x.T, dtype)
    if precision.calibrates:
        slot[SCALE], slot[AMAX] = 0, np.maximum(slot[AMAX], amax_of(x))
        update_fp8_scales(slots[row : row + 1], history[row : row + 1], recipe.margin)
    if recipe.recipe == "delayed":
        slot[AMAX] = amax_of(x, slot[AMAX])
    return given_tensor(cast_fp8(x, slot[SCALE], dtype), slot)


def given_tensor(x8: NDArray[Any], slot: NDArray[Any]) -> CastTensor:
    """Makes the `CastTensor` of a matrix that has been cast to FP8 with the scale in a slot."""
    return x8.astype(np.float64) * slot[INVERSE], x8.T, slot


def represented(transposed: NDArray[Any], scales: NDArray[Any], precision: Precision) -> NDArray[np.float64]:
    """The values that a transpose in FP8 represents; both arrays are of a `CastTensor`."""
    factors: NDArray[np.float64] = scales[:, None] if precision.recipe.by_rows else scales[INVERSE]
    return transposed.astype(np.float64) * factors
