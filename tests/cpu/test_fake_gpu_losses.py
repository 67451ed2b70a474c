"""Losses and dropout on the pretended GPU: calls that repeat, are bound or overwrite operands, and refused calls."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from lt_runtime import reference
from lt_runtime.problem import Philox
from tests.host_kernels.arrays import assert_close
from tests.support.fake_gpu import FakeGpu
from tests.support.placed import COLUMNS, FLAT, ODD, Placed, host_of
from tests.support.strategies import Placement

_CALLS = 5  # the first call makes a plan; later calls are looked up, and then replay a graph
_ROWS, _CLASSES = 12, 20


@dataclasses.dataclass
class LossCall:
    """A test case: a loss with a buffer for every result, and the expected results.

    Attributes:
        gradient: buffer of the gradient; None if the gradient is written over the scores.
        scale: factor of the gradient: a number, or an array of one number.
        by_row, by_column: whether there are row weights and column weights.
    """

    gpu: FakeGpu
    name: str
    gradient_place: Placement | None = FLAT
    scale: Any = 1.0
    share: float = 1.0
    smoothing: float = 0.0
    ignore_index: int | None = -100
    delta: float = 1.0
    by_row: bool = False
    by_column: bool = False

    def __post_init__(self) -> None:
        empty = np.zeros((_ROWS, _CLASSES), np.float32)
        self.scores, self.target = Placed(self.gpu, empty, ODD), Placed(self.gpu, empty, COLUMNS)
        self.gradient = None if self.gradient_place is None else Placed(self.gpu, empty, self.gradient_place)
        self.labels = self.gpu.cp.asarray(np.zeros(_ROWS, np.int64))
        self.loss = self.gpu.cp.asarray(np.zeros((), np.float32))
        self.row_weights, self.column_weights = (
            self.gpu.cp.asarray(np.ones(length, np.float32)) for length in (_ROWS, _CLASSES)
        )

    def refill(self, seed: int) -> None:
        """Writes new operands into the same memory."""
        generator = np.random.default_rng(seed)
        self._x, self._y = (generator.standard_normal((_ROWS, _CLASSES)).astype(np.float32) for _ in range(2))
        self._classes = generator.integers(0, _CLASSES, _ROWS)
        self._classes[3] = 0 if self.ignore_index is None else self.ignore_index
        self.scores.fill(self._x)
        self.target.fill(self._y)
        host_of(self.gpu, self.labels)[...] = self._classes
        host_of(self.gpu, self.loss)[...] = -1.0
        host_of(self.gpu, self.row_weights)[...] = generator.standard_normal(_ROWS)
        host_of(self.gpu, self.column_weights)[...] = 0.5 + generator.random(_CLASSES)

    @property
    def function(self) -> Any:
        return getattr(self.gpu.lt, self.name)

    @property
    def operands(self) -> tuple[Any, Any]:
        return self.scores.array, self.labels if self.name == "cross_entropy" else self.target.array

    @property
    def options(self) -> dict[str, Any]:
        """Returns the loss's own options, without the weights."""
        if self.name == "cross_entropy":
            return {"label_smoothing": self.smoothing, "ignore_index": self.ignore_index}
        return {"delta": self.delta} if self.name == "huber_loss" else {}

    @property
    def weights(self) -> dict[str, Any]:
        of_columns = {"cross_entropy": "class_weights", "bce_with_logits": "pos_weight"}.get(self.name)
        made = {"row_weights": self.row_weights} if self.by_row else {}
        return made | ({of_columns: self.column_weights} if of_columns and self.by_column else {})

    @property
    def settings(self) -> dict[str, Any]:
        return {"grad_scale": self.scale, "share": self.share, **self.options, **self.weights}

    @property
    def buffers(self) -> dict[str, Any]:
        return {"out_gradient": (self.gradient or self.scores).array, "out_loss": self.loss}

    def check(self, stream: Any) -> None:
        """Makes the call, and compares its results with the reference."""
        made = self.function(*self.operands, **self.settings, **self.buffers, stream=stream)
        assert made.loss is self.loss
        assert made.gradient is self.buffers["out_gradient"]
        self.check_results(stream, self.loss, (self.gradient or self.scores).values)

    def check_results(self, stream: Any, loss: Any, gradient: Any) -> None:
        """Compares a loss and its gradient with the reference, after the work of `stream`.

        `gradient` is a function that returns the gradient's values; it is called when they have been computed.
        """
        self.gpu.synchronize(stream.ptr)
        weights = {name: host_of(self.gpu, each).copy() for name, each in self.weights.items()}
        target = self._classes if self.name == "cross_entropy" else self._y
        expected, exact = getattr(reference, self.name)(self._x, target, **self.options, **weights)
        scale = self.scale if isinstance(self.scale, float) else float(host_of(self.gpu, self.scale).reshape(()))
        assert float(host_of(self.gpu, loss)) == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert_close("gradient", gradient(), exact * scale * self.share, 1e-6 * scale)


