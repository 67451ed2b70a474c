"""The kernel of exponential moving averages (EMA) against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from lt_runtime.kernels.adamw import EMA, Tensor, ema_table
from lt_runtime.kernels.tiling import THREADS
from lt_runtime.problem import DType
from tests.host_kernels.arrays import EPS32, numbers, vector
from tests.host_kernels.cases import MORE, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.optimizer import sizes
from tests.host_kernels.variants import BF16, F16, F32, TYPES


@dataclass(frozen=True)
class Case:
    """Sizes, types of the values, and elements before the average and the value."""

    tensors: list[tuple[int, DType, int, int]]
    weight: float
    order: int
    seed: int


shifts = st.sampled_from((0, 0, 1, 4, 8))
cases = st.builds(
    Case,
    tensors=st.lists(st.tuples(sizes, st.sampled_from(TYPES), shifts, shifts), min_size=1, max_size=4),
    weight=st.sampled_from((1.0, 0.5, 0.1, 1e-4)),
    order=orders,
    seed=seeds,
)


@MORE
@example(Case([(300, F32, 0, 0), (7, BF16, 1, 0), (0, F16, 0, 0), (2500, F16, 0, 8)], 0.1, 0, 0))
@given(case=cases)
def test_averages(host: HostKernels, case: Case) -> None:
    generator = np.random.default_rng(case.seed)
    averages = [vector(numbers(generator, (size,), F32), F32, first) for size, _, first, _ in case.tensors]
    values = [vector(numbers(generator, (size,), dtype), dtype, first) for size, dtype, _, first in case.tensors]
    before = [average.array.astype(np.float64) for average in averages]
    table = ema_table(
        [
            Tensor(size, {"average": (average.address, F32), "value": (value.address, dtype)})
            for average, value, (size, dtype, *_) in zip(averages, values, case.tensors, strict=True)
        ]
    )
    params = EMA.params(table.ctypes.data, case.weight)
    host.get(EMA).launch((table.size, 1), (THREADS, 1), params, order=case.order)
    weight = float(np.float32(case.weight))
    for average, value, old in zip(averages, values, before, strict=True):
        new = value.array.astype(np.float64)
        bound = 3 * EPS32 * (np.abs(old) + weight * (np.abs(old) + np.abs(new))) + 1e-44
        assert (np.abs(average.values() - (old + weight * (new - old))) <= bound).all()
        value.assert_unchanged()
