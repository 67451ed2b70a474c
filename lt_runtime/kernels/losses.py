"""elementwise_loss.cu, summed_loss.cu, scale.cu and tally.cu: elementwise losses, and kernels for any loss.

elementwise_loss.cu computes the mean of a loss over all elements, and its gradient. summed_loss.cu also sums the
gradient over the rows. scale.cu rounds FP32 gradients, and tally.cu sums losses over steps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.cross_entropy import Labels
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, Tally, define, struct
from lt_runtime.kernels.tiling import OCTET, THREADS, WARP, Access, Tiling, are_aligned, reduction, wave_of
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import DType, Spec

LOSSES: Final = {"mse": "lt::SquaredError", "huber": "lt::Huber", "bce_with_logits": "lt::BinaryCrossEntropy"}
"""The struct of `losses.cuh` for each loss."""
# Octets of each operand whose loads a thread issues before it waits.
_OCTETS: Final = 2
# Arrays with weights and more elements than this are not joined to one row: the kernel finds an element's row by a
# 32-bit division.
_MOST_JOINED: Final = 1 << 32
# Largest number of blocks of a loss's grid, because the last block adds up a partial sum of each.
_MAX_BLOCKS: Final = 4096
_SCALE_BLOCKS: Final = 1 << 16
_TALLY_ROWS: Final = THREADS // WARP  # rows of logits that a block of the tally reads at a time: one for each warp
_TALLY_BLOCKS: Final = 1024


ELEMENTWISE_LOSS: Final = Entry("elementwise_loss", "elementwise_loss.cu")


class ElementwiseLoss(NamedTuple):
    """The loss that a pass computes, with its options.

    Attributes:
        name: one of `LOSSES`.
        delta: absolute error beyond which Huber's loss is linear; other losses do not read it.
        weighted: whether calls may have weights of rows or columns.
    """

    name: str = "mse"
    delta: float = 1.0
    weighted: bool = False


def loss_macros(dtype: DType, name: str, *, weighted: bool) -> Macros:
    """The preprocessor definitions of elementwise_loss."""
    return define(SCALAR=dtype, LOSS=LOSSES[name], WEIGHTED=weighted)


class ElementwiseLossPass:
    """Computes the mean of an elementwise loss of prediction against target, and its gradient.

    Attributes:
        scratch_bytes: bytes of scratch memory for the blocks' partial sums.
    """

    def __init__(
        self, dtype: DType, prediction: Layout, gradient: Layout, target: Layout, loss: ElementwiseLoss, device: int
    ) -> None:
        layouts = flattened((prediction, target, gradient), weighted=loss.weighted)
        rows, cols = layouts[0].shape
        self._size = rows * cols
        blocks = min(-(-rows * -(-cols // OCTET) // (_OCTETS * THREADS)), _MAX_BLOCKS)
        self.scratch_bytes = 4 * blocks
        params = ELEMENTWISE_LOSS.params(*map(Matrix.of, layouts), rows=rows, cols=cols, width=prediction.cols)
        params.size, params.delta = self._size, loss.delta
        tiling, macros = Tiling((blocks, 1), (THREADS, 1)), loss_macros(dtype, loss.name, weighted=loss.weighted)
        self._launches = Launches(ELEMENTWISE_LOSS, macros, device, tiling, params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of prediction, target, gradient, loss, row weights and column weights; the
                last two are 0 where there are none.
        """
        params, launch = self._launches[memory.stream]
        prediction, target, gradient, params.loss, params.row_weights, params.pos_weight = call.addresses
        params.prediction.data, params.target.data, params.gradient.data = prediction, target, gradient
        number, params.grad_scale = call.scalars
        params.tally = call.tally
        params.partial, params.ticket = memory.scratch(self.scratch_bytes), memory.tickets
        params.gradient_scale = number / self._size
        launch()


def flattened(layouts: Sequence[Layout], *, weighted: bool = False) -> Sequence[Layout]:
    """Equivalent layouts with fewer and longer rows, for kernels that handle all elements alike.

    Args:
        weighted: whether rows or columns have weights. Then rows are joined only where the kernel can still compute an
            element's own row and column.
    """
    if weighted and layouts[0].size >= _MOST_JOINED:
        return layouts
    if not weighted and all(layout.order is Order.COLUMN for layout in layouts):
        layouts = [layout.transposed for layout in layouts]
    if all(layout.order is Order.ROW and layout.leading_dimension == layout.cols for layout in layouts):
        layouts = [packed(1, layout.size) for layout in layouts]
    return layouts


SUMMED_LOSS: Final = Entry("summed_loss", "summed_loss.cu")


def summed_loss_macros(dtype: DType, name: str, access: Access) -> Macros:
    """The preprocessor definitions of summed_loss; `access` is not FLAT."""
    return define(SCALAR=dtype, LOSS=LOSSES[name]) + access.macros(_summed_blocks(dtype, name))