_names = pytest.mark.parametrize("name", ["mse_loss", "huber_loss", "bce_with_logits", "cross_entropy"])


@_names
@pytest.mark.parametrize("place", [FLAT, ODD, COLUMNS, None], ids=["flat", "gaps", "columns", "over the scores"])
def test_same_buffers_with_other_contents(gpu: FakeGpu, name: str, place: Placement | None) -> None:
    call = LossCall(gpu, name, place)
    for seed in range(_CALLS):
        call.refill(seed)
        call.check(gpu.stream)


@_names
def test_leading_axes_are_rows(gpu: FakeGpu, name: str) -> None:
    call, shape = LossCall(gpu, name, ODD, by_row=True, by_column=True), (3, 4, _CLASSES)
    for placed in (call.scores, call.target, call.gradient):
        assert placed is not None
        placed.array = placed.array.reshape(shape)
    for seed in range(_CALLS):
        call.refill(seed)
        plain, call.row_weights = call.row_weights, call.row_weights.reshape(3, 4)
        labels, call.labels = call.labels, call.labels.reshape(3, 4)
        made = call.function(*call.operands, **call.settings, **call.buffers, stream=gpu.stream)
        call.row_weights, call.labels = plain, labels
        call.check_results(gpu.stream, made.loss, call.gradient.values)  # type: ignore[union-attr]


@_names
@pytest.mark.parametrize("place", [FLAT, ODD, COLUMNS], ids=["flat", "gaps", "columns"])
def test_what_is_asked_is_told_apart(gpu: FakeGpu, name: str, place: Placement) -> None:
    """Calls that differ in one option alternate, on the same arrays; each uses its own option and present weights."""
    call = LossCall(gpu, name, place)
    on_device = gpu.cp.asarray(np.full(1, 8.0, np.float32))
    changes: list[dict[str, Any]] = [{}, {"scale": 3.0}, {"share": 0.25}, {"scale": on_device}, {"by_row": True}]
    changes += [{"by_column": True}, {"by_row": True, "by_column": True}]
    if name == "huber_loss":
        changes += [{"delta": 0.5}, {"delta": 2.0, "by_row": True}]
    if name == "cross_entropy":
        changes += [{"smoothing": 0.25}, {"ignore_index": None}, {"ignore_index": 2}]
        changes += [{"smoothing": 0.25, "by_column": True}, {"smoothing": 0.1, "by_row": True, "by_column": True}]
        changes += [{"smoothing": 0.1, "by_row": True}]
    for seed in range(_CALLS):
        host_of(gpu, on_device)[...] = 2.0**seed
        for each in changes:
            for field in ("scale", "share", "smoothing", "ignore_index", "delta", "by_row", "by_column"):
                default = LossCall.__dataclass_fields__[field].default
                setattr(call, field, each.get(field, default))
            call.refill(seed)
            call.check(gpu.stream)


