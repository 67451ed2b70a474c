"""Losses on NumPy arrays: values, types, layouts, buffers, and what has no mean."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

import lt_runtime as lt
from lt_runtime import reference
from tests.support.numpy_cases import DTYPES, PLACES, Array, Guarded, assert_rounded, numbers

M, C = 5, 4
LABELS = np.array([0, 3, 1, 2, 3])


def expected_cross_entropy(logits: Array, labels: Array, smoothing: float = 0.0) -> tuple[float, Array]:
    """By SciPy's log-softmax."""
    log_softmax = special.log_softmax(logits.astype(np.float64), axis=1)
    target = (1 - smoothing) * np.eye(logits.shape[1])[labels] + smoothing / logits.shape[1]
    return -float((log_softmax * target).sum(axis=1).mean()), (np.exp(log_softmax) - target) / len(labels)


def run(name: str, scores: Array, **more: Any) -> tuple[Any, float, Array]:
    """The loss of random targets, and the expected value and gradient."""
    if name == "cross_entropy":
        return lt.cross_entropy(scores, LABELS, **more), *expected_cross_entropy(scores, LABELS)
    target = numbers(9, scores.shape).astype(scores.dtype)
    difference = scores.astype(np.float64) - target.astype(np.float64)
    return lt.mse_loss(scores, target, **more), float((difference**2).mean()), 2 * difference / scores.size


