"""Forward on NumPy arrays: values against scalar sums, layouts, types, buffers, empty axes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.problem import ACTIVATIONS
from tests.host_kernels.arrays import Guarded
from tests.support.numpy_cases import DTYPES, FORMULAS, assert_rounded, numbers, scalar_linear
from tests.support.strategies import Placement

M, N, K = 5, 6, 7
SIZE = st.integers(1, 9)
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


@pytest.mark.parametrize(("m", "n"), [(0, N), (M, 0), (0, 0)])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_no_rows_or_no_outputs(m: int, n: int, p: float) -> None:
    x, w, bias = (np.ones(shape, np.float16) for shape in ((m, K), (n, K), (n,)))
    y, ctx = lt.linear_fwd(x, w, bias, activation="gelu", dropout=p, rng=lt.Philox())
    assert (y.shape, y.dtype) == ((m, n), np.float16)
    assert ctx.preactivation.shape == (m, n)


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
