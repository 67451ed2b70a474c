"""Bound calls on NumPy arrays run the operation each time with the arrays' present values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, DTypeError
from tests.support.numpy_cases import Array, numbers

M, N, K = 5, 4, 3


def zeros(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def of_forward() -> tuple[Callable[..., Any], list[Array], dict[str, Any], dict[str, Array]]:
    operands = [numbers(i, shape, "float32") for i, shape in enumerate([(M, K), (N, K), (N,)])]
    options = {"activation": "gelu", "dropout": 0.5, "rng": lt.Philox(1, 2, np.zeros(1, np.uint32))}
    return lt.linear_fwd, operands, options, {"out": zeros(M, N), "out_z": zeros(M, N)}


def of_inference() -> tuple[Callable[..., Any], list[Array], dict[str, Any], dict[str, Array]]:
    operands = [numbers(i, shape, "float32") for i, shape in enumerate([(M, K), (N, K), (N,)])]
    return lt.linear, operands, {"activation": "tanh"}, {"out": zeros(M, N)}


def of_product() -> tuple[Callable[..., Any], list[Array], dict[str, Any], dict[str, Array]]:
    operands = [numbers(i, shape, "float32") for i, shape in enumerate([(M, K), (K, N), (M, N)])]
    scalars = {"alpha": np.full(1, 2, np.float32), "beta": np.full(1, -1, np.float32)}
    return lt.matmul, operands, scalars, {"out": zeros(M, N)}


def of_mse() -> tuple[Callable[..., Any], list[Array], dict[str, Any], dict[str, Array]]:
    operands = [numbers(i, (M, N), "float32") for i in range(2)]
    return lt.mse_loss, operands, {"grad_scale": 3.0}, {"out_gradient": zeros(M, N), "out_loss": zeros()}


def of_dropout() -> tuple[Callable[..., Any], list[Array], dict[str, Any], dict[str, Array]]:
    options = {"p": 0.5, "rng": lt.Philox(1, 2, np.zeros(1, np.uint32))}
    return lt.dropout, [numbers(0, (M, N), "float32")], options, {"out": zeros(M, N)}


def of_sum() -> tuple[Callable[..., Any], list[Array], dict[str, Any], dict[str, Array]]:
    return lt.add, [numbers(i, (M, N), "float32") for i in range(2)], {}, {"out": zeros(M, N)}


@pytest.mark.parametrize("make", [of_forward, of_inference, of_product, of_mse, of_dropout, of_sum])
def test_a_bound_call(make: Callable[[], Any]) -> None:
    operation, operands, options, buffers = make()
    bound = lt.bind(operation, *operands, **options, **buffers)
    assert all((each == 0).all() for each in buffers.values())
    for turn in range(3):
        for i, each in enumerate(operands):
            each[...] = numbers(10 * turn + i, each.shape)
        if "rng" in options:
            options["rng"].step[...] = turn
        expected = {name: np.zeros_like(each) for name, each in buffers.items()}
        operation(*operands, **options, **expected)
        assert bound() is None
        for name, each in buffers.items():
            np.testing.assert_array_equal(each, expected[name], err_msg=name)
            assert each.any()


def test_bound_gradients() -> None:
    x, w, dy = (numbers(i, shape, "float32") for i, shape in enumerate([(M, K), (N, K), (M, N)]))
    z = zeros(M, N)
    _, ctx = lt.linear_fwd(x, w, activation="gelu", out=zeros(M, N), out_z=z)
    buffers = {"out_dx": zeros(M, K), "out_dw": zeros(N, K)}
    bound = lt.bind(lt.linear_bwd, dy, ctx, accumulate=True, **buffers)
    bound()
    bound()
    expected = lt.linear_bwd(dy, ctx)
    np.testing.assert_allclose(buffers["out_dx"], expected.dx, rtol=1e-6)
    np.testing.assert_allclose(buffers["out_dw"], 2 * expected.dw, rtol=1e-6)


def test_labels_are_looked_at_each_time() -> None:
    logits, labels, loss = numbers(0, (M, N), "float32"), np.zeros(M, np.int32), zeros()
    bound = lt.bind(lt.cross_entropy, logits, labels, out_gradient=zeros(M, N), out_loss=loss)
    bound()
    np.testing.assert_allclose(loss, lt.cross_entropy(logits, labels).loss)
    labels[2] = N
    with pytest.raises(ArgumentError, match="labels holds 4; accepted are 0 to 3"):
        bound()


def test_what_is_refused_is_refused_when_it_is_bound() -> None:
    x, w = zeros(M, K), zeros(N, K)
    with pytest.raises(ArgumentError, match="out is None; a bound call makes no arrays"):
        lt.bind(lt.linear, x, w)
    with pytest.raises(DTypeError, match="w is float64 but x is float32"):
        lt.bind(lt.linear, x, w.astype(np.float64), out=zeros(M, N))


def test_layers_in_fp8_are_refused() -> None:
    x, w, state = zeros(16, 32), zeros(16, 32), lt.FP8State()
    _, ctx = lt.linear_fwd(x, w, precision=state)
    for call in (
        lambda: lt.bind(lt.linear_fwd, x, w, precision=state, out=zeros(16, 16)),
        lambda: lt.bind(lt.linear_bwd, zeros(16, 16), ctx=ctx, out_dx=zeros(16, 32), out_dw=zeros(16, 32)),
    ):
        with pytest.raises(ArgumentError, match="a call with a precision, or with the context of a layer in FP8"):
            call()
