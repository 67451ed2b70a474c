"""Streams, events, captures and graphs of a pretended GPU: work waits until somebody waits for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from cuda.bindings import driver

Status = driver.CUresult
NodeType = driver.CUgraphNodeType
KERNEL: Final = NodeType.CU_GRAPH_NODE_TYPE_KERNEL
MEMSET: Final = NodeType.CU_GRAPH_NODE_TYPE_MEMSET
MEMCPY: Final = NodeType.CU_GRAPH_NODE_TYPE_MEMCPY
EVENT: Final = NodeType.CU_GRAPH_NODE_TYPE_EVENT_RECORD


_node_handles = itertools.count(0x2000_0000, 0x10)


class DriverStatusError(Exception):
    """A status that a driver function is to return."""

    def __init__(self, status: Any) -> None:
        super().__init__(status.name)
        self.status = status


@dataclass
class Node:
    """Work in a graph; `after` are the nodes that must have run before it.

    Attributes:
        handle: what the driver knows it by.
        arguments: of a kernel of ours, its function and its argument block.
        value: of a memset.
        ends: of a copy, the addresses that it writes to and reads from.
    """

    kind: Any
    run: Callable[[], None]
    after: frozenset[int]
    arguments: tuple[int, Any] | None = None
    value: int = 0
    ends: tuple[int, int] = (0, 0)
    handle: int = field(default_factory=lambda: next(_node_handles))

    def __int__(self) -> int:
        return self.handle


@dataclass
class Capture:
    """A graph in the making.

    Attributes:
        origin: the stream whose capture was begun.
        tails: by stream, the nodes that its next one comes after.
        unjoined: streams whose last work nobody in the capture waits for yet.
        workspaces: by address, the stream that uses each.
        events: are recorded by each launch of the graph.
        is_strict: whether calls that may do harm end it, work of the default stream among them.
        handle: what the driver knows the graph by, once somebody has asked; 0 before.
    """

    origin: int
    nodes: list[Node] = field(default_factory=list)
    tails: dict[int, frozenset[int]] = field(default_factory=dict)
    unjoined: set[int] = field(default_factory=set)
    workspaces: dict[int, int] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    is_broken: bool = False
    is_strict: bool = False
    handle: int = 0

    def add(self, stream: int, kind: Any, run: Callable[[], None]) -> None:
        self.nodes.append(Node(kind, run, self.tails[stream]))
        self.tails[stream] = frozenset({len(self.nodes) - 1})
        if stream != self.origin:
            self.unjoined.add(stream)


def in_late_order(nodes: list[Node]) -> Iterator[Node]:
    """The nodes in an order that their edges allow, which is not that in which they were captured.

    Of several that may run, the one captured last comes first: what relies on more than the edges goes wrong.
    """
    left = dict(enumerate(nodes))
    while left:
        index = max(index for index, node in left.items() if not node.after & left.keys())
        yield left.pop(index)


@dataclass
class Event:
    """What a stream had been given when the event was recorded; `at_us`, when that was done."""

    stream: int | None = None
    at_us: float = 0.0
    count: int = 0
    capture: Capture | None = None
    tails: frozenset[int] = frozenset()


@dataclass
class _Stream:
    """What is not done yet, and whether it is work or an event; how much was ever given and is done."""

    waiting: list[tuple[Callable[[], None], bool]] = field(default_factory=list)
    given: int = 0
    done: int = 0


class Observer:
    """Is told of work; this one looks away."""

    def given(self, kind: Any) -> Any:
        """A call has given a stream work; the kind of a graph is None. What is returned names the call."""

    def running(self, token: Any, kind: Any, name: str, stream: int) -> AbstractContextManager[Any]:
        """Work runs."""
        return nullcontext()

    def within_graph(self, token: Any, executable: int, index: int) -> AbstractContextManager[Any]:
        """A graph's node runs: what runs is this node's, and the launch's."""
        return nullcontext()

    def instantiated(self, graph: int, executable: int) -> None:
        """A graph has been instantiated."""


