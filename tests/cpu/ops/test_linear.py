"""`linear_fwd` and `linear_bwd` on NumPy arrays: values against scalar sums, gradients against finite differences,
layouts, types, output buffers, subsets of gradients, accumulation and empty axes.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.problem import ACTIVATIONS, Activation
from tests.host_kernels.arrays import Guarded
from tests.support.numpy_cases import DTYPES, FORMULAS, PLACES, ULP, Array, assert_rounded, numbers, scalar_linear
from tests.support.strategies import Placement

M, N, K = 4, 5, 3
SIZE = st.integers(1, 9)
NEEDS = list(itertools.product([False, True], repeat=3))
PLACE = st.builds(Placement, st.booleans(), st.integers(0, 3), st.integers(0, 3))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_every_activation_and_type(activation: str, dtype: str, with_bias: bool) -> None:
    x, w, bias = (numbers(seed, shape, dtype) for seed, shape in enumerate(((M, K), (N, K), (N,))))
    used = bias if with_bias else None
    exact_y, exact_z = scalar_linear(x, w, used, activation, 0.2)
    y, ctx = lt.linear_fwd(x, w, used, activation=activation, negative_slope=0.2)
    assert_rounded(y, exact_y, dtype)
    assert_rounded(ctx.preactivation, exact_z, dtype)
    assert (lt.linear(x, w, used, activation=activation, negative_slope=0.2) == y).all()
    assert (lt.linear(x, w, used, activation=lt.Activation(activation, 0.2)) == y).all()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.tuples(SIZE, SIZE, SIZE),
    places=st.tuples(PLACE, PLACE, PLACE, PLACE),
    dtype=st.sampled_from(list(DTYPES)),
    activation=st.sampled_from(ACTIVATIONS),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_layout(
    sizes: tuple[int, int, int], places: tuple[Placement, ...], dtype: str, activation: str, seed: int
) -> None:
    m, n, k = sizes
    shapes = ((m, k), (n, k), (m, n), (m, n))
    x, w, out, out_z = (
        Guarded(numbers(seed + i, shape, dtype), place)
        for i, (shape, place) in enumerate(zip(shapes, places, strict=True))
    )
    exact_y, exact_z = scalar_linear(x.array, w.array, None, activation)
    y, ctx = lt.linear_fwd(x.array, w.array, activation=activation, out=out.array, out_z=out_z.array)
    assert y is out.array
    assert ctx.preactivation is out_z.array
    assert_rounded(y, exact_y, dtype)
    assert_rounded(out_z.array, exact_z, dtype)
    for guarded in (x, w, out, out_z):
        guarded.values()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.3, 0.9])
def test_dropout_follows_the_activation(dtype: str, p: float) -> None:
    x, w, bias = (numbers(seed, shape, dtype) for seed, shape in enumerate(((M, K), (N, K), (N,))))
    rng = lt.Philox(2**40, 1, 2)
    factors = reference.dropout_scale((M, N), p, rng)
    exact_y, exact_z = scalar_linear(x, w, bias, "sigmoid", factors=factors)
    y, ctx = lt.linear_fwd(x, w, bias, activation="sigmoid", dropout=p, rng=rng)
    assert_rounded(y, exact_y, dtype)
    assert_rounded(ctx.preactivation, exact_z, dtype)
    assert ((y != 0) == reference.dropout_mask((M, N), p, rng)).all()


@pytest.mark.parametrize("activation", ["none", "sigmoid", "gelu"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_no_inputs_leave_the_activation_of_the_bias(activation: str, with_bias: bool) -> None:
    bias = numbers(0, (N,), "float32") if with_bias else None
    y, ctx = lt.linear_fwd(np.ones((M, 0), np.float32), np.ones((N, 0), np.float32), bias, activation=activation)
    row = np.array([FORMULAS[activation](float(b), 0.01) for b in (np.zeros(N) if bias is None else bias)])
    assert_rounded(y, np.tile(row, (M, 1)), "float32")
    assert (ctx.preactivation == (0 if bias is None else bias)).all()


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_an_addend_comes_last_and_changes_no_gradient(activation: str, dtype: str, place: str) -> None:
    x, w, bias, dy = operands(dtype)
    added, rng = Guarded(numbers(9, (M, N), dtype), PLACES[place]), lt.Philox(5)
    options: dict[str, Any] = {"activation": activation, "dropout": 0.4, "rng": rng}
    exact_y, exact_z = scalar_linear(x, w, bias, activation, factors=reference.dropout_scale((M, N), 0.4, rng))
    exact = exact_y + added.array.astype(np.float64)
    y, ctx = lt.linear_fwd(x, w, bias, **options, add=added.array)
    assert_rounded(y, exact, dtype)
    assert_rounded(ctx.preactivation, exact_z, dtype)
    for one, other in zip(
        lt.linear_bwd(dy, ctx), lt.linear_bwd(dy, lt.linear_fwd(x, w, bias, **options)[1]), strict=True
    ):
        np.testing.assert_array_equal(one, other)
    inferred = lt.linear(x, w, bias, activation=activation, add=added.array)
    assert_near(inferred, scalar_linear(x, w, bias, activation)[0] + added.array.astype(np.float64), dtype)
    added.assert_unchanged()
    found, _ = lt.linear_fwd(x, w, bias, **options, add=added.array, out=added.array)  # y overwrites the addend
    assert found is added.array
    assert_rounded(added.array, exact, dtype)
    added.values()


def test_a_residual_connection_with_leading_axes() -> None:
    x, w = numbers(1, (2, 3, N), "float32"), numbers(2, (N, N), "float32")
    y = lt.linear(x, w, add=x)
    np.testing.assert_allclose(y, x + x @ w.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("m", "n"), [(0, N), (M, 0), (0, 0)])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_no_rows_or_no_outputs(m: int, n: int, p: float) -> None:
    x, w, bias = (np.ones(shape, np.float16) for shape in ((m, K), (n, K), (n,)))
    y, ctx = lt.linear_fwd(x, w, bias, activation="gelu", dropout=p, rng=lt.Philox())
    assert (y.shape, y.dtype) == ((m, n), np.float16)
    assert ctx.preactivation.shape == (m, n)


@pytest.mark.parametrize("axes", [(2, 3), (2, 1, 3), (6, 1), (1, 1), (0, 3)])
@pytest.mark.parametrize("columns", [False, True])
def test_leading_axes_are_rows(axes: tuple[int, ...], columns: bool) -> None:
    """Operands with leading axes give the same bits as the same operands reshaped to matrices."""
    rows, rng = math.prod(axes), lt.Philox(3, 2, 1)
    x, w, bias, dy = (numbers(i, shape, "float32") for i, shape in enumerate(((rows, K), (N, K), (N,), (rows, N))))
    options: dict[str, Any] = {"activation": "gelu", "dropout": 0.4, "rng": rng}
    y, ctx = lt.linear_fwd(x, w, bias, **options)
    exact = lt.linear_bwd(dy, ctx)

    def spread(array: Array, gap: int = 0) -> Array:
        """Returns a copy with leading axes, in a buffer with a gap after each row or column."""
        return Guarded(array, Placement(columns, gap, 0)).array.reshape(*axes, array.shape[1])

    found, context = lt.linear_fwd(spread(x), w, bias, **options)
    assert (found.shape, context.preactivation.shape, context.shape) == ((*axes, N), (*axes, N), (rows, N, K))
    np.testing.assert_array_equal(found.reshape(rows, N), y)
    made = lt.linear_bwd(spread(dy, 2), context)
    assert made.dx.shape == (*axes, K)
    for one, other in zip(made, exact, strict=True):
        np.testing.assert_array_equal(one.reshape(other.shape), other)
    out, out_z, out_dx, out_dz = (spread(np.zeros_like(each), 3) for each in (y, y, x, y))
    _, context = lt.linear_fwd(spread(x), w, bias, **options, out=out, out_z=out_z)
    lt.linear_bwd(spread(dy), context, out_dx=out_dx, out_dz=out_dz)
    for one, other in ((out, y), (out_z, ctx.preactivation), (out_dx, exact.dx)):
        np.testing.assert_array_equal(one.reshape(other.shape), other)
    assert (lt.linear(spread(x), w, bias).reshape(rows, N) == lt.linear(x, w, bias)).all()


def test_overflow_and_nan_are_results() -> None:
    x = np.array([[300.0], [np.nan], [np.inf]], np.float16)
    y = lt.linear(x, np.array([[300.0]], np.float16), activation="relu")
    assert np.isinf(y[0, 0])
    assert np.isnan(y[1, 0])
    assert np.isinf(y[2, 0])


@pytest.mark.parametrize("option", [{"compute": "tf32"}, {"propagate_nan": True}, {"stream": 0}, {"stream": None}])
def test_options_without_a_meaning_on_the_host_change_nothing(option: dict[str, Any]) -> None:
    x, w = numbers(0, (M, K), "float32"), numbers(1, (N, K), "float32")
    assert (lt.linear(x, w, activation="relu", **option) == lt.linear(x, w, activation="relu")).all()


def operands(dtype: str) -> tuple[Array, Array, Array, Array]:
    """Draws random x, w, bias and dy of a type."""
    x, w, bias, dy = (numbers(seed, shape, dtype) for seed, shape in enumerate(((M, K), (N, K), (N,), (M, N))))
    return x, w, bias, dy


def einsum_gradients(dy: Array, x: Array, w: Array, z: Array, activation: str, factors: Any) -> dict[str, Array]:
    """Computes dx, dw, db and dz by explicit sums; only the activation's derivative is the reference's."""
    dz = dy.astype(np.float64) * reference.derivative(z, Activation(activation))
    dz = dz if factors is None else dz * factors
    x, w = x.astype(np.float64), w.astype(np.float64)
    dx, dw = np.einsum("mn,nk->mk", dz, w), np.einsum("mn,mk->nk", dz, x)
    return {"dx": dx, "dw": dw, "db": np.einsum("mn->n", dz), "dz": dz}


def assert_near(actual: Array, exact: Array, dtype: str) -> None:
    """Asserts that a result equals the float64 result, up to the rounding to the result's type."""
    assert actual.dtype == DTYPES[dtype]
    np.testing.assert_allclose(actual.astype(np.float64), exact, rtol=ULP[dtype], atol=1e-12)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_gradients_of_every_activation_and_type(activation: str, dtype: str, p: float) -> None:
    x, w, bias, dy = operands(dtype)
    rng = lt.Philox(9, 8, 7)
    _, ctx = lt.linear_fwd(x, w, bias, activation=activation, dropout=p, rng=rng)
    dz = np.zeros((M, N), DTYPES[dtype])
    gradients = lt.linear_bwd(dy, ctx, out_dz=dz)
    factors = reference.dropout_scale((M, N), p, rng) if p else None
    exact = einsum_gradients(dy, x, w, ctx.preactivation, activation, factors)
    for name, actual in (*gradients._asdict().items(), ("dz", dz)):
        assert_near(actual, exact[name], dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_are_those_of_forward(activation: str) -> None:
    x, w, bias, dy = operands("float32")

    def slope(name: str, direction: Array) -> float:
        """Central difference of sum(dy · y) along a direction, in float64, because FP32's rounding would exceed it."""
        step = 1e-6
        values = []
        for sign in (1, -1):
            at = {"x": x.astype(np.float64), "w": w.astype(np.float64), "bias": bias.astype(np.float64)}
            at[name] = at[name] + sign * step * direction
            values.append(float((dy * reference.linear_fwd(**at, activation=Activation(activation))[0]).sum()))
        return (values[0] - values[1]) / (2 * step)

    _, ctx = lt.linear_fwd(x, w, bias, activation=activation)
    gradients = lt.linear_bwd(dy, ctx)
    for name, gradient in zip(("x", "w", "bias"), gradients, strict=True):
        direction = numbers(77, gradient.shape)
        assert float((gradient * direction).sum()) == pytest.approx(slope(name, direction), rel=1e-4, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(places=st.tuples(PLACE, PLACE, PLACE, PLACE, PLACE, PLACE), dtype=st.sampled_from(list(DTYPES)))
def test_gradients_of_any_layout_and_buffers(places: tuple[Placement, ...], dtype: str) -> None:
    x, w, bias, dy = operands(dtype)
    values = (x, w, dy, *(np.zeros(shape, DTYPES[dtype]) for shape in ((M, K), (N, K), (M, N))))
    guarded = [Guarded(value, place) for value, place in zip(values, places, strict=True)]
    at_x, at_w, at_dy, dx, dw, dz = (g.array for g in guarded)
    db = np.zeros(N, DTYPES[dtype])
    _, ctx = lt.linear_fwd(at_x, at_w, bias, activation="tanh")
    gradients = lt.linear_bwd(at_dy, ctx, out_dx=dx, out_dw=dw, out_db=db, out_dz=dz)
    assert (gradients.dx is dx, gradients.dw is dw, gradients.db is db) == (True, True, True)
    exact = einsum_gradients(dy, x, w, ctx.preactivation, "tanh", None)
    for name, actual in (("dx", dx), ("dw", dw), ("db", db), ("dz", dz)):
        assert_near(actual, exact[name], dtype)
    for each in guarded:
        each.values()


@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_dz", [False, True])
def test_any_subset_of_the_gradients(need: tuple[bool, bool, bool], with_bias: bool, with_dz: bool) -> None:
    x, w, bias, dy = operands("float32")
    _, ctx = lt.linear_fwd(x, w, bias if with_bias else None, activation="gelu")
    everything = lt.linear_bwd(dy, ctx)
    buffers: dict[str, Any] = {"out_dx": np.full((M, K), 9.0, np.float32), "out_dw": np.full((N, K), 9.0, np.float32)}
    dz = np.zeros((M, N), np.float32)
    flags = dict(zip(("need_dx", "need_dw", "need_db"), need, strict=True))
    some = lt.linear_bwd(dy, ctx, **flags, **buffers, out_dz=dz if with_dz else None)
    wanted = {"dx": need[0], "dw": need[1], "db": need[2] and with_bias}
    for name, is_wanted in wanted.items():
        one, all_of_it = getattr(some, name), getattr(everything, name)
        assert (one is not None) == is_wanted
        assert one is None or (one == all_of_it).all()
    for name, is_wanted in (("dx", need[0]), ("dw", need[1])):
        assert is_wanted or (buffers[f"out_{name}"] == 9).all(), "a gradient that nobody wanted was written"
    assert dz.any() == with_dz


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_gradients_that_accumulate(dtype: str, place: str) -> None:
    x, w, bias, dy = operands(dtype)
    _, ctx = lt.linear_fwd(x, w, bias, activation="silu")
    start_dw, start_db = numbers(20, (N, K), dtype), numbers(21, (N,), dtype)
    dw, db = Guarded(start_dw, PLACES[place]), start_db.copy()
    dx, start_dx = np.full((M, K), np.nan, DTYPES[dtype]), numbers(22, (M, K), dtype)
    lt.linear_bwd(dy, ctx, accumulate=True, out_dx=dx, out_dw=dw.array, out_db=db)
    added = Guarded(start_dx, PLACES[place])
    gradients = lt.linear_bwd(dy, ctx, accumulate_dx=True, out_dx=added.array)
    assert gradients.dx is added.array
    assert_near(gradients.dw, einsum_gradients(dy, x, w, ctx.preactivation, "silu", None)["dw"], dtype)
    exact = einsum_gradients(dy, x, w, ctx.preactivation, "silu", None)
    assert_near(dw.array, exact["dw"] + start_dw.astype(np.float64), dtype)
    assert_near(db, exact["db"] + start_db.astype(np.float64), dtype)
    assert_near(dx, exact["dx"], dtype)
    assert_near(added.array, exact["dx"] + start_dx.astype(np.float64), dtype)
    added.values()
    dw.values()


def test_accumulate_needs_the_buffers_of_what_is_wanted_only() -> None:
    x, w, bias, dy = operands("float32")
    _, ctx = lt.linear_fwd(x, w, bias)
    db = np.ones(N, np.float32)
    gradients = lt.linear_bwd(dy, ctx, need_dw=False, accumulate=True, out_db=db)
    assert gradients.dw is None
    np.testing.assert_allclose(db, 1 + dy.sum(axis=0), rtol=1e-6)
    _, without_bias = lt.linear_fwd(x, w)
    dw = np.zeros((N, K), np.float32)
    assert lt.linear_bwd(dy, without_bias, accumulate=True, out_dw=dw).db is None


@pytest.mark.parametrize("empty", ["m", "n", "k"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_gradients_with_empty_axes(empty: str, activation: str, accumulate: bool) -> None:
    sizes = {"m": M, "n": N, "k": K, empty: 0}
    m, n, k = sizes["m"], sizes["n"], sizes["k"]
    x, w, bias, dy = (numbers(i, s, "float32") for i, s in enumerate(((m, k), (n, k), (n,), (m, n))))
    _, ctx = lt.linear_fwd(x, w, bias, activation=activation)
    dw, db, dx = np.full((n, k), 3.0, np.float32), np.full(n, 3.0, np.float32), np.full((m, k), 3.0, np.float32)
    lt.linear_bwd(dy, ctx, accumulate=accumulate, out_dx=dx, out_dw=dw, out_db=db)
    kept = 3.0 if accumulate else 0.0
    if empty == "m":
        assert (dw == kept).all()
        assert (db == kept).all()
    elif empty == "n":
        assert (dx == 0).all()
    else:
        exact = dy.astype(np.float64) * reference.derivative(np.tile(bias, (m, 1)), Activation(activation))
        np.testing.assert_allclose(db, exact.sum(axis=0) + kept, rtol=1e-6)


@pytest.mark.parametrize("activation", ["none", "relu", "tanh", "gelu"])
def test_backward_uses_forwards_mask(activation: str) -> None:
    x, w = np.ones((16, K), np.float32), np.ones((24, K), np.float32)
    y, ctx = lt.linear_fwd(x, w, activation=activation, dropout=0.5, rng=lt.Philox(1, 2, 3))
    dz = np.zeros((16, 24), np.float32)
    lt.linear_bwd(np.ones((16, 24), np.float32), ctx, out_dz=dz)
    assert 100 < (y != 0).sum() < 284
    assert ((dz != 0) == (y != 0)).all()


def test_the_step_is_read_when_the_mask_is_drawn() -> None:
    step = np.array([6], np.uint32)
    x, w, _, dy = operands("float32")

    def run(rng: lt.Philox) -> list[Any]:
        y, ctx = lt.linear_fwd(x, w, activation="relu", dropout=0.5, rng=rng)
        return [y.tolist(), lt.linear_bwd(dy, ctx).dx.tolist()]

    assert run(lt.Philox(1, 2, step)) == run(lt.Philox(1, 2, 6))
    step += 1
    assert run(lt.Philox(1, 2, step)) == run(lt.Philox(1, 2, 7))
    assert run(lt.Philox(1, 2, 6)) != run(lt.Philox(1, 2, 7))
