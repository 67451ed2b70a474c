"""Which nodes of a graph were captured within which ranges."""

from __future__ import annotations

import threading
from typing import Any

from cuda.bindings import driver

from lt_runtime.gpu.driver import call

_ACTIVE = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE


def nodes_of(graph: Any) -> list[int]:
    """The handles of a graph's nodes."""
    _, count = call("cuGraphGetNodes", graph, 0)
    nodes, _ = call("cuGraphGetNodes", graph, count)
    return [int(node) for node in nodes[:count]]


def graph_under_capture(stream: int) -> tuple[int, int]:
    """The graph that is being captured from a stream: its handle, and the number of the capture.

    Both are 0 if there is none, or the capture has been broken.
    """
    status, capture, graph, *_ = call("cuStreamGetCaptureInfo", stream)
    return (int(graph), int(capture)) if status == _ACTIVE else (0, 0)


class CapturedNodes:
    """A listener of `lt_runtime.ranges` that notes, while a stream is captured, which nodes each range brings.

    It hears the ranges of the thread alone that it was made in.

    Attributes:
        paths: by a node's handle, the ranges within which it was captured, outermost first; only nodes within one.
    """

    def __init__(self, stream: int) -> None:
        self._stream, self._thread = stream, threading.get_ident()
        self._open: list[str] = []
        self._capture, self._seen = 0, set[int]()
        self.paths: dict[int, tuple[str, ...]] = {}

    def enter(self, name: str) -> None:
        """A range begins."""
        if threading.get_ident() == self._thread:
            self.note()
            self._open.append(name)

    def exit(self, name: str) -> None:
        """The innermost range ends; one that had begun before this listened is passed over."""
        if threading.get_ident() == self._thread and self._open and self._open[-1] == name:
            self.note()
            self._open.pop()

    def note(self) -> None:
        """Gives the nodes that are new since the last call to the ranges that are open."""
        graph, capture = graph_under_capture(self._stream)
        if not graph:
            return
        if capture != self._capture:  # one before has been broken off
            self._seen.clear()
            self.paths.clear()
            self._capture = capture
        path = tuple(self._open)
        for node in nodes_of(graph):
            if node not in self._seen:
                self._seen.add(node)
                if path:
                    self.paths[node] = path
