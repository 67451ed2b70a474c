"""Losses on NumPy arrays: values, types, layouts, output buffers, and batches whose mean is NaN."""

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
from tests.host_kernels.arrays import Guarded
from tests.support.numpy_cases import DTYPES, PLACES, Array, assert_rounded, numbers

M, C = 5, 4
LABELS = np.array([0, 3, 1, 2, 3])


def expected_cross_entropy(logits: Array, labels: Array, smoothing: float = 0.0) -> tuple[float, Array]:
    """The mean cross-entropy and its gradient, computed with SciPy's log-softmax."""
    log_softmax = special.log_softmax(logits.astype(np.float64), axis=1)
    target = (1 - smoothing) * np.eye(logits.shape[1])[labels] + smoothing / logits.shape[1]
    return -float((log_softmax * target).sum(axis=1).mean()), (np.exp(log_softmax) - target) / len(labels)


LOSSES = ["mse", "huber", "bce_with_logits", "cross_entropy"]


def run(name: str, scores: Array, **more: Any) -> tuple[Any, float, Array]:
    """Calls a loss with random targets; returns the result, and the expected loss and gradient."""
    if name == "cross_entropy":
        return lt.cross_entropy(scores, LABELS, **more), *expected_cross_entropy(scores, LABELS)
    target = np.abs(numbers(9, scores.shape)).astype(scores.dtype)
    exact, wanted = scores.astype(np.float64), target.astype(np.float64)
    difference, size = exact - wanted, scores.size
    if name == "huber":
        value = float(special.huber(0.5, difference).mean())
        return lt.huber_loss(scores, target, delta=0.5, **more), value, np.clip(difference, -0.5, 0.5) / size
    if name == "bce_with_logits":
        value = float(-(wanted * special.log_expit(exact) + (1 - wanted) * special.log_expit(-exact)).mean())
        return lt.bce_with_logits(scores, target, **more), value, (special.expit(exact) - wanted) / size
    return lt.mse_loss(scores, target, **more), float((difference**2).mean()), 2 * difference / size


@pytest.mark.parametrize("name", LOSSES)
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
    gradient.values()
    scores.values()


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_makes_its_results(name: str, dtype: str) -> None:
    result, value, exact = run(name, numbers(8, (M, C), dtype))
    assert (result.loss.shape, result.loss.dtype) == ((), np.float32)
    assert float(result.loss) == pytest.approx(value, rel=1e-6)
    assert_rounded(result.gradient, exact, dtype)


@pytest.mark.parametrize("name", LOSSES)
def test_leading_axes_are_rows(name: str) -> None:
    shape, axes = (6, C), (2, 1, 3)
    function = getattr(lt, {"mse": "mse_loss", "huber": "huber_loss"}.get(name, name))
    target = np.array([0, 3, -100, 1, 2, 3]) if name == "cross_entropy" else np.ones(shape, np.float32)
    scores, weights = numbers(8, shape, "float32"), np.arange(6, dtype=np.float32)
    plain = function(scores, target, row_weights=weights)
    scores, target, weights = (each.reshape(*axes, *each.shape[1:]) for each in (scores, target, weights))
    found = function(scores, target, row_weights=weights, out_gradient=np.zeros((*axes, C + 2), np.float32)[..., :C])
    assert found.loss == plain.loss
    np.testing.assert_array_equal(found.gradient.reshape(shape), plain.gradient)


@pytest.mark.parametrize("name", LOSSES)
def test_gradient_over_the_scores(name: str) -> None:
    scores = numbers(8, (M, C), "float32")
    untouched = scores.copy()
    _, value, exact = run(name, untouched)
    result, _, _ = run(name, scores, out_gradient=scores)
    assert result.gradient is scores
    assert float(result.loss) == pytest.approx(value, rel=1e-6)
    assert_rounded(scores, exact, "float32")


