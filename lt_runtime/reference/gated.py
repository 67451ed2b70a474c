"""Gated activations in float64: the first half of a row holds the gate's columns, the second the value's."""

from __future__ import annotations

import numpy as np

from lt_runtime.problem import Activation
from lt_runtime.reference.activations import Array, activate, derivative
from lt_runtime.reference.products import Values


def gated_fwd(h: Values, activation: Activation, dropout: Array | None = None) -> Array:
    """y = dropout(act(gate) · value), elementwise.

    Args:
        h: (..., 2F), the gate's columns, then the value's.
        dropout: (..., F) factors, as from `dropout_scale`.

    Returns:
        y (..., F).
    """
    gate, value = np.split(h.astype(np.float64), 2, axis=-1)
    y = activate(gate, activation) * value
    return y if dropout is None else y * dropout


def gated_bwd(dy: Values, h: Values, activation: Activation, dropout: Array | None = None) -> Array:
    """The gradient (..., 2F) of h (..., 2F), from the gradient dy (..., F) of the output of `gated_fwd`."""
    gate, value = np.split(h.astype(np.float64), 2, axis=-1)
    dy = dy.astype(np.float64) * (1.0 if dropout is None else dropout)
    return np.concatenate([dy * value * derivative(gate, activation), dy * activate(gate, activation)], axis=-1)
