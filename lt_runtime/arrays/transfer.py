"""Copies values between the host and arrays of any library; places many arrays in one allocation (an arena).

Each array of an arena has the alignment of a separate allocation, so that operations on it use the same plans.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arguments import shown
from lt_runtime.arrays.copies import copies_of
from lt_runtime.arrays.libraries import cupy, is_from
from lt_runtime.arrays.operand import CUPY, HOST, Operand, device_of, library_of, read
from lt_runtime.errors import ArgumentError, CaptureError, DTypeError, LtError, OperandError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call, is_capturing
from lt_runtime.problem import ALIGNMENT

# Largest integer up to which FP32 holds every integer exactly.
_LARGEST_INTEGER: Final = 1 << 24
# DLPack's device type kDLCPU: host memory.
_DLPACK_CPU: Final = 1
_NOT_CONVERTED: Final = (AttributeError, BufferError, OverflowError, RuntimeError, TypeError, ValueError)
"""The exceptions that libraries raise for a value that is no array, or that NumPy cannot represent."""


def host_values(name: str, values: Any) -> NDArray[Any]:
    """Converts an array of any library, or nested sequences of numbers, to a NumPy array.

    Waits for the GPU if necessary.

    Raises:
        OperandError: the values cannot be converted to an array.
        DTypeError: the values are neither floating-point numbers nor integers.
    """
    try:
        host = _to_numpy(name, values)
    except LtError:
        raise
    except _NOT_CONVERTED as error:
        raise _no_numbers(OperandError, name, values) from error
    if host.dtype.kind not in "fiu" and not (host.dtype.kind == "V" and np.can_cast(host.dtype, np.float32)):
        raise _no_numbers(DTypeError, f"{name} ({host.dtype})", values)
    return host


def in_float32(name: str, values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[np.float32]:
    """Rounds numbers to FP32, after checking that they also stay finite in `dtype`, to which the caller rounds them.

    Raises:
        ArgumentError: an integer above 2**24 in magnitude, or a finite number that would become infinite.
    """
    if values.dtype.kind in "iu" and values.size and max(int(values.max()), -int(values.min())) > _LARGEST_INTEGER:
        raise ArgumentError(f"{name} has integers beyond 2**24 in magnitude, which float32 does not hold exactly")
    with np.errstate(all="ignore"):
        result = values.astype(np.float32)
        lost = np.isinf(result.astype(dtype)) & np.isfinite(values)
    if lost.any():
        index = tuple(map(int, np.argwhere(lost)[0]))
        raise ArgumentError(f"{name} has {values[index]!s} at {index}, which is too large for {dtype.name}")
    return result


def fetch(operand: Operand, stream: int) -> NDArray[Any]:
    """The values of an operand on the host; a NumPy array is not copied. Waits for the stream."""
    if operand.device == HOST:
        return np.asarray(operand.array)
    memory = np.empty(operand.extent, np.dtype(operand.dtype))
    if memory.size:
        with activated(operand.device):
            call("cuMemcpyDtoHAsync", memory.ctypes.data, operand.address, memory.nbytes, stream)
            call("cuStreamSynchronize", stream)
    strides = tuple(stride * operand.itemsize for stride in operand.strides)
    return np.lib.stride_tricks.as_strided(memory, operand.shape, strides)


def host_access(name: str, array: Any) -> tuple[Operand, int]:
    """Returns the operand of an array that the host will read or write, and the current stream of the array's library.

    Raises:
        CaptureError: the current stream is being captured.
    """
    device = device_of(name, array)
    if device == HOST:
        return read(name, array, 0), 0
    stream = library_of(array).current_stream(device)
    if stream and is_capturing(stream):
        raise CaptureError(f"stream {stream:#x} is being captured; {name} cannot be read or written by the host")
    return read(name, array, stream), stream


def store(operand: Operand, values: NDArray[Any], stream: int) -> None:
    """Copies values into a contiguous operand of the same shape and type. Waits for the stream."""
    if operand.device == HOST:
        operand.array[...] = values
    elif values.size:
        source = np.ascontiguousarray(values)
        with activated(operand.device):
            call("cuMemcpyHtoDAsync", operand.address, source.ctypes.data, source.nbytes, stream)
            call("cuStreamSynchronize", stream)


def array_of(values: NDArray[Any], device: int, stream: int) -> Any:
    """A new array with a NumPy array's values: of NumPy with `HOST`, of CuPy on a GPU. Waits for the stream."""
    if device == HOST:
        array = host_zeros(values.size, values.dtype).reshape(values.shape)
    else:
        array = CUPY.empty(values.shape, values.dtype, device, stream)
    store(read("the new array", array, stream), values, stream)
    return array


