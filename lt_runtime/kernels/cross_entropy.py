"""cross_entropy.cu: softmax cross-entropy of the rows of a matrix, and its gradient."""

from __future__ import annotations

import enum
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

# These numbers may be tuned. Others are in the sources: launch bounds, and the loads a thread waits for at once. All
# decide the order of sums, and with it the bits of results. Where rows might be streamed, the loss's last bits also
# depend on the GPU: on the number of its multiprocessors, and on whether their shared memory holds a row.
_WARP_ROW_THREADS: Final = 320  # threads of a block in which a row is shared by a warp or fewer threads
_BLOCK_ROW_THREADS: Final = 256  # threads of a block that shares a row: fewer threads wait at its barriers
_LONG_ROW_THREADS: Final = 512  # of a block that shares a long row, and has a multiprocessor for itself
_LONG_ROW: Final = 112 << 10  # bytes; an H200's shared memory does not hold two longer rows
_COLUMNS_PER_LANE: Final = 16  # a row has so many threads that each has about 16 columns or fewer, up to a warp
_WARP_COLUMNS: Final = 2048  # a longer row is shared by a whole block
_BATCH: Final = 4  # packets that a thread waits for at once; softmax_rows.cuh has the same number
_KEPT_BATCHES: Final = 1  # batches that stay in registers, which have room for few, if a block shares a longer row
_SPREAD: Final = 2  # WEIGHTS where labels are smoothed and classes have weights
_FEW_CLASSES: Final = 16  # as few as a thread keeps in registers; few_classes.cuh has the same number
_ROWS_OF_ONE_BLOCK: Final = 1024  # with few classes a block of a thread a row counts labels itself, and waits for none
_COLUMN_LANES: Final = 8  # threads that share a row of column-major logits: neighbours read down the columns
_MAX_BLOCKS: Final = 4096  # each writes a partial sum, which the last block adds up; few classes may take more blocks
_BLOCKS_PER_MULTIPROCESSOR: Final = 2  # they share its memory where rows are a block's but not long
_RESERVED_SHARED: Final = 2048  # bytes of shared memory a block for the kernel's own variables and the driver's
# Each block counts up to so many labels itself; more labels are counted by a launch of their own. The number cannot be
# smaller: several blocks of few classes rely on a launch of its own.
_COUNTED_IN_BLOCKS: Final = _ROWS_OF_ONE_BLOCK


CROSS_ENTROPY: Final = Entry("cross_entropy", "cross_entropy.cu")
CROSS_ENTROPY_FEW: Final = Entry("cross_entropy_few", "cross_entropy.cu")
COUNT_LABELS: Final = Entry("count_labels", "cross_entropy.cu")


class Weighting(NamedTuple):
    """How a pass weighs its target.

    Attributes:
        smoothing: of the labels; 0 for none.
        rows: whether calls have a weight for each row.
        classes: whether calls have a weight for each class, which counts for the rows with its label.
    """

    smoothing: float = 0.0
    rows: bool = False
    classes: bool = False

    @property
    def mode(self) -> int:
        """WEIGHTS of `cross_entropy.cuh`."""
        return _SPREAD if self.classes and self.smoothing > 0 else int(self.rows or self.classes)


class RowGroup(enum.Enum):
    """The threads that share a row: at most a warp, a block, or the only block of a multiprocessor.

    Attributes:
        threads: threads of a block.
        blocks_per_multiprocessor: blocks that share the memory of a multiprocessor.
    """

    WARP = "warp", _WARP_ROW_THREADS, _BLOCKS_PER_MULTIPROCESSOR
    BLOCK = "block", _BLOCK_ROW_THREADS, _BLOCKS_PER_MULTIPROCESSOR
    MULTIPROCESSOR = "multiprocessor", _LONG_ROW_THREADS, 1

    def __init__(self, _: str, threads: int, blocks_per_multiprocessor: int) -> None:
        self.threads, self.blocks_per_multiprocessor = threads, blocks_per_multiprocessor


def row_macros(row_group: RowGroup, kept: int, weights: int = 0) -> Macros:
    """The definitions that cross_entropy is compiled for, besides a type: blocks, threads, threads of a row, weights.

    Args:
        kept: batches that stay in registers.
        weights: see `Weighting.mode`.
    """
    lanes = WARP if row_group is RowGroup.WARP else row_group.threads
    threads, blocks = row_group.threads, row_group.blocks_per_multiprocessor
    return define(ROW_THREADS=threads, ROW_LANES=lanes, WEIGHTS=weights, ROW_BLOCKS=blocks, ROW_KEPT=kept)


class Labels(NamedTuple):
    """The form of class labels: int64 (`wide`) or int32, and the label whose rows are left out, or None."""

    wide: bool = False
    ignore_index: int | None = None

    @property
    def fields(self) -> dict[str, int]:
        """The fields of an argument block that state the form."""
        ignores = self.ignore_index is not None
        return {"wide_labels": self.wide, "ignore_index": self.ignore_index or 0, "ignores": ignores}


