"""cross_entropy.cu: softmax cross-entropy of the rows of a matrix, and its gradient."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.devices import device_attributes, device_info
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, define
from lt_runtime.kernels.tiling import THREADS, VECTOR_BYTES, WARP, Tiling, next_power_of_two
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import DType

FEW_CLASSES: Final = 16
"""Number of classes up to which one thread keeps a row in registers; few_classes.cuh has the same number.

Only the kernel for so few classes adds to a tally.
"""

# The constants below were chosen by measurement. Further ones are in the CUDA sources: launch bounds, and the number of
# loads that a thread issues before it waits. All of them decide the order of sums, and so the last bits of results. If
# rows are streamed (copied to shared memory ahead of their computation), the last bits of the loss also depend on the
# number of multiprocessors of the GPU, and on whether their shared memory holds a row.

# Threads of a block whose rows are each shared by a warp or by fewer threads.
_WARP_ROW_THREADS: Final = 320
# Threads of a block that computes one row at a time. More threads would wait longer at the block's barriers.
_BLOCK_ROW_THREADS: Final = 256
# Threads of a block that computes a long row, and is the only block of its multiprocessor.
_LONG_ROW_THREADS: Final = 512
# A row of more bytes is long: an H200 multiprocessor's shared memory does not hold two such rows.
_LONG_ROW: Final = 112 << 10
# Target number of columns for each thread if a warp, or fewer threads, share a row.
_COLUMNS_PER_LANE: Final = 16
# Number of columns beyond which a whole block shares a row.
_WARP_COLUMNS: Final = 2048
# Packets of 16 bytes that a thread loads before it waits; softmax_rows.cuh has the same number.
_BATCH: Final = 4
# Value of the macro WEIGHTS if labels are smoothed and classes have weights.
_SPREAD: Final = 2
# Largest number of rows that a single block computes if there are few classes, with one thread for each row. A single
# block counts the labels itself, and waits for no other block.
_ROWS_OF_ONE_BLOCK: Final = 1024
# Threads that share a row of column-major logits. They are few, so that a warp reads several rows of a column.
_COLUMN_LANES: Final = 8
# Largest number of blocks of a grid, because the last block adds up a partial sum of each. With few classes a grid may
# have more.
_MAX_BLOCKS: Final = 4096
# Blocks that share a multiprocessor's shared memory, unless rows are long.
_BLOCKS_PER_MULTIPROCESSOR: Final = 2
# Bytes of a block's shared memory that the kernel's own variables and the driver take.
_RESERVED_SHARED: Final = 2048
# Number of labels up to which each block counts them all itself; more labels are counted by a separate launch. The
# number cannot be smaller: with few classes, several blocks rely on the separate launch.
_COUNTED_IN_BLOCKS: Final = _ROWS_OF_ONE_BLOCK


CROSS_ENTROPY: Final = Entry("cross_entropy", "cross_entropy.cu")
CROSS_ENTROPY_FEW: Final = Entry("cross_entropy_few", "cross_entropy.cu")
COUNT_LABELS: Final = Entry("count_labels", "cross_entropy.cu")


class Weighting(NamedTuple):
    """Label smoothing and weights of a cross-entropy pass.

    Attributes:
        smoothing: label smoothing, from 0 (none) to 1.
        rows: whether calls have a weight for each row.
        classes: whether calls have a weight for each class, by which the loss of a row with this label is multiplied.
    """

    smoothing: float = 0.0
    rows: bool = False
    classes: bool = False

    @property
    def mode(self) -> int:
        """Value of the macro WEIGHTS, which selects the code in `cross_entropy.cuh`."""
        return _SPREAD if self.classes and self.smoothing > 0 else int(self.rows or self.classes)


class RowGroup(enum.Enum):
    """The threads that compute a row together: at most a warp, a block, or the only block of a multiprocessor.

    Attributes:
        threads: threads of a block.
        blocks_per_multiprocessor: blocks that share the memory of a multiprocessor.
        kept: batches of packets of a row that a thread keeps in registers from reading them to writing their gradient.
    """

    WARP = "warp", _WARP_ROW_THREADS, _BLOCKS_PER_MULTIPROCESSOR, 0
    BLOCK = "block", _BLOCK_ROW_THREADS, _BLOCKS_PER_MULTIPROCESSOR, 1
    MULTIPROCESSOR = "multiprocessor", _LONG_ROW_THREADS, 1, 2

    def __init__(self, _: str, threads: int, blocks_per_multiprocessor: int, kept: int) -> None:
        self.threads, self.blocks_per_multiprocessor, self.kept = threads, blocks_per_multiprocessor, kept


def row_macros(row_group: RowGroup, kept: int, weights: int = 0, *, writes: bool = True) -> Macros:
    """Preprocessor definitions of cross_entropy.cu except SCALAR.

    Args:
        kept: batches that stay in registers.
        weights: see `Weighting.mode`.
        writes: whether the kernel writes the gradient.
    """
    lanes = WARP if row_group is RowGroup.WARP else row_group.threads
    threads, blocks = row_group.threads, row_group.blocks_per_multiprocessor
    of_rows = define(ROW_THREADS=threads, ROW_LANES=lanes, ROW_BLOCKS=blocks, ROW_KEPT=kept)
    return (*of_rows, *define(WEIGHTS=weights, GRADIENT=writes))


class Labels(NamedTuple):
    """Properties of class labels: int64 (`wide`) or int32, and the label whose rows are ignored, or None."""

    wide: bool = False
    ignore_index: int | None = None

    @property
    def fields(self) -> dict[str, int]:
        """These options as fields of a kernel's argument block."""
        ignores = self.ignore_index is not None
        return {"wide_labels": self.wide, "ignore_index": self.ignore_index or 0, "ignores": ignores}


