"""The steps of an optimizer before it uses gradients: norm, clipping, loss scale."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime.grad_scaler import LARGEST_SCALE, SMALLEST_SCALE, GradScaler


def gradient_norm(gradients: Sequence[NDArray[Any]], scale: float = 1.0) -> tuple[float, bool]:
    """The norm of all gradients together, each divided by `scale`, and whether every element is finite."""
    exact = [gradient.astype(np.float64).reshape(-1) for gradient in gradients]
    finite = all(bool(np.isfinite(gradient).all()) for gradient in exact)
    squares = sum(float(np.square(gradient / scale).sum()) for gradient in exact)
    return math.sqrt(squares), finite


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that clips gradients of norm `norm` to `max_norm`, as in PyTorch's `clip_grad_norm_`."""
    return min(max_norm / (norm + 1e-6), 1.0)  # in this order of its arguments, min returns NaN if the norm is NaN


def next_scale(scaler: GradScaler, scale: float, growth_tracker: int, finite: bool) -> tuple[float, int]:
    """Scale and growth tracker after a step, updated as by PyTorch's GradScaler.

    Args:
        finite: whether all elements of all gradients were finite.
    """
    if not finite:
        return max(scale * scaler.backoff_factor, SMALLEST_SCALE), 0
    if growth_tracker + 1 < scaler.growth_interval:
        return scale, growth_tracker + 1
    grown = scale * scaler.growth_factor
    return (grown if grown <= LARGEST_SCALE else scale), 0
