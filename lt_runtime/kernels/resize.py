"""Copies of matrices into others of a different size or order, several in one launch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lt_runtime.gpu.launch import Launch
from lt_runtime.kernels.kernel import get_kernel
from lt_runtime.kernels.params import SCALAR, Matrix, Resized, ResizeParams
from lt_runtime.kernels.tiling import grid_for, turning
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import DType


class Resize(NamedTuple):
    """How a matrix lies that is copied, and the one that it is copied into: in any order, of any size.

    What the target has beyond the source becomes zero; what it lacks is left out.
    """

    source: Layout
    target: Layout

    @property
    def by_rows(self) -> Resize:
        """The same, or that of the transposes, whichever target is row-major."""
        if self.target.order is Order.ROW:
            return self
        return Resize(self.source.transposed, self.target.transposed)


class ResizePass:
    """Up to `RESIZED` copies in one kernel."""

    def __init__(self, dtype: DType, resizes: Sequence[Resize], device: int) -> None:
        self._resizes = [each.by_rows for each in resizes]
        rows = max(each.target.rows for each in self._resizes)
        cols = max(each.target.cols for each in self._resizes)
        turns = any(each.source.order is Order.COLUMN for each in self._resizes)
        self._tiling = (turning if turns else grid_for)(packed(rows, cols))
        self._kernel = get_kernel("resize", (("SCALAR", SCALAR[dtype]),), device)
        self._launches: dict[int, tuple[ResizeParams, Launch]] = {}

    def run(self, addresses: Iterable[tuple[int, int]], stream: int) -> None:
        """Puts the copies on a stream, whose memory's lock the caller holds.

        Args:
            addresses: of each copy's source and target.
        """
        params, launch = self._launches.get(stream) or self._prepare(stream)
        for item, (source, target) in zip(params.items, addresses, strict=False):
            item.from_.data, item.to.data = source, target
        launch()

    def _prepare(self, stream: int) -> tuple[ResizeParams, Launch]:
        """The argument block of a stream, without addresses, and the launch that it is of."""
        params = ResizeParams()
        for number, (source, target) in enumerate(self._resizes):
            shapes = (*source.shape, *target.shape)
            params.items[number] = Resized(Matrix.at(0, source), Matrix.at(0, target), *shapes)
        launch = self._kernel.prepare(*self._tiling, params, stream, batch=len(self._resizes))
        self._launches[stream] = params, launch
        return params, launch
