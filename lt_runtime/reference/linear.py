"""The linear layer and its gradients in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime.problem import Activation
from lt_runtime.reference.activations import activate, derivative

Array = NDArray[np.float64]


class LinearGradients(NamedTuple):
    """dx (M, K), dw (N, K), db (N,), and dz (M, N), the gradient of the pre-activation."""

    dx: Array
    dw: Array
    db: Array
    dz: Array


def linear_fwd(
    x: NDArray[Any],
    w: NDArray[Any],
    bias: NDArray[Any] | None = None,
    activation: Activation = Activation(),  # noqa: B008 (frozen)
    dropout: Array | None = None,
) -> tuple[Array, Array]:
    """y = dropout(act(z)), z = x · wᵀ + bias.

    Args:
        x: (M, K). w: (N, K). bias: (N,).
        dropout: (M, N) factors, as from `dropout_scale`.

    Returns:
        y and z, both (M, N).
    """
    z = x.astype(np.float64) @ w.astype(np.float64).T
    if bias is not None:
        z = z + bias.astype(np.float64)
    y = activate(z, activation)
    return (y if dropout is None else y * dropout), z


def through_activation(
    dy: NDArray[Any], z: NDArray[Any], activation: Activation, dropout: Array | None = None
) -> Array:
    """The gradient dz of the pre-activation z, from the gradient dy of the output dropout(act(z)); all (M, N)."""
    dz = dy.astype(np.float64) * derivative(z, activation)
    return dz if dropout is None else dz * dropout


def linear_bwd(
    dy: NDArray[Any],
    x: NDArray[Any],
    w: NDArray[Any],
    z: NDArray[Any],
    activation: Activation = Activation(),  # noqa: B008 (frozen)
    dropout: Array | None = None,
) -> LinearGradients:
    """The gradients of `linear_fwd`, from the gradient dy of its output (M, N) and the pre-activation z (M, N)."""
    dz = through_activation(dy, z, activation, dropout)
    return LinearGradients(dz @ w.astype(np.float64), dz.T @ x.astype(np.float64), dz.sum(axis=0), dz)
