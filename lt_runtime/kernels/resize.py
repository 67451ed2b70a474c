"""resize.cu: copies of matrices into others of a different size or order, several in one launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import Structure, c_int64
from typing import Final, NamedTuple

from lt_runtime.kernels.blocks import SCALAR, Matrix, fields
from lt_runtime.kernels.kernel import Entry, Launches
from lt_runtime.kernels.tiling import grid_for, turning
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import DType

RESIZED: Final = 3
"""Matrices that one launch of `resize` copies, at most."""


class Resized(Structure):
    """`lt::Resized`."""

    _fields_ = fields(("from_ to", Matrix), ("from_rows from_cols rows cols", c_int64))


class ResizeParams(Structure):
    """`lt::ResizeParams`."""

    _fields_ = fields(("items", Resized * RESIZED))


RESIZE: Final = Entry("resize", "resize.cu", ResizeParams)


class Resize(NamedTuple):
    """How a matrix lies that is copied, and how the one lies that it is copied into, each in any order and size.

    Elements of the target beyond the source become zero; elements of the source beyond the target are left out.
    """

    source: Layout
    target: Layout

    @property
    def by_rows(self) -> Resize:
        """The same copy with a row-major target: itself, or the copy of the transposes."""
        if self.target.order is Order.ROW:
            return self
        return Resize(self.source.transposed, self.target.transposed)


class ResizePass:
    """Up to `RESIZED` copies in one kernel."""

    def __init__(self, dtype: DType, resizes: Sequence[Resize], device: int) -> None:
        by_rows = [each.by_rows for each in resizes]
        rows = max(each.target.rows for each in by_rows)
        cols = max(each.target.cols for each in by_rows)
        turns = any(each.source.order is Order.COLUMN for each in by_rows)
        tiling = (turning if turns else grid_for)(packed(rows, cols))
        params = ResizeParams()
        for number, (source, target) in enumerate(by_rows):
            params.items[number] = Resized(Matrix.of(source), Matrix.of(target), *source.shape, *target.shape)
        self._launches = Launches(RESIZE, (("SCALAR", SCALAR[dtype]),), device, tiling, params, batch=len(by_rows))

    def run(self, addresses: Iterable[tuple[int, int]], stream: int) -> None:
        """Puts the copies on a stream, whose memory's lock the caller holds.

        Args:
            addresses: of each copy's source and target.
        """
        params, launch = self._launches[stream]
        for item, (source, target) in zip(params.items, addresses, strict=False):
            item.from_.data, item.to.data = source, target
        launch()