def copied(array: Any) -> Any:
    """A copy of a NumPy array, or of a contiguous CuPy array on CuPy's current device and stream."""
    if isinstance(array, np.ndarray):
        return array.copy()
    device = array.device.id
    stream = CUPY.current_stream(device)
    made = CUPY.empty(array.shape, array.dtype, device, stream)
    call("cuMemcpyDtoDAsync", made.data.ptr, array.data.ptr, array.nbytes, stream)
    return made


class _Writes:
    """Records which training step was the last to write parameters or FP8 scales, of which steps keep copies.

    Attributes:
        latest: an object of the training step that wrote last; None if something else did. A step that finds another
            object than its own makes its copies again.
    """

    latest: object = None


writes: Final = _Writes()


def replace_all(assigned: Sequence[tuple[Operand, NDArray[Any], int]]) -> None:
    """Stores values in operands and renews their copies; if one store fails, the old values of all are restored."""
    before = [(operand, np.array(fetch(operand, stream)), stream) for operand, _, stream in assigned]
    try:
        for operand, values, stream in assigned:
            store(operand, values, stream)
    except BaseException:
        for operand, values, stream in before:
            store(operand, values, stream)
        raise
    finally:
        writes.latest = None
    for operand, _, stream in assigned:
        for each in copies_of(operand):
            with activated(operand.device):
                each.renew(stream)
                call("cuStreamSynchronize", stream)


def _to_numpy(name: str, values: Any) -> NDArray[Any]:
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError("NumPy would drop the mask")
    if is_from(values, "cupy"):
        return np.asarray(cupy().asnumpy(values))
    if is_from(values, "torch") and not values.is_cuda:
        tensor = values.detach()
        return np.asarray((tensor.float() if "bfloat16" in str(tensor.dtype) else tensor).numpy())
    if is_from(values, "torch") or _is_on_gpu(values):
        device = device_of(name, values)
        stream = library_of(values).current_stream(device)
        return fetch(read(name, values, stream), stream)
    if hasattr(values, "__dlpack__") and not hasattr(values, "__array__"):
        return np.from_dlpack(values)
    return np.asarray(values)


def _is_on_gpu(values: Any) -> bool:
    if isinstance(values, (np.ndarray, np.generic)):
        return False
    if hasattr(values, "__cuda_array_interface__"):
        return True
    return hasattr(values, "__dlpack_device__") and int(values.__dlpack_device__()[0]) != _DLPACK_CPU


def _no_numbers(kind: type[OperandError], name: str, values: Any) -> OperandError:
    return kind(f"{name} is {shown(values)}; accepted are arrays of any library and nested sequences, of real numbers")


_Shapes = Sequence[tuple[int, ...]]


def arena_size(shapes: _Shapes, itemsize: int) -> int:
    """Number of elements of an arena for arrays of these shapes, each aligned to `ALIGNMENT` bytes."""
    return _starts(shapes, itemsize)[-1]


def arena_views(flat: Any, shapes: _Shapes) -> list[Any]:
    """Views of the given shapes into `flat`, an aligned array of `arena_size` elements."""
    starts = _starts(shapes, flat.itemsize)
    return [flat[start : start + math.prod(shape)].reshape(shape) for start, shape in zip(starts, shapes, strict=False)]


def host_zeros(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """A flat NumPy array of zeros, whose address is a multiple of `ALIGNMENT` bytes."""
    memory = np.zeros(size * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size * dtype.itemsize].view(dtype)


def _starts(shapes: _Shapes, itemsize: int) -> list[int]:
    """Offsets of an arena's arrays in elements, followed by the end of the last array."""
    step = ALIGNMENT // itemsize
    sizes = (-(-math.prod(shape) // step) * step for shape in shapes)
    return [*itertools.accumulate(sizes, initial=0)]
