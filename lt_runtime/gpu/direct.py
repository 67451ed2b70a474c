"""The driver's functions that every call of an operation needs, through ctypes, which is faster than the bindings.

The bindings would build a dozen objects for the attributes of a launch alone.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Final

from lt_runtime.errors import MissingLibraryError
from lt_runtime.gpu.driver import check

_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6
_POINTER: Final = ctypes.c_void_p
_ARGUMENTS: Final[dict[str, tuple[Any, ...]]] = {
    "cuCtxGetDevice": (ctypes.POINTER(ctypes.c_int),),
    "cuEventRecord": (_POINTER, _POINTER),
    "cuGraphLaunch": (_POINTER, _POINTER),
    "cuLaunchKernelEx": (_POINTER, _POINTER, _POINTER, _POINTER),
    "cuMemcpyHtoDAsync_v2": (_POINTER, _POINTER, ctypes.c_size_t, _POINTER),
    "cuStreamIsCapturing": (_POINTER, _POINTER),
}


@functools.cache
def function(name: str) -> Callable[..., int]:
    """The driver's function of that name, which returns a status.

    Raises:
        MissingLibraryError: there is no NVIDIA driver on this machine.
    """
    try:
        found = ctypes.CDLL("libcuda.so.1")[name]
    except OSError as error:
        raise MissingLibraryError(f"no NVIDIA driver on this machine ({error})") from error
    found.argtypes, found.restype = _ARGUMENTS[name], ctypes.c_int
    return found


class _Ordinal(threading.local):
    """Each thread's own place for the driver to write a device's ordinal to."""

    def __init__(self) -> None:
        self.cell = ctypes.c_int()


_ordinal: Final = _Ordinal()


def is_current(device: int) -> bool:
    """Whether the calling thread has a current context, and it belongs to `device`."""
    cell = _ordinal.cell
    status = function("cuCtxGetDevice")(cell)
    return not status and cell.value == device  # another status than 0 says that there is no context


def is_capturing(stream: int) -> bool:
    """Whether a graph is being captured from the stream.

    Raises:
        DriverError: the driver cannot tell, for example of the default stream while a stream that it waits for is
            captured.
    """
    state = ctypes.c_int()
    status = function("cuStreamIsCapturing")(stream, ctypes.addressof(state))
    if status:
        check("cuStreamIsCapturing", status)
    return state.value != 0  # CU_STREAM_CAPTURE_STATUS_NONE


def launch_graph(executable: int, stream: int) -> None:
    """Puts an instantiated graph on a stream.

    Raises:
        DriverError: the driver refused.
    """
    status = function("cuGraphLaunch")(executable, stream)
    if status:
        check("cuGraphLaunch", status)


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


_OVERLAP: Final = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION, (ctypes.c_uint64 * 8)(1))


class Launch:
    """A kernel that takes one struct, prepared for one stream: a call only passes pointers.

    Between calls, one thread at a time may write into the struct what differs from the call before.

    Args:
        kernel: handle of its function.
        params: the struct; the driver copies it at each call.
        shared: bytes of a block's dynamic shared memory.
        overlaps: whether the kernel may start before its predecessor on the stream has ended; it waits for its
            predecessor by itself.
    """

    def __init__(
        self,
        kernel: int,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        params: ctypes.Structure,
        stream: int,
        *,
        shared: int,
        overlaps: bool,
    ) -> None:
        attributes = ctypes.addressof(_OVERLAP) if overlaps else None
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        config = _Config(grid, block, shared, stream, attributes, int(overlaps))
        self._kept = params, arguments, config
        self._put = function("cuLaunchKernelEx")
        self._blocks = ctypes.addressof(config), kernel, ctypes.addressof(arguments), None

    def __call__(self) -> None:
        """Puts the kernel on the stream.

        Raises:
            DriverError: the driver refused.
        """
        status = self._put(*self._blocks)
        if status:
            check("cuLaunchKernelEx", status)
