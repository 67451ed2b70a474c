"""Losses of a training step on the host: options by name, row weights, and user-defined functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, DTypeError, LtError, OperandError, ShapeError
from tests.support.numpy_cases import DTYPES, Array

ROWS, INPUTS, OUTPUTS = 12, 4, 3
SINGLE = np.array([0.5, 1, 2], np.float32)


def step_of(loss: Any, options: Any = None, *, dtype: str = "float32", lr: float = 1e-2, **more: Any) -> lt.TrainStep:
    model = lt.MLP([INPUTS, 8, OUTPUTS], dtype=dtype, seed=3, device="cpu")
    scaler = more.pop("scaler", None)
    optimizer = lt.AdamW(model.parameters(), lr=lr, scaler=scaler)
    return lt.TrainStep(model, optimizer, loss=loss, loss_options=options, **more)


def batch(seed: int = 0, dtype: str = "float32") -> tuple[Array, Array]:
    generator = np.random.default_rng(seed)
    kind = DTYPES[dtype]
    return generator.standard_normal((ROWS, INPUTS)).astype(kind), generator.random((ROWS, OUTPUTS)).astype(kind)


def gradients(step: lt.TrainStep) -> list[Array]:
    return [parameter.grad.astype(np.float64) for parameter in step.model.parameters()]


def squared(outputs: Array, target: Array, gradient: Array, stream: Any) -> Any:
    error = outputs.astype("float32") - target
    gradient[...] = 2 * error / error.size
    return (error**2).mean()


@pytest.mark.parametrize(
    ("name", "options", "function"),
    [
        ("cross_entropy", {}, lt.cross_entropy),
        ("cross_entropy", {"label_smoothing": 0.2, "class_weights": SINGLE}, lt.cross_entropy),
        ("huber", {"delta": 0.25}, lt.huber_loss),
        ("bce_with_logits", {"pos_weight": SINGLE}, lt.bce_with_logits),
        ("bce_with_logits", {"pos_weight": None}, lt.bce_with_logits),
        ("mse", {}, lt.mse_loss),
    ],
)
@pytest.mark.parametrize("weighted", [False, True])
def test_a_step_minimizes_the_function_of_its_loss(
    name: str, options: dict[str, Any], function: Callable[..., Any], weighted: bool
) -> None:
    step = step_of(name, options)
    x, target = batch()
    target = np.arange(ROWS) % OUTPUTS if name == "cross_entropy" else target
    weights = np.linspace(0, 2, ROWS).astype(np.float32) if weighted else None
    outputs, contexts = step.model.forward(x)
    expected = function(outputs, target, row_weights=weights, **options)
    step.model.backward(expected.gradient, contexts)
    exact = gradients(step)
    assert float(step(x, target, weights)) == float(expected.loss)
    for one, other in zip(gradients(step), exact, strict=True):
        np.testing.assert_array_equal(one, other)


def test_options_are_read_when_the_step_is_made() -> None:
    weights, options = SINGLE.copy(), {"pos_weight": SINGLE.copy()}
    step, other = step_of("bce_with_logits", options), step_of("bce_with_logits", {"pos_weight": weights})
    options["pos_weight"][:] = 100.0
    options["label_smoothing"] = 1.0  # type: ignore[assignment]
    assert float(step(*batch())) == float(other(*batch()))


@pytest.mark.parametrize(
    ("loss", "options", "error", "message"),
    [
        ("mse", {"delta": 1.0}, ArgumentError, "loss_options has 'delta'; those of 'mse' are none"),
        ("huber", {"pos_weight": 1}, ArgumentError, "loss_options has 'pos_weight'; those of 'huber' are delta"),
        ("cross_entropy", {3: 1}, ArgumentError, "has 3; those of 'cross_entropy' are label_smoothing, class_weights"),
        ("cross_entropy", {"row_weights": SINGLE}, ArgumentError, "has 'row_weights'"),
        ("cross_entropy", {"label_smoothing": 2}, ArgumentError, "label_smoothing is 2.0; accepted are numbers from"),
        ("huber", {"delta": 0}, ArgumentError, "delta is 0.0; it must be positive"),
        ("huber", {"delta": "1"}, ArgumentError, "delta is '1'; it must be a number"),
        ("huber", [1], ArgumentError, r"loss_options is \[1\]; it must be a mapping"),
        ("bce_with_logits", {"pos_weight": 2.0}, OperandError, "pos_weight is a float"),
        ("bce_with_logits", {"pos_weight": SINGLE[:2]}, ShapeError, r"pos_weight has shape \(2,\); .* \(3,\), one"),
        ("cross_entropy", {"class_weights": np.ones(3)}, DTypeError, "class_weights is float64; it must be float32"),
        ("cross_entropy", {"class_weights": -SINGLE}, ArgumentError, "class_weights holds -0.5; accepted"),
        ("bce_with_logits", {"pos_weight": SINGLE * np.nan}, ArgumentError, "pos_weight holds nan; accepted"),
        (squared, {"delta": 1.0}, ArgumentError, "loss_options are for losses with a name"),
        (None, None, ArgumentError, "loss is None; accepted are cross_entropy, mse, huber, bce_with_logits"),
    ],
)
def test_losses_and_options_that_are_refused(loss: Any, options: Any, error: type[LtError], message: str) -> None:
    with pytest.raises(error, match=message):
        step_of(loss, options)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scaled", [False, True])
def test_an_own_loss_is_as_good_as_ours(dtype: str, scaled: bool, accumulate: int) -> None:
    """A user's loss agrees with the built-in one but for a rounding: its gradient is rounded to FP32, then scaled."""
    scalers = [lt.GradScaler(1024.0) if scaled else None for _ in range(2)]
    own, ours = (
        step_of(loss, dtype=dtype, accumulate=accumulate, scaler=scaler)
        for loss, scaler in zip((squared, "mse"), scalers, strict=True)
    )
    x, target = batch(1, dtype)
    assert float(own(x, target)) == pytest.approx(float(ours(x, target)), rel=1e-6)
    tolerance = {"float32": 1e-6, "float16": 4e-3, "bfloat16": 3e-2}[dtype] * (1024 if scaled else 1)
    for one, other in zip(gradients(own), gradients(ours), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)


