"""Stream handles from any library, queries whether a stream is being captured, and ordering of streams by events."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from cuda.bindings import driver

from lt_runtime.arguments import shown
from lt_runtime.errors import ArgumentError, CaptureError, DeviceError, DriverError, KindError
from lt_runtime.gpu.driver import call, is_capturing

_DEFAULT_STREAM: Final = 0
_OF_EVERY_DEVICE: Final = range(3)  # handles that name the default stream: 0, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD


def cupy_current(device: int) -> int:
    """The handle of CuPy's current stream; the default stream's if CuPy has not been imported."""
    cupy = sys.modules.get("cupy")
    return int(cupy.cuda.get_current_stream(device).ptr) if cupy is not None else _DEFAULT_STREAM


def stream_handle(stream: Any, device: int, current: Callable[[int], int] = cupy_current) -> int:
    """The handle of a stream.

    Args:
        stream: None for the current stream on `device`, which is 0 on the host; an int handle; or an object with
            `__cuda_stream__` (CuPy, PyTorch, cuda.core).
        current: function that returns the current stream of the library that the operands come from.

    Raises:
        KindError: anything else.
        ArgumentError: an int that is negative, or has more than 64 bits.
        DeviceError: a stream of another device.
    """
    if stream is None:
        return current(device) if device >= 0 else 0
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        handle = int((protocol() if callable(protocol) else protocol)[1])
    elif isinstance(stream, (int, np.integer)) and not isinstance(stream, bool) and 0 <= stream < 1 << 64:
        handle = int(stream)
    else:
        kind = ArgumentError if isinstance(stream, int) and not isinstance(stream, bool) else KindError
        raise kind(f"stream is {shown(stream)}; accepted are None, an int handle, or an object with __cuda_stream__")
    if (device, handle) not in _placed:
        _check_place(stream, handle, device)
    return handle


_placed: Final[set[tuple[int, int]]] = set()
"""Pairs (device, stream handle) for which the stream was found to belong to the device.

A new stream may get the handle of a destroyed one. If it is on another device, this check passes wrongly, but the
driver then refuses every launch on it, so that nothing runs on the wrong device.
"""


def _check_place(stream: Any, handle: int, device: int) -> None:
    """Raises `DeviceError` unless a stream belongs to `device`; for the host (below 0), accepts any stream."""
    if device >= 0 and handle not in _OF_EVERY_DEVICE:
        # A stream under capture is not checked, because cuStreamGetDevice would invalidate the capture; the driver
        # checks each launch anyway.
        if is_capturing(handle):
            return
        home = int(call("cuStreamGetDevice", handle))
        if home != device:
            raise DeviceError(f"stream is {shown(stream)}, which is of GPU {home}; the operands are on GPU {device}")
    _placed.add((device, handle))


@functools.cache
def private_stream(device: int, purpose: str) -> int:
    """The handle of a non-blocking stream of the current device, one for each purpose; the first call creates it.

    Neither the stream nor the default stream waits for the other.
    """
    return int(call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def is_captured(stream: int) -> bool:
    """Whether a graph is being captured from a stream; always False for the default stream, which cannot be captured.

    Raises:
        DriverError: see `is_capturing`.
    """
    return stream != _DEFAULT_STREAM and is_capturing(stream)


@contextlib.contextmanager
def beside_captures(device: int) -> Iterator[None]:
    """Allows the calling thread to allocate, wait and load kernels while other threads capture graphs.

    Outside this block, CUDA refuses these calls during a capture, and invalidates the other threads' captures.

    Raises:
        CaptureError: CuPy's current stream, or a stream that the default stream waits for, is being captured.
    """
    for stream in {0, stream_handle(None, device)}:
        try:
            is_held = is_capturing(stream)
        except DriverError as error:
            # The driver refuses queries of the default stream while a blocking stream is captured; the capture stays
            # valid.
            is_held = error.status == int(driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
            if not is_held:
                raise
        if is_held:
            raise CaptureError(f"stream {stream:#x} or one that it waits for is being captured; measure before that")
    with relaxed_captures():
        yield


@contextlib.contextmanager
def relaxed_captures() -> Iterator[None]:
    """Allows the calling thread to allocate and load kernels during any capture, including one of its own."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", previous)


def order_after(stream: int, producer: int) -> None:
    """Makes `stream` wait for all work on `producer` so far; the host does not wait."""
    if stream == producer:
        return
    with end_of(producer) as event:
        call("cuStreamWaitEvent", stream, event, 0)


@contextlib.contextmanager
def end_of(stream: int) -> Iterator[Any]:
    """Yields an event that marks the end of all work on `stream` so far; it is destroyed at the end of the block."""
    event = call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    try:
        call("cuEventRecord", event, stream)
        yield event
    finally:
        # The event may be destroyed before the stream reaches it: the driver then frees it afterwards.
        call("cuEventDestroy", event)
