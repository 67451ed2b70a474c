"""Losses and their gradients in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def mse_loss(prediction: NDArray[Any], target: NDArray[Any]) -> tuple[float, Array]:
    """Mean of (prediction - target)² over all elements, and its gradient, shaped as `prediction`.

    The mean over no elements is NaN.
    """
    difference = prediction.astype(np.float64) - target.astype(np.float64)
    if difference.size == 0:
        return float("nan"), difference
    return float(np.mean(difference**2)), difference * (2.0 / difference.size)


def cross_entropy(logits: NDArray[Any], labels: NDArray[Any]) -> tuple[float, Array]:
    """Mean over rows of -log softmax(logits)[label], and its gradient (softmax - onehot) / M.

    Args:
        logits: (M, C).
        labels: (M,) integers in [0, C). A label outside makes the loss NaN and its row of the gradient NaN.
    """
    rows, classes = logits.shape
    shifted = logits.astype(np.float64)
    if rows == 0:
        return float("nan"), shifted
    shifted = shifted - shifted.max(axis=1, keepdims=True)
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1, keepdims=True)
    valid = (labels >= 0) & (labels < classes)
    picked = np.where(valid, labels, 0)
    losses = np.where(valid, np.log(sums[:, 0]) - shifted[np.arange(rows), picked], np.nan)
    gradient = exponentials / sums
    gradient[np.arange(rows), picked] -= 1.0
    gradient[~valid] = np.nan
    return float(losses.mean()), gradient / rows
