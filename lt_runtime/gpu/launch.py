"""Launches of a kernel through ctypes; the driver's bindings would build a dozen objects for the attributes."""

from __future__ import annotations

import ctypes
from typing import Final

from lt_runtime.gpu.direct import function as driver_function
from lt_runtime.gpu.driver import check

_PROGRAMMATIC_STREAM_SERIALIZATION: Final = 6


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
        function: handle of the kernel.
        params: the struct; the driver copies it at each call.
        shared: bytes of a block's dynamic shared memory.
        overlaps: whether the kernel may start before its predecessor on the stream has ended; it waits for its
            predecessor by itself.
    """

    def __init__(
        self,
        function: int,
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
        self._put = driver_function("cuLaunchKernelEx")
        self._blocks = ctypes.addressof(config), function, ctypes.addressof(arguments), None

    def __call__(self) -> None:
        """Puts the kernel on the stream.

        Raises:
            DriverError: the driver refused.
        """
        status = self._put(*self._blocks)
        if status:
            check("cuLaunchKernelEx", status)
