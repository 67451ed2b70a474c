"""FP8 in NumPy, bit for bit as the kernels: saturating casts, absolute maxima, and the scales that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

LARGEST: Final = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
"""The largest finite number of each FP8 type. E4M3 has 4 bits of exponent, 3 of mantissa, and no infinities."""
FP8_TYPES: Final = {name: np.dtype(getattr(ml_dtypes, name)) for name in LARGEST}
SCALE_EXPONENT: Final = 126
"""Scales are powers of two with exponents from -126 to 126. So a scale and its reciprocal are normal FP32 numbers."""
_NAN: Final = 0x7F  # The bits to which CUDA converts every NaN, in both FP8 types.
_MANTISSA_BITS: Final = 23  # Number of bits of FP32's mantissa.
_MANTISSA: Final = (1 << _MANTISSA_BITS) - 1
_INFINITY: Final = np.uint32(0x7F800000)  # the bits of infinity in FP32


def cast_fp8(x: NDArray[Any], scale: Any, dtype: str) -> NDArray[Any]:
    """x · scale, computed in FP32, rounded to nearest even and saturated; an infinite element becomes NaN.

    Args:
        x: any shape, of a type that FP32 contains.
        scale: FP32 number, or numbers that broadcast with x.
        dtype: name of an FP8 type.
    """
    with np.errstate(invalid="ignore"):  # NumPy warns of signalling NaNs, and of 0 · infinity, which is NaN
        numbers = x.astype(np.float32)
        scaled = numbers * np.float32(scale) + numbers * np.float32(0)
    cast = np.asarray(np.clip(scaled, -LARGEST[dtype], LARGEST[dtype])).astype(FP8_TYPES[dtype])
    cast.view(np.uint8)[np.isnan(scaled)] = _NAN
    return cast


def cast_fp8_rows(x: NDArray[Any], dtype: str) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Casts each row of a matrix to FP8 with a scale of its own; also returns 1 / scale of each row.

    A scale is the largest power of two by which no element of the row exceeds the type's largest number, and at most
    2^`SCALE_EXPONENT`. An infinite or NaN element counts as 2^128.
    """
    largest = np.minimum(np.abs(x.astype(np.float32)).view(np.uint32), _INFINITY).max(axis=1, initial=0)
    high = int(np.float32(LARGEST[dtype]).view(np.uint32))
    # A mantissa above that of the type's largest number carries into the exponent, which gives the next power of two.
    exponents = (largest + (_MANTISSA - (high & _MANTISSA)) >> _MANTISSA_BITS).astype(np.int64)
    exponents = np.maximum(exponents - (high >> _MANTISSA_BITS), -SCALE_EXPONENT)
    return cast_fp8(x, np.exp2(-exponents)[:, None], dtype), np.exp2(exponents).astype(np.float32)


def amax_of(x: NDArray[Any], least: Any = 0.0) -> np.float32:
    """The largest |x|, and at least `least`; infinity is larger than every number, and NaN larger than infinity."""
    bits, lowest = (np.abs(np.asarray(each, np.float32)).view(np.uint32) for each in (x, least))
    return np.float32(np.max(bits, initial=lowest.item()).astype(np.uint32).view(np.float32))


def next_fp8_scale(scale: Any, amax: Any, largest: float, headroom: float) -> np.float32:
    """The largest power of two s with amax · headroom · s ≤ `largest`, limited to exponents of ±`SCALE_EXPONENT`.

    Args:
        scale: the present scale, which stays if `amax` is 0, infinite or NaN.
        headroom: factor by which later absolute maxima may exceed `amax` without saturation.
    """
    amax = np.float32(amax)
    if not (np.isfinite(amax) and amax > 0):
        return np.float32(scale)
    with np.errstate(over="ignore"):
        reached = amax * np.float32(headroom)
    high, low = (int(np.float32(each).view(np.uint32)) for each in (largest, reached))
    exponent = (high >> _MANTISSA_BITS) - (low >> _MANTISSA_BITS) - ((low & _MANTISSA) > (high & _MANTISSA))
    return np.float32(2.0 ** max(-SCALE_EXPONENT, min(exponent, SCALE_EXPONENT)))


