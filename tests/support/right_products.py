"""A fake cuBLASLt algorithm: computes the right results of a product on NumPy arrays."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.layout import Order
from lt_runtime.problem import DType
from lt_runtime.tuner.verification import ProductOperands
from tests.support.host_memory import bits, read


def encode(values: NDArray[Any], dtype: DType) -> NDArray[Any]:
    if dtype.is_float8:
        largest = float(ml_dtypes.finfo(dtype.numpy).max)
        values = np.clip(values, -largest, largest)
    rounded = values.astype(dtype.numpy)
    return rounded.view(f"uint{8 * dtype.itemsize}")


def operands(given: ProductOperands) -> tuple[NDArray[Any], NDArray[Any]]:
    return read(given, "a"), read(given, "b")


def compute(given: ProductOperands, a: NDArray[Any], b: NDArray[Any]) -> None:
    """Computes in float64 and rounds once."""
    problem, buffers = given.problem, given.buffers
    result = reference.matmul(
        a,
        b,
        read(given, "c") if problem.c else None,
        beta=1.0,
        epilogue=problem.epilogue,
        bias=read(given, "vector")[0, 0] if problem.epilogue.has_bias else None,
        aux=read(given, "aux") if problem.epilogue.is_derivative else None,
    )
    bits(buffers["d"])[...] = encode(result.d, problem.d_dtype)
    if result.bias_gradient is not None:
        bits(buffers["vector"])[...] = encode(result.bias_gradient.reshape(1, 1, -1), problem.d_dtype)
    if result.aux is not None and given.has_mask:
        flipped = problem.d.layout.order is Order.COLUMN
        positive = result.aux > 0
        lines = positive.swapaxes(-1, -2) if flipped else positive
        mask = bits(buffers["aux"])
        mask[...] = reference.pack_mask(lines)[..., : mask.shape[-1]]
    elif result.aux is not None:
        bits(buffers["aux"])[...] = encode(result.aux, problem.aux_dtype)


def right(given: ProductOperands) -> None:
    compute(given, *operands(given))