@pytest.mark.parametrize(("kind", "smoothing"), [(np.int32, 0), (np.int64, 0.1), (np.int64, 1.0)])
def test_types_of_labels_and_smoothing(kind: type[np.signedinteger[Any]], smoothing: float) -> None:
    logits = numbers(8, (M, C), "float32")
    value, exact = expected_cross_entropy(logits, LABELS, smoothing)
    result = lt.cross_entropy(logits, LABELS.astype(kind), label_smoothing=smoothing)
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


@pytest.mark.parametrize("name", LOSSES)
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
@given(logits=st.lists(st.tuples(*[st.floats(-1e4, 1e4)] * 3), min_size=1, max_size=5), first=st.integers(0, 2))
def test_cross_entropy_of_large_logits(logits: list[tuple[float, ...]], first: int) -> None:
    scores, labels = np.array(logits), (np.arange(len(logits)) + first) % 3
    value, gradient = reference.cross_entropy(scores, labels)
    expected, exact = expected_cross_entropy(scores, labels)
    assert value == pytest.approx(expected, rel=1e-12, abs=1e-12)
    np.testing.assert_allclose(gradient, exact, atol=1e-12)


@pytest.mark.parametrize("bad", [-1, 4])
def test_the_reference_marks_a_label_out_of_range(bad: int) -> None:
    value, gradient = reference.cross_entropy(np.zeros((3, 4)), np.array([0, bad, 3]))
    assert math.isnan(value)
    assert np.isnan(gradient).all(axis=1).tolist() == [False, True, False]


def test_the_mean_over_nothing_is_nan() -> None:
    nothing = np.zeros((0, 4), np.float32)
    losses = [loss(nothing, nothing) for loss in (lt.mse_loss, lt.huber_loss, lt.bce_with_logits)]
    for result in (*losses, lt.cross_entropy(nothing, np.zeros(0, np.int32))):
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


LOGITS = np.array([[0.5, -1.25, 2.0], [-3.0, 0.75, 1.5]], np.float32)
TARGETS = np.array([[1.0, 0.0, 0.25], [0.0, 1.0, 1.0]], np.float32)


def singles(*values: float) -> Array:
    return np.array(values, np.float32)


BY_PYTORCH: list[tuple[str, Any, dict[str, Any], float, list[list[float]]]] = [
    # PyTorch's value of F.binary_cross_entropy_with_logits(LOGITS, TARGETS)
    (
        *("bce_with_logits", TARGETS, {}, 0.4983009520399744),
        [[-0.0629234448, 0.0371166898, 0.1051328463], [0.0079043122, -0.0534702168, -0.0304042540]],
    ),
    # PyTorch's value of F.binary_cross_entropy_with_logits(LOGITS, TARGETS, pos_weight=[2, 0.5, 3])
    (
        *("bce_with_logits", TARGETS, {"pos_weight": singles(2, 0.5, 3)}, 0.6227896258082491),
        [[-0.1258468896, 0.0371166898, 0.0951992695], [0.0079043122, -0.0267351084, -0.0912127619]],
    ),
    # PyTorch's value of F.binary_cross_entropy_with_logits(LOGITS, TARGETS, weight=[[2], [0.5]])
    (
        *("bce_with_logits", TARGETS, {"row_weights": singles(2, 0.5)}, 0.8373839951621003),
        [[-0.1258468896, 0.0742333796, 0.2102656927], [0.0039521561, -0.0267351084, -0.0152021270]],
    ),
    # PyTorch's values of F.huber_loss(LOGITS, TARGETS), and with delta=0.5
    ("huber_loss", TARGETS, {}, 0.796875, [[-1 / 12, -1 / 6, 1 / 6], [-1 / 6, -1 / 24, 1 / 12]]),
    ("huber_loss", TARGETS, {"delta": 0.5}, 0.484375, [[-1 / 12, -1 / 12, 1 / 12], [-1 / 12, -1 / 24, 1 / 12]]),
    # PyTorch's values of F.cross_entropy(LOGITS, [2, 0], weight=[0.5, 1, 2]), with label_smoothing=0.1, and with the
    # second label -100
    (
        *("cross_entropy", np.array([2, 0]), {"class_weights": singles(0.5, 1, 2)}, 1.1649751222481934),
        [[0.1414561457, 0.0245813923, -0.1660375379], [-0.1985023014, 0.0636837665, 0.1348185348]],
    ),
    (
        *("cross_entropy", np.array([2, 0]), {"class_weights": singles(0.5, 1, 2), "label_smoothing": 0.1}),
        *(1.171071394247, [[0.1288954729, 0.0102238343, -0.1391193072], [-0.1849692749, 0.0588416021, 0.1261276728]]),
    ),
    (
        *("cross_entropy", np.array([2, -100]), {"class_weights": singles(0.5, 1, 2), "label_smoothing": 0.1}),
        *(0.28959606713944797, [[0.1611193412, 0.0127797928, -0.1738991340], [0.0, 0.0, 0.0]]),
    ),
]
"""The losses equal the values that PyTorch 2.11 computes in float64."""


