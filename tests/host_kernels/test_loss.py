"""The kernels of losses and their gradients, launched by the runtime, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.kernels import cross_entropy as family
from lt_runtime.kernels import fp8, losses
from lt_runtime.kernels import kernel as kernels
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.cross_entropy import FEW_CLASSES, CrossEntropyPass, Labels, Weighting
from lt_runtime.kernels.fp8 import LossCastPass
from lt_runtime.kernels.kernel import Entry
from lt_runtime.kernels.losses import ElementwiseLoss, ElementwiseLossPass, SummedLossPass
from lt_runtime.problem import DType
from lt_runtime.reference import bce_with_logits, cross_entropy, huber_loss, mse_loss
from lt_runtime.reference.fp8 import FP8_TYPES, cast_fp8
from lt_runtime.training.averages import HostTally, Scores
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, numbers, rounding, vector
from tests.host_kernels.cases import FEW, Shape, axes, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.products import Memory, spec_of
from tests.host_kernels.test_tally import State
from tests.host_kernels.variants import BF16, F16, F32, TYPES
from tests.support.placed import COLUMNS
from tests.support.strategies import Placement, placements

Array = NDArray[np.float64]

MUCH_SHARED_MEMORY = (227 << 10, 228 << 10)
LITTLE_SHARED_MEMORY = (48 << 10, 30 << 10)
"""Bytes of shared memory of a block and of a multiprocessor: they hold only a few packets of each thread."""


class Runner:
    """Stands in for the GPU: the kernels run on the host, with threads in a given order."""

    def __init__(self, host: HostKernels) -> None:
        self._host, self.order = host, 0
        self.shared_memory = MUCH_SHARED_MEMORY
        self.launched: list[str] = []
        self.shared: list[int] = []

    def get_kernel(self, entry: Entry, macros: Any, device: int) -> Any:
        kernel = self._host.get(entry, macros)

        def prepare(*arguments: Any, **more: Any) -> Callable[[], None]:
            self.launched.append(entry.name)
            self.shared.append(arguments[-1])
            return kernel.prepare(*arguments, **more, order=self.order)

        return SimpleNamespace(prepare=prepare)


@pytest.fixture(scope="module")
def runner(host: HostKernels) -> Iterator[Runner]:
    made = Runner(host)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "get_kernel", made.get_kernel)
        patch.setattr(family, "device_attributes", lambda *_: made.shared_memory)
        patch.setattr(family, "device_info", lambda _: DeviceInfo(0, "", 90, multiprocessors=1, memory=0))
        yield made


class LossMemory(Memory):
    """The memory that a loss's launch needs: the stream's workspace and tickets, the loss itself and a tally."""

    def __init__(self) -> None:
        super().__init__()
        self.loss, self.tally = Guarded(np.full((1, 1), 7.0, np.float32)), State()

    def call(self, addresses: tuple[int, ...], scale: tuple[float, int]) -> Call:
        """The call of a loss that is also added to the tally."""
        return Call(addresses, 0, scale, tally=self.tally.part(0.3, first=True))

    def read(self, scores: Scores | None = None) -> float:
        """Returns the loss, after comparing the tally with NumPy's; `scores` as for `HostTally.add`."""
        self.check()
        loss, expected = self.loss.values()[0, 0].astype(np.float32), HostTally()
        expected.add(loss, scores, 0.3, first=True, stream=None)
        np.testing.assert_equal(self.tally.mean, float(expected.mean))
        (steps, total, *counts), wanted = self.tally.read(), expected.read(None)
        assert (steps, *counts) == (wanted.steps, wanted.rows, wanted.correct)
        assert total == wanted.loss or not math.isfinite(loss)
        return float(loss)


def scale_of(factor: float, on_device: bool) -> tuple[tuple[float, int], NDArray[np.float32]]:
    """Makes the scale argument of a call, and the memory of its factor, which must live until the launch."""
    array = np.array([factor], np.float32)
    return ((0.5, array.ctypes.data) if on_device else (0.5 * factor, 0)), array


@dataclass(frozen=True)
class LossCase:
    """A test case: one launch of a loss kernel.

    Attributes:
        in_place: whether the gradient is written over the prediction.
        little_memory: whether not all of a row fits into shared memory.
        scale: twice the factor by which the gradient is multiplied.
        scale_on_device: whether the factor, or a part of it, is in device memory.
    """

    shape: Shape
    in_place: bool = False
    order: int = 0
    prediction: Placement = FLAT
    target: Placement = FLAT
    gradient: Placement = FLAT
    little_memory: bool = False
    scale: float = 2.0
    scale_on_device: bool = False
    seed: int = 0

    def gradient_of(self, prediction: Guarded, dtype: DType) -> Guarded:
        return prediction if self.in_place else Guarded(np.zeros(self.shape), self.gradient, dtype)


