"""Arrays placed into guarded buffers, and comparison with a tolerance for every element."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.kernels.kernel import Matrix
from lt_runtime.layout import Layout, layout_of
from lt_runtime.problem import DType
from lt_runtime.reference import pack_mask
from tests.host_kernels.build import SANITIZER, Sanitizer
from tests.support.strategies import Placement

EPSILON: Final = {DType.FLOAT32: 2.0**-24, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}
"""Half a unit in the last place of a type, relative to the number."""
EPS32: Final = EPSILON[DType.FLOAT32]

_HALF_SUBNORMAL: Final = {DType.FLOAT32: 2.0**-150, DType.FLOAT16: 2.0**-25, DType.BFLOAT16: 2.0**-134}
_GUARD: Final = 8192 if SANITIZER is Sanitizer.NONE else 0
"""Bytes before and after a test's matrix that must not change. Sanitizers have guards of their own."""
_FILL: Final = 0xFF
"""Byte that fills buffers: numbers of every type then are NaN, with bits that arithmetic never yields."""

FLAT: Final = Placement(column_major=False, gap=0, offset=0)
"""Placement of a row-major matrix without gaps, at an aligned address."""


class Guarded:
    """A matrix inside a larger buffer, whose other bytes must not change; a kernel that reads them gets NaN."""

    def __init__(self, values: NDArray[Any], placement: Placement = FLAT, dtype: DType | None = None) -> None:
        self._type = dtype.numpy if dtype else values.dtype
        self._shape, self._placement = values.shape, placement
        lines, pitch, _ = self._lines()
        self._size = (placement.offset + lines * pitch) * self._type.itemsize
        self._bytes, self._start = _filled(self._size)
        self.array = self._matrix_in(self._bytes)
        self.array[...] = values.astype(self._type)
        self._before = self._bytes.copy()

    @property
    def dtype(self) -> DType:
        """The element type of the operand; fails for a mask, whose bytes belong to none of our types."""
        return DType.parse("values", self._type)

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)

    @property
    def matrix(self) -> Matrix:
        """Returns the argument block (C struct) that describes the matrix."""
        row, col = self.array.strides
        return Matrix(self.address, row // self._type.itemsize, col // self._type.itemsize)

    @property
    def layout(self) -> Layout:
        """Returns the matrix's layout as the runtime's plans take it."""
        return layout_of("matrix", self._shape, [stride // self._type.itemsize for stride in self.array.strides])

    def assert_unchanged(self) -> None:
        """Fails if any byte of the buffer has changed."""
        assert np.array_equal(self._bytes, self._before), "an operand that is only read was written"

    def values(self) -> NDArray[np.float64]:
        """The matrix's values; fails if anything around it was written."""
        before, now = self._before.copy(), self._bytes.copy()
        for buffer in (before, now):
            self._matrix_in(buffer)[...] = np.zeros((), self._type)
        assert np.array_equal(before, now), "memory outside the matrix was written"
        return self.array.astype(np.float64)

    def _lines(self) -> tuple[int, int, int]:
        """Number of lines (rows or columns), elements from one line to the next, elements of a line."""
        rows, cols = self._shape
        lines, width = (cols, rows) if self._placement.column_major else (rows, cols)
        return lines, width + self._placement.gap, width

    def _matrix_in(self, buffer: NDArray[np.uint8]) -> NDArray[Any]:
        lines, pitch, width = self._lines()
        elements = buffer[self._start : self._start + self._size].view(self._type)
        block = elements[self._placement.offset :].reshape(lines, pitch)[:, :width]
        return block.T if self._placement.column_major else block


def _filled(size: int) -> tuple[NDArray[np.uint8], int]:
    """A buffer of guard bytes, and the place of `size` bytes in it, aligned to 16 as the GPU's allocations are."""
    buffer = np.full(size + 2 * _GUARD, _FILL, np.uint8)
    assert buffer.ctypes.data % 16 == 0
    return buffer, _GUARD


def vector(values: NDArray[Any], dtype: DType, offset: int = 0) -> Guarded:
    """Makes a guarded vector, as a matrix of one row."""
    return Guarded(values.reshape(1, -1), Placement(column_major=False, gap=0, offset=offset), dtype)


def mask(positive: NDArray[np.bool_], gap: int) -> Guarded:
    """A ReLU mask in guarded memory, with `gap` times 16 bytes after each row; bits beyond the last column are set."""
    beyond = np.ones((positive.shape[0], -positive.shape[1] % 8), np.bool_)
    width = (positive.shape[1] + beyond.shape[1]) // 8
    packed_bits = pack_mask(np.concatenate([positive, beyond], axis=1))[:, :width]
    return Guarded(packed_bits, Placement(column_major=False, gap=-width % 16 + 16 * gap, offset=0))


def rounding(dtype: DType, expected: NDArray[Any]) -> NDArray[np.float64]:
    """The bound of the error of rounding a value to `dtype`."""
    error: NDArray[np.float64] = EPSILON[dtype] * np.abs(expected) + _HALF_SUBNORMAL[dtype]
    return error


def assert_close(name: str, actual: NDArray[Any], expected: NDArray[Any], tolerance: NDArray[Any] | float) -> None:
    """Fails, naming the worst element, unless |actual - expected| <= tolerance; NaN and infinities must match."""
    assert actual.shape == expected.shape
    actual, expected = actual.astype(np.float64), expected.astype(np.float64)
    same = (actual == expected) | (np.isnan(actual) & np.isnan(expected))
    with np.errstate(invalid="ignore"):
        excess = np.abs(actual - expected) / np.maximum(tolerance, np.finfo(np.float64).tiny)
    excess = np.where(same, 0.0, np.nan_to_num(excess, nan=np.inf))
    if excess.size and not excess.max() <= 1.0:
        worst = np.unravel_index(int(np.argmax(excess)), excess.shape)
        limit = float(np.broadcast_to(tolerance, excess.shape)[worst])
        raise AssertionError(
            f"{name}{tuple(map(int, worst))} is {actual[worst]}, expected {expected[worst]} ± {limit}; "
            f"{int((excess > 1.0).sum())} of {excess.size} elements are off"
        )


def numbers(generator: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> NDArray[Any]:
    """Draws normal numbers of many magnitudes, with zeros of both signs."""
    chance, power = np.divmod(generator.integers(0, 1000, shape, np.int16), np.int16(10))
    values = np.ldexp(generator.standard_normal(shape, np.float32), power - np.int16(6))
    values[chance < 5] = 0.0
    values[chance >= 98] = -0.0
    return values.astype(dtype.numpy)
