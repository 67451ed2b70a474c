"""Gated activations on NumPy arrays, against scalar formulas and finite differences."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.errors import ArgumentError, DTypeError, KindError, LayoutError, OverlapError, ShapeError
from lt_runtime.problem import ACTIVATIONS
from tests.host_kernels.arrays import Guarded
from tests.support.numpy_cases import DTYPES, FORMULAS, PLACES, Array, assert_rounded, numbers

RNG = lt.Philox(2**50 + 1, 2, 3)
_SLOPE = 0.25
_STEP = 1e-6


def formula(h: Array, activation: str) -> Array:
    """Computes act(gate) · value, element by element, by scalar formulas."""
    gate, value = np.split(h.astype(np.float64), 2, axis=-1)
    act = [FORMULAS[activation](each, _SLOPE) for each in gate.reshape(-1).tolist()]
    return np.array(act).reshape(gate.shape) * value


@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_and_finite_differences(activation: str, dtype: str, p: float) -> None:
    h, dy = numbers(1, (5, 14), dtype), numbers(2, (5, 7), dtype)
    factors = reference.dropout_scale((5, 7), p, RNG) if p else np.ones((5, 7))
    y, ctx = lt.gated_fwd(h, activation=activation, negative_slope=_SLOPE, dropout=p, rng=RNG)  # type: ignore[arg-type]
    assert_rounded(y, formula(h, activation) * factors, dtype)
    differences = np.zeros((5, 14))
    for column in range(14):
        moved = np.zeros((5, 14))
        moved[:, column] = _STEP
        up, down = (formula(h.astype(np.float64) + each, activation) for each in (moved, -moved))
        differences[:, column] = ((up - down) / (2 * _STEP) * factors * dy.astype(np.float64)).sum(axis=1)
    dh = lt.gated_bwd(dy, ctx)
    assert dh.dtype == h.dtype
    rounding = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    np.testing.assert_allclose(
        dh.astype(np.float64), differences, rtol=rounding if dtype != "float32" else 1e-6, atol=1e-7
    )


@settings(max_examples=30, deadline=None)
@given(axes=st.lists(st.integers(0, 4), max_size=3), cols=st.integers(0, 9))
def test_leading_axes_are_rows(axes: list[int], cols: int) -> None:
    h, dy = numbers(3, (*axes, 2 * cols), "float32"), numbers(4, (*axes, cols), "float32")
    y, ctx = lt.gated_fwd(h, dropout=0.5, rng=RNG)
    flat, flat_ctx = lt.gated_fwd(h.reshape(-1, 2 * cols) if h.size else h, dropout=0.5, rng=RNG)
    assert y.shape == dy.shape
    np.testing.assert_array_equal(y.reshape(flat.shape), flat)
    dh = lt.gated_bwd(dy, ctx)
    assert dh.shape == h.shape
    np.testing.assert_array_equal(dh.reshape(flat_ctx.h.shape), lt.gated_bwd(dy.reshape(flat.shape), flat_ctx))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_any_layout_and_buffers(place: Any) -> None:
    h, y, dh = (Guarded(numbers(5, (6, cols), "float32"), place) for cols in (10, 5, 10))
    exact, exact_ctx = lt.gated_fwd(h.array.copy(), activation="gelu")
    made, ctx = lt.gated_fwd(h.array, activation="gelu", out=y.array)
    assert made is y.array
    np.testing.assert_array_equal(y.values(), exact)
    expected = lt.gated_bwd(exact, exact_ctx)
    assert lt.gated_bwd(y.array, ctx, out=dh.array) is dh.array
    np.testing.assert_array_equal(dh.values(), expected)
    h.assert_unchanged()
    assert lt.gated_bwd(y.array, ctx, out=h.array) is h.array  # the gradient of h is written over h
    np.testing.assert_array_equal(h.values(), expected)


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_y_is_computed_again_over_dy(place: Any) -> None:
    h, dy = (Guarded(numbers(seed, (6, cols), "float32"), place) for seed, cols in ((7, 10), (8, 5)))
    y, ctx = lt.gated_fwd(h.array, activation="gelu", dropout=0.5, rng=RNG)
    expected = lt.gated_bwd(dy.array.copy(), ctx)
    assert lt.gated_bwd(dy.array, ctx, remake_y=True, out=h.array) is h.array
    np.testing.assert_array_equal(h.values(), expected)
    np.testing.assert_array_equal(dy.values(), y)


def test_the_context_keeps_h_alone() -> None:
    h = numbers(6, (4, 6), "float32")
    _, ctx = lt.gated_fwd(h, activation="gelu", dropout=0.5, rng=RNG)
    assert [each.name for each in dataclasses.fields(ctx)] == ["h", "activation", "dropout", "rng"]
    assert (ctx.h is h, ctx.rng is RNG, ctx.dropout) == (True, True, 0.5)
    assert repr(ctx) == "GatedContext(h=(4, 6), gelu, dropout=0.5)"
    assert lt.gated_fwd(h, rng=RNG)[1].rng is None


def test_the_step_may_advance_in_place() -> None:
    step, h, dy = np.zeros(1, np.uint32), np.ones((9, 40), np.float32), np.ones((9, 20), np.float32)
    for number in range(3):
        step[0] = number
        y, ctx = lt.gated_fwd(h, activation="none", dropout=0.5, rng=lt.Philox(1, 2, step))
        scale = reference.dropout_scale((9, 20), 0.5, lt.Philox(1, 2, number))
        np.testing.assert_array_equal(y, scale)
        np.testing.assert_array_equal(lt.gated_bwd(dy, ctx), np.concatenate([scale, scale], axis=1))


_H = np.ones((4, 6), np.float32)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: lt.gated_fwd(_H[:, :5]), ShapeError, r"h has shape \(4, 5\); its last axis must be even: the gate's"),
        (lambda: lt.gated_fwd(np.array(1.0, np.float32)), ShapeError, r"h has shape \(\); its last axis must be even"),
        (lambda: lt.gated_fwd(_H.astype(np.float64)), DTypeError, r"h has type float64; .*h\.astype\('float32'\)"),
        (lambda: lt.gated_fwd(np.ones((4, 12), "f4")[:, ::2]), LayoutError, r"h of shape .*pass lt\.contiguous\(h\)"),
        (lambda: lt.gated_fwd(_H, out=_H[:, :3]), OverlapError, "out shares memory with h"),
        (lambda: lt.gated_fwd(_H, out=_H.copy()), ShapeError, r"out has shape \(4, 6\); it must be \(4, 3\)"),
        (lambda: lt.gated_fwd(_H, out=np.ones((4, 3), "f2")), DTypeError, "out is float16 but h is float32"),
        (lambda: lt.gated_fwd(_H, activation="swiglu"), ArgumentError, "activation is 'swiglu'; accepted are none,"),  # type: ignore[arg-type]
        (lambda: lt.gated_fwd(_H, dropout=0.5), ArgumentError, r"dropout is 0\.5 but rng is None"),
        (lambda: lt.gated_fwd(_H, dropout=1.0, rng=RNG), ArgumentError, r"dropout probability is 1\.0; it must be in"),
        (lambda: lt.gated_bwd(_H, lt.gated_fwd(_H)[1]), ShapeError, r"dy has shape \(4, 6\); it must be \(4, 3\), y's"),
        (lambda: lt.gated_bwd(_H[:, :3].astype("f2"), lt.gated_fwd(_H)[1]), DTypeError, "dy is float16 but h is float"),
        (lambda: lt.gated_bwd(_H[:, 1:4], lt.gated_fwd(_H)[1], remake_y=True), OverlapError, "dy shares memory with h"),
        (lambda: lt.gated_bwd(_H[:, :3], _H), KindError, r"ctx is array.*; it must be the context that gated_fwd"),  # type: ignore[arg-type]
        (lambda: lt.gated_bwd(_H[:3, :3], lt.gated_fwd(_H[:3])[1], out=_H[1:]), OverlapError, "out shares memory with"),
    ],
)
def test_refusals(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    assert (_H == 1).all()
