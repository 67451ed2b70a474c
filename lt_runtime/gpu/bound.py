"""Plans bound to buffers and a stream: captured once, so that a call is the launch of one small graph."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Final

from lt_runtime.errors import CaptureError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.graphs import Graph, no_collection
from lt_runtime.gpu.memory import StreamMemory, stream_memory
from lt_runtime.gpu.streams import is_captured, order_after, private_stream, relaxed_captures

_ended: Final[list[tuple[Graph, int]]] = []
"""Graphs to be freed, with their devices: a capture of the thread that ends a plan would not survive that."""


class BoundPlan:
    """Puts an operation on its stream, over its buffers, which must be there still; nothing is checked.

    The library's part costs the host as much as a launch of the whole graph, which, what is more, has a weight
    gradient beside the input gradient where that is the plan. While the stream is being captured the operation is put
    there launch by launch.

    Args:
        run: puts the operation on the stream whose handle it is given. It has run before, on any stream.
        prepare: makes what `run` needs of a stream's memory, which it then has even while the stream is captured.
        device: ordinal of the GPU, which is current, and will be when the plan is called.
        stream: a handle. What the graph keeps in scratch memory is this stream's own.

    Raises:
        CaptureError: the stream is being captured.
    """

    __slots__ = ("__weakref__", "_graph", "_lock", "_run", "_stream")

    def __init__(
        self,
        run: Callable[[int], None],
        device: int,
        stream: int,
        prepare: Callable[[StreamMemory], None] = lambda _: None,
    ) -> None:
        if is_captured(stream):
            raise CaptureError(f"stream {stream:#x} is being captured; bind a call to it before the capture")
        self._run, self._stream = run, stream
        with relaxed_captures():
            self._lock = stream_memory(device, stream).lock
            captured = private_stream(device, f"bound to {stream:#x}")
            with self._lock, no_collection():
                _free_ended()
                for each in (captured, stream):  # the latter for captures
                    prepare(stream_memory(device, each))
                self._graph = Graph(run, captured)
            order_after(stream, captured)  # which zeroes that memory
        weakref.finalize(self, _ended.append, (self._graph, device)).atexit = False

    def __call__(self) -> None:
        """Raises GpuError if the launch fails."""
        if is_captured(self._stream):
            self._run(self._stream)
            return
        with self._lock:
            self._graph.launch(self._stream)


def _free_ended() -> None:
    """Frees the graphs of plans that have ended since, which may have been in the middle of a capture."""
    while True:
        try:
            graph, device = _ended.pop()
        except IndexError:  # other threads free them too
            return
        with activated(device):
            graph.close()
