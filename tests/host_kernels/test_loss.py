"""Losses and their gradients against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.kernels import THREADS
from lt_runtime.gpu.params import CrossEntropyParams, LossFinishParams, Matrix, MseParams
from lt_runtime.problem import DType
from lt_runtime.reference import cross_entropy, mse_loss
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, numbers, rounding
from tests.host_kernels.cases import FEW, MORE, Shape, axes, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.variants import F32, LOSSES, loss_macros
from tests.strategies import Placement, placements

Array = NDArray[np.float64]
BLOCK = (THREADS, 1)


@dataclass(frozen=True)
class LossCase:
    shape: Shape
    gradient: str  # "absent", "apart", or "in place" of the prediction
    grid: int
    order: int
    prediction: Placement
    target: Placement
    gradient_place: Placement
    seed: int


cases = st.builds(
    LossCase,
    # a block reduces over 256 threads, so a row (or all elements) may be fewer, as many, or more
    shape=st.tuples(st.integers(1, 6), st.one_of(axes, st.sampled_from((255, 256, 257, 515)))),
    gradient=st.sampled_from(("absent", "apart", "in place")),
    grid=st.integers(1, 5),
    order=orders,
    prediction=placements,
    target=placements,
    gradient_place=placements,
    seed=seeds,
)


def place_gradient(case: LossCase, prediction: Guarded, dtype: DType) -> Guarded | None:
    apart = Guarded(np.zeros(case.shape), case.gradient_place, dtype)
    return {"absent": None, "apart": apart, "in place": prediction}[case.gradient]


def total(host: HostKernels, macros: Macros, partial: Guarded, scale: float, order: int = 0) -> float:
    """What loss_finish makes of partial sums."""
    loss = Guarded(np.full((1, 1), 7.0, np.float32))
    params = LossFinishParams(partial.address, loss.address, partial.array.size, scale)
    host.get("loss_finish", macros).launch((1, 1), BLOCK, params, order=order)
    return float(loss.values()[0, 0])


@pytest.mark.parametrize(("dtype", "labels"), LOSSES, ids=str)
@FEW
@example(case=LossCase((3, 200), "apart", 2, 0, FLAT, FLAT, FLAT, 0))
@given(case=cases)
def test_mse(host: HostKernels, dtype: DType, labels: str, case: LossCase) -> None:
    generator = np.random.default_rng(case.seed)
    prediction = Guarded(numbers(generator, case.shape, dtype), case.prediction)
    target = Guarded(numbers(generator, case.shape, dtype), case.target)
    gradient = place_gradient(case, prediction, dtype)
    size = case.shape[0] * case.shape[1]
    expected, expected_gradient = mse_loss(prediction.array, target.array)
    magnitude = np.abs(prediction.array.astype(np.float64)) + np.abs(target.array.astype(np.float64))
    partial = Guarded(np.full((1, case.grid), np.nan, np.float32))
    params = MseParams(
        prediction.matrix,
        target.matrix,
        gradient.matrix if gradient else Matrix(),
        partial.address,
        *case.shape,
        2.0 / size,
    )
    host.get("mse_loss", loss_macros(dtype, labels)).launch((case.grid, 1), BLOCK, params, order=case.order)

    assert np.isfinite(partial.values()).all()
    loss = total(host, loss_macros(dtype, labels), partial, 1.0 / size, case.order)
    assert abs(loss - expected) <= (size / THREADS + 20) * EPS32 * float(np.mean(magnitude**2))
    if gradient is not None:
        tolerance = rounding(dtype, expected_gradient) + 4 * EPS32 * magnitude * 2.0 / size
        assert_close("gradient", gradient.values(), expected_gradient, tolerance)
    target.assert_unchanged()
    if gradient is not prediction:
        prediction.assert_unchanged()


def run_cross_entropy(
    host: HostKernels, logits: Guarded, labels: NDArray[Any], gradient: Guarded | None, grid: int, order: int
) -> tuple[Array, float]:
    """Losses of the rows, and the loss."""
    macros = loss_macros(logits.dtype, labels.dtype.name)
    rows, cols = logits.array.shape
    partial = Guarded(np.full((1, rows), 7.0, np.float32))
    params = CrossEntropyParams(
        logits.matrix,
        labels.ctypes.data,
        gradient.matrix if gradient else Matrix(),
        partial.address,
        rows,
        cols,
        1.0 / rows,
    )
    host.get("cross_entropy", macros).launch((grid, 1), BLOCK, params, order=order)
    return partial.values()[0], total(host, macros, partial, 1.0 / rows, order)


@pytest.mark.parametrize(("dtype", "label_type"), LOSSES, ids=str)
@FEW
@given(data=st.data(), case=cases)
def test_cross_entropy(host: HostKernels, dtype: DType, label_type: str, data: st.DataObject, case: LossCase) -> None:
    rows, cols = case.shape
    logits = Guarded(numbers(np.random.default_rng(case.seed), case.shape, dtype), case.prediction)
    # now and then a label out of range, next to it or far
    label = st.one_of(st.integers(0, cols - 1), st.sampled_from((0, cols - 1, 0, cols - 1, -1, cols, -(2**31))))
    labels = np.array(data.draw(st.lists(label, min_size=rows, max_size=rows)), label_type)
    gradient = place_gradient(case, logits, dtype)
    expected, expected_gradient = cross_entropy(logits.array, labels)
    each = [cross_entropy(logits.array[row : row + 1], labels[row : row + 1])[0] for row in range(rows)]
    largest = np.abs(logits.array.astype(np.float64)).max(axis=1)
    losses, loss = run_cross_entropy(host, logits, labels, gradient, case.grid, case.order)

    # rounding of logit - max is as large as the largest logit's, and exp makes a relative error of it
    limits = EPS32 * (cols / THREADS + 24 + 8 * largest)
    assert_close("row loss", losses, np.array(each), limits)
    assert_close("loss", np.array([loss]), np.array([expected]), float(limits.max()) + 32 * EPS32)
    if gradient is not None:
        tolerance = rounding(dtype, expected_gradient) + limits[:, None] / rows
        assert_close("gradient", gradient.values(), expected_gradient, tolerance)
    if gradient is not logits:
        logits.assert_unchanged()


@pytest.mark.parametrize("far", [2**31 - 1, -(2**31), 2**32 + 1, -(2**63), 2**63 - 1])
@pytest.mark.parametrize("place", ["apart", "in place"])
def test_labels_far_out_of_range(host: HostKernels, far: int, place: str) -> None:
    labels = np.array([1, far, 0], np.int64)
    logits = Guarded(np.eye(3, 4, dtype=np.float32))
    gradient = logits if place == "in place" else Guarded(np.zeros((3, 4), np.float32))
    losses, loss = run_cross_entropy(host, logits, labels, gradient, grid=2, order=0)
    assert np.isnan(losses).tolist() == [False, True, False]
    assert np.isnan(loss)
    assert np.isnan(gradient.values()).all(axis=1).tolist() == [False, True, False]
    assert np.isfinite(gradient.values()[[0, 2]]).all()


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("col", [0, 3, 299])
def test_logits_that_are_not_finite(host: HostKernels, special: float, col: int) -> None:
    values = np.zeros((1, 300), np.float32)
    values[0, col] = special
    logits, gradient = Guarded(values), Guarded(np.zeros_like(values))
    with np.errstate(invalid="ignore"):
        expected, expected_gradient = cross_entropy(values, np.array([3]))
    _, loss = run_cross_entropy(host, logits, np.array([3], np.int64), gradient, grid=1, order=0)
    assert_close("loss", np.array([loss]), np.array([expected]), 64 * EPS32)
    assert_close("gradient", gradient.values(), expected_gradient, 64 * EPS32)


def test_logits_far_apart_do_not_overflow(host: HostKernels) -> None:
    values = np.array([[3e38, -3e38, 0.0], [-3e38, -3e38, -3e38]], np.float32)
    labels = np.array([0, 2], np.int32)
    losses, _ = run_cross_entropy(host, Guarded(values), labels, None, grid=2, order=0)
    # the second row's maximum leaves nothing of log 3, which is right in FP32
    assert losses[0] == 0.0
    assert losses[1] == 0.0


@MORE
@given(parts=st.one_of(axes, st.sampled_from((255, 256, 257, 3000))), scale=st.floats(1e-3, 10.0), seed=seeds)
def test_finish(host: HostKernels, parts: int, scale: float, seed: int) -> None:
    values = np.abs(numbers(np.random.default_rng(seed), (1, parts), F32))
    partial = Guarded(values)
    loss = total(host, loss_macros(F32, "int32"), partial, scale, order=seed % 3)
    expected = float(values.astype(np.float64).sum()) * scale
    assert abs(loss - expected) <= (parts / THREADS + 12) * EPS32 * expected
    partial.assert_unchanged()