def test_small_gradients_of_an_own_loss_are_scaled_before_they_are_rounded() -> None:
    def tiny(outputs: Array, target: Array, gradient: Array, stream: Any) -> Any:
        assert (gradient.dtype, stream) == (np.float32, None)
        gradient[...] = 2.0**-30  # this gradient is below FP16's smallest positive number
        return np.zeros(1, np.float32)

    step = step_of(tiny, dtype="float16", scaler=lt.GradScaler(2.0**20))
    assert step(*batch(dtype="float16")).shape == ()
    np.testing.assert_array_equal(step.model.parameters()[-1].grad, np.float16(ROWS * 2.0**-10))


def test_the_gradient_of_an_own_loss_begins_with_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every micro-batch, elements of the gradient that a user's loss does not write are 0."""

    def first_column(outputs: Array, target: Array, gradient: Array, stream: Any) -> Any:
        gradient[:, 0] = 1
        return np.float32(0)

    monkeypatch.setattr(np, "empty", lambda shape, dtype=float, **_: np.full(shape, 7, dtype))
    step = step_of(first_column, accumulate=2)
    for _ in range(3):
        step(*batch())
        np.testing.assert_array_equal(step.model.parameters()[-1].grad, [ROWS // 2, 0, 0])


def test_numpys_errors_in_an_own_loss_are_the_callers() -> None:
    def overflows(outputs: Array, target: Array, gradient: Array, stream: Any) -> Any:
        return np.exp(np.float32(1000))

    with np.errstate(all="raise"), pytest.raises(FloatingPointError, match="overflow"):
        step_of(overflows)(*batch())
