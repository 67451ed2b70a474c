"""Plans bound to buffers and a stream: captured once, so that each call is the launch of one small graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from lt_runtime import ranges
from lt_runtime.errors import CaptureError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import check, function, is_capturing
from lt_runtime.gpu.graphs import Graph
from lt_runtime.gpu.memory import StreamMemory, stream_memory
from lt_runtime.gpu.streams import is_captured, private_stream, relaxed_captures

_ended: Final[list[tuple[Graph, int]]] = []
"""Graphs to be freed, with their devices. A plan that ends does not free its graph at once: the thread may be
capturing, and freeing would invalidate the capture."""


class BoundPlan:
    """Puts an operation on its stream, over its buffers, which must still exist; nothing is checked.

    A launch of the whole graph costs the host as much as cuBLASLt's part of the operation alone. The graph also runs
    the weight gradient beside the input gradient where the plan says so. While the stream is being captured, a call
    puts the operation's own launches on it instead.

    The graph uses the workspace and the scratch memory of its stream, as the same operation unbound does.

    Args:
        put: puts the operation on a memory's stream. It has run before, on any stream.
        device: ordinal of the GPU. It is current now, and must be current at each call.
        stream: handle of the stream that each call runs on.
        reserve: allocates the memory that `put` needs.

    Attributes:
        known: passed to the watchers of the ranges at each call; None if the caller tells them itself.

    Raises:
        CaptureError: the stream is being captured.
    """

    __slots__ = ("__weakref__", "_executable", "_graph", "_launch", "_lock", "_memory", "_put", "_stream", "prepared")

    def __init__(
        self,
        put: Callable[[StreamMemory], None],
        device: int,
        stream: int,
        reserve: Callable[[StreamMemory], None] = lambda _: None,
    ) -> None:
        if is_captured(stream):
            raise CaptureError(f"stream {stream:#x} is being captured; bind a call to it before the capture")
        self._put, self._stream = put, stream
        self.prepared: Any = None
        self._launch = function("cuGraphLaunch")
        with relaxed_captures():
            self._memory = memory = stream_memory(device, stream)
            self._lock = memory.lock
            with memory.lock:
                _free_ended()
                reserve(memory)
                self._graph = Graph(lambda handle: put(memory.on(handle)), private_stream(device, f"bound to {stream}"))
                self._executable = self._graph.executable
                weakref.finalize(self, _ended.append, (self._graph, device)).atexit = False

    def __call__(self) -> None:
        """Makes the call; raises GpuError if the launch fails."""
        if ranges.watchers and self.prepared is not None:
            ranges.tell(self.prepared)
        stream = self._stream
        with self._lock:
            if stream and is_capturing(stream):  # the default stream cannot be captured
                self._put(self._memory)
            elif status := self._launch(self._executable, stream):
                check("cuGraphLaunch", status)


def _free_ended() -> None:
    """Frees the graphs of plans that have ended."""
    while True:
        try:
            graph, device = _ended.pop()
        except IndexError:  # the list is empty; `while _ended` could race with other threads that free graphs too
            return
        with activated(device):
            graph.close()
