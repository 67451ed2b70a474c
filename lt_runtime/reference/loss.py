"""Losses and their gradients in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def mse_loss(prediction: NDArray[Any], target: NDArray[Any]) -> tuple[float, Array]:
    """The mean of (prediction - target)² over all elements, and its gradient, of `prediction`'s shape.

    The mean over no elements is NaN.
    """
    difference = prediction.astype(np.float64) - target.astype(np.float64)
    if difference.size == 0:
        return float("nan"), difference
    return float(np.mean(difference**2)), difference * (2.0 / difference.size)


def cross_entropy(
    logits: NDArray[Any], labels: NDArray[Any], *, label_smoothing: float = 0.0, ignore_index: int | None = None
) -> tuple[float, Array]:
    """The mean over rows of -Σ target · log softmax(logits), and its gradient (softmax - target) / rows.

    The target of a row is ε / C for every class, and 1 - ε more for the label; ε is the label smoothing.

    Args:
        logits: (M, C).
        labels: (M,) integers in [0, C). A label outside makes the loss and its row of the gradient NaN.
        label_smoothing: ε, in [0, 1].
        ignore_index: rows with this label do not count in the mean, and have gradient 0. The mean of no rows is NaN.
    """
    counts = np.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    rows = int(counts.sum())
    gradient = np.zeros(logits.shape)
    if rows == 0:
        return float("nan"), gradient
    losses, gradient[counts] = _of_rows(logits[counts].astype(np.float64), labels[counts], label_smoothing)
    return float(losses.mean()), gradient / rows


def _of_rows(logits: Array, labels: NDArray[Any], smoothing: float) -> tuple[Array, Array]:
    """The loss of each row, (M,), and its gradient, (M, C)."""
    rows, classes = logits.shape
    shifted = logits - logits.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    valid = (labels >= 0) & (labels < classes)
    label = np.arange(rows), np.where(valid, labels, 0)
    losses = np.log(sums[:, 0]) - (1.0 - smoothing) * shifted[label]
    gradient = exponentials / sums
    gradient[label] -= 1.0 - smoothing
    if smoothing > 0:
        losses -= smoothing / classes * shifted.sum(axis=1)
        gradient -= smoothing / classes
    losses[~valid], gradient[~valid] = np.nan, np.nan
    return losses, gradient
