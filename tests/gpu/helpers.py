"""Arrays placed into guarded buffers, and comparison with a tolerance for every element."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from lt_runtime.problem import DType
from tests.strategies import Placement

EPSILON = {DType.FLOAT32: 2.0**-24, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}
"""Half a unit in the last place, relative."""


class Guarded:
    """A matrix laid into a larger buffer whose other elements must not change."""

    def __init__(self, values: NDArray[Any], placement: Placement) -> None:
        rows, cols = values.shape
        lines, width = (cols, rows) if placement.column_major else (rows, cols)
        pitch = width + placement.gap
        self._buffer = cp.full(placement.offset + lines * pitch + 1, np.nan, values.dtype)
        start = placement.offset
        block = self._buffer[start : start + lines * pitch].reshape(lines, pitch)[:, :width]
        self.array = block.T if placement.column_major else block
        self.array[...] = cp.asarray(values)
        self._written = self._mask(lines, width, pitch, start)

    def _mask(self, lines: int, width: int, pitch: int, start: int) -> NDArray[np.bool_]:
        inside = np.zeros(self._buffer.size, bool)
        inside[start : start + lines * pitch].reshape(lines, pitch)[:, :width] = True
        return inside

    def values(self) -> NDArray[np.float64]:
        """The matrix on the host; fails if anything around it was written."""
        host = cp.asnumpy(self._buffer).astype(np.float32)
        assert np.isnan(host[~self._written]).all(), "memory outside the matrix was written"
        result: NDArray[np.float64] = cp.asnumpy(cp.ascontiguousarray(self.array)).astype(np.float64)
        return result


def to_host(array: Any) -> NDArray[np.float64]:
    """A CuPy array's values in float64."""
    values: NDArray[np.float64] = cp.asnumpy(cp.ascontiguousarray(array)).astype(np.float64)
    return values


def assert_close(name: str, actual: NDArray[Any], expected: NDArray[Any], tolerance: NDArray[Any] | float) -> None:
    """Fails, naming the worst element, unless |actual - expected| <= tolerance everywhere; NaN fails."""
    error = np.abs(actual - expected)
    bad = ~(error <= tolerance)
    if bad.any():
        worst = np.unravel_index(
            np.argmax(np.where(bad, np.nan_to_num(error / (tolerance + 1e-300), nan=np.inf), 0)), error.shape
        )
        limit = np.broadcast_to(tolerance, error.shape)[worst]
        raise AssertionError(
            f"{name}{tuple(map(int, worst))} is {actual[worst]}, expected {expected[worst]} ± {limit}; "
            f"{int(bad.sum())} of {bad.size} elements are off"
        )
