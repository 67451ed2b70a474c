"""Streams, events, captures and graphs of a pretended GPU. Work runs only once its stream is synchronised."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

from cuda.bindings import driver

from tests.support.races import HOST, Known, Races, Stamp, Touch

Status = driver.CUresult
NodeType = driver.CUgraphNodeType
KERNEL: Final = NodeType.CU_GRAPH_NODE_TYPE_KERNEL
MEMSET: Final = NodeType.CU_GRAPH_NODE_TYPE_MEMSET
MEMCPY: Final = NodeType.CU_GRAPH_NODE_TYPE_MEMCPY
EVENT: Final = NodeType.CU_GRAPH_NODE_TYPE_EVENT_RECORD


_node_handles = itertools.count(0x2000_0000, 0x10)


class DriverStatusError(Exception):
    """Raised in a function of the pretended driver, which then returns this status."""

    def __init__(self, status: Any) -> None:
        super().__init__(status.name)
        self.status = status


@dataclass
class Node:
    """A node of a CUDA graph.

    Attributes:
        after: indices of the nodes that must run before.
        before: a bit for each node that runs before because of the edges.
        handle: the driver's handle.
        arguments: function and argument block of one of our kernels.
        value: the value that a memset writes.
        ends: the addresses that a copy writes to and reads from.
    """

    kind: Any
    run: Callable[[], None]
    after: frozenset[int]
    before: int = 0
    arguments: tuple[int, Any] | None = None
    value: int = 0
    ends: tuple[int, int] = (0, 0)
    handle: int = field(default_factory=lambda: next(_node_handles))

    def __int__(self) -> int:
        return self.handle


@dataclass
class Capture:
    """A capture of streams, and the graph that it makes.

    Attributes:
        origin: the stream whose capture was begun.
        tails: for each stream, the nodes that its next node comes after.
        unjoined: streams whose last work no other stream of the capture waits for yet.
        workspaces: the stream that uses a workspace, by address.
        events: events that each launch of the graph records.
        is_broken: whether the capture has been invalidated.
        is_strict: whether forbidden calls of any thread, and work on the default stream, invalidate it (mode GLOBAL).
        handle: the driver's handle of the graph; 0 before the first query.
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
        before = 0
        for index in self.tails[stream]:
            before |= self.nodes[index].before | 1 << index
        self.nodes.append(Node(kind, run, self.tails[stream], before))
        self.tails[stream] = frozenset({len(self.nodes) - 1})
        if stream != self.origin:
            self.unjoined.add(stream)


