"""Graphs: captures that show what a call puts on a stream, and work captured once to be launched many times."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Self, TypeAlias

from cuda.bindings import driver

from lt_runtime.errors import DriverError, GpuError
from lt_runtime.gpu.captured_nodes import CapturedNodes, nodes_of
from lt_runtime.gpu.direct import launch_graph
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import private_stream
from lt_runtime.ranges import listening

StandIn: TypeAlias = "Callable[[Graph, Callable[[], Graph]], Graph]"
"""Takes a graph that is to be launched, and what captures the same work once more; gives the graph to launch."""

stand_in: StandIn | None = None
"""A profile has training steps launched from graphs of its own, with events in them. Theirs stay as they are."""

_lock = threading.Lock()
_with_ranges: weakref.WeakSet[Graph] = weakref.WeakSet()
_PREFIX = "CU_GRAPH_NODE_TYPE_"
_ATTEMPTS = 3
_INVALIDATED = int(driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
_UNSUPPORTED = int(driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)  # the capturing thread's own doing


def rehearse(run: Callable[[int], object], device: int) -> list[str]:
    """`captured_nodes` on a stream that is used only for this purpose; `device` is current."""
    with _lock:
        return captured_nodes(run, private_stream(device, "rehearsal"))


def captured_nodes(run: Callable[[int], object], stream: int) -> list[str]:
    """Types of the nodes that `run(stream)` would launch, such as "KERNEL" or "MEMSET"; nothing is executed.

    Args:
        run: see `Graph`.
        stream: see `Graph`.

    Raises:
        Whatever `run` raises; the capture is ended all the same.
    """
    graph = _capture(run, stream)
    try:
        return [call("cuGraphNodeGetType", node).name.removeprefix(_PREFIX) for node in nodes_of(graph)]
    finally:
        call("cuGraphDestroy", graph)


class Graph:
    """Work captured from a stream, to be launched any number of times; a context manager that frees it.

    The capture restricts the calls of this thread alone, not those of other threads.

    Args:
        run: puts its work on the stream whose handle it is given; called again if another thread ends the capture.
        stream: a handle, not that of the default stream, which cannot be captured.

    Attributes:
        executable: handle of the instantiated graph.
        template: handle of the graph that was captured, as long as there are ranges; 0 otherwise.
        ranges: handles of the template's nodes, in the order of their capture, with the path of the ranges that were
            begun within the capture and open when the node was captured. Nodes outside of all ranges are not in it.

    Raises:
        Whatever `run` raises; the capture is ended all the same.
    """

    def __init__(self, run: Callable[[int], object], stream: int) -> None:
        nodes = CapturedNodes(stream)
        with listening(nodes):
            graph = _capture(run, stream)
        self.ranges, self.template = nodes.paths, 0
        try:
            self.executable = int(call("cuGraphInstantiate", graph, 0))
        except DriverError:
            _destroy(graph)
            raise
        if self.ranges:
            self.template = int(graph)
            _with_ranges.add(self)
        else:
            _destroy(graph)

    def launch(self, stream: int) -> None:
        """Puts the work on `stream`."""
        launch_graph(self.executable, stream)

    def close(self) -> None:
        """Frees the graph; launches that are still running finish all the same."""
        if self.template:
            _with_ranges.discard(self)
            _destroy(self.template)
            self.template = 0
        call("cuGraphExecDestroy", self.executable)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def graphs_with_ranges() -> list[Graph]:
    """All open graphs within whose capture ranges began, of all devices."""
    return [*_with_ranges]


def _destroy(graph: driver.CUgraph | int) -> None:
    with contextlib.suppress(DriverError):  # which could only tell of earlier work
        call("cuGraphDestroy", graph)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Turns the garbage collector off, during a capture or a measurement.

    Some objects wait for a GPU when they end, or free memory, which is refused to a thread that captures and lost then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_collection()
def _capture(run: Callable[[int], object], stream: int) -> driver.CUgraph:
    """Captures what `run` puts on a stream, anew if another thread has put an end to the capture.

    A thread that waits for the whole device ends all captures on it. The driver then refuses the next launch, which
    cuBLASLt reports as a failure of its own.
    """
    for attempt in range(_ATTEMPTS):
        call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            run(stream)
        except BaseException as error:
            was_ended = _abandon(stream) and isinstance(error, GpuError) and getattr(error, "status", 0) != _UNSUPPORTED
            if not was_ended or attempt == _ATTEMPTS - 1:
                raise
        else:
            try:
                return call("cuStreamEndCapture", stream)
            except DriverError as error:
                if error.status != _INVALIDATED or attempt == _ATTEMPTS - 1:
                    raise
    raise AssertionError("the last attempt returns or raises")


def _abandon(stream: int) -> bool:
    """Ends a capture and drops its graph; returns whether it had been invalidated."""
    try:
        call("cuGraphDestroy", call("cuStreamEndCapture", stream))
    except DriverError as error:
        return error.status == _INVALIDATED
    return False
