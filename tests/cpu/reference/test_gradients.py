"""Gradients of the reference against finite differences of a scalar function in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from lt_runtime import reference
from lt_runtime.problem import ACTIVATIONS, Activation, Philox
from tests.support.numpy_cases import Array, numbers

M, N, K = 3, 4, 5
STEP = 1e-5


def slopes(function: Callable[[Array], float], at: Array) -> Array:
    """Central differences, element by element."""
    result = np.empty_like(at)
    for index in np.ndindex(at.shape):
        shift = np.zeros_like(at)
        shift[index] = STEP
        result[index] = (function(at + shift) - function(at - shift)) / (2 * STEP)
    return result


def assert_gradient(actual: Array, function: Callable[[Array], float], at: Array) -> None:
    np.testing.assert_allclose(actual, slopes(function, at), rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_linear(name: str, with_bias: bool, p: float) -> None:
    x, w, bias, upstream = (numbers(seed, shape) for seed, shape in enumerate(((M, K), (N, K), (N,), (M, N))))
    activation = Activation(name, 0.2)
    factors = reference.dropout_scale((M, N), p, Philox(5, 6, 7)) if p else None
    used_bias = bias if with_bias else None

    def loss(x: Array, w: Array, bias: Array | None) -> float:
        return float((upstream * reference.linear_fwd(x, w, bias, activation, factors)[0]).sum())

    y, z = reference.linear_fwd(x, w, used_bias, activation, factors)
    gradients = reference.linear_bwd(upstream, x, w, z, activation, factors)
    assert y.shape == z.shape == gradients.dz.shape == (M, N)
    assert_gradient(gradients.dx, lambda value: loss(value, w, used_bias), x)
    assert_gradient(gradients.dw, lambda value: loss(x, value, used_bias), w)
    zero = np.zeros(N) if used_bias is None else bias
    assert_gradient(gradients.db, lambda value: loss(x, w, value), zero)

    def loss_of_z(z: Array) -> float:
        return loss(z, np.eye(N), None)

    assert_gradient(gradients.dz, loss_of_z, z)


def test_dropped_elements_have_no_gradient() -> None:
    x, w, upstream = numbers(0, (8, 3)), numbers(1, (16, 3)), np.ones((8, 16))
    philox = Philox(1, 2, 3)
    factors = reference.dropout_scale((8, 16), 0.5, philox)
    y, z = reference.linear_fwd(x, w, None, Activation("tanh"), factors)
    dz = reference.linear_bwd(upstream, x, w, z, Activation("tanh"), factors).dz
    mask = reference.dropout_mask((8, 16), 0.5, philox)
    assert 0 < mask.sum() < mask.size
    assert ((y != 0) == mask).all()
    assert ((dz != 0) == mask).all()


def test_mse() -> None:
    prediction, target = numbers(2, (M, N)), numbers(3, (M, N))
    value, gradient = reference.mse_loss(prediction, target)
    assert value == pytest.approx(sum(d * d for d in (prediction - target).flat) / (M * N), rel=1e-14)
    assert_gradient(gradient, lambda at: reference.mse_loss(at, target)[0], prediction)


@pytest.mark.parametrize("labels", [[0, 3, 1], [2, 2, 2]])
def test_cross_entropy(labels: list[int]) -> None:
    logits, classes = 3 * numbers(4, (M, N)), np.array(labels)
    _, gradient = reference.cross_entropy(logits, classes)
    assert_gradient(gradient, lambda at: reference.cross_entropy(at, classes)[0], logits)
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-16)


def test_clipping_adds_to_the_norm_what_pytorch_adds() -> None:
    assert reference.clip_factor(1e-6, 1e-6) == pytest.approx(0.5)
    assert reference.clip_factor(0.0, 1.0) == 1.0
    assert np.isnan(reference.clip_factor(float("nan"), 1.0))