columns = st.one_of(
    axes,
    # numbers of columns for which a thread, some lanes, a warp or a block share a row, with and without a remainder
    st.sampled_from((1, 2, 3, 7, 8, 9, 31, 32, 33, 63, 100, 255, 256, 257, 511, 512, 513, 1000, 1023, 1024, 1025)),
    st.sampled_from((2047, 2048, 2056, 2057, 4000, 10000)),
)
cases = st.builds(
    LossCase,
    shape=st.tuples(st.one_of(st.integers(1, 6), axes), columns).filter(lambda shape: shape[0] * shape[1] < 60000),
    in_place=st.booleans(),
    order=orders,
    prediction=placements,
    target=placements,
    gradient=placements,
    little_memory=st.booleans(),
    scale=st.sampled_from((2.0, 1.0, 1024.0)),
    scale_on_device=st.booleans(),
    seed=seeds,
)


def row_of(values: NDArray[Any] | None, offset: int = 0) -> Guarded | None:
    """Places weights in guarded memory; returns None if there are no weights."""
    return None if values is None else vector(values, F32, offset)


def address_of(operand: Guarded | None) -> int:
    return 0 if operand is None else operand.address


@dataclass(frozen=True)
class Elementwise:
    """For each loss that is a mean over all elements, its options and the kinds of its weights."""

    loss: str
    delta: float = 1.0
    by_row: bool = False
    by_column: bool = False

    def weights(self, shape: Shape, seed: int) -> tuple[Guarded | None, Guarded | None]:
        """Draws weights of rows, some of them 0 or negative, and weights of columns, aligned or not."""
        generator = np.random.default_rng(seed + 2)
        of_rows, of_columns = generator.integers(-2, 4, shape[0]) / 2, generator.random(shape[1]) * 4
        return row_of(of_rows if self.by_row else None), row_of(of_columns if self.by_column else None, seed % 2)

    def exact(self, prediction: NDArray[Any], target: NDArray[Any], *weights: Any) -> tuple[float, Array]:
        of_rows, of_columns = (None if each is None else each.array[0] for each in weights)
        if self.loss == "mse":
            return mse_loss(prediction, target, row_weights=of_rows)
        if self.loss == "huber":
            return huber_loss(prediction, target, delta=self.delta, row_weights=of_rows)
        return bce_with_logits(prediction, target, pos_weight=of_columns, row_weights=of_rows)


def check_elementwise(runner: Runner, dtype: DType, case: LossCase, asked: Elementwise) -> None:
    """Compares a launch with the reference; the tolerance is a multiple of the rounding of each element's terms."""
    generator = np.random.default_rng(case.seed)
    prediction = Guarded(numbers(generator, case.shape, dtype), case.prediction)
    is_binary = asked.loss == "bce_with_logits"
    targets = generator.random(case.shape).round(1) if is_binary else numbers(generator, case.shape, dtype)
    target = Guarded(targets, case.target, dtype)
    gradient = case.gradient_of(prediction, dtype)
    size, factor = case.shape[0] * case.shape[1], case.scale / 2
    weights = asked.weights(case.shape, case.seed)
    expected, expected_gradient = asked.exact(prediction.array, target.array, *weights)
    magnitude = np.abs(prediction.array.astype(np.float64)) + np.abs(target.array.astype(np.float64)) + 5.0 * is_binary
    if weights[0] is not None:
        magnitude = magnitude * np.maximum(1.0, np.abs(weights[0].array[0].astype(np.float64)))[:, None]
    if weights[1] is not None:
        magnitude = magnitude * np.maximum(1.0, weights[1].array[0].astype(np.float64))
    kind = ElementwiseLoss(asked.loss, asked.delta, asked.by_row or asked.by_column)
    loss_pass = ElementwiseLossPass(dtype, prediction.layout, gradient.layout, target.layout, kind, 0)
    memory = LossMemory()
    scale, _kept = scale_of(case.scale, case.scale_on_device)
    runner.order = case.order
    addresses = (prediction.address, target.address, gradient.address, memory.loss.address, *map(address_of, weights))
    loss_pass.launch(memory.call(addresses, scale), memory)  # type: ignore[arg-type]

    assert abs(memory.read() - expected) <= 60 * EPS32 * float(np.mean(magnitude**2))
    exact = expected_gradient * factor
    terms = magnitude * (2.0 if asked.loss == "mse" else 1.0) * factor / size  # (p - t)² has the derivative 2 (p - t)
    assert_close("gradient", gradient.values(), exact, rounding(dtype, exact) + 4 * EPS32 * terms)
    for each in (target, *weights, None if case.in_place else prediction):
        if each is not None:
            each.assert_unchanged()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("loss", ["mse", "huber", "bce_with_logits"])
