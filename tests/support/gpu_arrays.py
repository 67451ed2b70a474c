"""CuPy arrays inside larger buffers, whose other elements must not change, and our mask kernel."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

import lt_runtime as lt
from lt_runtime.gpu.memory import MAX_TICKETS
from lt_runtime.kernels.epilogue import BackwardPass, Sums
from lt_runtime.layout import Layout, Order, layout_of
from lt_runtime.problem import ALIGNMENT, Activation, Derivative, DType, Saved, Spec
from tests.support.strategies import Placement

EPSILON = {DType.FLOAT32: 2.0**-24, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8, DType.FLOAT64: 2.0**-52}
"""Half a unit in the last place, relative."""


class Guarded:
    """A matrix, or a batch of them, inside a larger buffer whose other elements must not change.

    Args:
        values: (rows, cols) or (batch, rows, cols).
        multiple: the leading dimension is rounded up to a multiple of this number.
    """

    def __init__(self, values: NDArray[Any], placement: Placement, multiple: int = 1) -> None:
        *_, rows, cols = values.shape
        lines, width = (cols, rows) if placement.column_major else (rows, cols)
        pitch = -(-(width + placement.gap) // multiple) * multiple
        stride = lines * pitch + multiple * placement.gap
        batch = values.shape[0] if values.ndim == 3 else 1
        self._buffer = cp.full(placement.offset + batch * stride + 1, np.nan, values.dtype)
        shape, strides = (batch, lines, width), (stride, pitch, 1)
        block = _strided(cp, self._buffer[placement.offset :], shape, strides)
        marks = np.arange(placement.offset, self._buffer.size)
        self._inside = np.zeros(self._buffer.size, bool)
        self._inside[_strided(np, marks, shape, strides)] = True
        batched = block.swapaxes(-1, -2) if placement.column_major else block
        self.array = batched if values.ndim == 3 else batched[0]
        self.array[...] = cp.asarray(values)

    def values(self) -> NDArray[np.float64]:
        """The values of the matrix; fails if memory around it was written."""
        host = cp.asnumpy(self._buffer).astype(np.float32)
        assert np.isnan(host[~self._inside]).all(), "memory outside the matrix was written"
        result: NDArray[np.float64] = cp.asnumpy(cp.ascontiguousarray(self.array)).astype(np.float64)
        return result


def spec_of(array: Any) -> Spec:
    """The layout and alignment of a CuPy matrix."""
    layout = layout_of("matrix", array.shape, [stride // array.itemsize for stride in array.strides])
    return Spec(layout, min(ALIGNMENT, array.data.ptr & -array.data.ptr))


def _strided(module: Any, flat: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    byte_strides = tuple(stride * flat.itemsize for stride in strides)
    return module.lib.stride_tricks.as_strided(flat, shape, byte_strides)


class MaskPass:
    """dz = dy · ReLU's mask and the bias gradient, by our kernel, for one layout of dy.

    Args:
        mask: uint8 of shape (M, bytes of a row), from `reference.pack_mask`.
    """

    def __init__(self, dy: Any, mask: Any) -> None:
        (m, n), dtype = dy.shape, DType.parse("dy", dy.dtype)
        layout = layout_of("dy", dy.shape, [stride // dy.itemsize for stride in dy.strides])
        spec, bits = Spec(layout, 16), Spec(Layout(m, n, Order.ROW, 8 * mask.shape[1]))
        derivative = Derivative(Activation("relu"), Saved.MASK, bits)
        self._mask, self._pass = mask, BackwardPass(dtype, derivative, spec, spec, 0, sums=Sums())
        self._partial, self._tickets = cp.empty(self._pass.partial_bytes, cp.uint8), cp.zeros(MAX_TICKETS, cp.uint32)

    def run(self, dy: Any, dz: Any, db: Any) -> None:
        """Launches the kernel. dy and dz, (M, N), have equal strides or are the same array; db has shape (N,)."""
        arrays = {"dy": dy, "saved": self._mask, "dz": dz, "db": db, "partial": self._partial, "tickets": self._tickets}
        addresses = {name: int(array.data.ptr) for name, array in arrays.items()}
        self._pass.run(**addresses, dropout=None, stream=cp.cuda.get_current_stream().ptr)


def to_host(array: Any) -> NDArray[np.float64]:
    """A CuPy array's values in float64."""
    values: NDArray[np.float64] = cp.asnumpy(cp.ascontiguousarray(array)).astype(np.float64)
    return values


class GpuMachine:
    """The GPU as a `rounding_checks.Machine`, on CuPy's current stream."""

    lt, stream = lt, None

    def place(self, values: NDArray[Any], placement: Placement, multiple: int = 1) -> Guarded:
        """See `Machine`."""
        return Guarded(values, placement, multiple)

    def array(self, values: NDArray[Any]) -> Any:
        """See `Machine`."""
        return cp.asarray(values)

    def host(self, array: Any) -> NDArray[Any]:
        """See `Machine`."""
        values: NDArray[Any] = cp.asnumpy(array)
        return values

    def wait(self) -> None:
        """See `Machine`."""
        cp.cuda.get_current_stream().synchronize()
