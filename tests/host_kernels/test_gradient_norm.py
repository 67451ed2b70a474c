"""The kernel of the gradients' norm against float64; NaN, infinity and overflow are counted or appear in the norm."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lt_runtime import reference
from lt_runtime.grad_scaler import GradScaler
from lt_runtime.kernels.tiling import THREADS
from lt_runtime.problem import DType
from tests.host_kernels.arrays import EPS32
from tests.host_kernels.cases import FEW, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.optimizer import OPTIONS, HostOptimizer, HostTensor, TensorCase
from tests.host_kernels.variants import BF16, F16, F32, PLAIN_ADAMW, TYPES

sizes = st.one_of(st.integers(0, 40), st.sampled_from((255, 1024, 5000, 16384, 16385, 40000)))
tensors = st.tuples(sizes, st.sampled_from(TYPES), st.sampled_from((0, 0, 1, 4, 8)))
"""Draws a gradient: size, type, and the number of elements between an aligned address and the first element."""


def measured(
    host: HostKernels, gradients: list[np.ndarray], offsets: list[int], scale: float | None = None, order: int = 0
) -> tuple[float, int]:
    """Runs the kernel; returns the norm, and the number of threads that found a NaN or infinite element."""
    tensors = []
    for gradient, offset in zip(gradients, offsets, strict=True):
        dtype = DType.parse("gradient", gradient.dtype)
        case = TensorCase(gradient.size, gradient_dtype=dtype, offsets=(0, offset, 0))
        tensors.append(HostTensor(case, PLAIN_ADAMW, 0, gradient))
    scaler = None if scale is None else GradScaler(scale)
    optimizer = HostOptimizer(host, PLAIN_ADAMW, replace(OPTIONS, scaler=scaler))
    optimizer.measure(tensors, order)
    for tensor in tensors:
        tensor.gradient.assert_unchanged()
    return float(optimizer.state["norm"][0]), int(optimizer.state["nonfinite"][0])


@FEW
@example([(16500, F32, 0), (70, BF16, 1), (0, F16, 0), (2049, F16, 0)], 4.0, 0, 0)
@given(st.lists(tensors, min_size=1, max_size=4), st.sampled_from((None, 1.0, 65536.0, 3.0, 2.0**-20)), orders, seeds)
def test_norms(host: HostKernels, drawn: list[tuple[int, DType, int]], scale: Any, order: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    gradients = [generator.standard_normal(size).astype(dtype.numpy) for size, dtype, _ in drawn]
    norm, nonfinite = measured(host, gradients, [offset for *_, offset in drawn], scale, order)
    expected, _ = reference.gradient_norm(gradients, scale or 1.0)
    assert norm == pytest.approx(expected, rel=8 * EPS32)
    assert nonfinite == 0


def test_order_changes_no_bit(host: HostKernels) -> None:
    generator = np.random.default_rng(3)
    gradients = [generator.standard_normal(size).astype(np.float32) for size in (40000, 17, 9000)]
    norms = {measured(host, gradients, [0, 1, 0], order=order) for order in range(5)}
    assert len(norms) == 1


def test_a_long_sum_keeps_its_precision(host: HostKernels) -> None:
    # a sequential FP32 sum would lose the small numbers after the large one
    gradient = np.full(200_000, 1e-4, np.float32)
    gradient[0] = 1.0
    norm, _ = measured(host, [gradient], [0])
    expected, _ = reference.gradient_norm([gradient])
    assert norm == pytest.approx(expected, rel=4 * EPS32)


@pytest.mark.parametrize("place", [0, 7, 4096, 16383, 16390, 16392])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_is_seen(host: HostKernels, bad: float, dtype: DType, place: int) -> None:
    gradient = np.ones(16393, dtype.numpy)
    gradient[place] = bad
    norm, nonfinite = measured(host, [np.ones(5, np.float32), gradient], [0, 0])
    assert nonfinite == 1
    assert math.isnan(norm) if math.isnan(bad) else norm == math.inf


@pytest.mark.parametrize("offset", [0, 1])
def test_an_overflown_sum_is_not_a_bad_element(host: HostKernels, offset: int) -> None:
    gradient = np.full(3000, 3e38, np.float32)
    assert measured(host, [gradient], [offset]) == (math.inf, 0)
    norm, nonfinite = measured(host, [gradient], [offset], scale=2.0**100)
    assert nonfinite == 0
    assert norm == pytest.approx(3e38 * 2.0**-100 * math.sqrt(3000), rel=8 * EPS32)


def test_the_largest_numbers_are_finite(host: HostKernels) -> None:
    for dtype, largest in ((F32, np.finfo(np.float32).max), (F16, 65504.0), (BF16, 3.3895313892515355e38)):
        gradient = np.array([largest, -largest], dtype.numpy)
        assert np.isfinite(gradient.astype(np.float64)).all()
        assert measured(host, [gradient], [0])[1] == 0


def test_more_chunks_than_a_block_adds_up_at_once(host: HostKernels) -> None:
    """A thread of the last block adds up eight of the blocks' sums at a time."""
    tensor, last = (HostTensor(TensorCase(1), PLAIN_ADAMW, 0, [value]) for value in (0.0, 3.0))
    optimizer = HostOptimizer(host, PLAIN_ADAMW, OPTIONS)
    optimizer.measure([*[tensor] * (8 * THREADS), last])
    assert optimizer.state["norm"] == 3.0