@FEW
@example(case=LossCase((3, 200)), delta=1.0, weighted=(False, False))
@example(case=LossCase((3, 200)), delta=0.5, weighted=(True, False))
@example(case=LossCase((9, 5)), delta=1.0, weighted=(True, False))  # octets that extend over several rows
@example(case=LossCase((8, 9)), delta=1.0, weighted=(True, False))
@example(case=LossCase((24, 5), False, 0, COLUMNS, COLUMNS, COLUMNS), delta=1.0, weighted=(True, False))
@example(case=LossCase((3, 16), prediction=Placement(False, 8, 0)), delta=1.0, weighted=(False, False))
@example(case=LossCase((3, 203)), delta=1.0, weighted=(False, False))
@example(case=LossCase((203, 1)), delta=1.0, weighted=(True, True))
@example(case=LossCase((3, 200), target=Placement(offset=1)), delta=1.0, weighted=(False, False))
@example(case=LossCase((3, 200), gradient=Placement(offset=1)), delta=1.0, weighted=(False, False))
@example(case=LossCase((3, 200), seed=1), delta=1.0, weighted=(False, True))  # pos_weight is misaligned
@given(case=cases, delta=st.sampled_from((1.0, 0.25, 7.0)), weighted=st.tuples(st.booleans(), st.booleans()))
def test_means_over_elements(
    runner: Runner, loss: str, dtype: DType, case: LossCase, delta: float, weighted: tuple[bool, bool]
) -> None:
    by_row, by_column = weighted
    check_elementwise(runner, dtype, case, Elementwise(loss, delta, by_row, by_column and loss == "bce_with_logits"))


@pytest.mark.parametrize("shape", [(5, 24), (24, 5), (1, 40)], ids=str)
def test_weights_of_rows_that_are_too_many_to_join(
    runner: Runner, shape: Shape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "_MOST_JOINED", 10)
    check_elementwise(runner, F32, LossCase(shape), Elementwise("bce_with_logits", by_row=True, by_column=True))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("loss", ["mse", "huber", "bce_with_logits"])
@FEW
@example(case=LossCase((3, 200)), accumulate=False, wave=1)
@example(case=LossCase((300, 72), in_place=True), accumulate=True, wave=7)
@example(case=LossCase((1, 5)), accumulate=False, wave=132)  # so short a row that one thread computes it
@example(case=LossCase((2100, 40), target=Placement(False, 8, 0)), accumulate=True, wave=132)
@given(case=cases, accumulate=st.booleans(), wave=st.integers(1, 40))
def test_sums_of_the_gradient(
    runner: Runner, loss: str, dtype: DType, case: LossCase, accumulate: bool, wave: int
) -> None:
    """The column sums of the gradient are those of its stored, rounded elements."""
    generator, (rows, cols) = np.random.default_rng(case.seed), case.shape
    values = [generator.random(case.shape).round(2) * 4 for _ in range(2)]
    prediction, target = (
        Guarded(each, at, dtype) for each, at in zip(values, (case.prediction, case.target), strict=True)
    )
    gradient, memory = case.gradient_of(prediction, dtype), LossMemory()
    sums = vector(np.full(cols, 2.0), dtype)
    asked = Elementwise(loss, 0.5)
    expected, exact = asked.exact(prediction.array, target.array, None, None)
    scale, _kept = scale_of(case.scale, case.scale_on_device)
    specs = (spec_of(each) for each in (prediction, gradient, target))
    runner.order = case.order
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(losses, "wave_of", lambda *_: wave)
        made = SummedLossPass(dtype, *specs, ElementwiseLoss(loss, 0.5), accumulate, 0)
    addresses = (prediction.address, target.address, gradient.address, memory.loss.address, sums.address)
    made.launch(memory.call(addresses, scale), memory)  # type: ignore[arg-type]

    exact = exact * case.scale / 2
    assert memory.read() == pytest.approx(expected, rel=1e-4)
    assert_close("gradient", gradient.values(), exact, rounding(dtype, exact) + 40 * EPS32 * case.scale / (rows * cols))
    stored = gradient.values()
    total = stored.sum(axis=0) + 2.0 * accumulate
    bound = rounding(dtype, total) + 64 * EPS32 * (np.abs(stored).sum(axis=0) + 2.0)
    assert_close("sums", sums.values()[0], total, bound)
    target.assert_unchanged()


