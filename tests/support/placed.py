"""Arrays on a pretended GPU inside larger buffers, whose other elements must not change."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.fake_gpu import FakeGpu
from tests.support.strategies import Placement

FLAT = Placement(column_major=False, gap=0, offset=0)
COLUMNS = Placement(column_major=True, gap=0, offset=0)
ODD = Placement(column_major=False, gap=3, offset=1)


class Placed:
    """A matrix, or a batch of them, in a buffer that is NaN elsewhere.

    Args:
        values: (rows, cols) or (batch, rows, cols).
        multiple: the leading dimension is rounded up to a multiple of this number.

    Attributes:
        array: the matrix as an argument of the package's functions.
    """

    def __init__(self, gpu: FakeGpu, values: NDArray[Any], place: Placement = FLAT, multiple: int = 1) -> None:
        *_, rows, cols = values.shape
        lines, width = (cols, rows) if place.column_major else (rows, cols)
        pitch = -(-(width + place.gap) // multiple) * multiple
        stride = lines * pitch + multiple * place.gap
        batch = values.shape[0] if values.ndim == 3 else 1
        self._gpu, self._host = gpu, np.full(place.offset + batch * stride + 1, np.nan, values.dtype)
        self._shape, self._steps = (batch, lines, width), (stride, pitch, 1)
        self._place, self._plain = place, values.ndim == 2
        self._block(self._host)[...] = values
        is_fp8 = values.dtype.kind in "Vf" and values.itemsize == 1  # CuPy copies FP8 arrays only as bytes
        self._buffer = gpu.cp.asarray(self._host.view(np.uint8) if is_fp8 else self._host).view(values.dtype)
        item = values.dtype.itemsize
        start = self._buffer.data + place.offset * item
        byte_steps = tuple(step * item for step in self._steps)
        raw = np.dtype(np.uint8) if is_fp8 else values.dtype
        whole = gpu.cp.ndarray(self._shape, raw, start, byte_steps).view(values.dtype)
        turned = whole.swapaxes(1, 2) if place.column_major else whole
        self.array = turned[0] if self._plain else turned

    def _block(self, flat: NDArray[Any]) -> NDArray[Any]:
        steps = tuple(step * flat.itemsize for step in self._steps)
        # viewed as raw bytes, because `as_strided` does not accept the types of ml_dtypes (BF16, FP8)
        raw = flat[self._place.offset :].view(f"V{flat.itemsize}")
        block = np.lib.stride_tricks.as_strided(raw, self._shape, steps).view(flat.dtype)
        turned = block.swapaxes(1, 2) if self._place.column_major else block
        return turned[0] if self._plain else turned

    def fill(self, values: NDArray[Any]) -> None:
        """Overwrites the matrix immediately; no work that reads the old values may be waiting."""
        self._block(self._host)[...] = values
        host_of(self._gpu, self._buffer)[...] = self._host

    def values(self) -> NDArray[np.float64]:
        """The values of the matrix; fails if memory around it was written."""
        now = host_of(self._gpu, self._buffer).copy()
        result = self._block(now).astype(np.float64)
        self._block(now)[...] = self._block(self._host)
        assert now.tobytes() == self._host.tobytes(), "memory outside the matrix was written"
        return result


def host_of(gpu: FakeGpu, array: Any) -> NDArray[Any]:
    """See `FakeGpu.host_of`."""
    return gpu.host_of(array)
