"""Helpers for tests of NumPy operations: scalar formulas, places of matrices in buffers, a stand-in for a GPU array."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tests.support.strategies import Placement

Array = NDArray[Any]

DTYPES: Mapping[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
ULP: Mapping[str, float] = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Distance from 1 to the next number."""


def sigmoid(z: float) -> float:
    return 1.0 / (1.0 + math.exp(-z)) if z > -700 else 0.0


FORMULAS: Mapping[str, Callable[[float, float], float]] = {
    "none": lambda z, _: z,
    "relu": lambda z, _: z if z > 0 else 0.0,
    "leaky_relu": lambda z, slope: z if z > 0 else slope * z,
    "sigmoid": lambda z, _: sigmoid(z),
    "tanh": lambda z, _: math.tanh(z),
    "gelu": lambda z, _: z / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3))),
    "gelu_erf": lambda z, _: z / 2 * math.erfc(-z / math.sqrt(2)),
    "silu": lambda z, _: z * sigmoid(z),
}
"""The activations as functions of one number, by name."""


def scalar_linear(
    x: Array, w: Array, bias: Array | None, activation: str, slope: float = 0.01, factors: Array | None = None
) -> tuple[Array, Array]:
    """Computes a layer's y and pre-activation z, summed term by term in double precision."""
    x_rows, w_rows = (array.astype(np.float64).tolist() for array in (x, w))
    offsets = [0.0] * len(w_rows) if bias is None else bias.astype(np.float64).tolist()
    layer = list(zip(w_rows, offsets, strict=True))
    z = [[math.fsum([*map(float.__mul__, row, weights), offset]) for weights, offset in layer] for row in x_rows]
    y = [[FORMULAS[activation](value, slope) for value in row] for row in z]
    shape = (len(x_rows), len(w_rows))
    exact_y = np.array(y, np.float64).reshape(shape)
    return (exact_y if factors is None else exact_y * factors), np.array(z, np.float64).reshape(shape)


def numbers(seed: int, shape: Sequence[int], dtype: str = "float64") -> Array:
    """Draws standard normal numbers."""
    values: Array = np.random.default_rng(seed).standard_normal(tuple(shape))
    return values.astype(DTYPES.get(dtype, np.dtype(np.float64)))


def assert_rounded(actual: Array, exact: Array, dtype: str) -> None:
    """Fails unless `actual` has the type, and equals `exact` rounded to it, up to one unit in the last place."""
    assert actual.dtype == DTYPES[dtype]
    assert actual.shape == exact.shape
    tiny = (
        2.0**-24 if dtype == "float16" else 1e-13
    )  # the least FP16 number, and the error of double precision where terms cancel
    np.testing.assert_allclose(actual.astype(np.float64), exact, rtol=ULP[dtype], atol=tiny)


PLACES: Mapping[str, Placement] = {
    "C": Placement(),
    "F": Placement(column_major=True),
    "sliced columns": Placement(gap=3, offset=1),
    "sliced rows of F": Placement(column_major=True, gap=2, offset=5),
}

SENTINEL = 7.0


class DeviceArray:
    """An object that claims to be an array on a GPU through `__cuda_array_interface__`.

    The array's address is not that of any memory, so that reading the array would crash the test.
    """

    def __init__(self, shape: tuple[int, ...], typestr: str = "<f4", address: int = 1 << 40, **more: Any) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": typestr, "data": (address, False), "version": 3}
        self.__cuda_array_interface__ |= more
