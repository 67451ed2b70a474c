"""Losses and their gradients on the GPU against the float64 reference."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.problem import DType
from tests.gpu.helpers import EPSILON, Guarded, assert_close
from tests.strategies import TYPES, Placement, placements, sizes

_seeds = st.integers(0, 2**32 - 1)
_dtypes = st.sampled_from(list(TYPES))


@settings(max_examples=150, deadline=None)
@given(rows=sizes, classes=sizes, dtype=_dtypes, at=placements, out=placements, seed=_seeds, wide=st.booleans())
def test_cross_entropy(
    rows: int, classes: int, dtype: DType, at: Placement, out: Placement, seed: int, wide: bool
) -> None:
    generator = np.random.default_rng(seed)
    logits = (5 * generator.standard_normal((rows, classes))).astype(dtype.numpy)
    labels = generator.integers(0, classes, rows).astype(np.int64 if wide else np.int32)
    gradient = Guarded(np.zeros((rows, classes), dtype.numpy), out)
    loss, returned = lt.cross_entropy(Guarded(logits, at).array, cp.asarray(labels), out_gradient=gradient.array)
    expected, exact = reference.cross_entropy(logits, labels)
    assert returned is gradient.array
    assert loss.shape == ()
    assert loss.dtype == cp.float32
    assert float(loss) == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_close("gradient", gradient.values(), exact, 2 * EPSILON[dtype] * np.abs(exact) + 1e-7)


@settings(max_examples=150, deadline=None)
@given(rows=sizes, cols=sizes, dtype=_dtypes, at=placements, other=placements, out=placements, seed=_seeds)
def test_mse(rows: int, cols: int, dtype: DType, at: Placement, other: Placement, out: Placement, seed: int) -> None:
    generator = np.random.default_rng(seed)
    prediction, target = (generator.standard_normal((rows, cols)).astype(dtype.numpy) for _ in range(2))
    gradient = Guarded(np.zeros((rows, cols), dtype.numpy), out)
    loss, _ = lt.mse_loss(Guarded(prediction, at).array, Guarded(target, other).array, out_gradient=gradient.array)
    expected, exact = reference.mse_loss(prediction, target)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert_close("gradient", gradient.values(), exact, 2 * EPSILON[dtype] * np.abs(exact) + 1e-7)


def test_labels_out_of_range_make_the_loss_nan() -> None:
    logits = cp.zeros((3, 4), cp.float32)
    loss, gradient = lt.cross_entropy(logits, cp.asarray([0, 4, -1], dtype=cp.int32))
    assert np.isnan(float(loss))
    assert cp.isnan(gradient).all(axis=1).tolist() == [False, True, True]


def test_gradient_over_the_logits() -> None:
    logits = cp.asarray(np.random.default_rng(0).standard_normal((37, 11)).astype(np.float32))
    labels = cp.zeros(37, cp.int64)
    expected = lt.cross_entropy(logits, labels).gradient
    loss, gradient = lt.cross_entropy(logits, labels, out_gradient=logits)
    assert gradient is logits
    assert (logits == expected).all()
    assert np.isfinite(float(loss))


@pytest.mark.parametrize("loss", [lt.mse_loss, lt.cross_entropy])
def test_nothing_to_average_is_nan(loss: Any) -> None:
    scores = cp.zeros((0, 4), cp.float32)
    target = scores if loss is lt.mse_loss else cp.zeros(0, cp.int32)
    value, gradient = loss(scores, target)
    assert np.isnan(float(value))
    assert gradient.shape == (0, 4)


def test_runs_are_bitwise_equal() -> None:
    generator = np.random.default_rng(1)
    logits = cp.asarray(generator.standard_normal((1000, 77)).astype(np.float32))
    labels = cp.asarray(generator.integers(0, 77, 1000))
    runs = {cp.asnumpy(lt.cross_entropy(logits, labels).loss).tobytes() for _ in range(10)}
    runs_mse = {cp.asnumpy(lt.mse_loss(logits, logits * 2).loss).tobytes() for _ in range(10)}
    assert len(runs) == len(runs_mse) == 1
