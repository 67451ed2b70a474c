"""FP8 casts, maxima and scales in NumPy, against the formats' definitions decoded bit by bit."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.reference import amax_of, cast_fp8, fp8_slots, next_fp8_scale, update_fp8_scales
from lt_runtime.reference.fp8 import AMAX, INVERSE, LARGEST, OVERFLOWS, SCALE, SCALE_EXPONENT, cast_fp8_rows

FORMATS = {"float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2)}
"""For each FP8 type, the bits of the exponent and of the mantissa."""


@functools.cache
def decoded(dtype: str) -> dict[int, float]:
    """Maps each non-negative code of an FP8 format to its value; NaN and infinity are left out."""
    exponent_bits, mantissa_bits = FORMATS[dtype]
    bias, values = 2 ** (exponent_bits - 1) - 1, {}
    for code in range(128):
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        is_special = exponent == 2**exponent_bits - 1 if dtype == "float8_e5m2" else code == 0x7F
        if not is_special:
            fraction = mantissa / 2**mantissa_bits
            values[code] = math.ldexp(fraction + (exponent > 0), max(exponent, 1) - bias)
    return values


def rounded(value: float, dtype: str) -> int:
    """The code of the nearest number (of two equally near, the even one); values beyond the largest number saturate."""
    codes, magnitude = decoded(dtype), min(abs(value), 1e9)
    above = bisect.bisect([*codes.values()], magnitude)  # values ascend with their codes
    near = [*codes][max(above - 1, 0) : above + 1]
    nearest = min(near, key=lambda code: (abs(Fraction(codes[code]) - Fraction(magnitude)), code % 2))
    return nearest | (0x80 if math.copysign(1.0, value) < 0 else 0)


def bits(values: NDArray[np.float32], dtype: str) -> list[int]:
    return [int(each) for each in cast_fp8(values, 1.0, dtype).view(np.uint8)]


@pytest.mark.parametrize("dtype", FORMATS)
def test_codes_midpoints_and_their_neighbours(dtype: str) -> None:
    values = [*decoded(dtype).values()]
    midpoints = [(low + high) / 2 for low, high in itertools.pairwise(values)]
    near = np.float32([*values, *midpoints, LARGEST[dtype] * 1.01, 3e38, 1e-40, 0.0])
    near = np.concatenate(
        [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf)), -near]
    )
    assert bits(near, dtype) == [rounded(float(each), dtype) for each in near]


@pytest.mark.parametrize("dtype", FORMATS)
def test_elements_that_are_not_finite_become_nan(dtype: str) -> None:
    """FP32 infinity becomes NaN. FP32's largest finite number saturates, even if it overflows when scaled."""
    largest = max(decoded(dtype))
    assert max(decoded(dtype).values()) == LARGEST[dtype]
    with np.errstate(over="ignore"):
        cast = cast_fp8(np.float32([3e38, -3e38, np.inf, -np.inf, np.nan, -np.nan]), 4.0, dtype)
    assert [*cast.view(np.uint8)] == [largest, largest | 0x80, *[0x7F] * 4]


@pytest.mark.parametrize("scale", [2.0**-3, 2.0**10, 0.7, -1.5])
def test_the_scaled_number_is_rounded_to_fp32_and_then_once(scale: float) -> None:
    x = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    scaled = [float(np.float32(each * np.float32(scale))) for each in x]
    found = cast_fp8(x, scale, "float8_e5m2").view(np.uint8)
    assert [int(each) for each in found] == [rounded(each, "float8_e5m2") for each in scaled]


@pytest.mark.parametrize(
    ("values", "amax"),
    [
        ([1.0, -3.0, 2.0], 3.0),
        ([0.0, -0.0], 0.0),
        ([], 0.0),
        ([1e-45, 0.0], 1e-45),
        ([3e38, -np.inf], np.inf),
        ([np.inf, np.nan, 1.0], np.nan),
    ],
)
def test_absolute_maxima(values: list[float], amax: float) -> None:
    np.testing.assert_array_equal(amax_of(np.float32(values)), np.float32(amax))


@given(
    amax=st.floats(2.0**-149, 2.0**128 - 2.0**104, width=32),
    headroom=st.sampled_from((1.0, 2.0, 1.5, 16.0)),
    dtype=st.sampled_from(list(FORMATS)),
)
def test_a_scale_is_the_largest_power_of_two_that_fits(amax: float, headroom: float, dtype: str) -> None:
    scale = float(next_fp8_scale(3.0, amax, LARGEST[dtype], headroom))
    mantissa, exponent = math.frexp(scale)
    assert mantissa == 0.5
    reached = Fraction(float(np.float32(amax) * np.float32(headroom))) if amax * headroom < 3.4e38 else None
    limit = SCALE_EXPONENT + 1
    assert abs(exponent - 1) <= SCALE_EXPONENT
    if reached is not None and reached >= Fraction(2) ** -126:
        assert exponent == limit or reached * Fraction(scale) * 2 > LARGEST[dtype]
        assert exponent == 2 - limit or reached * Fraction(scale) <= LARGEST[dtype]
    else:
        assert exponent == limit or reached is None


@pytest.mark.parametrize("amax", [0.0, np.inf, np.nan])
def test_a_scale_stays_where_the_maximum_says_nothing(amax: float) -> None:
    assert next_fp8_scale(0.25, amax, 448.0, 2.0) == 0.25


def test_scales_follow_the_largest_value_of_the_history() -> None:
    """The history has three steps; a skipped step or a maximum that is not finite changes neither scale nor history."""
    slots, history = fp8_slots(["float8_e4m3fn"]), np.zeros((1, 3), np.float32)
    seen = []
    for amax, skip in ((7.0, False), (1.0, False), (np.inf, False), (100.0, True), (1.0, False), (1.0, False)):
        slots[0, AMAX] = amax
        update_fp8_scales(slots, history, 2.0, skip=skip)
        assert slots[0, AMAX] == 0
        assert slots[0, INVERSE] * slots[0, SCALE] == 1
        seen.append((float(slots[0, SCALE]), float(slots[0, OVERFLOWS])))
    # Scales are 448 / (2 · largest), rounded down to a power of two: 448 / (2 · 7) = 32. The products 100 · 32 and
    # infinity exceed 448, and count as overflows. When 7 has left the history, 448 / 2 = 224 gives 128.
    assert seen == [(32, 0), (32, 0), (32, 1), (32, 2), (32, 2), (128, 2)]
    assert history.tolist() == [[1, 1, 1]]


@pytest.mark.parametrize("dtype", FORMATS)
@given(rows=st.lists(st.lists(st.floats(width=32), min_size=3, max_size=3), min_size=1, max_size=5))
def test_scales_of_rows(dtype: str, rows: list[list[float]]) -> None:
    """A row's scale is the largest power of two that fits, in exact arithmetic."""
    cast, inverse = cast_fp8_rows(np.float32(rows), dtype)
    for row, made, factor in zip(rows, cast, inverse, strict=True):
        finite = all(map(math.isfinite, row))
        amax = Fraction(max(map(abs, row))) if finite else Fraction(2) ** 128
        mantissa, exponent = math.frexp(float(factor))
        assert mantissa == 0.5
        assert amax / Fraction(float(factor)) <= Fraction(LARGEST[dtype])
        assert exponent == 1 - SCALE_EXPONENT or 2 * amax / Fraction(float(factor)) > Fraction(LARGEST[dtype])
        expected = cast_fp8(np.float32(row), np.float32(1 / factor), dtype)
        np.testing.assert_array_equal(made.view(np.uint8), expected.view(np.uint8))