def _summed_blocks(dtype: DType, name: str) -> int:
    """Launch bound of summed_loss, in blocks of a multiprocessor: as many as possible without spilling registers."""
    return 2 if dtype is DType.FLOAT32 else 3 if name == "bce_with_logits" else 4


class LossSums:
    """Sums of a pass that computes a mean loss, its gradient, and the sums of the gradient's columns.

    Attributes:
        scratch_bytes: bytes of scratch memory for the blocks' partial sums.
    """

    def __init__(self, layout: Layout, tiling: Tiling) -> None:
        self._size, self._sums_bytes = layout.size, tiling.sums_bytes
        self.scratch_bytes = self._sums_bytes + 4 * math.prod(tiling.grid)

    def write(self, params: Any, call: Call, memory: StreamMemory) -> None:
        """Writes the scalars and the tally of a call into an argument block, and the addresses of the partial sums."""
        number, params.grad_scale = call.scalars
        params.gradient_scale = number / self._size
        mean, db = params.mean, params.db
        mean.size, mean.tally = self._size, call.tally
        db.partial, db.tickets = memory.scratch(self.scratch_bytes), memory.tickets
        mean.partial = db.partial + self._sums_bytes


class SummedLossPass:
    """Computes the mean of a loss of one matrix against another, its gradient, and the sums of the gradient's columns.

    Args:
        loss: a loss without weights of rows or columns.
        accumulate: whether the sums are added to the present values of their buffer.

    Attributes:
        scratch_bytes: bytes of scratch memory for the blocks' partial sums.
    """

    def __init__(
        self,
        dtype: DType,
        prediction: Spec,
        gradient: Spec,
        target: Spec,
        loss: ElementwiseLoss,
        accumulate: bool,
        device: int,
    ) -> None:
        layout, specs = prediction.layout, (prediction, target, gradient)
        access = Access.ALIGNED if are_aligned(dtype, *specs) else Access.ANY
        macros = summed_loss_macros(dtype, loss.name, access)
        tiling = reduction(layout, wave_of(device, _summed_blocks(dtype, loss.name)), transposes=False)
        self._sums = LossSums(layout, tiling)
        self.scratch_bytes = self._sums.scratch_bytes
        params = SUMMED_LOSS.params(*map(Matrix.of, specs), rows=layout.rows, cols=layout.cols)
        params.delta, params.db.accumulate = loss.delta, accumulate
        self._launches = Launches(SUMMED_LOSS, macros, device, tiling, params)

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Launches the pass on `memory.stream`; the caller must hold `memory.lock`.

        Args:
            call: holds the addresses of prediction, target, gradient, loss and sums; the sums have the pass's type.
        """
        params, launch = self._launches[memory.stream]
        prediction, target, gradient, params.mean.loss, params.db.sum = call.addresses
        params.prediction.data, params.target.data, params.gradient.data = prediction, target, gradient
        self._sums.write(params, call, memory)
        launch()


SCALE: Final = Entry("scale", "scale.cu")


def launch_scale(
    source: int, target: int, size: int, dtype: DType, scale: int, share: float, device: int, stream: int
) -> None:
    """Launches target = source · share on a stream of the current device.

    Args:
        source: address of `size` FP32 numbers without gaps.
        target: address of `size` numbers of type `dtype`; it may be the source if the type is FP32.
        scale: device address of an FP32 number, which is another factor; 0 for none.
    """
    blocks = min(max(1, -(-size // THREADS)), _SCALE_BLOCKS)
    params = SCALE.params(source, target, scale, size, share)
    _, launch = Launches(SCALE, define(SCALAR=dtype), device, Tiling((blocks, 1), (THREADS, 1)), params)[stream]
    launch()


TALLY: Final = Entry("tally", "tally.cu")
TallyState: Final = struct("TallyState")
"""The C++ struct of a tally on the device: sums of losses and counts of rows over steps, and the last step's loss."""


class TallyPass:
    """Adds a micro-batch of a step to a tally: its loss, and its correctly classified rows.

    Args:
        dtype: type of the logits; any type if there are none.
        logits: layout of the logits; None for a loss without classes.
    """

    def __init__(self, dtype: DType, logits: Layout | None, labels: Labels, device: int) -> None:
        params, blocks = TALLY.params(), 1
        if logits is not None:
            params = TALLY.params(Matrix.of(logits), rows=logits.rows, cols=logits.cols, **labels.fields)
            blocks = max(1, min(-(-logits.rows // _TALLY_ROWS), _TALLY_BLOCKS))
        tiling = Tiling((blocks, 1), (THREADS, 1))
        self._launches = Launches(TALLY, define(SCALAR=dtype), device, tiling, params)
        self._lock = threading.Lock()

    def launch(self, logits: int, labels: int, loss: int, tally: Tally, stream: int) -> None:
        """Launches the pass on `stream`.

        Args:
            logits, labels, loss: addresses; the loss is an FP32 number.
            tally: the tally to add to.
        """
        with self._lock:
            params, launch = self._launches[stream]
            params.logits.data, params.labels, params.loss, params.tally = logits, labels, loss, tally
            launch()
