"""Gated activations on the GPU against the reference, in all types, layouts and activations."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.problem import ACTIVATIONS, Activation, DType, Philox
from tests.host_kernels.arrays import assert_close, rounding
from tests.support.gpu_arrays import EPSILON, to_host
from tests.support.placed import Placed
from tests.support.strategies import TYPES, Placement, activations, generators, placements, sizes

RNG = Philox(2**40 + 3, 5, 7)
_TINY = 1e-6


def check(h: Any, dy: Any, y: Any, dh: Any, activation: Activation, factors: Any) -> None:
    """Compares y and dh with the float64 reference; h and dy are NumPy arrays of the operands' type."""
    dtype, size = DType.parse("h", h.dtype), np.max(factors, initial=1.0) * max(1.0, abs(activation.negative_slope))
    gate, value = (np.abs(each.astype(np.float64)) for each in np.split(h, 2, axis=-1))
    expected = reference.gated_fwd(h, activation, factors)
    error = 16 * EPSILON[DType.FLOAT32] * size * (1 + gate)
    assert_close("y", y, expected, rounding(dtype, expected) + error * value + _TINY)
    expected = reference.gated_bwd(dy, h, activation, factors)
    error *= 2 * np.abs(dy.astype(np.float64))
    tolerance = rounding(dtype, expected) + np.concatenate([error * value, error], axis=-1) + _TINY
    assert_close("dh", dh, expected, tolerance)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape", [(5, 3), (700, 96), (129, 771), (3, 50, 264)])
def test_results(dtype: DType, activation: Any, p: float, shape: tuple[int, ...]) -> None:
    generator, wide = np.random.default_rng(shape[0]), (*shape[:-1], 2 * shape[-1])
    h, dy = (generator.standard_normal(each, np.float32).astype(dtype.numpy) for each in (wide, shape))
    factors = reference.dropout_scale(shape, p, RNG) if p else np.ones(shape)
    y, ctx = lt.gated_fwd(cp.asarray(h), activation=activation, dropout=p, rng=RNG)
    dh = lt.gated_bwd(cp.asarray(dy), ctx)
    assert (y.dtype, dh.dtype, dh.shape) == (h.dtype, h.dtype, wide)
    check(h, dy, to_host(y), to_host(dh), Activation(activation), factors)
    remade = cp.asarray(dy)
    assert lt.gated_bwd(remade, ctx, remake_y=True, out=ctx.h) is ctx.h  # y overwrites dy, and dh overwrites h
    np.testing.assert_array_equal(to_host(ctx.h), to_host(dh))
    np.testing.assert_array_equal(to_host(remade), to_host(y))


@settings(max_examples=150, deadline=None)
@given(
    rows=sizes,
    cols=sizes,
    places=st.tuples(placements, placements, placements, placements),
    dtype=st.sampled_from(list(TYPES)),
    activation=activations,
    p=st.sampled_from((0.0, 0.1, 0.5)),
    rng=generators,
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layout(
    gpu: Any,
    rows: int,
    cols: int,
    places: tuple[Placement, ...],
    dtype: DType,
    activation: Activation,
    p: float,
    rng: Philox,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    values = [generator.standard_normal((rows, n), np.float32).astype(dtype.numpy) for n in (2 * cols, cols)]
    empty = [np.zeros_like(each) for each in values]
    h, dy, dh, y = (Placed(gpu, each, place) for each, place in zip((*values, *empty), places, strict=True))
    _, ctx = lt.gated_fwd(h.array, activation=activation, dropout=p, rng=rng, out=y.array)
    lt.gated_bwd(dy.array, ctx, out=dh.array)
    factors = reference.dropout_scale((rows, cols), p, rng) if p else np.ones((rows, cols))
    check(*values, y.values(), dh.values(), activation, factors)


@pytest.mark.parametrize("cols", [40, 67])
def test_a_captured_pass_reads_its_step_at_each_replay(cols: int) -> None:
    h, dy, step = cp.ones((500, 2 * cols), cp.float32), cp.ones((500, cols), cp.float32), cp.zeros(1, cp.uint32)
    y, dh, stream = cp.empty_like(dy), cp.empty_like(h), cp.cuda.Stream(non_blocking=True)

    def run() -> None:
        _, ctx = lt.gated_fwd(h, activation="none", dropout=0.5, rng=lt.Philox(3, 1, step), out=y, stream=stream)
        lt.gated_bwd(dy, ctx, out=dh, stream=stream)

    cp.cuda.get_current_stream().synchronize()
    run()
    stream.begin_capture()
    run()
    graph = stream.end_capture()
    for number in range(4):
        step.fill(number)
        cp.cuda.get_current_stream().synchronize()
        graph.launch(stream)
        stream.synchronize()
        expected = reference.dropout_scale((500, cols), 0.5, Philox(3, 1, number))
        np.testing.assert_array_equal(to_host(y), expected)
        np.testing.assert_array_equal(to_host(dh), np.concatenate([expected, expected], axis=1))
