"""Batches on their way to a GPU: page-locked memory, a stream of copies, and buffers that are used again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from lt_runtime.arrays.libraries import cupy, cupy_stream
from lt_runtime.errors import DriverError, OperandError
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import aligned

Batch: TypeAlias = Any
"""A NumPy array, or a tuple, list or dict of batches."""

_MEMORY_TYPE: Final = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_HOST_MEMORY: Final = int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)


def arrays_of(batch: Batch, where: str = "the batch") -> list[NDArray[Any]]:
    """The arrays of a batch, in a fixed order.

    Raises:
        OperandError: something in it is no NumPy array.
    """
    if isinstance(batch, np.ndarray):
        if batch.dtype.hasobject:
            raise OperandError(f"{where} holds Python objects; accepted are arrays of numbers")
        return [batch]
    if isinstance(batch, dict):
        return [array for key, part in batch.items() for array in arrays_of(part, f"{where}[{key!r}]")]
    if isinstance(batch, (tuple, list)):
        return [array for i, part in enumerate(batch) for array in arrays_of(part, f"{where}[{i}]")]
    raise OperandError(f"{where} is a {type(batch).__name__}; accepted are NumPy arrays, and tuples and dicts of them")


def rebuilt(batch: Batch, replace: Callable[[], Any]) -> Batch:
    """The batch with each array, in the order of `arrays_of`, replaced by what a call returns."""
    if isinstance(batch, np.ndarray):
        return replace()
    if isinstance(batch, dict):
        return {key: rebuilt(part, replace) for key, part in batch.items()}
    parts = [rebuilt(part, replace) for part in batch]
    if isinstance(batch, list):
        return parts
    return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)


def is_pinned(array: NDArray[Any]) -> bool:
    """Whether an array lies in page-locked memory, which a GPU reads by itself."""
    try:
        return int(call("cuPointerGetAttribute", _MEMORY_TYPE, array.ctypes.data)) == _HOST_MEMORY
    except DriverError:  # ordinary memory, which the driver does not know
        return False


class Slot:
    """Buffers for one batch, on the host and on the device, which grow and are used again.

    Attributes:
        ready: an event, recorded when the batch has been copied.
        released: an event, to be recorded when nobody reads the batch any more.
    """

    def __init__(self, device: int, copies: int) -> None:
        self._device, self._copies = device, copies
        self.ready, self.released = (
            call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING) for _ in range(2)
        )
        self._staging: NDArray[Any] = np.empty(0, np.uint8)
        self._buffer: Any = None

    def fill(self, batch: Batch) -> Batch:
        """The batch in CuPy arrays, which its copies are on their way to.

        Returns once the batch's own arrays may be changed. Waits until what was in the slot before has been copied.
        """
        arrays = arrays_of(batch)
        call("cuEventSynchronize", self.ready)
        self._grow(sum(aligned(array.nbytes) for array in arrays))
        call("cuStreamWaitEvent", self._copies, self.released, 0)
        copied, offset, reads_source = [], 0, False
        for array in arrays:
            reads_source |= self._copy(array, offset)
            copied.append(self._view(array, offset))
            offset += aligned(array.nbytes)
        call("cuEventRecord", self.ready, self._copies)
        if reads_source:
            call("cuEventSynchronize", self.ready)
        return rebuilt(batch, iter(copied).__next__)

    def close(self) -> None:
        """Waits for the copies and frees the events; the arrays stay as long as somebody has them."""
        call("cuEventSynchronize", self.ready)
        for event in (self.ready, self.released):
            call("cuEventDestroy", event)

    def _copy(self, array: NDArray[Any], offset: int) -> bool:
        """Puts one copy on the stream; whether it reads the array itself."""
        size = array.nbytes
        if not size:
            return False
        direct = array.flags.c_contiguous and is_pinned(array)
        source = array.ctypes.data
        if not direct:
            staged = self._staging[offset : offset + size]
            np.copyto(staged.view(array.dtype).reshape(array.shape), array)
            source = staged.ctypes.data
        call("cuMemcpyHtoDAsync", self._buffer.data.ptr + offset, source, size, self._copies)
        return bool(direct)

    def _view(self, array: NDArray[Any], offset: int) -> Any:
        module = cupy()
        if not array.size:
            return module.empty(array.shape, array.dtype)
        return module.ndarray(array.shape, array.dtype, self._buffer.data + offset)

    def _grow(self, size: int) -> None:
        if size <= self._staging.size:
            return
        with cupy_stream(self._device, self._copies) as module:
            buffer = module.empty(size, np.uint8)
            self._staging = np.frombuffer(module.cuda.alloc_pinned_memory(size), np.uint8, size)
            self._buffer = buffer
