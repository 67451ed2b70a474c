"""One launch of a kernel, through ctypes: the driver's bindings would build a dozen objects for its attributes."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Final

from lt_runtime.gpu.driver import check

_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6


class _Attribute(ctypes.Structure):
    """`CUlaunchAttribute`; the value is a union of 64 bytes, on eight."""

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


@functools.cache
def _driver() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes = (ctypes.c_void_p,) * 4
    function.restype = ctypes.c_int
    return function


def launch(
    function: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    params: ctypes.Structure,
    stream: int,
    *,
    shared: int,
    overlaps: bool,
) -> None:
    """Puts a kernel that takes one struct on a stream.

    Args:
        function: handle of the kernel.
        shared: bytes of a block's dynamic shared memory.
        overlaps: the kernel may start before the one before it on the stream has ended; it waits for that by itself.

    Raises:
        GpuError: the driver refused.
    """
    attributes = ctypes.addressof(_OVERLAP) if overlaps else None
    config = _Config(grid, block, shared, stream, attributes, int(overlaps))
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    check("cuLaunchKernelEx", _driver()(ctypes.addressof(config), function, ctypes.addressof(arguments), None))
