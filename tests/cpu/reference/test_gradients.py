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


WEIGHTS = np.array([2.0, -0.5, 1.25])


@pytest.mark.parametrize("delta", [0.25, 1.0, 10.0])
def test_huber(delta: float) -> None:
    prediction, target = numbers(2, (M, N)), numbers(3, (M, N))
    value, gradient = reference.huber_loss(prediction, target, delta=delta)
    losses = [d * d / 2 if abs(d) <= delta else delta * (abs(d) - delta / 2) for d in (prediction - target).flat]
    assert value == pytest.approx(sum(losses) / (M * N), rel=1e-14)
    assert_gradient(gradient, lambda at: reference.huber_loss(at, target, delta=delta)[0], prediction)


@pytest.mark.parametrize("pos_weight", [None, np.array([0.5, 1.0, 2.0, 7.0])])
def test_bce_with_logits(pos_weight: Array | None) -> None:
    logits, targets = 3 * numbers(4, (M, N)), np.linspace(0, 1, M * N).reshape(M, N)
    value, gradient = reference.bce_with_logits(logits, targets, pos_weight=pos_weight)
    sigmoid = 1 / (1 + np.exp(-logits))
    positive = targets if pos_weight is None else targets * pos_weight
    assert value == pytest.approx(float(-(positive * np.log(sigmoid) + (1 - targets) * np.log(1 - sigmoid)).mean()))
    assert_gradient(gradient, lambda at: reference.bce_with_logits(at, targets, pos_weight=pos_weight)[0], logits)


def test_bce_is_finite_for_logits_of_any_size() -> None:
    logits, targets = np.array([[-800.0, 800.0, -800.0, 800.0]]), np.array([[0.0, 1.0, 1.0, 0.0]])
    value, gradient = reference.bce_with_logits(logits, targets)
    assert value == 400.0
    assert gradient.tolist() == [[0.0, 0.0, -0.25, 0.25]]


@pytest.mark.parametrize("loss", [reference.mse_loss, reference.huber_loss, reference.bce_with_logits])
def test_weights_of_rows_multiply_their_losses(loss: Callable[..., tuple[float, Array]]) -> None:
    """The mean divides by the number of elements, with weights as without."""
    prediction, target = numbers(2, (M, N)), np.abs(numbers(3, (M, N))) % 1
    value, gradient = loss(prediction, target, row_weights=WEIGHTS)
    rows = [loss(prediction[i : i + 1], target[i : i + 1])[0] for i in range(M)]
    assert value == pytest.approx(float(WEIGHTS @ rows) / M, rel=1e-13)
    assert_gradient(gradient, lambda at: loss(at, target, row_weights=WEIGHTS)[0], prediction)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("row_weights", [None, WEIGHTS])
@pytest.mark.parametrize("class_weights", [None, np.array([0.5, 1.0, 3.0, 2.0])])
def test_weights_of_cross_entropy(smoothing: float, row_weights: Array | None, class_weights: Array | None) -> None:
    logits, labels = 3 * numbers(4, (M, N)), np.array([2, -1, 0])
    options = {"label_smoothing": smoothing, "class_weights": class_weights, "row_weights": row_weights}

    def loss(at: Array) -> tuple[float, Array]:
        return reference.cross_entropy(at, labels, ignore_index=-1, **options)  # type: ignore[arg-type]

    of_rows = np.ones(M) if row_weights is None else row_weights
    of_classes = np.ones(N) if class_weights is None else class_weights
    log_softmax = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    target = ((1 - smoothing) * np.eye(N)[labels] + smoothing / N) * of_classes
    losses = -(target * log_softmax).sum(axis=1) * of_rows
    value, gradient = loss(logits)
    assert value == pytest.approx((losses[0] + losses[2]) / (of_classes[2] + of_classes[0]), rel=1e-13)
    assert_gradient(gradient, lambda at: loss(at)[0], logits)


def test_clipping_adds_to_the_norm_what_pytorch_adds() -> None:
    assert reference.clip_factor(1e-6, 1e-6) == pytest.approx(0.5)
    assert reference.clip_factor(0.0, 1.0) == 1.0
    assert np.isnan(reference.clip_factor(float("nan"), 1.0))