@dataclass(frozen=True, slots=True)
class RowSharing:
    """How the threads of cross_entropy's grid share the rows.

    Attributes:
        row_group: who shares a row.
        itemsize: bytes of a logit.
        lanes: threads that share a row.
        blocks: blocks of the grid.
        packets: packets of 16 bytes in the longest share of a row.
        spreads: whether labels are smoothed and classes have weights, so that every column has a weight of its own.
    """

    row_group: RowGroup
    itemsize: int
    lanes: int
    blocks: int
    packets: int
    spreads: bool = False

    @classmethod
    def of(cls, logits: Layout, itemsize: int, *, spreads: bool = False) -> RowSharing:
        """The division of the rows for a shape, order and type; `spreads` is an attribute."""
        packets, row_group = logits.cols * itemsize // VECTOR_BYTES, RowGroup.WARP
        if logits.order is Order.COLUMN:
            lanes = _COLUMN_LANES
        elif logits.cols > _WARP_COLUMNS:
            row_group = RowGroup.MULTIPROCESSOR if logits.cols * itemsize > _LONG_ROW else RowGroup.BLOCK
            lanes = row_group.threads
        else:
            lanes = min(WARP, next_power_of_two((logits.cols + _COLUMNS_PER_LANE // 2) // _COLUMNS_PER_LANE))
        blocks = min(-(-logits.rows * lanes // row_group.threads), _MAX_BLOCKS)
        return cls(row_group, itemsize, lanes, blocks, -(-packets // lanes), spreads)

    @property
    def batches(self) -> int:
        """Batches of packets that a thread reads at most from a matrix row."""
        return -(-self.packets // _BATCH)

    @property
    def kept(self) -> int:
        """How many batches of packets stay in registers: `_KEPT_BATCHES` if a block shares a longer row, otherwise 0.

        It is 0 too where labels are smoothed and classes have weights: every column then has a weight of its own, and
        on sm_75 the BF16 kernel would spill registers.
        """
        has_more = self.row_group is not RowGroup.WARP and self.batches > _KEPT_BATCHES
        return _KEPT_BATCHES if has_more and not self.spreads else 0

    def held_packets(self, device: int) -> int:
        """How many packets of each thread fit into the block's share of shared memory.

        It is at most the number of packets in all batches of a row.
        """
        names = "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"
        of_block, of_multiprocessor = device_attributes(device, *names)
        room = min(of_block, of_multiprocessor // self.row_group.blocks_per_multiprocessor) - _RESERVED_SHARED
        return min(self.batches * _BATCH, room // self.held_bytes)

    def holds_row(self, held: int) -> bool:
        """Whether a whole row fits into registers and `held` packets of each thread in shared memory."""
        return held // _BATCH + self.kept >= self.batches

    @property
    def held_bytes(self) -> int:
        """Bytes of shared memory for one packet of each thread."""
        return self.row_group.threads * VECTOR_BYTES


class CrossEntropyPass:
    """Softmax cross-entropy of the rows of one matrix, and its gradient.

    Attributes:
        scratch_bytes: bytes of scratch memory for partial sums.
    """

    def __init__(
        self, dtype: DType, logits: Layout, gradient: Layout, labels: Labels, weighting: Weighting, device: int
    ) -> None:
        weights = weighting.mode
        self._rows = logits.rows
        self._sharing = sharing = RowSharing.of(logits, dtype.itemsize, spreads=weights == _SPREAD)
        few = logits.cols <= _FEW_CLASSES
        held = sharing.held_packets(device) if logits.order is Order.ROW and not few else 0
        self._streams = self._can_stream(dtype, (logits, gradient), held)
        tiling = self._tiling(few, device)
        macros = (*define(SCALAR=dtype), *row_macros(sharing.row_group, sharing.kept, weights))
        entry, of_labels = CROSS_ENTROPY_FEW if few else CROSS_ENTROPY, {"cols": logits.cols, **labels.fields}
        params = entry.params(Matrix.of(logits), Matrix.of(gradient), rows=logits.rows, **of_labels)
        params.smoothing, params.lanes, params.held = weighting.smoothing, sharing.lanes, held
        self._launches = Launches(entry, macros, device, tiling, params, shared=held * sharing.held_bytes)
        # Few labels are counted by the blocks themselves, which costs less than a launch.
        self._counts = (bool(params.ignores) or weighting.classes) and logits.rows > _COUNTED_IN_BLOCKS
        counting = Tiling((min(-(-logits.rows // THREADS), _MAX_BLOCKS), 1), (THREADS, 1))
        count = COUNT_LABELS.params(rows=logits.rows, **of_labels)
        self._count_launches = Launches(COUNT_LABELS, macros, device, counting, count)
        # The scratch memory holds the number of rows that count, then losses of blocks or rows.
        keeps_rows = self._streams and sharing.row_group is not RowGroup.WARP
        self.scratch_bytes = 4 * (1 + max(tiling.grid[0], counting.grid[0], keeps_rows * logits.rows))

    def _can_stream(self, dtype: DType, layouts: tuple[Layout, Layout], held: int) -> bool:
        """Whether a row can be copied while the previous row is computed.

        Rows must begin at multiples of 16 bytes. A warp or a block must hold a row, or a multiprocessor a batch of it.
        The address of the first row, which is not known yet, is left to `launch`.
        """
        straight = all(layout.order is Order.ROW for layout in layouts)
        even = all(layout.leading_dimension * dtype.itemsize % VECTOR_BYTES == 0 for layout in layouts)
        sharing = self._sharing
        holds = held >= _BATCH and (sharing.holds_row(held) or sharing.row_group is RowGroup.MULTIPROCESSOR)
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
        """Puts the pass on the memory's stream; the caller holds the memory's lock.

        Args:
            call: its addresses are those of logits, labels, gradient, loss, row weights and class weights; the last two
                are 0 where there are none.
        """
        logits, labels, gradient, loss, row_weights, class_weights = call.addresses
        scratch, tickets, counted = memory.scratch(self.scratch_bytes), memory.tickets, 0
        if self._counts:  # the number of rows that count, or the sum of the weights of their labels
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
        params.partial, params.loss = scratch + 4, loss
        params.ticket, params.claimed = tickets, tickets + 4
        params.streams = self._streams and (logits | gradient) % VECTOR_BYTES == 0
        launch()
