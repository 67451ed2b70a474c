"""Launches of the losses: grids, argument blocks, and how threads share the rows of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.devices import device_info, shared_memory
from lt_runtime.kernels.kernel import OCTET, THREADS, VECTOR_BYTES, get_kernel
from lt_runtime.kernels.params import SCALAR, CountLabelsParams, CrossEntropyParams, Matrix, MseParams
from lt_runtime.kernels.tiling import next_power_of_two
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import DType

# What may be tuned; the sources have the rest: launch bounds, and what a thread waits for at once. The order of
# sums, and with it the bits, follow from all of it. The loss's last bits also depend on the GPU where rows might be
# streamed: on the number of its multiprocessors, and on whether their shared memory holds a row.
_WARP_ROW_THREADS: Final = 320  # of a block of cross_entropy, whole warps, where a warp at most shares a row
_BLOCK_ROW_THREADS: Final = 256  # where the block does: its barriers wait for fewer, and each has a longer share
_OCTETS_PER_LANE: Final = 2  # as many threads share a row as leave each of them so many, up to a warp
_WARP_OCTETS: Final = 256  # longer rows are a whole block's
_FEW_CLASSES: Final = 16  # that a thread keeps in registers, as few_classes.cuh has it
_ROWS_OF_ONE_BLOCK: Final = 1024  # of few classes, a thread each: it counts labels itself, and waits for nobody
_COLUMN_LANES: Final = 8  # threads that share a row of column-major logits: neighbours read down the columns
_MSE_OCTETS: Final = 2  # that a thread of mse_loss waits for at once
_MAX_BLOCKS: Final = 4096  # each writes a partial sum, which the last one adds up; of few classes there may be more
_BLOCKS_PER_MULTIPROCESSOR: Final = 2  # that share its memory among them when rows are long
_RESERVED_SHARED: Final = 2048  # bytes a block: the kernel's own, and the driver's
# So many labels each block counts itself; more are counted by a launch of their own. No fewer, since several blocks of
# few classes rely on that.
_COUNTED_IN_BLOCKS: Final = _ROWS_OF_ONE_BLOCK

_WARP: Final = 32


def row_macros(*, block_rows: bool) -> Macros:
    """What cross_entropy is compiled for, besides a type: threads of a block, and of them those that stream a row.

    Args:
        block_rows: whether a block shares a row, or at most a warp.
    """
    threads = _BLOCK_ROW_THREADS if block_rows else _WARP_ROW_THREADS
    return ("ROW_THREADS", str(threads)), ("ROW_LANES", str(threads if block_rows else _WARP))


@dataclass(frozen=True, slots=True)
class GradScale:
    """What the gradient, not the loss, is multiplied by: a number, and one FP32 at `address` if that is not 0."""

    number: float = 1.0
    address: int = 0


@dataclass(frozen=True, slots=True)
class Labels:
    """Class labels on the device: int64 or int32, and which of them leaves its row out, if one does."""

    address: int
    wide: bool
    ignore_index: int | None


@dataclass(frozen=True, slots=True)
class RowSharing:
    """How the threads of cross_entropy's grid share the rows.

    Attributes:
        lanes: threads that share a row.
        threads: of a block.
        blocks: of the grid.
        octets: that the longest share of a row has.
    """

    lanes: int
    threads: int
    blocks: int
    octets: int

    @classmethod
    def of(cls, logits: Layout) -> RowSharing:
        """A function of the shape and order alone."""
        octets, threads = logits.cols // OCTET, _WARP_ROW_THREADS
        if logits.order is Order.COLUMN:
            lanes = _COLUMN_LANES
        elif octets > _WARP_OCTETS:
            lanes = threads = _BLOCK_ROW_THREADS
        else:
            lanes = min(_WARP, next_power_of_two(-(-octets // _OCTETS_PER_LANE)))
        blocks = min(-(-logits.rows * lanes // threads), _MAX_BLOCKS)
        return cls(lanes, threads, blocks, -(-octets // lanes))

    @property
    def shared_by_block(self) -> bool:
        """Whether a block shares a row, or at most a warp."""
        return self.lanes > _WARP

    def held_octets(self, itemsize: int, device: int) -> int:
        """How many of a thread's octets fit into shared memory, its block's share of it."""
        of_block, of_multiprocessor = shared_memory(device)
        room = min(of_block, of_multiprocessor // _BLOCKS_PER_MULTIPROCESSOR) - _RESERVED_SHARED
        return min(self.octets, room // self.held_bytes(itemsize))

    def held_bytes(self, itemsize: int) -> int:
        """Of shared memory, for an octet of each thread."""
        return self.threads * OCTET * itemsize


class CrossEntropyPass:
    """Softmax cross-entropy of the rows of one matrix, and its gradient."""

    def __init__(self, dtype: DType, logits: Layout, gradient: Layout, device: int) -> None:
        self._logits, self._gradient = logits, gradient
        self._sharing = RowSharing.of(logits)
        few = logits.cols <= _FEW_CLASSES
        holds = logits.order is Order.ROW and not few
        self._held = self._sharing.held_octets(dtype.itemsize, device) if holds else 0
        self._shared = self._held * self._sharing.held_bytes(dtype.itemsize)
        macros = (("SCALAR", SCALAR[dtype]), *row_macros(block_rows=self._sharing.shared_by_block))
        self._streams = self._can_stream(dtype)
        self._threads, self._blocks = self._sharing.threads, self._sharing.blocks
        if few:
            self._threads = _WARP * -(-logits.rows // _WARP) if logits.rows <= _ROWS_OF_ONE_BLOCK else THREADS
            self._blocks = -(-logits.rows // self._threads)
        elif self._streams:
            processors = device_info(device).multiprocessors
            self._blocks = min(self._sharing.blocks, processors * _BLOCKS_PER_MULTIPROCESSOR)
        self._kernel = get_kernel("cross_entropy_few" if few else "cross_entropy", macros, device)
        self._count = get_kernel("count_labels", macros, device)
        self._count_blocks = min(-(-logits.rows // THREADS), _MAX_BLOCKS)

    def _can_stream(self, dtype: DType) -> bool:
        """Whether rows are a block's or a warp's, held as a whole, and begin on 16 bytes if the first ones do."""
        layouts = (self._logits, self._gradient)
        straight = all(layout.order is Order.ROW for layout in layouts)
        even = all(layout.leading_dimension * dtype.itemsize % VECTOR_BYTES == 0 for layout in layouts)
        whole = self._sharing.lanes >= _WARP and self._held == self._sharing.octets
        return straight and even and whole

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory: losses of blocks or rows, and before them the number of rows that count."""
        keeps_rows = self._streams and self._sharing.shared_by_block
        sums = max(self._blocks, self._logits.rows) if keeps_rows else self._blocks
        return 4 * (1 + max(sums, self._count_blocks))

    def run(
        self,
        *,
        logits: int,
        gradient: int,
        loss: int,
        labels: Labels,
        smoothing: float,
        scale: GradScale,
        scratch: int,
        ticket: int,
        stream: int,
    ) -> None:
        """Puts the pass on `stream`.

        Args:
            logits, gradient, loss, scratch: addresses.
            ticket: address of two counters that are zero, and are so again afterwards.
        """
        counted = self._count_labels(labels, scratch, ticket, stream)
        params = CrossEntropyParams(
            logits=Matrix.at(logits, self._logits),
            gradient=Matrix.at(gradient, self._gradient),
            labels=labels.address,
            counted=counted,
            grad_scale=scale.address,
            partial=scratch + 4,
            loss=loss,
            ticket=ticket,
            claimed=ticket + 4,
            rows=self._logits.rows,
            cols=self._logits.cols,
            ignore_index=labels.ignore_index or 0,
            gradient_scale=scale.number,
            smoothing=smoothing,
            wide_labels=labels.wide,
            ignores=labels.ignore_index is not None,
            lanes=self._sharing.lanes,
            held=self._held,
            streams=self._streams and (logits | gradient) % VECTOR_BYTES == 0,
        )
        self._kernel.prepare((self._blocks, 1), (self._threads, 1), params, stream, shared=self._shared)()

    def _count_labels(self, labels: Labels, counted: int, ticket: int, stream: int) -> int:
        """Has the labels counted if that is worth a launch; the count's address, or 0."""
        rows = self._logits.rows
        if labels.ignore_index is None or rows <= _COUNTED_IN_BLOCKS:
            return 0
        params = CountLabelsParams(
            labels=labels.address,
            partial=counted + 4,
            counted=counted,
            ticket=ticket,
            rows=rows,
            ignore_index=labels.ignore_index,
            wide_labels=labels.wide,
        )
        self._count.prepare((self._count_blocks, 1), (THREADS, 1), params, stream)()
        return counted


