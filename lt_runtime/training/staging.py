"""Copies of batches to a GPU, through page-locked memory into buffers that are used again."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from lt_runtime.arrays.libraries import cupy, cupy_stream
from lt_runtime.arrays.operand import check_plain
from lt_runtime.errors import DriverError, OperandError
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import aligned

Batch: TypeAlias = Any
"""A NumPy array, or a tuple, list or dict of batches."""

_MEMORY_TYPE: Final = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_NO_TIMING: Final = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
_HOST_MEMORY: Final = int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)


def map_arrays(batch: Batch, function: Callable[[NDArray[Any]], Any], where: str = "the batch") -> Batch:
    """A batch of the same structure with `function(array)` in place of each array.

    Args:
        where: the name of the batch in errors.

    Raises:
        OperandError: something in the batch is no NumPy array, or a masked one or a matrix.
    """
    if isinstance(batch, np.ndarray):
        check_plain(where, batch)
        if batch.dtype.hasobject:
            raise OperandError(f"{where} holds Python objects; accepted are arrays of numbers")
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_arrays(part, function, f"{where}[{key!r}]") for key, part in batch.items()}
    if not isinstance(batch, (tuple, list)):
        name = type(batch).__name__
        raise OperandError(f"{where} is a {name}; accepted are NumPy arrays, and tuples, lists and dicts of them")
    parts = [map_arrays(part, function, f"{where}[{i}]") for i, part in enumerate(batch)]
    if isinstance(batch, list):
        return parts
    return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)


def is_pinned(array: NDArray[Any]) -> bool:
    """Whether an array lies in page-locked memory, from which a GPU can copy while the host goes on."""
    try:
        return int(call("cuPointerGetAttribute", _MEMORY_TYPE, array.ctypes.data)) == _HOST_MEMORY
    except DriverError:  # pageable memory, which the driver does not know
        return False


@contextlib.contextmanager
def _event() -> Iterator[int]:
    """An event, destroyed at the end."""
    event = call("cuEventCreate", _NO_TIMING)
    try:
        yield event
    finally:
        call("cuEventDestroy", event)


class Slot:
    """Memory for one batch on the host and on the device. It is used again, and grows with the largest batch.

    Args:
        copies: the stream of the copies.

    Attributes:
        ready: an event, recorded after the copies of the batch.
        released: an event, which the user records after all work that reads the batch.
    """

    def __init__(self, device: int, copies: int) -> None:
        self._device, self._copies = device, copies
        with contextlib.ExitStack() as stack:
            self.ready, self.released = (stack.enter_context(_event()) for _ in range(2))
            self._events = stack.pop_all()
        self._staging: NDArray[Any] = np.empty(0, np.uint8)
        self._buffer: Any = None

    def fill(self, batch: Batch) -> Batch:
        """Puts the copies of a batch on the stream, and returns the CuPy arrays that they write.

        When this returns, the caller may change the batch's arrays. It waits until the slot's previous batch has been
        copied from the slot's memory on the host.
        """
        arrays: list[NDArray[Any]] = []
        map_arrays(batch, arrays.append)
        sizes = [aligned(array.nbytes) for array in arrays]
        call("cuEventSynchronize", self.ready)
        self._grow(sum(sizes))
        call("cuStreamWaitEvent", self._copies, self.released, 0)
        offsets, direct = itertools.accumulate(sizes, initial=0), list[NDArray[Any]]()
        copied = map_arrays(batch, lambda array: self._copy(array, next(offsets), direct))
        call("cuEventRecord", self.ready, self._copies)
        if direct:
            call("cuEventSynchronize", self.ready)
        return copied

    def close(self) -> None:
        """Waits for the copies and frees the events. The CuPy arrays stay valid for as long as they are referenced."""
        with self._events:
            call("cuEventSynchronize", self.ready)

    def _copy(self, array: NDArray[Any], offset: int, direct: list[NDArray[Any]]) -> Any:
        """Puts the copy of one array on the stream; adds a page-locked array, which is copied directly, to `direct`."""
        module = cupy()
        if not array.size:
            return module.empty(array.shape, array.dtype)
        if array.flags.c_contiguous and is_pinned(array):
            source = array
            direct.append(array)
        else:
            source = self._staging[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(source, array)
        call("cuMemcpyHtoDAsync", self._buffer.data.ptr + offset, source.ctypes.data, array.nbytes, self._copies)
        return module.ndarray(array.shape, array.dtype, self._buffer.data + offset)

    def _grow(self, size: int) -> None:
        if size > self._staging.size:
            with cupy_stream(self._device, self._copies) as module:
                buffer = module.empty(size, np.uint8)
                self._staging = np.frombuffer(module.cuda.alloc_pinned_memory(size), np.uint8, size)
                self._buffer = buffer