INVERSE, SCALE, AMAX, LARGEST_NUMBER, OVERFLOWS = range(5)
"""Columns of the slots, an FP32 array (tensors, `SLOT_WIDTH`) with the scales of some FP8 tensors.

The columns hold 1 / scale, by which a product is multiplied; the scale, by which the tensor is multiplied before it is
cast; the largest absolute value since the last update; the largest number of the tensor's type; and the number of
updates whose largest absolute value was beyond what the scale allows. A scale of 0 has not been found yet: the next
update computes it.
"""
SLOT_WIDTH: Final = 8


def fp8_slots(dtypes: Sequence[str]) -> NDArray[np.float32]:
    """Returns the slots (scales and maxima, see `INVERSE`) of tensors of these FP8 types, with scales of 1."""
    slots = np.zeros((len(dtypes), SLOT_WIDTH), np.float32)
    slots[:, [INVERSE, SCALE]] = 1.0
    slots[:, LARGEST_NUMBER] = [LARGEST[each] for each in dtypes]
    return slots


def update_fp8_scales(
    slots: NDArray[np.float32], history: NDArray[np.float32], headroom: float, *, skip: bool = False
) -> None:
    """Updates the scales in `slots`, and the history, for the next step: scales follow the history's largest value.

    Overflows are counted and the absolute maxima start again at 0 in any case. If a maximum is infinite or NaN, or with
    `skip`, the tensor's scale and history stay as they are. A scale of 0 that no maximum replaces becomes 1.

    Args:
        slots: (tensors, `SLOT_WIDTH`), see the names of its columns.
        history: (tensors, steps) absolute maxima, the latest first.
        headroom: see `next_fp8_scale`.
        skip: whether the step is skipped, as for a gradient that is not finite.
    """
    for slot, past in zip(slots, history, strict=True):
        amax = slot[AMAX]
        slot[AMAX] = 0
        with np.errstate(invalid="ignore"):  # NumPy warns of infinity · 0, which counts as an overflow
            slot[OVERFLOWS] += not amax * slot[SCALE] <= slot[LARGEST_NUMBER]
        if not skip and np.isfinite(amax):
            past[1:], past[0] = past[:-1].copy(), amax
            slot[SCALE] = next_fp8_scale(slot[SCALE], past.max(), float(slot[LARGEST_NUMBER]), headroom)
        slot[SCALE] = slot[SCALE] or 1
        slot[INVERSE] = 1 / slot[SCALE]


def fault_of(slots: NDArray[np.float32], history: NDArray[np.float32]) -> str:
    """Says which scales no update can reach, as the end of an error message; empty if there are none."""
    scales, inverses, counts = slots[:, SCALE], slots[:, INVERSE], slots[:, OVERFLOWS]
    with np.errstate(all="ignore"):
        mantissas, exponents = np.frexp(scales)  # in [0.5, 1)
        is_possible = (mantissas == 0.5) & (abs(exponents - 1) <= SCALE_EXPONENT) & (inverses == 1 / scales)
        if not is_possible.all():
            return f"slots has the scales {scales.tolist()}, 1 / {inverses.tolist()}"
        if not np.isin(slots[:, LARGEST_NUMBER], [*LARGEST.values()]).all() or (slots[:, AMAX] < 0).any():
            return "slots has magnitudes that no FP8 type has"
        if not (np.isfinite(counts) & (counts >= 0)).all():
            return f"slots has the counts {counts.tolist()}"
    if not (np.isfinite(history) & (history >= 0)).all():
        return "history has magnitudes that are negative, infinite or NaN"
    return ""