@pytest.mark.parametrize("kind", sorted(FP8_TYPES))
@pytest.mark.parametrize(
    ("shape", "loss", "order"), [((16, 16), "huber", 0), ((400, 272), "mse", 1), ((8320, 16), "bce_with_logits", 2)]
)
def test_gradients_in_fp8(runner: Runner, shape: Shape, loss: str, order: int, kind: str) -> None:
    """The FP8 gradient is the cast of the gradient that the kernel without a cast writes, bit for bit."""
    generator, size = np.random.default_rng(0), shape[0] * shape[1]
    prediction, target = (Guarded(generator.random(shape).round(2) * 4, FLAT, BF16) for _ in range(2))
    gradients = [Guarded(np.zeros(shape), FLAT, BF16) for _ in range(2)]
    scale, amax, options = np.array([0.25], np.float32), np.zeros(1, np.float32), ElementwiseLoss(loss, 0.5)
    plain, factor = LossMemory(), (float(size), 0)
    made = ElementwiseLossPass(BF16, *[prediction.layout] * 3, options, 0)
    addresses = [prediction.address, target.address, gradients[0].address, plain.loss.address, 0, 0]
    made.launch(plain.call(tuple(addresses), factor), plain)  # type: ignore[arg-type]
    runner.order, found = order, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fp8, "check_fp8", lambda _: None)
        cast = LossCastPass(spec_of(prediction), spec_of(target), kind, options, True, 0)
    for is_cast in (False, True):
        memory, sums = LossMemory(), vector(np.full(shape[1], 2.0), BF16)
        rows, transposed = (Guarded(np.zeros(each), FLAT, DType(kind)) for each in (shape, shape[::-1]))
        fixed = prediction.address, target.address, gradients[1].address * (not is_cast), memory.loss.address
        of_cast = rows.address, transposed.address, scale.ctypes.data, amax.ctypes.data
        addresses = [*fixed, sums.address, *(each * is_cast for each in of_cast)]
        cast.launch(memory.call(tuple(addresses), factor), memory)  # type: ignore[arg-type]
        found.append((memory.read(), sums.values().tobytes()))
    assert found[0] == found[1]
    assert found[0][0] == pytest.approx(plain.read(), rel=1e-5)
    gradient, uncast = (each.values() for each in gradients)
    np.testing.assert_array_equal(uncast, gradient)
    expected = cast_fp8(gradients[0].array, scale[0], kind).astype(np.float64)
    np.testing.assert_array_equal(rows.values(), expected)
    np.testing.assert_array_equal(transposed.values(), expected.T)
    assert amax[0] == np.abs(gradient).max()
    total = 2.0 + gradient.sum(axis=0)
    assert_close("sums", sums.values()[0], total, rounding(BF16, total) + 64 * EPS32 * np.abs(gradient).sum(axis=0))


def run_elementwise(
    runner: Runner, loss: str, prediction: Array, target: Array, delta: float = 1.0
) -> tuple[float, Array]:
    """Runs a loss on FP32 matrices; returns loss and gradient, the latter not divided by their size."""
    operands = [Guarded(each.astype(np.float32)) for each in (prediction, target, np.zeros_like(prediction))]
    layouts = [each.layout for each in operands]
    loss_pass = ElementwiseLossPass(F32, layouts[0], layouts[2], layouts[1], ElementwiseLoss(loss, delta), 0)
    memory = LossMemory()
    addresses = (*(each.address for each in operands), memory.loss.address, 0, 0)
    loss_pass.launch(memory.call(addresses, (float(prediction.size), 0)), memory)  # type: ignore[arg-type]
    return memory.read(), operands[2].values()


@pytest.mark.parametrize("logit", [-1e30, -200.0, -20.0, 0.0, 20.0, 200.0, 1e30])
@pytest.mark.parametrize("target", [0.0, 1.0])
def test_logits_of_any_size_have_an_exact_gradient(runner: Runner, logit: float, target: float) -> None:
    """Loss and gradient of large logits stay accurate: they are not computed as differences of nearly equal numbers."""
    z, t = np.full((1, 1), logit), np.full((1, 1), target)
    loss, gradient = run_elementwise(runner, "bce_with_logits", z, t)
    expected, exact = bce_with_logits(z, t)
    assert loss == pytest.approx(expected, rel=1e-5, abs=1e-37)
    np.testing.assert_allclose(gradient, exact, rtol=1e-5, atol=1e-37)


@pytest.mark.parametrize("loss", ["mse", "huber", "bce_with_logits"])
def test_nan_stays_nan(runner: Runner, loss: str) -> None:
    prediction = np.zeros((1, 12))
    prediction[0, 9] = np.nan
    value, gradient = run_elementwise(runner, loss, prediction, np.zeros_like(prediction))
    assert math.isnan(value)
    assert np.isnan(gradient[0]).nonzero()[0].tolist() == [9]


def run_cross_entropy(
    runner: Runner,
    logits: Guarded,
    labels: NDArray[Any],
    gradient: Guarded | None,
    smoothing: float = 0.0,
    ignore_index: int | None = None,
    scale: tuple[float, int] = (1.0, 0),
    order: int = 0,
    little_memory: bool = False,
    weights: tuple[Guarded | None, Guarded | None] = (None, None),
) -> float:
    """Runs the cross-entropy kernel of a case; returns the loss.

    Args:
        gradient: where the gradient is written; None if it is not wanted.
        weights: weights of rows and of classes, or None.
    """
    runner.order, runner.launched = order, []
    runner.shared_memory = LITTLE_SHARED_MEMORY if little_memory else MUCH_SHARED_MEMORY
    kind = Labels(labels.dtype == np.int64, ignore_index)
    weighting = Weighting(smoothing, *(each is not None for each in weights))
    written = None if gradient is None else gradient.layout
    loss_pass = CrossEntropyPass(logits.dtype, logits.layout, written, kind, weighting, 0)
    memory = LossMemory()
    others = (gradient, memory.loss, *weights)
    addresses = (logits.address, labels.ctypes.data, *map(address_of, others))
    before, few = logits.array.copy(), logits.array.shape[1] <= FEW_CLASSES
    call = memory.call(addresses, scale) if few else Call(addresses, 0, scale)
    loss_pass.launch(call, memory)  # type: ignore[arg-type]
    if few:
        return memory.read(Scores(before, labels, ignore_index))
    memory.check()
    return float(memory.loss.values()[0, 0])


