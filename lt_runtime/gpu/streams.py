"""Streams by handle, from whichever library they come."""

from __future__ import annotations

import sys
from typing import Any

from cuda.bindings import driver

from lt_runtime.errors import ArgumentError
from lt_runtime.gpu.driver import call


def stream_handle(stream: Any, device: int) -> int:
    """The handle of a stream.

    Args:
        stream: None for CuPy's current stream on `device` (the default stream where CuPy is not in use), an int
            handle, or an object with `__cuda_stream__` (CuPy, PyTorch, cuda.core).

    Raises:
        ArgumentError: anything else.
    """
    if stream is None:
        cupy = sys.modules.get("cupy")
        return int(cupy.cuda.get_current_stream(device).ptr) if cupy is not None else 0
    if isinstance(stream, int) and not isinstance(stream, bool) and stream >= 0:
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is None:
        raise ArgumentError(
            f"stream is {stream!r}; accepted are None, an int handle, or an object with __cuda_stream__"
        )
    return int((protocol() if callable(protocol) else protocol)[1])


def is_capturing(stream: int) -> bool:
    """Whether a graph is being captured from the stream."""
    status = call("cuStreamIsCapturing", stream)
    return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def order_after(stream: int, producer: int) -> None:
    """Makes `stream` wait for all that `producer` has been given so far, without holding up the host."""
    if stream == producer:
        return
    event = call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
    try:
        call("cuEventRecord", event, producer)
        call("cuStreamWaitEvent", stream, event, 0)
    finally:
        # Destroying a recorded event is safe: the driver keeps it until the wait is over.
        call("cuEventDestroy", event)