@pytest.mark.parametrize("name", ["mse", "cross_entropy"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", PLACES)
def test_types_layouts_and_buffers(name: str, dtype: str, place: str) -> None:
    scores = Guarded(numbers(8, (M, C), dtype), PLACES[place])
    gradient = Guarded(np.zeros((M, C), DTYPES[dtype]), PLACES[place])
    number = np.zeros((), np.float32)
    result, value, exact = run(name, scores.array, out_gradient=gradient.array, out_loss=number)
    assert result.gradient is gradient.array
    assert result.loss is number
    assert float(number) == pytest.approx(value, rel=1e-6)
    assert_rounded(gradient.array, exact, dtype)
    gradient.assert_untouched_around()
    scores.assert_untouched_around()


@pytest.mark.parametrize("name", ["mse", "cross_entropy"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_makes_its_results(name: str, dtype: str) -> None:
    result, value, exact = run(name, numbers(8, (M, C), dtype))
    assert (result.loss.shape, result.loss.dtype) == ((), np.float32)
    assert float(result.loss) == pytest.approx(value, rel=1e-6)
    assert_rounded(result.gradient, exact, dtype)


@pytest.mark.parametrize("name", ["mse", "cross_entropy"])
def test_gradient_over_the_scores(name: str) -> None:
    scores = numbers(8, (M, C), "float32")
    untouched = scores.copy()
    _, value, exact = run(name, untouched)
    result, _, _ = run(name, scores, out_gradient=scores)
    assert result.gradient is scores
    assert float(result.loss) == pytest.approx(value, rel=1e-6)
    assert_rounded(scores, exact, "float32")


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_types_of_labels(kind: type[np.signedinteger[Any]]) -> None:
    logits = numbers(8, (M, C), "float32")
    value, exact = expected_cross_entropy(logits, LABELS)
    result = lt.cross_entropy(logits, LABELS.astype(kind))
    assert float(result.loss) == pytest.approx(value, rel=1e-6)
    assert_rounded(result.gradient, exact, "float32")


@pytest.mark.parametrize("smoothing", [0, 0.1, 1.0])
def test_label_smoothing(smoothing: float) -> None:
    logits = numbers(8, (M, C), "float32")
    value, exact = expected_cross_entropy(logits, LABELS, smoothing)
    result = lt.cross_entropy(logits, LABELS, label_smoothing=smoothing)
    assert float(result.loss) == pytest.approx(value, rel=1e-6)
    assert_rounded(result.gradient, exact, "float32")


@pytest.mark.parametrize("ignored", [-100, 3])
def test_rows_with_the_ignored_label_do_not_count(ignored: int) -> None:
    logits, labels = numbers(8, (M, C), "float32"), np.where(LABELS == 3, ignored, LABELS)
    counts = labels != ignored
    value, exact = expected_cross_entropy(logits[counts], labels[counts], 0.2)
    logits[~counts] = np.nan
    result = lt.cross_entropy(logits, labels, label_smoothing=0.2, ignore_index=ignored)
    assert float(result.loss) == pytest.approx(value, rel=1e-6)
    assert_rounded(result.gradient[counts], exact, "float32")
    assert (result.gradient[~counts] == 0).all()


def test_where_all_is_ignored_the_loss_is_nan_and_the_gradient_zero() -> None:
    result = lt.cross_entropy(numbers(8, (2, C), "float32"), np.full(2, -100))
    assert math.isnan(float(result.loss))
    assert (result.gradient == 0).all()


@pytest.mark.parametrize("name", ["mse", "cross_entropy"])
@pytest.mark.parametrize("scale", [4, 0.5, np.full((), 1024, np.float32), np.full(1, 0.25, np.float32)])
def test_the_scale_is_the_gradient_s_alone(name: str, scale: Any) -> None:
    result, value, exact = run(name, numbers(8, (M, C), "float32"), grad_scale=scale)
    assert float(result.loss) == pytest.approx(value, rel=1e-6)
    assert_rounded(result.gradient, exact * float(np.reshape(scale, ())), "float32")


def test_a_scale_keeps_small_gradients() -> None:
    logits, labels = np.array([[30, 0]] * 2, np.float16), np.array([0, 0])
    assert (lt.cross_entropy(logits, labels).gradient == 0).all()
    assert (lt.cross_entropy(logits, labels, grad_scale=2.0**40).gradient[:, 1] > 0).all()


@settings(max_examples=50, deadline=None)
@given(
    logits=st.lists(st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3), min_size=1, max_size=5),
    first=st.integers(0, 2),
)
def test_cross_entropy_of_large_logits(logits: list[list[float]], first: int) -> None:
    scores, labels = np.array(logits), (np.arange(len(logits)) + first) % 3
    value, gradient = reference.cross_entropy(scores, labels)
    expected, exact = expected_cross_entropy(scores, labels)
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(gradient, exact, atol=1e-12)


def test_known_values() -> None:
    assert float(lt.cross_entropy(np.zeros((7, 10), np.float32), np.zeros(7, np.int32)).loss) == np.float32(
        math.log(10)
    )
    result = lt.mse_loss(np.array([[1, 2]], np.float32), np.array([[3, 1]], np.float32))
    assert float(result.loss) == 2.5
    assert result.gradient.tolist() == [[-2, 1]]


def test_a_certain_and_right_prediction_costs_nothing() -> None:
    logits = np.array([[0, 200, 0]], np.float32)
    result = lt.cross_entropy(logits, np.array([1]))
    assert float(result.loss) == 0
    np.testing.assert_allclose(result.gradient, 0, atol=1e-30)


@pytest.mark.parametrize("bad", [-1, 4])
def test_the_reference_marks_a_label_out_of_range(bad: int) -> None:
    value, gradient = reference.cross_entropy(np.zeros((3, 4)), np.array([0, bad, 3]))
    assert math.isnan(value)
    assert np.isnan(gradient).all(axis=1).tolist() == [False, True, False]


def test_the_mean_over_nothing_is_nan() -> None:
    nothing = np.zeros((0, 4), np.float32)
    for result in (lt.mse_loss(nothing, nothing), lt.cross_entropy(nothing, np.zeros(0, np.int32))):
        assert math.isnan(float(result.loss))
        assert result.gradient.shape == (0, 4)


def test_nan_and_infinity_are_results() -> None:
    logits = np.array([[0, np.inf], [np.nan, 0], [1, 2]], np.float32)
    result = lt.cross_entropy(logits, np.array([0, 0, 0]))
    assert math.isnan(float(result.loss))
    assert np.isnan(result.gradient).any(axis=1).tolist() == [True, True, False]
    large = np.full((1, 1), 60000, np.float16)
    assert float(lt.mse_loss(large, -large).loss) == pytest.approx(1.2e5**2)
    assert np.isinf(lt.mse_loss(large, -large).gradient).all()