def in_late_order(nodes: list[Node]) -> Iterator[int]:
    """Returns the indices of the graph's nodes in an order that their edges allow, and that differs from the order of
    their capture.

    Of several nodes that may run, the node captured last comes first: code that relies on more than edges fails.
    """
    waits = [len(node.after) for node in nodes]
    followers: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        for each in node.after:
            followers[each].append(index)
    ready = [-index for index, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    while ready:
        index = -heapq.heappop(ready)
        yield index
        for each in followers[index]:
            waits[each] -= 1
            if not waits[each]:
                heapq.heappush(ready, -each)


@dataclass
class Event:
    """A recorded event: a point after a stream's first `count` operations, or in a capture after the nodes `tails`.

    `known` are the operations that are ordered before this point.
    """

    stream: int | None = None
    at_us: float = 0.0
    count: int = 0
    capture: Capture | None = None
    tails: frozenset[int] = frozenset()
    known: Known = field(default_factory=dict)


@dataclass
class _Stream:
    """The queue of a stream.

    Attributes:
        waiting: the operations that have not run: a function for each, and whether it is work rather than an event.
        given: number of operations that were ever queued.
        done: number of operations that have run.
    """

    waiting: list[tuple[Callable[[], None], bool]] = field(default_factory=list)
    given: int = 0
    done: int = 0


class Observer:
    """Observer of all work on streams, which ignores it. CUPTI's stand-in is a subclass."""

    def given(self, kind: Any) -> Any:
        """Called when a call gave a stream work of a kind (None for a graph); returns a token for the call."""

    def running(self, token: Any, kind: Any, name: str, stream: int) -> AbstractContextManager[Any]:
        """The streams run each work within this context manager."""
        return nullcontext()

    def within_graph(self, token: Any, executable: int, index: int) -> AbstractContextManager[Any]:
        """The streams run each node of a graph within this context manager."""
        return nullcontext()

    def instantiated(self, graph: int, executable: int) -> None:
        """The streams call this method when a graph has been instantiated."""


class Streams:
    """All streams of a pretended GPU. Work runs only once its stream is synchronised, so work on a wrong stream shows.

    Attributes:
        captures: the capture that a stream takes part in, by stream.
        log: names of the work that each stream was given, including captured work.
        costs_us: microseconds of each kind of work; 1 for kinds that are not named, 0 for events in graphs.
        now_us: the time, which is the sum of the costs of all work so far.
        observer: an `Observer` whose methods are called for all work.
        races: checks the order of all accesses to memory.
    """

    def __init__(self) -> None:
        self._streams: dict[int, _Stream] = {}
        self.captures: dict[int, Capture] = {}
        self.log: dict[int, list[str]] = {}
        self.costs_us: dict[str, float] = {}
        self.now_us = 0.0
        self.observer: Observer = Observer()
        self.races = Races()
        self._launched_on: dict[int, int] = {}
        self._node_stamp: Stamp | None = None

    def running_on(self, stream: int) -> int:
        """Returns the stream that runs the work of `stream`.

        Captured work is run by the stream on which the graph was launched.
        """
        return self._launched_on.get(stream, stream)

    def put(
        self,
        stream: int,
        kind: Any,
        name: str,
        run: Callable[[], None],
        touched: Callable[[], Iterable[Touch]] = tuple,
        function: str = "",
    ) -> None:
        """Appends work to a stream's queue, or to the graph if the stream is being captured.

        Args:
            touched: returns the memory that the work touches, when the work is about to run.
            function: the name of a kernel, for the description of a race.
        """
        strict = [each for each in self.captures.values() if each.is_strict]
        if stream == 0 and strict:
            strict[0].is_broken = True
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT)
        self.log.setdefault(stream, []).append(name)
        token, capture = self.observer.given(kind), self.captures.get(stream)
        stamp = None if capture is not None else self.races.put(stream)

        def work() -> None:
            place = stamp or self._node_stamp
            assert place is not None, "captured work runs in a launch of its graph"
            self.races.add(place, function or name, touched())
            with self.observer.running(token, kind, name, stream):
                run()
            self.now_us += self.costs_us.get(name, 1.0)

        if capture is not None:
            capture.add(stream, kind, work)
            return
        self._give(stream, work)

    def _give(self, stream: int, run: Callable[[], None], *, is_work: bool = True) -> None:
        own = self._streams.setdefault(stream, _Stream())
        own.waiting.append((run, is_work))
        own.given += 1

    def synchronize(self, stream: int) -> None:
        """Runs all work of a stream, and the work of other streams that it waits for."""
        if stream in self.captures:
            self.captures[stream].is_broken = True
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        self._run_to(stream, self._streams.setdefault(stream, _Stream()).given)
        self.races.wait(HOST, self.races.recorded(stream))

    def _run_to(self, stream: int, count: int) -> None:
        own = self._streams.setdefault(stream, _Stream())
        while own.done < count:
            run, _ = own.waiting.pop(0)
            own.done += 1
            run()

    def synchronize_all(self) -> None:
        """Runs the waiting work of all streams."""
        for stream in list(self._streams):
            self._run_to(stream, self._streams[stream].given)
        self.races.wait_for_all()

    def abandon(self) -> None:
        """Drops all captures, and all work that has not run."""
        self.captures.clear()
        for own in self._streams.values():
            own.waiting.clear()
            own.done = own.given

    def left_undone(self) -> dict[int, int]:
        """Returns for each stream how many of its operations have not run, without events."""
        undone = {handle: sum(is_work for _, is_work in own.waiting) for handle, own in self._streams.items()}
        return {handle: count for handle, count in undone.items() if count}

    def record(self, event: Event, stream: int) -> None:
        """Stands in for `cuEventRecord`."""
        capture = self.captures.get(stream)
        event.stream, event.capture = stream, capture
        if capture is not None:
            event.tails = capture.tails[stream]
            return

        def mark() -> None:
            event.at_us = self.now_us

        self._give(stream, mark, is_work=False)
        event.count, event.known = self._streams[stream].given, self.races.recorded(stream)

    def record_in_graph(self, event: Event, stream: int) -> None:
        """Stands in for `cuEventRecordWithFlags` with an external event, which makes a node in a capture."""
        capture = self.captures[stream]

        def mark() -> None:
            self.now_us += self.costs_us.get("event", 0.0)
            event.at_us = self.now_us

        capture.add(stream, EVENT, mark)
        capture.events.append(event)

    def wait_event(self, stream: int, event: Event) -> None:
        """`cuStreamWaitEvent`, which in a capture makes an edge, and may bring another stream into the capture."""
        capture, own = event.capture, self.captures.get(stream)
        if event.stream is None:
            return
        if capture is None and own is None:
            producer, count = event.stream, event.count
            self._give(stream, lambda: self._run_to(producer, count), is_work=False)
            self.races.wait(stream, event.known)
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
        """Stands in for `cuEventSynchronize`."""
        if event.stream is not None and event.capture is None:
            self._run_to(event.stream, event.count)
            self.races.wait(HOST, event.known)

    def has_run(self, event: Event) -> bool:
        """Whether the work before an event has run."""
        return event.stream is None or self._streams[event.stream].done >= event.count

    def begin_capture(self, stream: int) -> None:
        """Stands in for `cuStreamBeginCapture`."""
        if stream == 0 or stream in self.captures:
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        capture = Capture(stream)
        capture.tails[stream] = frozenset()
        self.captures[stream] = capture

    def end_capture(self, stream: int) -> Capture:
        """Stands in for `cuStreamEndCapture`."""
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
        token, stamp = self.observer.given(None), self.races.put(stream)

        def run() -> None:
            self._launched_on = {capture.origin: stream}
            try:
                for index in in_late_order(capture.nodes):
                    node = capture.nodes[index]
                    self._node_stamp = stamp._replace(node=index, before=node.before)
                    with self.observer.within_graph(token, executable, index):
                        node.run()
            finally:
                self._launched_on, self._node_stamp = {}, None

        self._give(stream, run)
        for event in capture.events:
            event.stream, event.count = stream, self._streams[stream].given
            event.known = self.races.recorded(stream)
