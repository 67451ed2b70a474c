"""Layer normalisation and root-mean-square normalisation of rows, with their gradients, in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from lt_runtime.reference.activations import Array
from lt_runtime.reference.products import Values


class Normalised(NamedTuple):
    """y (M, N), and of each row its mean (M,), None for RMSNorm, and 1 / √(variance or mean square + eps) (M,)."""

    y: Array
    mean: Array | None
    rstd: Array


class NormGradients(NamedTuple):
    """dx (M, N), dweight (N,) and dbias (N,). dbias is computed for RMSNorm too, although RMSNorm has no bias."""

    dx: Array
    dweight: Array
    dbias: Array


def layer_norm_fwd(x: Values, weight: Values, bias: Values | None = None, *, eps: float = 1e-5) -> Normalised:
    """y = (x - mean) / √(variance + eps) · weight + bias, with the mean and the variance of each row of x (M, N)."""
    mean = x.astype(np.float64).mean(axis=1)
    y, _, rstd = rms_norm_fwd(x.astype(np.float64) - mean[:, None], weight, eps=eps)
    return Normalised(y if bias is None else y + bias.astype(np.float64), mean, rstd)


def rms_norm_fwd(x: Values, weight: Values, *, eps: float = 1e-6) -> Normalised:
    """y = x / √(mean square + eps) · weight, with the mean square of each row of x (M, N)."""
    exact = x.astype(np.float64)
    rstd = 1.0 / np.sqrt((exact**2).mean(axis=1) + eps)
    return Normalised(exact * rstd[:, None] * weight.astype(np.float64), None, rstd)


def norm_bwd(dy: Values, x: Values, weight: Values, mean: Values | None, rstd: Values) -> NormGradients:
    """The gradients from dy (M, N), x (M, N), and the statistics of its rows (M,); `mean` is None for RMSNorm."""
    exact_dy, factor = dy.astype(np.float64), rstd.astype(np.float64)[:, None]
    centred = x.astype(np.float64) - (0.0 if mean is None else mean.astype(np.float64)[:, None])
    normalised, g = centred * factor, exact_dy * weight.astype(np.float64)
    dx = g - normalised * (g * normalised).mean(axis=1, keepdims=True)
    if mean is not None:
        dx -= g.mean(axis=1, keepdims=True)
    return NormGradients(dx * factor, (exact_dy * normalised).sum(axis=0), exact_dy.sum(axis=0))