def draw_labels(data: st.DataObject | None, case: LossCase) -> tuple[NDArray[Any], float, int | None]:
    """Draws labels, most of them in range, their smoothing, and the label to ignore; without `data`, plain labels."""
    rows, cols = case.shape
    if data is None:
        return np.arange(rows) % cols, 0.1, None
    generator = np.random.default_rng(case.seed + 1)
    ignore_index = data.draw(st.sampled_from((None, -100, cols - 1, -(2**31))))
    labels = generator.integers(0, cols, rows).astype(data.draw(st.sampled_from((np.int32, np.int64))))
    if ignore_index is not None:
        labels[generator.random(rows) < data.draw(st.sampled_from((0.1, 0.9, 1.1)))] = ignore_index
    if data.draw(st.integers(0, 3)) == 0:
        labels[generator.integers(0, rows)] = data.draw(st.sampled_from((-1, cols, -(2**31), 2**31 - 1)))
    return labels, data.draw(st.sampled_from((0.0, 0.0, 0.1, 1.0))), ignore_index


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@FEW
@example(data=None, case=LossCase((3, 200), gradient=Placement(offset=1)))
@given(data=st.data(), case=cases)
def test_cross_entropy(runner: Runner, dtype: DType, data: st.DataObject | None, case: LossCase) -> None:
    check_cross_entropy(runner, dtype, case, *draw_labels(data, case))


few_rows = st.one_of(st.integers(1, 70), st.sampled_from((255, 256, 257, 511, 513, 1023, 1024, 1025, 1300)))
few_classes = st.builds(replace, cases, shape=st.tuples(few_rows, st.integers(1, 18)), little_memory=st.just(False))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@FEW
@example(data=None, case=LossCase((9, 3), prediction=Placement(False, 1, 0), gradient=Placement(False, 1, 0)))
@given(data=st.data(), case=few_classes)
def test_few_classes(runner: Runner, dtype: DType, data: st.DataObject | None, case: LossCase) -> None:
    check_cross_entropy(runner, dtype, case, *draw_labels(data, case))
    assert ("cross_entropy_few" in runner.launched) == (case.shape[1] <= 16)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [300, 2100])
def test_equal_and_infinite_logits_of_few_classes(runner: Runner, dtype: DType, rows: int) -> None:
    """The kernel counts as correct the rows that NumPy's tally counts, see `LossMemory.read`."""
    generator, shape = np.random.default_rng(rows), (rows, 10)
    values = generator.integers(-2, 3, shape).astype(np.float64)
    special = generator.random(shape) < 0.03
    values[special] = generator.choice([np.nan, np.inf, -np.inf], special.sum())
    values[::50] = -np.inf
    labels = np.where(generator.random(rows) < 0.5, values.argmax(axis=1), generator.integers(-1, 11, rows))
    logits, gradient = Guarded(values, FLAT, dtype), Guarded(np.zeros(shape), FLAT, dtype)
    run_cross_entropy(runner, logits, labels, gradient, ignore_index=3)


@dataclass(frozen=True)
class Weighted:
    """The kinds of weights (of rows, of classes) that a case has."""

    by_row: bool = False
    by_class: bool = False

    def weights(self, shape: Shape, seed: int) -> tuple[Guarded | None, Guarded | None]:
        """Draws weights of rows, some of them 0 or negative, and weights of classes, all positive."""
        generator = np.random.default_rng(seed + 2)
        of_rows, of_classes = generator.integers(-2, 4, shape[0]) / 2, 0.5 + generator.random(shape[1])
        return row_of(of_rows if self.by_row else None), row_of(of_classes if self.by_class else None)


UNWEIGHTED = Weighted()


