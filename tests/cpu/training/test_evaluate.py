"""Metrics over batches of any size, on NumPy arrays and on the pretended GPU, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import DTypeError, KindError, OperandError, ShapeError
from tests.support.fake_gpu import FakeGpu
from tests.support.numpy_cases import Array, numbers

DIMS, SIZES = [3, 8, 5], (4, 1, 7, 4, 2)


def data(rows: int) -> tuple[Array, Array, Array]:
    """Draws inputs, labels (some of them ignored) and targets."""
    labels = np.random.default_rng(1).integers(0, 5, rows)
    labels[:3] = -100
    return numbers(0, (rows, 3), "float32"), labels, numbers(2, (rows, 5), "float32")


def expected(model: Any, x: Array, labels: Array, target: Array) -> tuple[float, float, float]:
    """Computes mean cross-entropy and accuracy over the rows that are not ignored, and the mean squared error."""
    (w0, b0), (w1, b1) = model
    hidden = np.maximum(x.astype(np.float64) @ w0.T + b0, 0)
    logits = hidden @ w1.T + b1
    counted = labels != -100
    shifted = logits - logits.max(axis=1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    losses = -logs[np.arange(len(x)), np.where(counted, labels, 0)][counted]
    return losses.mean(), (logits.argmax(axis=1) == labels)[counted].mean(), ((logits - target) ** 2).mean()


class World:
    """Where a model is evaluated: the package (real or on the pretended GPU) and the device."""

    def __init__(self, package: Any, gpu: FakeGpu | None) -> None:
        self.lt, self.gpu = package, gpu
        self.place: Callable[[Any], Any] = (lambda array: array.copy()) if gpu is None else gpu.cp.asarray
        self.more: dict[str, Any] = {} if gpu is None else {"stream": gpu.stream}

    def model(self, **options: Any) -> Any:
        model = self.lt.MLP(DIMS, device="cpu" if self.gpu is None else "cuda", seed=4, **options)
        if self.gpu is not None:
            self.gpu.synchronize_all()  # initialises the model on the default stream; calls run on other streams
        return model

    def batches(self, x: Array, target: Array) -> Iterator[tuple[Any, Any]]:
        start = 0
        for size in SIZES:
            yield self.place(x[start : start + size]), self.place(target[start : start + size])
            start += size


@pytest.fixture(params=[False, True], ids=["numpy", "gpu"])
def world(gpu: FakeGpu, request: pytest.FixtureRequest) -> Iterator[World]:
    if request.param:
        yield World(gpu.lt, gpu)
        return
    with gpu.others_package() as package:
        yield World(package, None)


def test_batches_of_any_size(world: World) -> None:
    x, labels, target = data(sum(SIZES))
    model = world.model(dropout=0.5)
    read = (lambda array: array) if world.gpu is None else world.gpu.host_of
    values = [[read(each.data).astype(np.float64) for each in layer.parameters()] for layer in model.layers]
    loss, accuracy, error = expected(values, x, labels, target)
    made = world.lt.evaluate(model, world.batches(x, labels), **world.more)
    assert made.steps == len(SIZES)
    assert made.loss == pytest.approx(loss, rel=1e-5)
    assert made.accuracy == pytest.approx(accuracy)
    made = world.lt.evaluate(model, list(world.batches(x, target)), loss="mse", **world.more)
    assert (made.steps, made.accuracy) == (len(SIZES), None)
    assert made.loss == pytest.approx(error, rel=1e-5)


def test_losses_with_options_and_of_ones_own(world: World) -> None:
    x, labels, target = data(sum(SIZES))
    labels = np.abs(labels) % 5
    model, options = world.model(), {"label_smoothing": 0.25}
    x_all, labels_all = world.place(x), world.place(labels)
    outputs = model(x_all, **world.more)
    smooth = world.lt.cross_entropy(outputs, labels_all, **options, **world.more).loss
    if world.gpu is not None:
        world.gpu.synchronize_all()
    made = world.lt.evaluate(model, world.batches(x, labels), loss_options=options, **world.more)
    assert made.loss == pytest.approx(float(smooth), rel=1e-5)

    def error(outputs: Any, target: Any, gradient: Any, stream: Any) -> Any:
        gradient[...] = 0
        return ((outputs - target) ** 2).mean()

    made = world.lt.evaluate(model, world.batches(x, target), loss=error, **world.more)
    assert made.loss == pytest.approx(world.lt.evaluate(model, world.batches(x, target), loss="mse", **world.more).loss)
    assert made.accuracy is None


def test_no_batches_and_no_rows_that_count(world: World) -> None:
    model = world.model()
    made = world.lt.evaluate(model, iter(()), **world.more)
    assert made.steps == 0
    assert math.isnan(made.loss)
    assert math.isnan(made.accuracy)
    assert world.lt.evaluate(model, [], loss="mse", **world.more).accuracy is None
    x, ignored = numbers(0, (4, 3), "float32"), np.full(4, -100)
    made = world.lt.evaluate(model, [(world.place(x), world.place(ignored))], **world.more)
    assert made.steps == 1
    assert math.isnan(made.loss)
    assert math.isnan(made.accuracy)
    batches = [(world.place(x), world.place(each)) for each in (ignored, ignored + 100)]
    assert world.lt.evaluate(model, batches, **world.more) == world.lt.evaluate(
        model, batches[1:], **world.more
    )._replace(steps=2)


def test_a_gpu_is_not_waited_for_before_the_end(gpu: FakeGpu) -> None:
    world, (x, labels, _) = World(gpu.lt, gpu), data(sum(SIZES))
    model, batches, left = world.model(), [*world.batches(x, labels)], []

    def given() -> Any:
        for i, batch in enumerate(batches):
            if i:  # `evaluate` must ask for the next batch while the last batch's work still waits on the stream
                left.append(gpu.stream.ptr in gpu.streams.left_undone())
            yield batch

    assert world.lt.evaluate(model, given(), stream=gpu.stream).steps == len(SIZES)
    assert left == [True] * (len(SIZES) - 1)


def test_tensors_are_evaluated_on_pytorch_s_current_stream(gpu: FakeGpu) -> None:
    world, (x, labels, _) = World(gpu.lt, gpu), data(4)
    model, batch = world.model(), [gpu.torch.Tensor(world.place(each)) for each in (x, labels)]
    gpu.streams.log.clear()
    with gpu.torch.cuda.stream(gpu.torch.cuda.ExternalStream(gpu.other_stream.ptr)):
        gpu.lt.evaluate(model, [batch])
    assert gpu.other_stream.ptr in gpu.streams.log
    assert 0 not in gpu.streams.log  # 0 is the handle of CuPy's current stream


def test_nothing_of_the_model_changes(world: World) -> None:
    x, labels, _ = data(sum(SIZES))
    model = world.model()
    arrays = [each for parameter in model.parameters() for each in (parameter.data, parameter.grad)]
    read = (lambda array: array) if world.gpu is None else world.gpu.host_of
    before = [read(each).copy() for each in arrays]
    world.lt.evaluate(model, world.batches(x, labels), **world.more)
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(read(array), old)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        (3, KindError, "batches is 3; it must be an iterable of pairs"),
        ([np.ones((2, 3), np.float32)], KindError, r"number 0 of batches is array\(.*; it must be a pair"),
        ([(1, 2, 3)], KindError, r"number 0 of batches is \(1, 2, 3\); it must be"),
        ([(np.ones((2, 3)), [0, 1])], DTypeError, "x is float64; the model takes float32"),
        ([([[1.0, 2.0, 3.0]], [0])], OperandError, "x is a list"),
        ([(np.ones((2, 4), np.float32), np.zeros(2, int))], ShapeError, r"x has shape \(2, 4\); .* \(\.\.\., 3\)"),
        ([(np.ones((2, 3), np.float32), np.zeros(3, int))], ShapeError, r"labels has shape \(3,\)"),
    ],
)
def test_batches_that_cannot_be(batches: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.evaluate(lt.MLP(DIMS, device="cpu"), batches)