class Streams:
    """All streams of a pretended GPU. Nothing runs before its stream is waited for: work on the wrong one shows.

    Attributes:
        captures: by stream, the capture that it takes part in.
        log: the kinds of work that were given to each stream, captures included.
        costs_us: what each kind of work costs, 1 where nothing is said, and events of graphs 0.
        now_us: the sum of what all that was done has cost.
        observer: is told of all work.
    """

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self.captures: dict[int, Capture] = {}
        self.log: dict[int, list[str]] = {}
        self.costs_us: dict[str, float] = {}
        self.now_us = 0.0
        self.observer: Observer = Observer()
        self._launched_on: dict[int, int] = {}

    def running_on(self, stream: int) -> int:
        """The stream that runs what `stream` was given: of what was captured from it, the one that the graph is on."""
        return self._launched_on.get(stream, stream)

    def put(self, stream: int, kind: Any, name: str, run: Callable[[], None]) -> None:
        """Gives a stream work."""
        strict = [each for each in self.captures.values() if each.is_strict]
        if stream == 0 and strict:
            strict[0].is_broken = True
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        self.log.setdefault(stream, []).append(name)
        token = self.observer.given(kind)

        def work() -> None:
            with self.observer.running(token, kind, name, stream):
                run()
            self.now_us += self.costs_us.get(name, 1.0)

        capture = self.captures.get(stream)
        if capture is not None:
            capture.add(stream, kind, work)
            return
        self._give(stream, work)

    def _give(self, stream: int, run: Callable[[], None], *, is_work: bool = True) -> None:
        own = self._streams.setdefault(stream, _Stream())
        own.waiting.append((run, is_work))
        own.given += 1

    def synchronize(self, stream: int) -> None:
        """Runs all that a stream was given, and what that waits for."""
        if stream in self.captures:
            self.captures[stream].is_broken = True
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        self._run_to(stream, self._streams.setdefault(stream, _Stream()).given)

    def _run_to(self, stream: int, count: int) -> None:
        own = self._streams.setdefault(stream, _Stream())
        while own.done < count:
            run, _ = own.waiting.pop(0)
            own.done += 1
            run()

    def synchronize_all(self) -> None:
        """Runs everything."""
        for stream in list(self._streams):
            self._run_to(stream, self._streams[stream].given)

    def abandon(self) -> None:
        """Forgets all work that is not done, and all captures."""
        self.captures.clear()
        for own in self._streams.values():
            own.waiting.clear()
            own.done = own.given

    def left_undone(self) -> dict[int, int]:
        """By stream, how much of its work nobody has waited for."""
        undone = {handle: sum(is_work for _, is_work in own.waiting) for handle, own in self._streams.items()}
        return {handle: count for handle, count in undone.items() if count}

    def record(self, event: Event, stream: int) -> None:
        """What `cuEventRecord` does."""
        capture = self.captures.get(stream)
        event.stream, event.capture = stream, capture
        if capture is not None:
            event.tails = capture.tails[stream]
            return

        def mark() -> None:
            event.at_us = self.now_us

        self._give(stream, mark, is_work=False)
        event.count = self._streams[stream].given

    def record_in_graph(self, event: Event, stream: int) -> None:
        """What `cuEventRecordWithFlags` does with an external event: within a capture it makes a node."""
        capture = self.captures[stream]

        def mark() -> None:
            self.now_us += self.costs_us.get("event", 0.0)
            event.at_us = self.now_us

        capture.add(stream, EVENT, mark)
        capture.events.append(event)

    def wait_event(self, stream: int, event: Event) -> None:
        """What `cuStreamWaitEvent` does: within a capture it makes an edge, and brings another stream in."""
        capture, own = event.capture, self.captures.get(stream)
        if event.stream is None:
            return
        if capture is None and own is None:
            producer, count = event.stream, event.count
            self._give(stream, lambda: self._run_to(producer, count), is_work=False)
            return
        if capture is None or own not in (None, capture):
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_ISOLATION)
        if event.stream != stream and event.tails == capture.tails[event.stream]:
            capture.unjoined.discard(event.stream)
        self.captures[stream] = capture
        capture.tails[stream] = capture.tails.get(stream, frozenset()) | event.tails
        if stream != capture.origin:
            capture.unjoined.add(stream)

    def wait_on_host(self, event: Event) -> None:
        """What `cuEventSynchronize` does."""
        if event.stream is not None and event.capture is None:
            self._run_to(event.stream, event.count)

    def begin_capture(self, stream: int) -> None:
        """What `cuStreamBeginCapture` does."""
        if stream == 0 or stream in self.captures:
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        capture = Capture(stream)
        capture.tails[stream] = frozenset()
        self.captures[stream] = capture

    def end_capture(self, stream: int) -> Capture:
        """What `cuStreamEndCapture` does."""
        capture = self.captures.get(stream)
        if capture is None or capture.origin != stream:
            raise DriverStatusError(Status.CUDA_ERROR_ILLEGAL_STATE)
        for joined in [each for each, other in self.captures.items() if other is capture]:
            del self.captures[joined]
        if capture.is_broken:
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
        if capture.unjoined:
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_UNJOINED)
        return capture

    def launch_graph(self, capture: Capture, stream: int, executable: int = 0) -> None:
        """Puts a captured graph on a stream."""
        if stream in self.captures:
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        self.log.setdefault(stream, []).append("graph")
        token = self.observer.given(None)

        def run() -> None:
            self._launched_on = {capture.origin: stream}
            try:
                for node in in_late_order(capture.nodes):
                    with self.observer.within_graph(token, executable, capture.nodes.index(node)):
                        node.run()
            finally:
                self._launched_on = {}

        self._give(stream, run)
        for event in capture.events:
            event.stream, event.count = stream, self._streams[stream].given
