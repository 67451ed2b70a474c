"""Streams by handle, whichever library they come from, and the captures and events that concern them."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any, Final

from cuda.bindings import driver

from lt_runtime.errors import ArgumentError, CaptureError, DriverError
from lt_runtime.gpu.direct import is_capturing
from lt_runtime.gpu.driver import call

_DEFAULT_STREAM: Final = 0


def cupy_current(device: int) -> int:
    """The handle of CuPy's current stream; the default stream's where CuPy is not in use."""
    cupy = sys.modules.get("cupy")
    return int(cupy.cuda.get_current_stream(device).ptr) if cupy is not None else _DEFAULT_STREAM


def stream_handle(stream: Any, device: int, current: Callable[[int], int] = cupy_current) -> int:
    """The handle of a stream.

    Args:
        stream: None for the current stream on `device`, an int handle, or an object with `__cuda_stream__` (CuPy,
            PyTorch, cuda.core).
        current: gives the current stream of the library that the operands come from.

    Raises:
        ArgumentError: anything else.
    """
    if stream is None:
        return current(device)
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise ArgumentError(
            f"stream is {stream!r}; accepted are None, an int handle, or an object with __cuda_stream__"
        )
    return int((protocol() if callable(protocol) else protocol)[1])


@functools.cache
def private_stream(device: int, purpose: str) -> int:
    """The handle of a stream of the current device that serves one purpose alone; it is made at the first call.

    It does not wait for the default stream, and the default stream does not wait for it.
    """
    return int(call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def is_captured(stream: int) -> bool:
    """Whether a graph is being captured from a stream; the default stream, which cannot be captured, is not asked.

    Raises:
        DriverError: see `is_capturing`.
    """
    return stream != _DEFAULT_STREAM and is_capturing(stream)


@contextlib.contextmanager
def beside_captures(device: int) -> Iterator[None]:
    """Lets the calling thread allocate, wait and load kernels while others capture graphs from their streams.

    Such calls would otherwise fail, and would end the others' captures.

    Raises:
        CaptureError: CuPy's current stream is being captured, or a stream is that the default stream waits for.
    """
    for stream in {0, stream_handle(None, device)}:
        if _holds_capture(stream):
            raise CaptureError(
                f"stream {stream:#x} is being captured, or one that it waits for; measure before the capture"
            )
    with relaxed_captures():
        yield


@contextlib.contextmanager
def relaxed_captures() -> Iterator[None]:
    """Lets the calling thread allocate and load kernels during any capture, also its own."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    previous = call("cuThreadExchangeStreamCaptureMode", relaxed)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", previous)


def _holds_capture(stream: int) -> bool:
    try:
        return is_capturing(stream)
    except DriverError as error:
        # The default stream's answer while a blocking stream is captured; the capture survives.
        if error.status == int(driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT):
            return True
        raise


def order_after(stream: int, producer: int) -> None:
    """Makes `stream` wait for all work that `producer` has been given so far; the host does not wait."""
    if stream == producer:
        return
    event = call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    try:
        call("cuEventRecord", event, producer)
        call("cuStreamWaitEvent", stream, event, 0)
    finally:
        # Destroying a recorded event is safe: the driver keeps it until the wait is over.
        call("cuEventDestroy", event)
