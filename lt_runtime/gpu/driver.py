"""CUDA driver calls with every status checked.

`call` goes through cuda.bindings. The few functions that every launch needs go through ctypes, because the bindings
would build a dozen objects for the attributes of one launch.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from cuda.bindings import driver

from lt_runtime.errors import DriverError, GpuError, MissingLibraryError

_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
_POINTER: Final = ctypes.c_void_p
_FATAL: Final = (
    *("ECC_UNCORRECTABLE", "NVLINK_UNCORRECTABLE", "ILLEGAL_ADDRESS", "LAUNCH_TIMEOUT", "ASSERT", "LAUNCH_FAILED"),
    *("HARDWARE_STACK_ERROR", "ILLEGAL_INSTRUCTION", "MISALIGNED_ADDRESS", "INVALID_ADDRESS_SPACE", "INVALID_PC"),
)
"""Names of `CUresult` values, without the prefix, after which the driver refuses all further work of the process."""
_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "cuCtxGetDevice": (ctypes.POINTER(ctypes.c_int),),
    **dict.fromkeys(("cuEventRecord", "cuGraphLaunch", "cuStreamIsCapturing"), (_POINTER, _POINTER)),
    "cuLaunchKernelEx": (_POINTER, _POINTER, _POINTER, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_POINTER, _POINTER, ctypes.c_size_t, _POINTER),
}


def call(name: str, *arguments: Any) -> Any:
    """Calls the driver function `name`; returns its result, a tuple of several, or None.

    Raises:
        DriverError: the driver reported a failure.
        MissingLibraryError: there is no NVIDIA driver on this machine.
    """
    try:
        status, *results = getattr(driver, name)(*arguments)
    except RuntimeError as error:  # cuda.bindings raises this if it finds no libcuda
        raise _missing(error) from error
    check(name, status)
    return tuple(results) if len(results) > 1 else results[0] if results else None


def check(name: str, status: int) -> None:
    """Raises `DriverError` unless the driver function `name` returned success."""
    if status != driver.CUresult.CUDA_SUCCESS:
        result = driver.CUresult(status)
        _, text = driver.cuGetErrorString(result)
        if result.name.removeprefix("CUDA_ERROR_") in _FATAL and not GpuError.aftermath:
            GpuError.aftermath = f"; the CUDA context is lost since {name} reported {result.name}: start a new process"
        raise DriverError(name, int(result), result.name, text.decode() if text else "unknown error")


def _missing(error: Exception) -> MissingLibraryError:
    return MissingLibraryError(f"no NVIDIA driver on this machine ({error})")


@functools.cache
def function(name: str) -> Callable[..., int]:
    """The driver's C function `name`, called through ctypes; it must be listed in `_ARGUMENTS`. It returns a status.

    Raises:
        MissingLibraryError: there is no NVIDIA driver on this machine.
    """
    try:
        found = ctypes.CDLL("libcuda.so.1")[name]
    except OSError as error:
        raise _missing(error) from error
    found.argtypes, found.restype = _ARGUMENTS[name], ctypes.c_int
    return found


class _Ordinal(threading.local):
    """A ctypes int for each thread, into which the driver writes a device's ordinal."""

    def __init__(self) -> None:
        self.cell = ctypes.c_int()


_ordinal: Final = _Ordinal()


def is_current(device: int) -> bool:
    """Whether the calling thread has a current context, and the context belongs to `device`."""
    cell = _ordinal.cell
    status = function("cuCtxGetDevice")(cell)
    return not status and cell.value == device  # a nonzero status means that the thread has no context


def is_capturing(stream: int) -> bool:
    """Whether a graph is being captured from the stream.

    Raises:
        DriverError: the driver refuses the query, as it does for the default stream while a stream that the default
            stream waits for is captured.
    """
    state = ctypes.c_int()
    if status := function("cuStreamIsCapturing")(stream, ctypes.addressof(state)):
        check("cuStreamIsCapturing", status)
    return state.value != 0  # 0 is CU_STREAM_CAPTURE_STATUS_NONE; an invalidated capture counts too


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`; its value is a union of 64 bytes, aligned to eight."""

    _fields_ = (("id", ctypes.c_int), ("value", ctypes.c_uint64 * 8))


class _Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


Dim3: TypeAlias = tuple[int, int, int]
"""Blocks of a grid, or threads of a block, in x, y and z."""
_OVERLAP: Final = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (ctypes.c_uint64 * 8)(1))


class Launch:
    """A kernel launch prepared for one stream, so that a call only passes pointers to the driver.

    The kernel takes one struct by value. Its fields may be changed between calls, by one thread at a time.

    Args:
        kernel: handle of the kernel's function.
        params: the struct; the driver copies it at each call.
        shared: bytes of dynamic shared memory of a block.
        overlaps: whether the kernel may start before the previous kernel on the stream has ended (programmatic
            dependent launch); the kernel then waits for it itself.
    """

    def __init__(
        self, kernel: int, grid: Dim3, block: Dim3, params: ctypes.Structure, stream: int, shared: int, overlaps: bool
    ) -> None:
        attributes = ctypes.addressof(_OVERLAP) if overlaps else None
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        config = _Config(grid, block, shared, stream, attributes, int(overlaps))
        self._kept = params, arguments, config
        self._launch = function("cuLaunchKernelEx")
        self._arguments = ctypes.addressof(config), kernel, ctypes.addressof(arguments), None

    def __call__(self) -> None:
        """Puts the kernel on the stream.

        Raises:
            DriverError: the driver refused.
        """
        if status := self._launch(*self._arguments):
            check("cuLaunchKernelEx", status)
