"""What a call puts on a stream, seen by capturing it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from cuda.bindings import driver

from lt_runtime.gpu.driver import call

_lock = threading.Lock()
_PREFIX = "CU_GRAPH_NODE_TYPE_"


@functools.cache
def _private_stream(device: int) -> int:
    return int(call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING))


def rehearse(run: Callable[[int], object], device: int) -> list[str]:
    """`captured_nodes` on a stream that is used for nothing else; `device` is current."""
    with _lock:
        return captured_nodes(run, _private_stream(device))


def captured_nodes(run: Callable[[int], object], stream: int) -> list[str]:
    """Types of the nodes that `run(stream)` would launch, such as "KERNEL" or "MEMSET". Nothing is executed.

    The capture is this thread's own business: other threads' calls are not restricted meanwhile.

    Args:
        run: puts its work on the stream whose handle it is given.
        stream: a handle, not that of the default stream, which cannot be captured.

    Raises:
        Whatever `run` raises; the capture is ended all the same.
    """
    call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
    try:
        run(stream)
    except BaseException:
        driver.cuStreamEndCapture(stream)  # its status can only repeat what is being raised
        raise
    graph = call("cuStreamEndCapture", stream)
    try:
        _, count = call("cuGraphGetNodes", graph, 0)
        nodes, _ = call("cuGraphGetNodes", graph, count)
        return [call("cuGraphNodeGetType", node).name.removeprefix(_PREFIX) for node in nodes]
    finally:
        call("cuGraphDestroy", graph)
