"""Losses and their gradients in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime.reference.activations import Array, sigmoid

Weights = NDArray[Any] | None


def mse_loss(prediction: NDArray[Any], target: NDArray[Any], *, row_weights: Weights = None) -> tuple[float, Array]:
    """The mean of (prediction - target)² over all elements, and its gradient, of `prediction`'s shape.

    The mean over no elements is NaN.

    Args:
        row_weights: (M,), which multiply the losses of the rows; the mean still divides by the number of elements.
    """
    difference = prediction.astype(np.float64) - target.astype(np.float64)
    return _mean(difference**2, 2.0 * difference, row_weights)


def huber_loss(
    prediction: NDArray[Any], target: NDArray[Any], *, delta: float = 1.0, row_weights: Weights = None
) -> tuple[float, Array]:
    """The Huber loss and its gradient, for d = prediction - target.

    The loss is the mean over all elements of d² / 2 where |d| <= δ, and of δ (|d| - δ / 2) elsewhere.

    Args:
        row_weights: as in `mse_loss`.
    """
    difference = prediction.astype(np.float64) - target.astype(np.float64)
    distance = np.abs(difference)
    losses = np.where(distance <= delta, 0.5 * difference**2, delta * (distance - 0.5 * delta))
    return _mean(losses, np.clip(difference, -delta, delta), row_weights)


def bce_with_logits(
    logits: NDArray[Any], targets: NDArray[Any], *, pos_weight: Weights = None, row_weights: Weights = None
) -> tuple[float, Array]:
    """The mean over all elements of -p t log σ(z) - (1 - t) log (1 - σ(z)), and its gradient.

    Args:
        pos_weight: p, (N,); None for p = 1.
        row_weights: as in `mse_loss`.
    """
    z, target = logits.astype(np.float64), targets.astype(np.float64)
    positive, negative = target if pos_weight is None else target * pos_weight.astype(np.float64), 1.0 - target
    losses = positive * np.logaddexp(0.0, -z) + negative * np.logaddexp(0.0, z)
    return _mean(losses, negative * sigmoid(z) - positive * sigmoid(-z), row_weights)


def cross_entropy(
    logits: NDArray[Any],
    labels: NDArray[Any],
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
    class_weights: Weights = None,
    row_weights: Weights = None,
) -> tuple[float, Array]:
    """The mean over rows of -Σ w · target · log softmax(logits), and its gradient.

    The target of a row is ε / C for every class, plus 1 - ε for the label; ε is the label smoothing. The class weights
    w are 1 by default. With class weights the mean divides by the sum of the labels' weights, as in PyTorch.

    Args:
        logits: (M, C).
        labels: (M,) integers in [0, C). A label outside makes the loss and its row of the gradient NaN; it has no
            weight in the divisor of the mean.
        label_smoothing: ε, in [0, 1].
        ignore_index: rows with this label do not count in the mean, and have gradient 0. The mean of no rows is NaN.
        class_weights: (C,).
        row_weights: (M,), which multiply the rows' losses; they do not change the divisor of the mean.
    """
    counts = np.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    gradient = np.zeros(logits.shape)
    if not counts.any():
        return float("nan"), gradient
    rows, label = logits[counts].astype(np.float64), labels[counts]
    weights = np.ones(logits.shape[-1]) if class_weights is None else class_weights.astype(np.float64)
    losses, of_rows = _of_rows(rows, label, label_smoothing, weights)
    if row_weights is not None:
        of_row = row_weights[counts].astype(np.float64)
        losses, of_rows = losses * of_row, of_rows * of_row[:, None]
    valid = (label >= 0) & (label < logits.shape[-1])
    divisor = float(len(label)) if class_weights is None else weights[label[valid]].sum()
    with np.errstate(divide="ignore", invalid="ignore"):
        gradient[counts] = of_rows / divisor
        return float(losses.sum() / divisor), gradient


def _mean(losses: Array, slopes: Array, row_weights: Weights) -> tuple[float, Array]:
    """The mean of elementwise losses and its gradient; `slopes` are their derivatives.

    The mean over zero elements is NaN.
    """
    if losses.size == 0:
        return float("nan"), slopes
    if row_weights is not None:
        weights = row_weights.astype(np.float64)[..., None]
        losses, slopes = losses * weights, slopes * weights
    return float(np.mean(losses)), slopes / losses.size


def _of_rows(logits: Array, labels: NDArray[Any], smoothing: float, weights: Array) -> tuple[Array, Array]:
    """The loss of each row, (M,), and its gradient, (M, C)."""
    rows, classes = logits.shape
    shifted = logits - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    valid = (labels >= 0) & (labels < classes)
    label = np.arange(rows), np.where(valid, labels, 0)
    certain = (1.0 - smoothing) * weights[label[1]]
    total = certain + (smoothing / classes * weights.sum() if smoothing > 0 else 0.0)
    losses = total * np.log(sums[:, 0]) - certain * shifted[label]
    gradient = total[:, None] * (exponentials / sums)
    gradient[label] -= certain
    if smoothing > 0:
        losses -= smoothing / classes * (shifted * weights).sum(axis=1)
        gradient -= smoothing / classes * weights
    losses[~valid], gradient[~valid] = np.nan, np.nan
    return losses, gradient
