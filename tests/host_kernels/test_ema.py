"""The kernel of exponential moving averages (EMA) against float64."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from lt_runtime.kernels.optimizer import EMA, Tensor, ema_table
from lt_runtime.kernels.tiling import THREADS
from lt_runtime.problem import DType
from tests.host_kernels.arrays import EPS32, numbers, vector
from tests.host_kernels.cases import FEW, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.optimizer import sizes
from tests.host_kernels.variants import BF16, F16, F32, TYPES

shifts = st.sampled_from((0, 0, 1, 4, 8))
tensors = st.tuples(sizes, st.sampled_from(TYPES), shifts, shifts)
"""Draws a case: size, type of the values, and by how many elements the average and the value are misaligned."""


@FEW
@example([(300, F32, 0, 0), (7, BF16, 1, 0), (300, BF16, 1, 0), (0, F16, 0, 0), (2500, F16, 0, 8)], 0.1, 0, 0)
@given(st.lists(tensors, min_size=1, max_size=4), st.sampled_from((1.0, 0.5, 0.1, 1e-4)), orders, seeds)
def test_averages(
    host: HostKernels, drawn: list[tuple[int, DType, int, int]], weight: float, order: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    averages = [vector(numbers(generator, (size,), F32), F32, first) for size, _, first, _ in drawn]
    values = [vector(numbers(generator, (size,), dtype), dtype, first) for size, dtype, _, first in drawn]
    for average, value in zip(averages, values, strict=True):
        average.array[:, ::3] = value.array[:, ::3]
    before = [average.array.astype(np.float64) for average in averages]
    rows = [
        Tensor(size, {"average": (average.address, F32), "value": (value.address, dtype)})
        for average, value, (size, dtype, *_) in zip(averages, values, drawn, strict=True)
    ]
    table = ema_table(rows)
    params = EMA.params(table.ctypes.data, weight)
    host.get(EMA).launch((table.size, 1), (THREADS, 1), params, order=order)
    weight = float(np.float32(weight))
    for average, value, old in zip(averages, values, before, strict=True):
        new = value.array.astype(np.float64)
        bound = 3 * EPS32 * (np.abs(old) + weight * (np.abs(old) + np.abs(new))) + 1e-44
        assert (np.abs(average.values() - (old + weight * (new - old))) <= bound).all()
        is_equal = old == new  # an average that equals its value must not change
        assert np.array_equal(average.values()[is_equal], old[is_equal])
        value.assert_unchanged()
