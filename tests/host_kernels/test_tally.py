"""The kernel that sums losses and counts correctly classified rows, launched by the runtime, against NumPy's tally."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lt_runtime.kernels.cross_entropy import Labels
from lt_runtime.kernels.kernel import Tally
from lt_runtime.kernels.losses import TallyPass, TallyState
from lt_runtime.problem import DType
from lt_runtime.training.averages import HostTally, Scores, Totals
from tests.host_kernels.arrays import FLAT, Guarded, vector
from tests.host_kernels.cases import FEW, axes, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.variants import BF16, F32, TYPES
from tests.support.strategies import Placement, placements


class State:
    """The sums of a tally in the CPU's memory; the last step's loss is NaN before the first step."""

    def __init__(self) -> None:
        kind = np.dtype(TallyState)
        self._words = Guarded(np.zeros((1, kind.itemsize // 8), np.uint64))
        self._state = self._words.array.view(kind)[0]
        self._state["mean"] = np.nan

    def part(self, weight: float, *, first: bool) -> Tally:
        return Tally(self._words.address, weight, first)

    @property
    def mean(self) -> float:
        return float(self._state["mean"][0])

    def read(self) -> Totals:
        self._words.values()
        (state,) = self._state
        loss = float(state["loss"]) - float(state["rest"])
        return Totals(int(state["steps"]), loss, int(state["rows"]), int(state["correct"]))


class KernelTally(State):
    """Stands in for `GpuTally`; the kernel runs on the CPU."""

    def __init__(self, host: HostKernels, dtype: DType, order: int = 0) -> None:
        super().__init__()
        self._host, self._dtype, self._order = host, dtype, order

    def add(self, loss: float, scores: Any, weight: float, *, first: bool) -> None:
        at = vector(np.full(1, loss), F32)
        layout, logits, labels, kind = None, 0, 0, Labels()
        if scores is not None:
            layout, logits = scores.logits.layout, scores.logits.address
            wide = scores.labels.array.dtype == np.int64
            labels, kind = scores.labels.address, Labels(wide, scores.ignore_index)
        with self._host.in_order(self._order):
            made = TallyPass(self._dtype, layout, kind, 0)
        made.launch(logits, labels, at.address, self.part(weight, first=first), 0)
        at.assert_unchanged()


def labels_of(values: Any, dtype: Any) -> Guarded:
    return Guarded(np.asarray(values, dtype).reshape(1, -1), FLAT)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@FEW
@example(shape=(300, 70), place=Placement(True, 3, 1), wide=True, ignore=-100, order=2, seed=0)
@given(
    shape=st.tuples(axes, axes),
    place=placements,
    wide=st.booleans(),
    ignore=st.sampled_from((None, -100, 0)),
    order=orders,
    seed=seeds,
)
def test_rows_are_counted(
    host: HostKernels,
    dtype: DType,
    shape: tuple[int, int],
    place: Placement,
    wide: bool,
    ignore: int | None,
    order: int,
    seed: int,
) -> None:
    generator = np.random.default_rng(seed)
    logits = generator.integers(-3, 4, shape).astype(dtype.numpy)  # the logits take so few values that many are equal
    logits[generator.random(shape) < 0.01] = np.nan
    classes = np.where(
        generator.random(shape[0]) < 0.5, logits.argmax(axis=1), generator.integers(0, shape[1], shape[0])
    )
    classes[generator.random(shape[0]) < 0.1] = -100
    classes[generator.random(shape[0]) < 0.1] = shape[1]
    at, labels = Guarded(logits, place), labels_of(classes, np.int64 if wide else np.int32)
    kernel, expected = KernelTally(host, dtype, order), HostTally()
    kernel.add(0.5, Scores(at, labels, ignore), 1.0, first=True)
    expected.add(np.float32(0.5), Scores(logits, classes, ignore), 1.0, first=True, stream=None)
    assert kernel.read() == expected.read(None)
    at.assert_unchanged()
    labels.assert_unchanged()


def test_steps_of_several_parts(host: HostKernels) -> None:
    kernel, expected = KernelTally(host, F32), HostTally()
    losses = np.random.default_rng(0).uniform(0, 3, (20, 4)).astype(np.float32)
    for step in losses:
        for i, loss in enumerate(step):
            kernel.add(float(loss), None, 0.25, first=i == 0)
            expected.add(loss, None, 0.25, first=i == 0, stream=None)
        assert kernel.mean == float(expected.mean) == pytest.approx(float(step.mean()), rel=1e-6)
    (steps, loss, *counts), wanted = kernel.read(), expected.read(None)
    assert (steps, counts) == (20, [0, 0])
    assert loss == pytest.approx(wanted.loss, rel=1e-7)


def test_a_long_sum_keeps_its_precision(host: HostKernels) -> None:
    kernel = KernelTally(host, BF16)
    kernel.add(1e6, None, 1.0, first=True)
    for _ in range(1000):  # each loss is less than half a unit in the last place of the sum
        kernel.add(0.03, None, 1.0, first=True)
    assert kernel.read().loss == pytest.approx(1e6 + 1000 * float(np.float32(0.03)), abs=1e-3)


def test_nan_stays(host: HostKernels) -> None:
    kernel = KernelTally(host, F32)
    for loss in (1.0, math.nan, 2.0):
        kernel.add(loss, None, 1.0, first=True)
    assert math.isnan(kernel.read().loss)
    assert kernel.mean == 2.0
