"""A training step on NumPy arrays: micro-batches, loss scaling, metrics, and refused arguments."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, FixedError, OperandError, ShapeError
from lt_runtime.training.averages import HostTally, Scores
from tests.support.numpy_cases import DTYPES, Array

ROWS, INPUTS, CLASSES = 24, 6, 4


def batch(seed: int, rows: int = ROWS, dtype: str = "float32") -> tuple[Array, Array]:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, INPUTS)).astype(DTYPES[dtype])
    return x, generator.integers(0, CLASSES, rows).astype(np.int32)


def step_of(dtype: str = "float32", dropout: float = 0.0, scaler: Any = None, **options: Any) -> lt.TrainStep:
    model = lt.MLP([INPUTS, 16, CLASSES], dtype=dtype, dropout=dropout, seed=2, device="cpu")
    return lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2, scaler=scaler), **{"batch_size": ROWS, **options})


def gradients(step: lt.TrainStep) -> list[Array]:
    return [parameter.grad.copy() for parameter in step.model.parameters()]


@pytest.mark.parametrize("accumulate", [2, 3, 24])
def test_micro_batches_make_the_whole_batchs_gradient(accumulate: int) -> None:
    whole, parts = step_of(), step_of(accumulate=accumulate)
    losses = [float(step(*batch(0))) for step in (whole, parts)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    for one, other in zip(gradients(whole), gradients(parts), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-8)
    assert int(parts.optimizer.steps[0]) == 1
    assert parts.metrics() == pytest.approx(whole.metrics(), rel=1e-6)


def test_micro_batches_have_masks_of_their_own() -> None:
    step = step_of(dropout=0.5, accumulate=2)
    x = np.ones((ROWS // 2, INPUTS), np.float32)
    hidden = [step.model.forward(x, 1, micro_batch=i)[1][1].x != 0 for i in range(2)]
    assert (hidden[0] != hidden[1]).any()
    assert (step.model.forward(x, 1)[1][1].x != 0).tolist() == hidden[0].tolist()


def test_a_step_draws_a_mask_for_each_micro_batch() -> None:
    step, (x, labels) = step_of(dropout=0.5, accumulate=2, batch_size=2 * ROWS), batch(0)
    outputs = [step.model.forward(x, step.optimizer.steps.copy(), micro_batch=i)[0] for i in range(2)]
    expected = [float(lt.cross_entropy(each, labels)[0]) for each in outputs]
    assert expected[0] != expected[1]
    assert float(step(np.concatenate((x, x)), np.concatenate((labels, labels)))) == pytest.approx(np.mean(expected))


def test_the_scaler_scales_the_gradient_and_moves() -> None:
    plain, scaled = step_of("float16"), step_of("float16", scaler=lt.GradScaler(2.0**60, growth_interval=2))
    assert float(plain(*batch(0, dtype="float16"))) == float(scaled(*batch(0, dtype="float16")))
    assert int(scaled.optimizer.skipped_steps[0]) == 1  # at a loss scale of 2⁶⁰ FP16 gradients overflow
    while int(scaled.optimizer.skipped_steps[0]) + int(scaled.optimizer.steps[0]) < 80:
        scaled(*batch(0, dtype="float16"))
    assert 1 < float(scaled.optimizer.scaler.scale) < 2.0**30
    assert int(scaled.optimizer.steps[0]) > 20


def test_scaled_micro_batches() -> None:
    whole, parts = (step_of(scaler=lt.GradScaler(1024.0), accumulate=n) for n in (1, 4))
    for step in (whole, parts):
        step(*batch(1))
    for one, other in zip(gradients(whole), gradients(parts), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)
        assert np.abs(one).max() > 1


def test_metrics_are_of_the_steps_since_they_were_read() -> None:
    step = step_of()
    assert step.metrics()[0] == 0
    assert math.isnan(step.metrics().loss)
    losses, right = [], 0
    for i in range(3):
        x, labels = batch(i)
        labels[:5] = -100
        right += int((step.model(x).argmax(axis=1) == labels).sum())
        losses.append(float(step(x, labels)))
    metrics = step.metrics()
    assert metrics.steps == 3
    assert metrics.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert metrics.accuracy == pytest.approx(right / (3 * (ROWS - 5)))
    step(*batch(3))
    assert step.metrics().steps == 1


def test_a_loss_without_classes_has_no_accuracy() -> None:
    model = lt.MLP([INPUTS, 2], device="cpu")
    step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse", batch_size=4)
    loss = step(np.ones((4, INPUTS), np.float32), np.zeros((4, 2), np.float32))
    assert step.metrics() == (1, pytest.approx(float(loss)), None)


def test_losses_may_be_kept() -> None:
    step = step_of()
    losses = [step(*batch(i)) for i in range(3)]
    assert len({float(loss) for loss in losses}) == 3


def test_batches_of_any_size() -> None:
    step = step_of(batch_size=None, accumulate=2)
    for rows in (24, 2, 8):
        assert np.isfinite(step(*batch(0, rows)))
    for shape in ((0, INPUTS), (3, INPUTS), (4, INPUTS + 1), (INPUTS,)):
        with pytest.raises(ShapeError, match=r"x has shape \(.*\); accepted are \(M, 6\), M a multiple of 2"):
            step(np.ones(shape, np.float32), np.zeros(shape[0], np.int32))


@pytest.mark.parametrize("graph", [True, False])
def test_on_the_host_there_is_no_graph(graph: bool) -> None:
    step, other = step_of(graph=graph, dropout=0.3), step_of(dropout=0.3)
    for i in range(3):
        assert float(step(*batch(i))) == float(other(*batch(i)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "accumulate is 0; it must be positive"),
        ({"accumulate": 5}, r"batch_size is 24; it must be a multiple of accumulate \(5\)"),
        ({"batch_size": 0}, "batch_size is 0; it must be positive"),
        ({"loss": "l1"}, "loss is .l1.; accepted are cross_entropy, mse, huber, bce_with_logits"),
    ],
)
def test_steps_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        step_of(**options)


def test_another_models_optimizer_is_refused() -> None:
    model, other = (lt.MLP([INPUTS, 16, CLASSES], seed=2, device="cpu") for _ in range(2))
    for parameters in (other.parameters(), [*model.parameters(), other.layers[0].bias]):
        with pytest.raises(
            ArgumentError, match=r"the optimizer has layer0.(weight|bias), which is no parameter of the model; make it"
        ):
            lt.TrainStep(model, lt.AdamW(parameters))
    weight = model.layers[0].weight
    # A parameter that no layer uses, so that backward does not write its gradient.
    beside = lt.Parameter(weight.data, np.zeros_like(weight.grad), name="beside")
    with pytest.raises(ArgumentError, match="the optimizer has beside, which is no parameter of the model"):
        lt.TrainStep(model, lt.AdamW([beside]))


def test_parameters_that_the_optimizer_has_not_are_frozen() -> None:
    model = lt.MLP([INPUTS, 16, CLASSES], seed=2, device="cpu")
    before = [each.data.copy() for each in model.parameters()]
    # Makes new parameters that share the arrays of others.
    own = [lt.Parameter(each.data, each.grad, lr_scale=2.0) for each in model.parameters()[2:]]
    step = lt.TrainStep(model, lt.AdamW(own, lr=1e-2))
    step(*batch(0))
    moved = [bool((each.data != old).any()) for each, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False, True, True]
    assert [bool(each.grad.any()) for each in model.parameters()] == moved


def test_an_array_replaced_before_the_step_was_made() -> None:
    model = lt.MLP([INPUTS, CLASSES], device="cpu")
    optimizer, weight = lt.AdamW(model.parameters()), model.layers[0].weight
    weight.master = np.array(weight.data)
    with pytest.raises(OperandError, match=r"layer0.weight was replaced after the optimizer was made"):
        lt.TrainStep(model, optimizer)


@pytest.mark.parametrize("name", ["model", "optimizer", "batch_size", "accumulate", "loss", "learning_rate"])
def test_what_a_step_was_made_with_stays(name: str) -> None:
    step = step_of()
    with pytest.raises(FixedError, match=rf"TrainStep.{name} cannot be set to 3; make another TrainStep"):
        setattr(step, name, 3)


@pytest.mark.parametrize("part", ["data", "grad", "master"])
def test_replaced_arrays(part: str) -> None:
    step = step_of("bfloat16")
    step(*batch(0, dtype="bfloat16"))
    parameter = step.model.layers[1].weight
    kept = getattr(parameter, part)
    setattr(parameter, part, kept.copy())
    with pytest.raises(OperandError, match=r"an array of layer1.weight was replaced .* parameter.assign\(values\)"):
        step(*batch(1, dtype="bfloat16"))
    assert int(step.optimizer.steps[0]) == 1
    setattr(parameter, part, kept)
    parameter.assign(np.zeros(parameter.data.shape))
    step(*batch(1, dtype="bfloat16"))


@pytest.mark.parametrize("share", [0, -0.5, 1.5, math.nan, None, "half"])
def test_shares_that_are_none(share: Any) -> None:
    with pytest.raises(ArgumentError, match=r"share is .*; it must be (above 0 and at most 1|a number)"):
        lt.cross_entropy(np.zeros((2, 3), np.float32), np.zeros(2, np.int32), share=share)


def test_a_row_is_right_if_its_logit_is_the_first_of_the_largest() -> None:
    logits = np.array([[1, 2, 2], [1, 2, 2], [3, 0, 0], [np.nan, 1, 0], [0, 1, 0]], np.float32)
    tally = HostTally()
    tally.add(np.float32(1), Scores(logits, np.array([1, 2, 0, 1, -100]), -100), 1.0, first=True, stream=None)
    assert tally.read(None)[2:] == (4, 2)
