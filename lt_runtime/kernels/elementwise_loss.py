"""elementwise_loss.cu: the mean of a loss of one matrix against another over all elements, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int64, c_void_p
from typing import Final, NamedTuple

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.blocks import SCALAR, Matrix, fields
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry, Launches
from lt_runtime.kernels.tiling import OCTET, THREADS, Tiling
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import DType

LOSSES: Final = {"mse": "lt::SquaredError", "huber": "lt::Huber", "bce_with_logits": "lt::BinaryCrossEntropy"}
"""The struct of `losses.cuh` for each loss."""
_OCTETS: Final = 2  # octets that a thread waits for at once
_MOST_JOINED: Final = 1 << 32  # elements of rows with weights: the kernel divides numbers of 32 bits
_MAX_BLOCKS: Final = 4096  # each writes a partial sum, which the last block adds up


class ElementwiseLossParams(Structure):
    """`lt::ElementwiseLossParams`."""

    _fields_ = fields(
        ("prediction target gradient", Matrix),
        ("grad_scale partial loss ticket row_weights pos_weight", c_void_p),
        ("rows cols width", c_int64),
        ("gradient_scale size delta", c_float),
    )


ELEMENTWISE_LOSS: Final = Entry("elementwise_loss", "elementwise_loss.cu", ElementwiseLossParams)


class ElementwiseLoss(NamedTuple):
    """Which loss a pass computes.

    Attributes:
        name: one of `LOSSES`.
        delta: of Huber's loss.
        weighted: whether calls may have weights of rows or columns.
    """

    name: str = "mse"
    delta: float = 1.0
    weighted: bool = False


def loss_macros(dtype: DType, name: str, *, weighted: bool) -> Macros:
    """The definitions that elementwise_loss is compiled for."""
    return ("SCALAR", SCALAR[dtype]), ("LOSS", LOSSES[name]), ("WEIGHTED", str(int(weighted)))


class ElementwiseLossPass:
    """The mean of a loss of one matrix against another, and its gradient."""

    def __init__(
        self, dtype: DType, prediction: Layout, gradient: Layout, target: Layout, loss: ElementwiseLoss, device: int
    ) -> None:
        layouts = flattened((prediction, target, gradient), weighted=loss.weighted)
        rows, cols = layouts[0].shape
        self._size = rows * cols
        self._blocks = min(-(-rows * -(-cols // OCTET) // (_OCTETS * THREADS)), _MAX_BLOCKS)
        params = ElementwiseLossParams(*map(Matrix.of, layouts), rows=rows, cols=cols, width=prediction.cols)
        params.size, params.delta = self._size, loss.delta
        tiling, macros = Tiling((self._blocks, 1), (THREADS, 1)), loss_macros(dtype, loss.name, weighted=loss.weighted)
        self._launches = Launches(ELEMENTWISE_LOSS, macros, device, tiling, params)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory for the blocks' partial sums."""
        return 4 * self._blocks

    def run(self, call: Call, memory: StreamMemory) -> None:
        """Puts the pass on the memory's stream; the caller holds the memory's lock.

        Args:
            call: its addresses are those of prediction, target, gradient, loss, row weights and column weights; the
                last two are 0 where there are none.
        """
        params, launch = self._launches[memory.stream]
        prediction, target, gradient, params.loss, params.row_weights, params.pos_weight = call.addresses
        params.prediction.data, params.target.data, params.gradient.data = prediction, target, gradient
        number, params.grad_scale = call.scalars
        params.partial, params.ticket = memory.scratch(self.scratch_bytes), memory.tickets
        params.gradient_scale = number / self._size
        launch()


def flattened(layouts: Sequence[Layout], *, weighted: bool = False) -> Sequence[Layout]:
    """Layouts of the same elements in as few and as long rows as possible, where all elements are handled alike.

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