@dataclass(frozen=True, slots=True)
class RowSharing:
    """How the threads of cross_entropy's grid share the rows.

    Attributes:
        row_group: the kind of group of threads that shares a row.
        itemsize: bytes of a logit.
        lanes: threads that share a row.
        blocks: blocks of the grid.
        packets: upper limit of the packets of 16 bytes that a thread has of a row.
        spreads: whether labels are smoothed and classes have weights, so that every column has a weight of its own.
        writes: whether the gradient is wanted. If not, no part of a row is kept.
    """

    row_group: RowGroup
    itemsize: int
    lanes: int
    blocks: int
    packets: int
    spreads: bool = False
    writes: bool = True

    @classmethod
    def of(cls, logits: Layout, itemsize: int, *, spreads: bool = False, writes: bool = True) -> RowSharing:
        """Decides how threads share rows of logits of this layout; for `spreads` and `writes` see the attributes."""
        packets, row_group = logits.cols * itemsize // VECTOR_BYTES, RowGroup.WARP
        if logits.order is Order.COLUMN:
            lanes = _COLUMN_LANES
        elif logits.cols > _WARP_COLUMNS:
            is_long = writes and logits.cols * itemsize > _LONG_ROW
            row_group = RowGroup.MULTIPROCESSOR if is_long else RowGroup.BLOCK
            lanes = row_group.threads
        else:
            lanes = min(WARP, next_power_of_two((logits.cols + _COLUMNS_PER_LANE // 2) // _COLUMNS_PER_LANE))
        blocks = min(-(-logits.rows * lanes // row_group.threads), _MAX_BLOCKS)
        return cls(row_group, itemsize, lanes, blocks, -(-packets // lanes), spreads, writes)

    @property
    def batches(self) -> int:
        """The most batches of packets that a thread reads from one row."""
        return -(-self.packets // _BATCH)

    @property
    def kept(self) -> int:
        """Batches that a thread keeps in registers: the group's number if a row has more batches, otherwise 0.

        With both label smoothing and class weights a thread keeps no batch either: each column then has a weight of its
        own, and on sm_75 the BF16 kernel would spill registers.
        """
        kept = self.row_group.kept
        return kept if self.batches > kept and self.writes and not self.spreads else 0

    def held_packets(self, device: int) -> int:
        """Number of packets of each thread that fit into the block's share of shared memory.

        The result is at most the number of packets that a thread reads from one row.
        """
        names = "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"
        of_block, of_multiprocessor = device_attributes(device, *names)
        room = min(of_block, of_multiprocessor // self.row_group.blocks_per_multiprocessor) - _RESERVED_SHARED
        return min(self.batches * _BATCH, room // self.held_bytes)

    def holds_row(self, held: int) -> bool:
        """Whether a row fits into registers and shared memory, if the latter holds `held` packets of each thread."""
        return held // _BATCH + self.kept >= self.batches

    @property
    def held_bytes(self) -> int:
        """Bytes of shared memory for one packet of each thread."""
        return self.row_group.threads * VECTOR_BYTES


class CrossEntropyPass:
    """Computes softmax cross-entropy of the rows of one matrix, and its gradient.

    If `gradient` is None, only the loss is computed.

    Attributes:
        scratch_bytes: bytes of scratch memory for partial sums.
    """

    def __init__(
        self, dtype: DType, logits: Layout, gradient: Layout | None, labels: Labels, weighting: Weighting, device: int
    ) -> None:
        weights = weighting.mode
        self._rows, writes = logits.rows, gradient is not None
        self._sharing = sharing = RowSharing.of(logits, dtype.itemsize, spreads=weights == _SPREAD, writes=writes)
        few = logits.cols <= FEW_CLASSES
        held = sharing.held_packets(device) if logits.order is Order.ROW and not few else 0
        self._streams = self._can_stream(dtype, (logits, gradient or logits), held)
        tiling = self._tiling(few, device)
        macros = (*define(SCALAR=dtype), *row_macros(sharing.row_group, sharing.kept, weights, writes=writes))
        entry, of_labels = CROSS_ENTROPY_FEW if few else CROSS_ENTROPY, {"cols": logits.cols, **labels.fields}
        params = entry.params(Matrix.of(logits), Matrix.of(gradient or logits), rows=logits.rows, **of_labels)
        params.smoothing, params.lanes, params.held = weighting.smoothing, sharing.lanes, held
        self._launches = Launches(entry, macros, device, tiling, params, shared=held * sharing.held_bytes)
        # If there are few labels, each block counts them itself, which costs less than a separate launch.
        self._counts = (bool(params.ignores) or weighting.classes) and logits.rows > _COUNTED_IN_BLOCKS
        counting = Tiling((min(-(-logits.rows // THREADS), _MAX_BLOCKS), 1), (THREADS, 1))
        count = COUNT_LABELS.params(rows=logits.rows, **of_labels)
        self._count_launches = Launches(COUNT_LABELS, macros, device, counting, count)
        # The scratch memory holds the number of rows that are not ignored, then the loss of each block or of each row.
        keeps_rows = self._streams and sharing.row_group is not RowGroup.WARP
        self.scratch_bytes = 4 * (1 + max(tiling.grid[0], counting.grid[0], keeps_rows * logits.rows))

    def _can_stream(self, dtype: DType, layouts: Sequence[Layout], held: int) -> bool:
        """Whether rows can be streamed: copied to shared memory while the previous row is computed.

        Rows must begin at multiples of 16 bytes, and a row must fit into the registers and shared memory of the warp or
        block that shares it; for long rows, and if no row is kept, room for one batch of packets suffices. `launch`
        checks the first row's address, which is not known here.
        """
        straight = all(layout.order is Order.ROW for layout in layouts)
        even = all(layout.leading_dimension * dtype.itemsize % VECTOR_BYTES == 0 for layout in layouts)
        sharing = self._sharing
        needs_row = sharing.writes and sharing.row_group is not RowGroup.MULTIPROCESSOR
        holds = held >= _BATCH and (not needs_row or sharing.holds_row(held))
        return straight and even and sharing.lanes >= WARP and holds

    def _tiling(self, few: bool, device: int) -> Tiling:
        row_group, blocks = self._sharing.row_group, self._sharing.blocks
        threads = row_group.threads
        if few:
            threads = WARP * -(-self._rows // WARP) if self._rows <= _ROWS_OF_ONE_BLOCK else THREADS
            blocks = -(-self._rows // threads)
        elif self._streams:
            blocks = min(blocks, device_info(device).multiprocessors * row_group.blocks_per_multiprocessor)
        return Tiling((blocks, 1), (threads, 1))

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of logits, labels, gradient, loss, row weights and class weights. The
                gradient's is 0 if its layout is None; the last two are 0 without weights.
        """
        logits, labels, gradient, loss, row_weights, class_weights = call.addresses
        scratch, tickets, counted = memory.scratch(self.scratch_bytes), memory.tickets, 0
        gradient = gradient or logits
        if self._counts:  # a separate launch counts the rows that are not ignored, or sums their class weights
            params, launch = self._count_launches[memory.stream]
            counted = scratch
            params.labels, params.class_weights = labels, class_weights
            params.partial, params.counted, params.ticket = scratch + 4, counted, tickets
            launch()
        params, launch = self._launches[memory.stream]
        params.logits.data, params.gradient.data = logits, gradient
        params.labels, params.counted = labels, counted
        params.row_weights, params.class_weights = row_weights, class_weights
        params.gradient_scale, params.grad_scale = call.scalars
        params.tally = call.tally
        params.partial, params.loss = scratch + 4, loss
        params.ticket, params.claimed = tickets, tickets + 4
        params.streams = self._streams and (logits | gradient) % VECTOR_BYTES == 0
        launch()
