"""dropout.cu: dropout on its own."""

from __future__ import annotations

import math
from ctypes import Structure, c_int64, c_uint32
from typing import Final

from lt_runtime.kernels.blocks import SCALAR, Dropout, Matrix, fields
from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.kernel import Entry, Launches
from lt_runtime.kernels.tiling import OCTET, Access, access_macros, are_aligned, sweep, wave_of
from lt_runtime.layout import Order, packed
from lt_runtime.problem import DType, Spec

_ROW: Final = 2048  # elements of a block's row
_BLOCKS: Final = 6  # blocks that a multiprocessor shall hold
_WAVES: Final = 4


class DropoutParams(Structure):
    """`lt::DropoutParams`."""

    _fields_ = fields(("in_ out", Matrix), ("rows", c_uint32), ("cols", c_int64), ("dropout", Dropout))


DROPOUT: Final = Entry("dropout", "dropout.cu", DropoutParams)


class DropoutPass:
    """target = mask · scale · source, over one matrix; both may be the same memory."""

    def __init__(self, dtype: DType, source: Spec, target: Spec, device: int) -> None:
        specs = [source, target]
        if all(spec.layout.order is Order.ROW and spec.layout.extent == spec.layout.size for spec in specs):
            specs = [_folded(spec) for spec in specs]
        layout = specs[0].layout
        access = Access.ALIGNED if are_aligned(dtype, *specs) else Access.ANY
        macros = ("SCALAR", SCALAR[dtype]), *access_macros(access, _BLOCKS)
        wave = None if dtype is DType.FLOAT32 else _WAVES * wave_of(device, _BLOCKS)
        params = DropoutParams(*map(Matrix.of, specs), layout.rows, layout.cols)
        self._launches = Launches(DROPOUT, macros, device, sweep(layout, wave), params)

    def run(self, source: int, target: int, state: DropoutState, stream: int) -> None:
        """Puts the pass on `stream`, whose memory's lock the caller holds.

        Args:
            source, target: addresses.
        """
        params, launch = self._launches[stream]
        params.in_.data, params.out.data = source, target
        params.dropout = state.block()
        launch()


def _folded(spec: Spec) -> Spec:
    """Elements without gaps, in row-major order, as rows of a length that suits the kernel, or else as one row.

    Each element keeps its row-major index, which decides its random number.
    """
    size = spec.layout.size
    cols = math.gcd(size, _ROW)
    return Spec(packed(size // cols, cols) if cols >= OCTET else packed(1, size), spec.alignment)
