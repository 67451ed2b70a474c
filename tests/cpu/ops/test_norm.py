"""LayerNorm and RMSNorm on NumPy arrays: values, finite differences, buffers, and everything that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, DTypeError, KindError, LayoutError, LtError, OverlapError, ShapeError
from tests.support.norm_checks import check_backward, check_forward
from tests.support.numpy_cases import DTYPES, numbers

KINDS = ("layer_norm", "rms_norm")
ROWS, COLS = 6, 5
SHAPE = (2, 3, COLS)


def forward(kind: str, x: Any, weight: Any, bias: Any, **options: Any) -> tuple[Any, Any]:
    made: tuple[Any, Any] = getattr(lt, f"{kind}_fwd")(x, weight, *([bias] if kind == "layer_norm" else []), **options)
    return made


def backward(dy: Any, ctx: Any, **options: Any) -> Any:
    return getattr(lt, "rms_norm_bwd" if ctx.mean is None else "layer_norm_bwd")(dy, ctx, **options)


def drawn(dtype: str = "float32", weight: str = "float32") -> list[Any]:
    """Draws random operands: x, a residual, dy and an added gradient, all with a batch axis; weight and bias."""
    return [numbers(i, SHAPE, dtype) for i in range(4)] + [numbers(i, (COLS,), weight) for i in (4, 5)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "weight"), [*((name, name) for name in DTYPES), ("bfloat16", "float32")])
@pytest.mark.parametrize("adds", [True, False])
def test_values(kind: str, dtype: str, weight: str, adds: bool) -> None:
    x, residual, dy, add, gamma, beta = drawn(dtype, weight)
    y, ctx = forward(kind, x, gamma, beta, eps=0.01, **({"add": residual} if adds else {}))
    total = (x.astype(np.float64) + residual.astype(np.float64)).astype(x.dtype) if adds else x
    np.testing.assert_array_equal(ctx.x, total)
    assert (y.shape, y.dtype, ctx.rstd.dtype) == (SHAPE, x.dtype, np.float32)
    rows, made = total.reshape(ROWS, COLS), y.astype(np.float64).reshape(ROWS, COLS)
    check_forward(rows, gamma, beta, 0.01, (made, ctx.mean, ctx.rstd))
    found = backward(dy, ctx, **({"add": add} if adds else {}))
    assert [each.dtype for each in found] == [x.dtype, *[gamma.dtype] * (len(found) - 1)]
    results = [found.dx.reshape(ROWS, COLS), found.dweight, found.dbias if kind == "layer_norm" else None]
    operands = dy.reshape(ROWS, COLS), rows, gamma
    check_backward(operands, (ctx.mean, ctx.rstd), add.reshape(ROWS, COLS) if adds else None, (0.0, 0.0), results)


@pytest.mark.parametrize("kind", KINDS)
def test_finite_differences(kind: str) -> None:
    """Compares the gradients with finite differences of sum(y · dy), for each element of x, weight and bias."""
    x, _, dy, _, gamma, beta = drawn()
    parameters = {"dx": x, "dweight": gamma, "dbias": beta}
    found = backward(dy, forward(kind, x, gamma, beta)[1])._asdict()
    for name, gradient in found.items():
        array, step = parameters[name], 2.0**-8
        for place in np.ndindex(array.shape):
            losses = []
            for sign in (1, -1):
                array[place] += sign * step
                losses.append(float((forward(kind, x, gamma, beta)[0].astype(np.float64) * dy).sum()))
                array[place] -= sign * step
            assert gradient[place] == pytest.approx((losses[0] - losses[1]) / (2 * step), abs=2e-3), (name, place)


@pytest.mark.parametrize("kind", KINDS)
def test_buffers_over_operands(kind: str) -> None:
    x, residual, dy, add, gamma, beta = drawn()
    y, ctx = forward(kind, x, gamma, beta, add=residual)
    expected = backward(dy, ctx, add=add)
    sums = [np.ones_like(gamma) for _ in expected[1:]]
    made, own = forward(kind, x, gamma, beta, add=residual, out=x, out_sum=residual)
    assert made is x
    assert own.x is residual
    names = ("out_dweight", "out_dbias")
    found = backward(dy, own, add=add, out_dx=add, accumulate=True, **dict(zip(names, sums, strict=False)))
    assert found.dx is add
    for one, other in ((made, y), (own.x, ctx.x), (found.dx, expected.dx)):
        np.testing.assert_array_equal(one, other)
    for each, right in zip(sums, expected[1:], strict=True):
        np.testing.assert_allclose(each, right + 1, rtol=1e-6)


def test_a_norm_without_bias() -> None:
    x, _, dy, _, gamma, _ = drawn()
    y, ctx = lt.layer_norm_fwd(x, gamma)
    np.testing.assert_array_equal(y, lt.layer_norm_fwd(x, gamma, np.zeros_like(gamma))[0])
    assert lt.layer_norm_bwd(dy, ctx).dbias is None
    assert repr(ctx) == "NormContext(layer_norm, x of shape (2, 3, 5), no bias)"


def test_some_gradients_and_one_row() -> None:
    row, gamma = numbers(0, (COLS,), "float32"), np.ones(COLS, np.float32)
    y, ctx = lt.rms_norm_fwd(row, gamma, eps=0.0)
    np.testing.assert_allclose(y, row / np.sqrt((row**2).mean()), rtol=1e-6)
    assert lt.rms_norm_bwd(row, ctx, need_dx=False).dx is None
    assert lt.rms_norm_bwd(row, ctx, need_dweight=False).dweight is None


def test_bound_calls_read_their_arrays_anew() -> None:
    x, _, dy, _, gamma, beta = drawn()
    buffers = {"out": np.zeros_like(x), "out_mean": np.zeros(ROWS, np.float32), "out_rstd": np.zeros(ROWS, np.float32)}
    _, ctx = lt.layer_norm_fwd(x, gamma, beta, **buffers)
    run = lt.bind(lt.layer_norm_fwd, x, gamma, beta, **buffers)
    results = {"out_dx": np.zeros_like(x), "out_dweight": np.zeros_like(gamma), "out_dbias": np.zeros_like(beta)}
    run_back = lt.bind(lt.layer_norm_bwd, dy, ctx, **results)
    x[...] = numbers(9, SHAPE, "float32")
    run()
    run_back()
    y, other = lt.layer_norm_fwd(x, gamma, beta)
    np.testing.assert_array_equal(buffers["out"], y)
    np.testing.assert_array_equal(results["out_dx"], lt.layer_norm_bwd(dy, other).dx)


def ones(*shape: int, dtype: Any = np.float32) -> Any:
    return np.ones(shape, dtype)


X, W = ones(4, 6), ones(6)
HALF = ones(4, 6, dtype=np.float16)
REFUSED: list[tuple[Callable[[], Any], type[LtError], str]] = [
    (lambda: lt.rms_norm_fwd(ones(), W), ShapeError, r"x has shape \(\); accepted are \(\.\.\., N\)"),
    (
        lambda: lt.rms_norm_fwd(X, ones(5)),
        ShapeError,
        r"weight has shape \(5,\); it must be \(6,\), an element for each",
    ),
    (lambda: lt.layer_norm_fwd(X, W, ones(1, 6)), ShapeError, r"bias has shape \(1, 6\); it must be \(6,\)"),
    (lambda: lt.rms_norm_fwd(X, ones(12)[::2]), LayoutError, r"weight has strides \(2,\); it must be row-major"),
    (lambda: lt.rms_norm_fwd(X, ones(6, dtype=np.float16)), DTypeError, "weight is float16 but x is float32; accepted"),
    (
        lambda: lt.layer_norm_fwd(HALF, W, ones(6, dtype=np.float16)),
        DTypeError,
        "bias is float16 but weight is float32",
    ),
    (lambda: lt.rms_norm_fwd(X, W, add=HALF), DTypeError, "add is float16 but x is float32"),
    (lambda: lt.rms_norm_fwd(X, W, add=ones(6)), ShapeError, r"add has shape \(6,\); it must be \(4, 6\), x's shape"),
    (lambda: lt.rms_norm_fwd(X, W, out_sum=ones(4, 6)), ArgumentError, r"out_sum has shape \(4, 6\), but add is None"),
    (lambda: lt.rms_norm_fwd(X, W, eps=-1.0), ArgumentError, "eps is -1.0; it must be finite and not negative"),
    (lambda: lt.rms_norm_fwd(X, W, out_rstd=ones(6)), ShapeError, r"out_rstd has shape \(6,\); it must be \(4,\)"),
    (lambda: lt.rms_norm_fwd(X, W, out=X[:, ::-1]), LayoutError, "out of shape"),
    (lambda: lt.rms_norm_fwd((a := ones(5, 6))[:4], W, out=a[1:]), OverlapError, "out shares memory with x"),
    (lambda: lt.rms_norm_fwd(X, (a := ones(4, 6))[0], out=a), OverlapError, "out shares memory with weight"),
    (lambda: lt.rms_norm_fwd(X, W, add=(a := ones(4, 6)), out=a, out_sum=a), OverlapError, "out_sum"),
    (lambda: lt.rms_norm_bwd(X, lt.layer_norm_fwd(X, W)[1]), KindError, r"ctx is .*; it must be .* rms_norm_fwd"),
    (lambda: lt.layer_norm_bwd(X, lt.rms_norm_fwd(X, W)[1]), KindError, r"ctx is .*; it must be .* layer_norm_fwd"),
    (lambda: lt.rms_norm_bwd(ones(4, 5), CTX), ShapeError, r"dy has shape \(4, 5\); it must be \(4, 6\), x's shape"),
    (lambda: lt.rms_norm_bwd(HALF, CTX), DTypeError, "dy is float16 but x is float32"),
    (lambda: lt.rms_norm_bwd(X, CTX, accumulate=True), ArgumentError, "accumulate=True needs out_dweight, to add to"),
    (lambda: lt.rms_norm_bwd(X, CTX, add=X, need_dx=False), ArgumentError, r"add has shape \(4, 6\), but need_dx is"),
    (lambda: lt.rms_norm_bwd(X, CTX, out_dx=CTX.x), OverlapError, "out_dx shares memory with x"),
]
"""Calls with bad arguments, and the errors that they must raise."""
CTX = lt.rms_norm_fwd(ones(4, 6), W)[1]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_refused(call: Callable[[], Any], error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
    for each in (X, W, HALF, CTX.x):
        assert (each == 1).all()
