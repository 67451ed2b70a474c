"""FP8 casts on the GPU against NumPy's, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime.problem import DType
from lt_runtime.reference import amax_of, cast_fp8
from lt_runtime.reference.fp8 import FP8_TYPES, cast_fp8_rows
from tests.support.placed import FLAT, Placed
from tests.support.strategies import TYPES, Placement, placements, sizes


@settings(max_examples=150, deadline=None)
@given(
    shape=st.one_of(st.tuples(sizes, sizes), st.sampled_from(((704, 4096), (16, 8208), (1000, 768), (3, 100_003)))),
    places=st.tuples(placements, placements, placements),
    flat=st.booleans(),
    dtype=st.sampled_from(list(TYPES)),
    to=st.sampled_from(list(FP8_TYPES)),
    scale=st.sampled_from((1.0, 2.0**-5, 300.0)),
    seed=st.integers(0, 2**32 - 1),
)
def test_casts(
    gpu: Any,
    shape: tuple[int, int],
    places: tuple[Placement, ...],
    flat: bool,
    dtype: DType,
    to: Any,
    scale: float,
    seed: int,
) -> None:
    values = np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype.numpy)
    results = (np.zeros(each, FP8_TYPES[to]) for each in (shape, shape[::-1]))
    x, out, transposed = (
        Placed(gpu, each, FLAT if flat else place) for each, place in zip((values, *results), places, strict=True)
    )
    amax = gpu.cp.zeros(1, np.float32)
    device_scale = gpu.cp.asarray(np.float32([scale]))
    lt.cast_fp8(x.array, device_scale, dtype=to, out=out.array, out_transposed=transposed.array, amax=amax)
    expected = cast_fp8(values, scale, to).astype(np.float64)
    np.testing.assert_array_equal(out.values(), expected)
    np.testing.assert_array_equal(transposed.values(), expected.T)
    assert float(amax[0]) == amax_of(values)


@pytest.mark.parametrize("shape", [(704, 4096), (48, 8208), (1000, 768), (3, 100_003), (65, 33)])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("to", FP8_TYPES)
def test_casts_with_a_scale_for_each_row(gpu: Any, to: Any, dtype: DType, shape: tuple[int, int]) -> None:
    """Rows and columns have magnitudes that differ by 2^12, and some elements are infinite or NaN."""
    generator = np.random.default_rng(5)
    sizes = np.outer(*(np.exp2(generator.uniform(-6, 6, each)) for each in shape))
    values = (generator.standard_normal(shape) * sizes).astype(dtype.numpy)
    values[0, :3], values[2] = (np.inf, np.nan, -np.inf), 0
    out, transposed, *scales = lt.cast_fp8_rows(gpu.cp.asarray(values), dtype=to)
    for source, found, inverse in ((values, out, scales[0]), (values.T, transposed, scales[1])):
        expected, factors = cast_fp8_rows(source, to)
        np.testing.assert_array_equal(gpu.cp.asnumpy(found.view(np.uint8)), expected.view(np.uint8))
        np.testing.assert_array_equal(gpu.cp.asnumpy(inverse), factors)


@pytest.mark.parametrize("to", FP8_TYPES)
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_every_number_of_sixteen_bits(gpu: Any, dtype: DType, to: Any) -> None:
    """Every 16-bit pattern, NaN and infinities included, is converted as by NumPy."""
    values = np.arange(1 << 16, dtype=np.uint16).view(dtype.numpy).reshape(256, 256)
    amax = gpu.cp.zeros(1, np.float32)
    rows, transposed = lt.cast_fp8(gpu.cp.asarray(values), dtype=to, amax=amax)
    expected = cast_fp8(values, 1.0, to).view(np.uint8)
    np.testing.assert_array_equal(gpu.cp.asnumpy(rows.view(np.uint8)), expected)
    np.testing.assert_array_equal(gpu.cp.asnumpy(transposed.view(np.uint8)), expected.T)
    assert np.isnan(float(amax[0]))
    numbers = values[:124]  # a part of the numbers in which neither type has an infinity or NaN
    lt.cast_fp8(gpu.cp.asarray(numbers), dtype=to, amax=(finite := gpu.cp.zeros(1, np.float32)))
    assert float(finite[0]) == amax_of(numbers)
