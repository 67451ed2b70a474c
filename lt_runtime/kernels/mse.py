"""mse.cu: the mean squared error of one matrix against another, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int64, c_void_p
from typing import Final

from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.blocks import SCALAR, Matrix, fields
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry, Launches
from lt_runtime.kernels.tiling import OCTET, THREADS, Tiling
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import DType

_OCTETS: Final = 2  # octets that a thread waits for at once
_MAX_BLOCKS: Final = 4096  # each writes a partial sum, which the last block adds up


class MseParams(Structure):
    """`lt::MseParams`."""

    _fields_ = fields(
        ("prediction target gradient", Matrix),
        ("grad_scale partial loss ticket", c_void_p),
        ("rows cols", c_int64),
        ("gradient_scale size", c_float),
    )


MSE_LOSS: Final = Entry("mse_loss", "mse.cu", MseParams)


class MsePass:
    """Mean squared error of one matrix against another, and its gradient."""

    def __init__(self, dtype: DType, prediction: Layout, gradient: Layout, target: Layout, device: int) -> None:
        layouts = flattened((prediction, target, gradient))
        rows, cols = layouts[0].shape
        self._size = rows * cols
        self._blocks = min(-(-rows * -(-cols // OCTET) // (_OCTETS * THREADS)), _MAX_BLOCKS)
        params = MseParams(*map(Matrix.of, layouts), rows=rows, cols=cols, size=self._size)
        tiling = Tiling((self._blocks, 1), (THREADS, 1))
        self._launches = Launches(MSE_LOSS, (("SCALAR", SCALAR[dtype]),), device, tiling, params)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory for the blocks' partial sums."""
        return 4 * self._blocks

    def run(self, call: Call, memory: StreamMemory) -> None:
        """Puts the pass on the memory's stream; the caller holds the memory's lock.

        Args:
            call: its addresses are those of prediction, target, gradient and loss.
        """
        params, launch = self._launches[memory.stream]
        params.prediction.data, params.target.data, params.gradient.data, params.loss = call.addresses
        number, params.grad_scale = call.scalars
        params.partial, params.ticket = memory.scratch(self.scratch_bytes), memory.tickets
        params.gradient_scale = 2.0 / self._size * number
        launch()


def flattened(layouts: Sequence[Layout]) -> Sequence[Layout]:
    """Layouts of the same elements in as few and as long rows as possible, where all elements are handled alike."""
    if all(layout.order is Order.COLUMN for layout in layouts):
        layouts = [layout.transposed for layout in layouts]
    if all(layout.order is Order.ROW and layout.leading_dimension == layout.cols for layout in layouts):
        layouts = [packed(1, layout.size) for layout in layouts]
    return layouts
