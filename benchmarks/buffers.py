"""Makes random arrays on the GPU: with zeros a GPU draws less power, and a kernel may treat zeros differently."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from typing import Any, Final

import ml_dtypes  # noqa: F401  NumPy knows the name "bfloat16" once this is imported.
import numpy as np

Sets = list[tuple[Any, ...]]
"""Type of the operands: for each buffer set its arrays, inputs first and then outputs."""

# Standard normal numbers by the Box-Muller transform, from splitmix64 of seed and index. BF16 is FP32's upper 16 bits.
DRAW: Final = """
    unsigned long long h = (seed << 40) + i;
    h = (h + 0x9E3779B97F4A7C15ull);
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
    h ^= h >> 31;
    const float radius = sqrtf(-2.0f * logf(((h >> 40) + 1) * 5.9604645e-8f));
    const float value = radius * cospif(2.0f * ((h & 0xFFFFFF) * 5.9604645e-8f));
"""
_STORE: Final = {"float32": "out = value;", "bfloat16": "out = __float_as_uint(value) >> 16;"}
_seeds: Final = itertools.count(1)


def itemsize(dtype: str) -> int:
    """The number of bytes of an element of a type."""
    return np.dtype(dtype).itemsize


def _plain(dtype: str) -> str:
    """The type that stores an element in CuPy's kernels: uint16 for the bits of BF16, otherwise the type itself."""
    return "uint16" if dtype == "bfloat16" else dtype


@functools.cache
def _kernel(dtype: str) -> Any:
    import cupy as cp

    return cp.ElementwiseKernel("uint64 seed", f"{_plain(dtype)} out", DRAW + _STORE[dtype], f"normal_{dtype}")


def normal(shape: tuple[int, ...], dtype: str, seed: int | None = None) -> Any:
    """An array of standard normal numbers of type "float32" or "bfloat16".

    Args:
        seed: below 2^24; if None, another one for each call.
    """
    import cupy as cp

    seed = next(_seeds) if seed is None else seed
    return _kernel(dtype)(np.uint64(seed), cp.empty(shape, _plain(dtype))).view(np.dtype(dtype))


class _Repeated:
    """Takes the place of a generator: draws from 2^21 uniform numbers, beginning at another one each time."""

    def __init__(self, seed: int | None = None) -> None:
        self._begins = itertools.count(104729 * (seed or 0), 7919)

    def uniform(self, low: float, high: float, size: Any) -> Any:
        """Numbers in FP32, which are repeated in arrays of more than 2^20."""
        period = 1 << 20
        begin = next(self._begins) % period
        return np.resize(_uniform()[begin : begin + period], size) * np.float32(high - low) + np.float32(low)


@functools.cache
def _uniform() -> Any:
    return np.random.Generator(np.random.PCG64(0)).random(1 << 21, np.float32)


@contextlib.contextmanager
def repeated_values() -> Iterator[None]:
    """Within a `with` block, models repeat random initial values: drawing 10^9 of them would take the host a minute."""
    before, np.random.default_rng = np.random.default_rng, _Repeated  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        np.random.default_rng = before


def labels(rows: int, classes: int) -> Any:
    """Random class labels, (rows,) int64."""
    import cupy as cp

    return cp.asarray(np.random.default_rng(next(_seeds)).integers(0, classes, rows))


def matrices(shape: tuple[int, int], dtype: str, sets: int, count: int) -> Sets:
    """Makes `count` buffer sets of matrices, all of random numbers, also the matrices that the measured task writes."""
    return [tuple(normal(shape, dtype) for _ in range(count)) for _ in range(sets)]
