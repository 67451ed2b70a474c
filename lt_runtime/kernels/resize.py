"""resize.cu and copy_rows.cu: copies of matrices into others of a different size or order, and of rows into buffers."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Sequence
from ctypes import sizeof
from struct import pack
from typing import Final, NamedTuple, TypeAlias

from lt_runtime.gpu.driver import check, function
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, Struct, declared, define, struct
from lt_runtime.kernels.tiling import OCTET, THREADS, VECTOR_BYTES, Tiling, grid_for, turning
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import DType

RESIZED: Final = 3
"""Matrices that one launch of `resize` copies, at most."""
# A thread copies several rows, because computing its position costs as much as copying a few octets. The fewest and the
# most blocks of a copy, unless its rows are too long.
_ROWS_OF_A_THREAD: Final = 4
_FEWEST_BLOCKS: Final = 512
_MOST_BLOCKS: Final = 2048


COPIED: Final = 3
"""Arrays whose rows one launch of `copy_rows` copies, at most."""
TABLE_BYTES: Final = COPIED * sizeof(struct("Rows"))
"""Bytes of a table on the device that holds the address and the row stride of each array to copy."""
Place: TypeAlias = tuple[int, int]
"""Where an array's rows lie: address, and bytes from row to row. These are the fields of `lt::Rows`."""


@declared
class RowBuffers(Struct):
    """The C++ struct `lt::RowBuffers`: parts that begin `stride` bytes apart; each has `rows` rows of `width` bytes."""


RESIZE: Final = Entry("resize", "resize.cu")
COPY_ROWS: Final = Entry("copy_rows", "copy_rows.cu")


class Resize(NamedTuple):
    """Layouts of the source and of the target of a copy, each in any order and size.

    Elements of the target beyond the source become zero; elements of the source beyond the target are left out.
    """

    source: Layout
    target: Layout

    @property
    def by_rows(self) -> Resize:
        """An equivalent copy whose target is row-major: the copy itself, or that of the transposed matrices."""
        if self.target.order is Order.ROW:
            return self
        return Resize(self.source.transposed, self.target.transposed)


class ResizePass:
    """Up to `RESIZED` copies in one kernel.

    Attributes:
        moved: bytes that a launch reads and writes.
    """

    def __init__(self, dtype: DType, resizes: Sequence[Resize], device: int) -> None:
        self.moved = dtype.itemsize * sum(each.source.size + each.target.size for each in resizes)
        params, blocks = RESIZE.params(), 0
        for number, (source, target) in enumerate(each.by_rows for each in resizes):
            across, threads, down = _tiled(source, target)
            matrices, log2_threads = (Matrix.of(source), Matrix.of(target)), threads.bit_length() - 1
            params.items[number] = *matrices, *source.shape, *target.shape, across, down, log2_threads
            blocks = max(blocks, across * down)
        tiling = Tiling((blocks, len(resizes)), (THREADS, 1))
        self._launches = Launches(RESIZE, define(SCALAR=dtype), device, tiling, params)

    def launch(self, addresses: Iterable[tuple[int, int]], stream: int) -> None:
        """Puts the copies on a stream, whose memory's lock the caller holds.

        Args:
            addresses: the address of each copy's source, followed by the address of its target.
        """
        params, launch = self._launches[stream]
        for item, (source, target) in zip(params.items, addresses, strict=False):
            item.from_.data, item.to.data = source, target
        launch()


def _tiled(source: Layout, target: Layout) -> tuple[int, int, int]:
    """The grid of a copy: blocks side by side, threads of a block side by side, and blocks below each other.

    If rows are no whole octets, a row's first octet may begin before the row, so that it is aligned; see resize.cu.
    """
    before = OCTET - 1 if target.leading_dimension % OCTET else 0
    wide = packed(target.rows, target.cols + before)
    tiling = turning(wide) if source.order is Order.COLUMN else grid_for(wide)
    threads = tiling.block[0]
    across, down = tiling.grid[0], -(-target.rows // (THREADS // threads))
    blocks = min(max(across * down // _ROWS_OF_A_THREAD, _FEWEST_BLOCKS), _MOST_BLOCKS)
    return across, threads, min(down, max(1, blocks // across))


class RowsCopy:
    """Copies the rows of arrays of any types into fixed buffers, in one kernel.

    Args:
        targets: the buffers of each array, for at most `COPIED` arrays.
        parts: number of equal parts (micro-batches) of each array's buffers.
    """

    def __init__(self, targets: Sequence[RowBuffers], parts: int, device: int) -> None:
        size = max(parts * each.rows * each.width for each in targets)
        tiling = Tiling((max(1, -(-size // (VECTOR_BYTES * THREADS))), len(targets)), (THREADS, 1))
        params = COPY_ROWS.params(targets=tuple(targets), parts=parts)
        self._launches = Launches(COPY_ROWS, (), device, tiling, params)
        self._lock = threading.Lock()

    def launch(self, places: Sequence[Place], stream: int, table: int = 0) -> None:
        """Puts the copies of the arrays at `places` on a stream.

        Args:
            table: device address of a table from which the kernel reads the places when it runs, instead of `places`;
                0 for none.
        """
        with self._lock:
            params, launch = self._launches[stream]
            params.table, params.sources = table, tuple(places)
            launch()


def write_table(table: int, places: Sequence[Place], stream: int) -> None:
    """Puts on a stream the write of `places` into the table at the device address `table`.

    Raises:
        DriverError: the driver refused; the contents of the table are undefined then.
    """
    rows = pack(f"{2 * len(places)}q", *itertools.chain.from_iterable(places))
    status = function("cuMemcpyHtoDAsync_v2")(table, rows, len(rows), stream)
    if status:  # `rows` may be freed: it is not page-locked, so that the driver has read it already
        check("cuMemcpyHtoDAsync", status)