@_names
def test_the_mean_over_nothing_is_nan(gpu: FakeGpu, name: str) -> None:
    nothing, labels = gpu.cp.asarray(np.zeros((0, 4), np.float32)), gpu.cp.asarray(np.zeros(0, np.int32))
    number = gpu.cp.asarray(np.zeros((), np.float32))
    for _ in range(_CALLS):
        host_of(gpu, number)[...] = 1.0
        target = labels if name == "cross_entropy" else nothing
        made = getattr(gpu.lt, name)(nothing, target, out_loss=number, stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        assert math.isnan(float(host_of(gpu, number)))
        assert made.gradient.shape == (0, 4)


@pytest.mark.parametrize("place", [FLAT, ODD, COLUMNS], ids=["flat", "gaps", "columns"])
@pytest.mark.parametrize("shape", [(40, 7), (9, 200), (5, 2304), (3, 2500)], ids=str)
def test_a_loss_without_its_gradient(gpu: FakeGpu, shape: tuple[int, int], place: Placement) -> None:
    values = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    logits, labels = Placed(gpu, values, place), gpu.cp.asarray(np.arange(shape[0]) % shape[1])
    for _ in range(_CALLS):
        loss, gradient = gpu.lt.cross_entropy(logits.array, labels, need_gradient=False, stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        expected, _ = reference.cross_entropy(values, host_of(gpu, labels))
        assert gradient is None
        assert float(host_of(gpu, loss)) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_array_equal(logits.values(), values)
    with pytest.raises(gpu.lt.errors.ArgumentError, match="out_gradient is given, but need_gradient is False"):
        gpu.lt.cross_entropy(logits.array, labels, need_gradient=False, out_gradient=logits.array)


@pytest.mark.parametrize("place", [FLAT, ODD, None], ids=["flat", "gaps", "over x"])
def test_dropout_that_repeats(gpu: FakeGpu, place: Placement | None) -> None:
    """Each repeated call applies the dropout mask of its own `Philox`; it is captured if the step is on the device."""
    x = Placed(gpu, np.zeros((_ROWS, _CLASSES), np.float32), ODD)
    y = x if place is None else Placed(gpu, np.zeros((_ROWS, _CLASSES), np.float32), place)
    step = gpu.cp.asarray(np.zeros(1, np.uint32))
    for seed in range(2 * _CALLS):
        values = np.random.default_rng(seed).standard_normal((_ROWS, _CLASSES)).astype(np.float32)
        x.fill(values)
        host_of(gpu, step)[...] = seed
        rng = gpu.lt.Philox(5, seed % 3, step if seed % 2 else seed)
        assert gpu.lt.dropout(x.array, 0.5, rng, out=y.array, stream=gpu.stream) is y.array
        gpu.synchronize(gpu.stream.ptr)
        expected = values * reference.dropout_scale(values.shape, 0.5, Philox(5, seed % 3, seed))
        assert_close("y", y.values(), expected, 0.0)


def test_bound_dropout_reads_its_step(gpu: FakeGpu) -> None:
    x, y = (Placed(gpu, np.ones((3, 40), np.float32)) for _ in range(2))
    step = gpu.cp.asarray(np.zeros(1, np.uint32))
    launch = gpu.lt.bind(gpu.lt.dropout, x.array, 0.5, gpu.lt.Philox(1, 2, step), out=y.array, stream=gpu.stream)
    for number in range(_CALLS):
        host_of(gpu, step)[...] = number
        launch()
        gpu.synchronize(gpu.stream.ptr)
        assert_close("y", y.values(), reference.dropout_scale((3, 40), 0.5, Philox(1, 2, number)), 0.0)


def test_without_dropout_it_copies(gpu: FakeGpu) -> None:
    x, nothing = gpu.cp.asarray(np.arange(24, dtype=np.float32).reshape(2, 3, 4)), gpu.cp.asarray(np.ones((0, 3)))
    out = gpu.cp.asarray(np.zeros((2, 3, 4), np.float32))
    for number in range(_CALLS):
        host_of(gpu, x)[0, 0, 0] = number
        gpu.lt.dropout(x, 0.0, out=out, stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        np.testing.assert_array_equal(host_of(gpu, out), host_of(gpu, x))
        assert gpu.lt.dropout(nothing.astype(np.float32), 0.0, stream=gpu.stream).shape == (0, 3)


def test_dropout_needs_its_source_each_time(gpu: FakeGpu) -> None:
    x = gpu.cp.asarray(np.ones((4, 4), np.float32))
    for _ in range(_CALLS):
        gpu.lt.dropout(x, 0.5, gpu.lt.Philox(1), out=x, stream=gpu.stream)
        with pytest.raises(gpu.lt.errors.ArgumentError, match=r"dropout is 0\.5 but rng is None"):
            gpu.lt.dropout(x, 0.5, out=x, stream=gpu.stream)
    gpu.synchronize(gpu.stream.ptr)
