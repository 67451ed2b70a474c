"""Activations and their derivatives in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.problem import Activation

Array = NDArray[np.float64]

_GELU_SCALE: Final = math.sqrt(2.0 / math.pi)
_GELU_CUBIC: Final = 0.044715


def activate(z: NDArray[Any], activation: Activation) -> Array:
    """act(z), elementwise; NaN stays NaN."""
    return _FUNCTIONS[activation.name][0](z.astype(np.float64), activation.negative_slope)


def derivative(z: NDArray[Any], activation: Activation) -> Array:
    """act'(z), elementwise. At z = 0 ReLU's derivative is 0, and leaky ReLU's its slope; ReLU's is 1 where z is NaN."""
    return _FUNCTIONS[activation.name][1](z.astype(np.float64), activation.negative_slope)


def sigmoid(z: Array) -> Array:
    """1 / (1 + exp(-z)), elementwise."""
    # `exp` is computed only of numbers that are not positive, so that it cannot overflow.
    decay = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, decay) / (1.0 + decay)


def _erf(z: Array) -> Array:
    return np.asarray(np.frompyfunc(math.erf, 1, 1)(z), dtype=np.float64)


def _gelu_inner(z: Array) -> Array:
    return _GELU_SCALE * z * (1.0 + _GELU_CUBIC * z * z)


def _gelu(z: Array, _: float) -> Array:
    return 0.5 * z * (1.0 + np.tanh(_gelu_inner(z)))


def _gelu_derivative(z: Array, _: float) -> Array:
    t = np.tanh(_gelu_inner(z))
    return 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * _GELU_SCALE * (1.0 + 3.0 * _GELU_CUBIC * z * z)


def _gelu_erf(z: Array, _: float) -> Array:
    return 0.5 * z * (1.0 + _erf(z / math.sqrt(2.0)))


def _gelu_erf_derivative(z: Array, _: float) -> Array:
    density = np.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    return 0.5 * (1.0 + _erf(z / math.sqrt(2.0))) + z * density


def _silu_derivative(z: Array, _: float) -> Array:
    s = sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


_Function = Callable[[Array, float], Array]

_FUNCTIONS: Final[Mapping[str, tuple[_Function, _Function]]] = {
    "none": (lambda z, _: z, lambda z, _: np.ones_like(z)),
    "relu": (lambda z, _: np.maximum(z, 0.0), lambda z, _: np.where(z <= 0, 0.0, 1.0)),
    "leaky_relu": (lambda z, slope: np.where(z > 0, z, slope * z), lambda z, slope: np.where(z > 0, 1.0, slope)),
    "sigmoid": (lambda z, _: sigmoid(z), lambda z, _: sigmoid(z) * (1.0 - sigmoid(z))),
    "tanh": (lambda z, _: np.tanh(z), lambda z, _: 1.0 - np.tanh(z) ** 2),
    "gelu": (_gelu, _gelu_derivative),
    "gelu_erf": (_gelu_erf, _gelu_erf_derivative),
    "silu": (lambda z, _: z * sigmoid(z), _silu_derivative),
}
"""Each activation and its derivative, as functions of the pre-activation and the negative slope."""