def check_cross_entropy(
    runner: Runner,
    dtype: DType,
    case: LossCase,
    labels: NDArray[Any],
    smoothing: float,
    ignore_index: int | None,
    weighted: Weighted = UNWEIGHTED,
) -> None:
    logits = Guarded(numbers(np.random.default_rng(case.seed), case.shape, dtype), case.prediction)
    gradient = case.gradient_of(logits, dtype)
    values, weights = logits.array.astype(np.float64), weighted.weights(case.shape, case.seed)
    of_rows, of_classes = (None if each is None else each.array[0].astype(np.float64) for each in weights)
    options: Any = {"label_smoothing": smoothing, "ignore_index": ignore_index, "class_weights": of_classes}
    expected, exact = cross_entropy(values, labels, row_weights=of_rows, **options)
    scale, _kept = scale_of(case.scale, case.scale_on_device)
    how = smoothing, ignore_index, scale, case.order, case.little_memory, weights
    alone = run_cross_entropy(runner, logits, labels, None, *how)
    logits.assert_unchanged()
    loss = run_cross_entropy(runner, logits, labels, gradient, *how)

    # exp turns the absolute error of a rounded difference into a relative error
    limits = EPS32 * (64 + 2 * np.abs(values).max(axis=1))
    most = 1.0 if of_rows is None else float(np.abs(of_rows).max())
    if of_classes is not None:
        most *= float(of_classes.max() / of_classes.min())
    # The rounding error of a weighted sum of logits is proportional to weight times logit.
    farthest = 1.0 if most == 1.0 else 1.0 + float(np.abs(values).max())
    tolerance = most * farthest * float(limits.max()) + 8 * EPS32 * abs(expected)
    assert_close("loss", np.array([loss, alone]), np.array([expected] * 2), tolerance)
    divisor, factor = max(int((labels != ignore_index).sum()), 1), case.scale / 2
    plain = cross_entropy(values, labels, label_smoothing=smoothing, ignore_index=ignore_index)[1]
    probabilities = np.exp(values - values.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    targets = np.abs(probabilities - plain * divisor)
    of_gradient = most * (limits[:, None] * probabilities + (4 if most == 1.0 else 16) * EPS32 * targets)
    limit = of_gradient * factor / divisor + rounding(dtype, exact * factor)
    assert_close("gradient", gradient.values(), exact * factor, limit)
    for each in (*weights, None if case.in_place else logits):
        if each is not None:
            each.assert_unchanged()


weightings = st.builds(Weighted, st.booleans(), st.booleans())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@FEW
@example(labels=(0, 5), case=LossCase((2, 300)), smoothing=0.1, weighted=Weighted(True, True))
@given(
    labels=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    case=cases,
    smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    weighted=weightings,
)
def test_weights(
    runner: Runner, dtype: DType, labels: tuple[int, int], case: LossCase, smoothing: float, weighted: Weighted
) -> None:
    """Weights of rows and classes, with labels of which some are ignored and, if there are few classes, some are out of
    range.
    """
    first, step = labels
    of_rows = (first + step * np.arange(case.shape[0])) % 7
    check_cross_entropy(runner, dtype, case, of_rows.astype(np.int32), smoothing, 6, weighted)


@pytest.mark.parametrize(
    "weighted", [Weighted(True, False), Weighted(False, True), Weighted(True, True)], ids=["rows", "classes", "both"]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize(
    "shape", [(1030, 3), (1030, 17), (21, 504), (4, 3000), (4, 3001), (3, 3072), (2, 20480)], ids=str
)
def test_weights_of_many_rows_and_classes(
    runner: Runner, shape: Shape, smoothing: float, weighted: Weighted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are so many labels that a separate launch sums their weights, and each warp or block has several rows."""
    monkeypatch.setattr(family, "_MAX_BLOCKS", 2)
    aligned = Placement(column_major=False, gap=-shape[1] % 8, offset=0)
    case = LossCase(shape, prediction=aligned, gradient=aligned)
    check_cross_entropy(runner, BF16, case, np.arange(shape[0]) % 3, smoothing, 1, weighted)
    by_class = ["count_labels"] if shape[0] > 1024 else []
    assert runner.launched == [*by_class, "cross_entropy_few" if shape[1] < 17 else "cross_entropy"]


@pytest.mark.parametrize("classes", [4, 40, 3000])
def test_a_label_out_of_range_has_no_weight(runner: Runner, classes: int) -> None:
    """A label out of range makes its own row NaN, and leaves the other rows finite."""
    labels = np.array([1, classes, 0], np.int64)
    gradient = Guarded(np.zeros((3, classes), np.float32))
    weights = None, row_of(np.full(classes, 2.0))
    logits = Guarded(np.eye(3, classes, dtype=np.float32))
    assert math.isnan(run_cross_entropy(runner, logits, labels, gradient, weights=weights))
    assert np.isnan(gradient.values()).all(axis=1).tolist() == [False, True, False]
    exact = cross_entropy(np.eye(3, classes), labels, class_weights=np.full(classes, 2.0))[1]
    np.testing.assert_allclose(gradient.values()[[0, 2]], exact[[0, 2]], rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("little_memory", [False, True], ids=["held", "read again"])
@pytest.mark.parametrize("offset", [0, 1, 8])
@pytest.mark.parametrize(("dtype", "classes"), [(BF16, 50304), (F16, 50257), (F32, 30000), (F32, 70000)], ids=str)
def test_many_classes(runner: Runner, dtype: DType, classes: int, offset: int, little_memory: bool) -> None:
    place = Placement(column_major=False, gap=0, offset=offset)
    case = LossCase((2, classes), False, 2, place, FLAT, place, little_memory)
    check_cross_entropy(runner, dtype, case, np.array([classes - 1, 777]), 0.1, None)


@pytest.mark.parametrize("dtype", [F32, DType.BFLOAT16], ids=str)
@pytest.mark.parametrize("classes", [40, 504, 1000, 1001, 2040, 3000, 3001])
def test_a_block_goes_from_row_to_row(
    runner: Runner, classes: int, dtype: DType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block uses the same shared memory for each of its rows, which must not disturb each other."""
    rows = 7 if classes > 2048 else 21 if classes > 256 else 200
    aligned = Placement(column_major=False, gap=-classes % 8, offset=0)
    for blocks, place in ((1, FLAT), (1, aligned), (2, aligned)):
        monkeypatch.setattr(family, "_MAX_BLOCKS", blocks)
        case = LossCase((rows, classes), in_place=True, prediction=place)
        check_cross_entropy(runner, dtype, case, np.arange(rows) % 3, 0.1, 1)


@pytest.mark.parametrize("dtype", [F32, DType.BFLOAT16], ids=str)
@pytest.mark.parametrize("room", [10, 42, 227], ids=["none", "of one batch", "of all"])
def test_long_rows(runner: Runner, room: int, dtype: DType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block streams several rows; a thread keeps its first packets in registers, and reads packets again for which
    memory has no room.
    """
    monkeypatch.setattr(family, "_LONG_ROW", 0)
    monkeypatch.setitem(globals(), "MUCH_SHARED_MEMORY", (room << 10, room << 10))
    for classes, smoothing in ((37000, 0.1), (16392, 0.0)):
        case = LossCase((4, classes), in_place=True, order=classes % 3)
        check_cross_entropy(runner, dtype, case, np.arange(4) * (classes // 4), smoothing, classes // 4)


def test_more_rows_than_a_block_adds_up_at_once(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row that a block streams stores a loss of its own; a thread adds up eight of these at a time."""
    monkeypatch.setattr(family, "_WARP_COLUMNS", 16)
    rows, classes = 8 * family.RowGroup.BLOCK.threads + 1, 24
    values = np.zeros((rows, classes), np.float32)
    values[-1, 1] = 100.0
    loss = run_cross_entropy(runner, Guarded(values), np.zeros(rows, np.int64), Guarded(np.zeros_like(values)))
    assert loss == pytest.approx((math.log(classes) * (rows - 1) + 100.0) / rows, rel=1e-6)


@pytest.mark.parametrize("classes", [40, 3000])
def test_maxima_of_threads_that_differ_a_little(runner: Runner, classes: int) -> None:
    """If the product of a maximum and log₂ e has a large rounding error, each thread has to correct its own error."""
    octets = np.arange(classes) // 8
    behind = np.stack([octets % 5, octets // 32 % 5])  # the maxima differ from thread to thread, and from warp to warp
    values = np.array([[2.0**20], [2.0**21]]) - np.array([[0.5], [1.0]]) * behind
    logits, gradient = Guarded(values.astype(np.float32)), Guarded(np.zeros_like(values, np.float32))
    run_cross_entropy(runner, logits, np.zeros(2, np.int64), gradient)
    exact = cross_entropy(values, np.zeros(2, np.int64))[1]
    np.testing.assert_allclose(gradient.values(), exact, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("classes", [3, 17])
@pytest.mark.parametrize("rows", [1, 300, 1024, 1025, 5000])
def test_the_ignored_are_counted(runner: Runner, rows: int, classes: int) -> None:
    """Ignored labels are counted in every block, or by a separate launch if there are many labels."""
    labels = np.random.default_rng(rows).integers(-1, 3, rows)
    logits, gradient = (Guarded(np.zeros((rows, classes), np.float32)) for _ in range(2))
    loss = run_cross_entropy(runner, logits, labels, gradient, ignore_index=-1, order=rows % 3)
    pass_ = "cross_entropy_few" if classes == 3 else "cross_entropy"
    assert runner.launched == ["count_labels"] * (rows > 1024) + [pass_]
    assert (runner.shared[-1] > 0) == (classes > 16), "rows are copied ahead, unless threads hold them in registers"
    counted = int((labels >= 0).sum())
    assert loss == pytest.approx(math.log(classes), rel=1e-6)
    assert (gradient.values()[labels == -1] == 0).all()
    np.testing.assert_allclose(gradient.values()[labels != -1].max(axis=1), 1 / classes / counted, rtol=1e-6)


@pytest.mark.parametrize("classes", [3, 100, 5000])
def test_what_is_ignored_is_not_read(runner: Runner, classes: int) -> None:
    values = np.ones((3, classes), np.float32)
    values[1] = np.nan
    gradient = Guarded(np.full_like(values, 7.0))
    loss = run_cross_entropy(runner, Guarded(values), np.array([0, 9, 2]), gradient, ignore_index=9)
    assert loss == pytest.approx(math.log(classes), rel=1e-6)
    assert (gradient.values()[1] == 0).all()
    assert np.isfinite(gradient.values()).all()


@pytest.mark.parametrize("far", [2**31 - 1, -(2**31), 2**32 + 1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("place", ["apart", "in place"])
@pytest.mark.parametrize("classes", [7, 20])
def test_labels_far_out_of_range(runner: Runner, far: int, place: str, classes: int) -> None:
    labels = np.array([1, far, 0], np.int64)
    logits = Guarded(np.eye(3, classes, dtype=np.float32))
    gradient = logits if place == "in place" else Guarded(np.zeros((3, classes), np.float32))
    assert math.isnan(run_cross_entropy(runner, logits, labels, gradient))
    assert np.isnan(gradient.values()).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(gradient.values()[[0, 2]]).all()


@pytest.mark.parametrize("classes", [2056, 4001, 4104])
@pytest.mark.parametrize("beyond", [0, 1, 7, 255])
def test_labels_just_out_of_range(runner: Runner, classes: int, beyond: int) -> None:
    """In rows that a block streams, no thread mistakes an out-of-range label for one of its columns."""
    place = Placement(column_major=False, gap=-classes % 8, offset=0)
    logits, gradient = (Guarded(np.zeros((3, classes), np.float32), place) for _ in range(2))
    labels = np.array([classes - 1, classes + beyond, 0])
    assert math.isnan(run_cross_entropy(runner, logits, labels, gradient))
    assert np.isnan(gradient.values()).all(axis=1).tolist() == [False, True, False]
    assert (gradient.values()[[0, 2]] < 0).sum(axis=1).tolist() == [1, 1]
    assert gradient.values()[0, classes - 1] < 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("col", [0, 3, -1, slice(None), slice(8, None)])
@pytest.mark.parametrize("classes", [9, 300])
def test_logits_that_are_not_finite(runner: Runner, classes: int, special: float, col: Any, smoothing: float) -> None:
    values = np.zeros((1, classes), np.float32)
    values[0, col] = special
    gradient = Guarded(np.zeros_like(values))
    with np.errstate(invalid="ignore"):
        expected, exact = cross_entropy(values, np.array([3]), label_smoothing=smoothing)
    loss = run_cross_entropy(runner, Guarded(values), np.array([3], np.int64), gradient, smoothing=smoothing)
    assert_close("loss", np.array([loss]), np.array([expected]), 64 * EPS32)
    assert_close("gradient", gradient.values(), exact, 64 * EPS32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("classes", [13, 40, 5000])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_logits_of_any_size(runner: Runner, dtype: DType, classes: int, sign: int, smoothing: float) -> None:
    """Rows of one launch have maxima of very different sizes, for which the kernel scales exponents differently."""
    largest = min(float(ml_dtypes.finfo(dtype.numpy).max), 3e38)
    powers = [1.0, 1e3, 2.0**16, 2.0**20, 1e8, 2.0**29, 2.0**30 - 64, 2.0**30, 2.0**31, 1e20, 3e38]
    maxima = sign * np.array([0.0, *(power for power in powers if power < largest), largest])
    below = np.resize([0.0, 0.25, 1, 3, 0, 10, 40, 64, 100, 128, 1e4, 1e10, 1e38], classes)
    logits = Guarded(np.maximum(maxima[:, None] - below, -largest).astype(dtype.numpy))
    gradient = Guarded(np.zeros_like(logits.array))
    rows = len(maxima)
    labels = np.arange(rows)
    loss = run_cross_entropy(runner, logits, labels, gradient, smoothing=smoothing)
    exact = cross_entropy(logits.array.astype(np.float64), labels, label_smoothing=smoothing)[1]
    assert smoothing or not math.isnan(loss)  # with smoothing the loss needs the sum of the logits, which may overflow
    assert_close("gradient", gradient.values(), exact, rounding(dtype, exact) + 128 * EPS32 / rows)


@pytest.mark.parametrize("place", [FLAT, Placement(column_major=False, gap=7, offset=0)])
@pytest.mark.parametrize("classes", [2, 33, 1000, 3000, 3001])
def test_uniform_logits_cost_the_logarithm_of_their_number(runner: Runner, classes: int, place: Placement) -> None:
    values, labels = np.full((5, classes), 2.5, np.float32), np.arange(5) % classes
    for smoothing in (0.0, 0.3):
        loss = run_cross_entropy(runner, Guarded(values, place), labels, Guarded(values, place), smoothing=smoothing)
        assert loss == pytest.approx(math.log(classes), rel=1e-6)


@pytest.mark.parametrize("shape", [(50, 10), (7, 1000), (5, 5000)])
def test_bits_depend_on_neither_order_nor_memory(runner: Runner, shape: Shape) -> None:
    values = numbers(np.random.default_rng(0), shape, F32)
    labels, results = np.arange(shape[0]) % shape[1], set()
    for order in range(5):
        for little_memory in (False, True):
            gradient = Guarded(np.zeros(shape, np.float32))
            loss = run_cross_entropy(
                runner, Guarded(values), labels, gradient, smoothing=0.1, order=order, little_memory=little_memory
            )
            results.add((loss, gradient.values().tobytes()))
    assert len(results) == 1
