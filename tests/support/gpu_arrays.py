"""CuPy arrays: their values on the host, their layout, and our mask kernel."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from lt_runtime.gpu.memory import stream_memory
from lt_runtime.kernels.epilogue import BackwardPass
from lt_runtime.layout import Layout, Order, layout_of
from lt_runtime.problem import ALIGNMENT, Activation, Derivative, DType, Saved, Spec

EPSILON = {DType.FLOAT32: 2.0**-24, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8, DType.FLOAT64: 2.0**-52}
"""Half a unit in the last place of a type, relative to the number."""


def spec_of(array: Any) -> Spec:
    """The layout and alignment of a CuPy matrix."""
    layout = layout_of("matrix", array.shape, [stride // array.itemsize for stride in array.strides])
    return Spec(layout, min(ALIGNMENT, array.data.ptr & -array.data.ptr))


class MaskPass:
    """A launch of our kernel of dz = dy · ReLU's mask, with the bias gradient, for one layout of dy.

    Args:
        mask: uint8 of shape (M, bytes of a row), from `reference.pack_mask`.
    """

    def __init__(self, dy: Any, mask: Any) -> None:
        (m, n), dtype = dy.shape, DType.parse("dy", dy.dtype)
        layout = layout_of("dy", dy.shape, [stride // dy.itemsize for stride in dy.strides])
        spec, bits = Spec(layout, 16), Spec(Layout(m, n, Order.ROW, 8 * mask.shape[1]))
        derivative = Derivative(Activation("relu"), Saved.MASK, bits, 256)
        self._mask, self._pass = mask, BackwardPass(dtype, derivative, spec, spec, 0)
        self._partial = cp.empty(self._pass.partial_bytes, cp.uint8)

    def run(self, dy: Any, dz: Any, db: Any) -> None:
        """Launches the kernel. dy and dz, (M, N), have equal strides or are the same array; db has shape (N,)."""
        arrays = {"dy": dy, "saved": self._mask, "dz": dz, "db": db, "partial": self._partial}
        addresses = {name: int(array.data.ptr) for name, array in arrays.items()}
        memory = stream_memory(0, cp.cuda.get_current_stream().ptr)
        self._pass.launch(**addresses, dropout=None, memory=memory)


def to_host(array: Any) -> NDArray[np.float64]:
    """Returns a CuPy array's values in float64."""
    values: NDArray[np.float64] = cp.asnumpy(cp.ascontiguousarray(array)).astype(np.float64)
    return values