class MsePass:
    """Mean squared error of one matrix against another, and its gradient."""

    def __init__(self, dtype: DType, prediction: Layout, target: Layout, gradient: Layout, device: int) -> None:
        self._layouts = flattened((prediction, target, gradient))
        octets = self._layouts[0].rows * -(-self._layouts[0].cols // OCTET)
        self._blocks = min(-(-octets // (_MSE_OCTETS * THREADS)), _MAX_BLOCKS)
        self._kernel = get_kernel("mse_loss", (("SCALAR", SCALAR[dtype]),), device)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory for the blocks' partial sums."""
        return 4 * self._blocks

    def run(
        self, addresses: tuple[int, int, int], loss: int, scale: GradScale, scratch: int, ticket: int, stream: int
    ) -> None:
        """Puts the pass on `stream`.

        Args:
            addresses: of prediction, target and gradient.
            ticket: address of a counter that is zero, and is so again afterwards.
        """
        prediction, target, gradient = map(Matrix.at, addresses, self._layouts)
        size = self._layouts[0].size
        params = MseParams(
            prediction=prediction,
            target=target,
            gradient=gradient,
            grad_scale=scale.address,
            partial=scratch,
            loss=loss,
            ticket=ticket,
            rows=self._layouts[0].rows,
            cols=self._layouts[0].cols,
            gradient_scale=2.0 / size * scale.number,
            size=size,
        )
        self._kernel.prepare((self._blocks, 1), (THREADS, 1), params, stream)()


def flattened(layouts: Sequence[Layout]) -> Sequence[Layout]:
    """The layouts of matrices whose elements are handled alike and in any order, as few and long rows as possible."""
    if all(layout.order is Order.COLUMN for layout in layouts):
        layouts = [layout.transposed for layout in layouts]
    if all(layout.order is Order.ROW and layout.leading_dimension == layout.cols for layout in layouts):
        layouts = [packed(1, layout.size) for layout in layouts]
    return layouts
