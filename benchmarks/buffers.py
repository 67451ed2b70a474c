"""Random arrays on the GPU. Never zeros: they draw less power and may take other ways through a kernel."""

from __future__ import annotations

import itertools
from typing import Any, Final

import cupy as cp
import numpy as np

from lt_runtime.problem import DType

Sets = list[tuple[Any, ...]]
"""Arrays of each buffer set, in the order of the case's inputs and then outputs."""

# Standard normal numbers by Box and Muller, from splitmix64 of seed and index; BF16 is the upper half of FP32.
_DRAW: Final = """
    unsigned long long h = (seed << 40) + i;
    h = (h + 0x9E3779B97F4A7C15ull);
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
    h ^= h >> 31;
    const float radius = sqrtf(-2.0f * logf(((h >> 40) + 1) * 5.9604645e-8f));
    const float value = radius * cospif(2.0f * ((h & 0xFFFFFF) * 5.9604645e-8f));
"""
_FP32: Final = cp.ElementwiseKernel("uint64 seed", "float32 out", _DRAW + "out = value;", "normal_fp32")
_BF16: Final = cp.ElementwiseKernel(
    "uint64 seed", "uint16 out", _DRAW + "out = __float_as_uint(value) >> 16;", "normal_bf16"
)
_seeds: Final = itertools.count(1)


def normal(shape: tuple[int, ...], dtype: DType) -> Any:
    """Standard normal numbers, other ones at each call.

    Args:
        dtype: FP32 or BF16.
    """
    if dtype is DType.FLOAT32:
        return _FP32(np.uint64(next(_seeds)), cp.empty(shape, cp.float32))
    return _BF16(np.uint64(next(_seeds)), cp.empty(shape, cp.uint16)).view(dtype.numpy)


def labels(rows: int, classes: int) -> Any:
    """Class indices, int64."""
    return cp.asarray(np.random.default_rng(next(_seeds)).integers(0, classes, rows))


def matrices(shape: tuple[int, int], dtype: DType, sets: int, count: int) -> Sets:
    """Sets of `count` matrices each; those that a task writes hold numbers as well until it does."""
    return [tuple(normal(shape, dtype) for _ in range(count)) for _ in range(sets)]