@pytest.mark.parametrize(("name", "target", "options", "value", "gradient"), BY_PYTORCH)
def test_as_pytorch(name: str, target: Any, options: dict[str, Any], value: float, gradient: list[list[float]]) -> None:
    result = getattr(lt, name)(LOGITS, target, **options)
    assert float(result.loss) == pytest.approx(value, rel=1e-6)
    np.testing.assert_allclose(result.gradient, gradient, rtol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("parts", [1, 2])
def test_weights_of_rows(name: str, parts: int) -> None:
    """A row's weight multiplies the row's loss; the weighted losses of a batch's parts add up to the batch's loss."""
    scores, weights = numbers(8, (4, C), "float32"), singles(2, 0, 1, 0.5)
    function = getattr(lt, name if name not in ("mse", "huber") else f"{name}_loss")
    target = LABELS[:4] if name == "cross_entropy" else np.abs(numbers(9, (4, C), "float32"))
    rows = [function(scores[i : i + 1], target[i : i + 1]) for i in range(4)]
    cuts = [slice(i * 4 // parts, (i + 1) * 4 // parts) for i in range(parts)]
    made = [function(scores[cut], target[cut], row_weights=weights[cut], share=1 / parts) for cut in cuts]
    exact = np.concatenate([row.gradient for row in rows]) * weights[:, None] / 4
    np.testing.assert_allclose(np.concatenate([part.gradient for part in made]), exact, rtol=1e-5, atol=1e-9)
    losses = sum(float(row.loss) * weight for row, weight in zip(rows, weights, strict=True))
    assert sum(float(part.loss) for part in made) / parts == pytest.approx(losses / 4, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("row_weights", [None, singles(2, 0.5, 1.25)])
@pytest.mark.parametrize("class_weights", [None, singles(0.5, 1, 3, 2)])
def test_weights_of_rows_and_classes(smoothing: float, row_weights: Any, class_weights: Any) -> None:
    """The mean divides by the sum of the labels' class weights; row weights do not change the divisor."""
    logits, labels = numbers(4, (3, C), "float32"), np.array([2, -100, 0])
    of_rows = (1 if row_weights is None else row_weights) * (labels >= 0)
    of_classes = np.ones(C) if class_weights is None else class_weights
    log_softmax = special.log_softmax(logits.astype(np.float64), axis=1)
    target = ((1 - smoothing) * np.eye(C)[labels % C] + smoothing / C) * of_classes * of_rows[:, None]
    divisor = of_classes[2] + of_classes[0]
    options = {"label_smoothing": smoothing, "class_weights": class_weights, "row_weights": row_weights}
    result = lt.cross_entropy(logits, labels, **options)
    assert float(result.loss) == pytest.approx(-(target * log_softmax).sum() / divisor, rel=1e-6)
    exact = (np.exp(log_softmax) * target.sum(axis=1, keepdims=True) - target) / divisor
    np.testing.assert_allclose(result.gradient, exact, rtol=1e-5, atol=1e-8)


def test_bce_is_finite_for_logits_of_any_size() -> None:
    result = lt.bce_with_logits(singles(-800, 800, -800, 800)[None], singles(0, 1, 1, 0)[None])
    assert (float(result.loss), result.gradient.tolist()) == (400.0, [[0.0, 0.0, -0.25, 0.25]])
