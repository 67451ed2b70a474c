"""resize.cu and copy_rows.cu: copy matrices to other sizes and orders, and rows of arrays into buffers."""

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
"""The largest number of matrices that one launch of `resize` copies."""
# A thread copies several rows, because computing its position costs as much as copying a few octets: rows of a thread,
# and limits of the number of blocks of a copy, which very long rows exceed.
_ROWS_OF_A_THREAD: Final = 4
_FEWEST_BLOCKS: Final = 512
_MOST_BLOCKS: Final = 2048


COPIED: Final = 3
"""The largest number of arrays whose rows one launch of `copy_rows` copies."""
TABLE_BYTES: Final = COPIED * sizeof(struct("Rows"))
"""Bytes of a table on the device that holds the address and the row stride of each array to copy."""
Place: TypeAlias = tuple[int, int]
"""An array's address, and the distance in bytes from row to row: the fields of the C++ struct `lt::Rows`."""


@declared
class RowBuffers(Struct):
    """The C++ struct `lt::RowBuffers`: parts that begin `stride` bytes apart; each has `rows` rows of `width` bytes."""


RESIZE: Final = Entry("resize", "resize.cu")
COPY_ROWS: Final = Entry("copy_rows", "copy_rows.cu")


class Resize(NamedTuple):
    """One copy: the layouts of its source and target, which may have different orders and sizes.

    Elements of the target beyond the source become zero; elements of the source beyond the target are left out.
    """

    source: Layout
    target: Layout

    @property
    def by_rows(self) -> Resize:
        """An equivalent copy with a row-major target: this copy, or the copy of the transposed matrices."""
        if self.target.order is Order.ROW:
            return self
        return Resize(self.source.transposed, self.target.transposed)


class ResizePass:
    """Runs up to `RESIZED` copies in one kernel.

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
        """Launches the copies on `stream`; the caller must hold the lock of the stream's `StreamMemory`.

        Args:
            addresses: the address of each copy's source, followed by the address of its target.
        """
        params, launch = self._launches[stream]
        for item, (source, target) in zip(params.items, addresses, strict=False):
            item.from_.data, item.to.data = source, target
        launch()


def _tiled(source: Layout, target: Layout) -> tuple[int, int, int]:
    """Launch geometry of a copy: blocks across the columns, threads of a block across them, blocks down the rows.

    If the target's leading dimension is not a multiple of eight, the first octet of a row may begin before the row, to
    be aligned, so that a row may take one octet more; see resize.cu.
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
        """Launches the copies of the arrays at `places` on a stream.

        Args:
            table: device address of a table from which the kernel reads addresses and row strides when it runs; 0 to
                use `places`.
        """
        with self._lock:
            params, launch = self._launches[stream]
            params.table, params.sources = table, tuple(places)
            launch()


def write_table(table: int, places: Sequence[Place], stream: int) -> None:
    """Writes `places` into the table at the device address `table`, in order on a stream.

    Raises:
        DriverError: the driver refused; the contents of the table are undefined then.
    """
    rows = pack(f"{2 * len(places)}q", *itertools.chain.from_iterable(places))
    status = function("cuMemcpyHtoDAsync_v2")(table, rows, len(rows), stream)
    if status:  # `rows` may be freed on return: the driver has copied pageable memory by then
        check("cuMemcpyHtoDAsync", status)
