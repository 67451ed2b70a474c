"""`lt.add` on the pretended GPU: repeated calls, layouts, and sums that overwrite an operand."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from lt_runtime.problem import DType
from tests.support.fake_gpu import FakeGpu
from tests.support.placed import COLUMNS, FLAT, ODD, Placed, host_of
from tests.support.strategies import Placement

_CALLS = 5  # the first call makes a plan; later calls are looked up, and then replay a graph
_SHAPE = 12, 16


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("over", [0, 1, 2], ids=["over a", "over b", "apart"])
@pytest.mark.parametrize(("odd", "place"), [(None, FLAT), *itertools.product((0, 1, 2), (ODD, COLUMNS))])
def test_same_buffers_with_other_contents(
    gpu: FakeGpu, dtype: DType, over: int, odd: int | None, place: Placement
) -> None:
    """One of the operands has another layout than the others."""
    placed = [Placed(gpu, np.zeros(_SHAPE, dtype.numpy), place if i == odd else FLAT) for i in range(3)]
    a, b, out = placed[0], placed[1], placed[over]
    for seed in range(_CALLS):
        generator = np.random.default_rng(seed)
        values = [generator.standard_normal(_SHAPE).astype(dtype.numpy) for _ in range(2)]
        a.fill(values[0])
        b.fill(values[1])
        assert gpu.lt.add(a.array, b.array, out=out.array, stream=gpu.stream) is out.array
        gpu.synchronize(gpu.stream.ptr)
        exact = sum(each.astype(np.float64) for each in values)
        np.testing.assert_array_equal(out.values(), np.asarray(exact).astype(dtype.numpy).astype(np.float64))


@pytest.mark.parametrize("shape", [(), (7,), (2, 5, 3), (3, 0), (2, 3, 8)])
def test_leading_axes_and_new_arrays(gpu: FakeGpu, shape: tuple[int, ...]) -> None:
    before, values = len(gpu.kernels.launched), np.random.default_rng(7).standard_normal(shape).astype(np.float32)
    given: Any = gpu.cp.asarray(np.asarray(values))
    for _ in range(_CALLS):
        made = gpu.lt.add(given, given, stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        np.testing.assert_array_equal(host_of(gpu, made), 2 * values)
    assert (len(gpu.kernels.launched) > before) == (values.size > 0)
