"""Times ranges: on the host by the host's clock, on a GPU by events, also ranges within graphs of training steps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self

from lt_runtime import ranges
from lt_runtime.errors import GpuError
from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.gpu import graphs
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.graphs import Graph
from lt_runtime.profiling.cupti.records import Activity
from lt_runtime.profiling.marks import EventMarks, MarkedCopy, MarkedGraph
from lt_runtime.ranges import Place, place_of

# Limit of the ended ranges whose events have not been read; beyond it the oldest events are read.
_MOST_PENDING: Final = 2048
# Limit of the timed ranges that are kept for the trace.
_MOST_SPANS: Final = 20_000
_MOST_PLACES: Final = 4096
RANGES: Final = 1_000_000
"""The number of the stream under which the trace shows ranges timed on the GPU."""
_OTHERS: Final = Place("(other ranges)", "")


@dataclass(slots=True)
class Cell:
    """The time that one step spent in one layer and phase, without the time of the layers nested in it.

    Attributes:
        works: the prepared calls and optimizers that ran there, as `ranges.tell` passes them.
    """

    calls: int = 0
    us: float = 0.0
    host_us: float = 0.0
    works: list[Any] = field(default_factory=list)


Step = dict[Place, Cell]


class _Frame:
    """A range that is open, or whose times have not been read.

    `start` and `end` are the host's nanoseconds, events, or numbers of moments in a captured graph (see `marks`).
    `inside` is the sum of the microseconds of the ranges within this range. `cost` is the sum of the microseconds that
    are spent on events in graphs launched within this range.
    """

    def __init__(self, name: str, parent: _Frame | None) -> None:
        self.name, self.parent, self.thread = name, parent, threading.get_ident()
        self.path: tuple[str, ...] = (name,) if parent is None else (*parent.path, name)
        self.phase = ""
        self.works: list[Any] = []
        self.start: Any = None
        self.end: Any = None
        self.host_start = self.host_end = time.monotonic_ns()
        self.inside = self.host_inside = self.cost = 0.0


class _Launch(NamedTuple):
    """A launch of one copy of a graph, whose times have not been read; `parent` is the range around the launch."""

    graph: MarkedGraph
    copy: MarkedCopy
    parent: _Frame | None


class _Thread(threading.local):
    """One thread's open ranges and, while it captures a copy of a graph, the ranges that ended during the capture."""

    def __init__(self) -> None:
        self.open: list[_Frame] = []
        self.captured: list[_Frame] | None = None


class Timer:
    """Times ranges step by step; a listener of ranges, and a context manager whose exit reads all times.

    Within the context, a captured training step is launched from copies of its graph with events in them.

    Args:
        device: ordinal of the GPU; None to time the host alone.

    Attributes:
        steps: for each step its times (`Cell`), by layer and phase (`Place`).
        spans: ranges that have ended, for the trace, at most `_MOST_SPANS`: their kind is "user_annotation" on the
            host, and "gpu_user_annotation" on the GPU. The times on the GPU are moved to the host's clock by taking the
            first event for simultaneous with the profile's begin.
        lost: how many ranges are left out of `spans`.
        left_open: how many ranges were never ended; each is taken to end with the range around it.
        discarded: how many steps are left out of `steps` because they captured a graph.
        count: how many steps are over, without the discarded ones; the last one's times may not be in `steps` yet.
        notes: sentences for the reader of the report.
        within: name of the range that is a step; `steps` then leaves out all ranges outside it. None if a step is all
            that runs between two calls of `end_step`.
    """

    def __init__(self, device: int | None) -> None:
        self.steps: list[Step] = []
        self.spans: list[Activity] = []
        self.notes: list[str] = []
        self.within: str | None = None
        self.left_open = self.discarded = self.lost = self.count = 0
        self._device = device
        self._events = None if device is None else EventMarks(device)
        self._begun_ns = time.monotonic_ns()
        self._thread, self._listening = _Thread(), ranges.listening(self)
        # Queue of ranges and launches whose times have not been read. A bool marks the end of a step: True if a stream
        # was captured in the step, other than by the profile, which discards the step's times.
        self._pending: deque[_Frame | _Launch | bool] = deque()
        self._unread_steps = 0
        self._marked: dict[Graph, MarkedGraph | None] = {}
        self._step: Step = {}
        self._lock = threading.RLock()

    def __enter__(self) -> Self:
        ranges.watchers.append(self.ran)
        self._listening.__enter__()
        if self._events is not None:
            graphs.stand_in = self.stand_in
        return self

    def __exit__(self, *_: object) -> None:
        """Drops the ranges after the last step. If no step was ended, all ranges together are one step."""
        graphs.stand_in = None
        self._listening.__exit__(None, None, None)
        ranges.watchers.remove(self.ran)
        if not self.count and not self.discarded and self._pending:
            self.end_step()
        self._read_while(lambda: True)
        if self._device is not None and self._events is not None:
            with activated(self._device):
                for marked in filter(None, self._marked.values()):
                    marked.close()
                self._marked.clear()
                self._events.close()

    def enter(self, name: str) -> None:
        """A range begins."""
        frames = self._thread.open
        frame = _Frame(name, frames[-1] if frames else None)
        frame.start = frame.host_start if self._events is None else self._events.take()
        frames.append(frame)

    def exit(self, name: str) -> None:
        """A range ends, and with it each range within it that was left open."""
        frames = self._thread.open
        if all(frame.name != name for frame in frames):
            return
        host_end = time.monotonic_ns()
        end = host_end if self._events is None else self._events.take()
        done = self._pending if self._thread.captured is None else self._thread.captured
        while True:
            frame = frames.pop()
            frame.end, frame.host_end = end, host_end
            done.append(frame)
            if frame.name == name:
                break
            self.left_open += 1
        if len(self._pending) > _MOST_PENDING:
            self._read_while(lambda: len(self._pending) > _MOST_PENDING // 2)

    def ran(self, work: Any) -> None:
        """Adds an operation's work to the innermost open range; `ranges.tell` calls this."""
        if self._thread.open and not isinstance(work, Fp8ChainProblem):
            self._thread.open[-1].works.append(work)

    def end_step(self) -> None:
        """Ends a step, then waits for the step before it and reads that step's events."""
        was_captured = False
        if self._events is not None:
            was_captured, self._events.captured_by_others = self._events.captured_by_others, False
        self.count, self.discarded = self.count + (not was_captured), self.discarded + was_captured
        self._pending.append(was_captured)
        self._unread_steps += 1
        self._read_while(lambda: self._unread_steps > 1)

    def stand_in(self, graph: Graph, capture: Callable[[], Graph]) -> Graph:
        """Returns the copy to launch instead of a graph; the graph itself if it cannot be copied.

        Args:
            capture: captures the graph anew.
        """
        if graph not in self._marked:
            try:
                self._marked[graph] = MarkedGraph(lambda copy: self._capture(copy, capture))
            except GpuError as error:
                self.notes.append(f"a training step's graph could not be captured with events in it ({error})")
                self._marked[graph] = None
        marked = self._marked[graph]
        copy = None if marked is None else marked.next
        if marked is None or copy is None or copy.graph is None:
            return graph
        # times of the copy's last launch are read first, because the next launch overwrites its events
        self._read_while(lambda: copy.is_unread)
        marked.launch(copy)
        frames = self._thread.open
        self._pending.append(_Launch(marked, copy, frames[-1] if frames else None))
        return copy.graph

    def _capture(self, copy: MarkedCopy, capture: Callable[[], Graph]) -> Graph:
        """Captures a graph again with the events of `copy`, which also gets the ranges that end during the capture."""
        assert self._events is not None
        events, thread, outside = self._events, self._thread, self._thread.open
        thread.open, thread.captured, events.own = [], copy.frames, copy
        try:
            return capture()
        finally:
            thread.open, thread.captured, events.own = outside, None, None

    def _read_while(self, condition: Callable[[], bool]) -> None:
        """Reads the times of pending ranges and launches, oldest first, as long as a condition holds."""
        with self._lock:
            while self._pending and condition():
                item = self._pending.popleft()
                if isinstance(item, _Frame):
                    self._read_single(item)
                elif isinstance(item, _Launch):
                    self._read_replay(item)
                else:
                    if not item:
                        self.steps.append(self._step)
                    self._step, self._unread_steps = {}, self._unread_steps - 1

    def _read_single(self, frame: _Frame) -> None:
        events, parent, host_us = self._events, frame.parent, (frame.host_end - frame.host_start) / 1e3
        us = host_us if events is None else events.us(frame.start, frame.end) - frame.cost
        if parent is not None:
            parent.cost += frame.cost
        self._add(frame, frame.path, parent, us, host_us)
        if events is None:
            self._keep(frame, frame.path, us, 0.0)
        elif frame.start is not None:
            self._keep(frame, frame.path, us, events.us(events.start, frame.start))
            events.drop(frame.start)
        if events is not None and (parent is None or parent.end is not frame.end):
            events.drop(frame.end)

    def _read_replay(self, launch: _Launch) -> None:
        assert self._events is not None
        graph, copy, parent = launch
        began_us, times = graph.read(copy, self._events), graph.times_us
        if parent is not None:
            parent.cost += graph.cost_us * len(copy.events)
        for frame in copy.frames:
            path = frame.path if parent is None else (*parent.path, *frame.path)
            us = sum(times[frame.start : frame.end])
            # host time is 0, because the host does not run the code within ranges when a graph is replayed
            self._add(frame, path, frame.parent or parent, us, 0.0)
            self._keep(None, path, us, began_us + sum(times[: frame.start]))
            # The sums over inner ranges start again at 0: the next launch of this copy of the graph adds to them.
            frame.inside = frame.host_inside = 0.0

    def _add(self, frame: _Frame, path: tuple[str, ...], above: _Frame | None, us: float, host_us: float) -> None:
        """Adds the time of a range, without the time of the ranges within it, to the time of its layer and phase.

        Args:
            path: names of the ranges around the range and its own name. above: the range around it.
        """
        if self.within is not None and self.within not in path:
            return
        place, around = place_of(path), place_of(path[:-1])
        phase = place.phase or frame.phase
        key = Place(place.layer, phase)
        if key not in self._step and len(self._step) >= _MOST_PLACES:
            key = _OTHERS
        cell = self._step.setdefault(key, Cell())
        cell.calls += place.layer != around.layer or (not place.layer and place != around)
        cell.us += us - frame.inside
        cell.host_us += host_us - frame.host_inside
        cell.works += frame.works
        if above is not None:
            above.inside += us
            above.host_inside += host_us
            above.phase = above.phase or (phase if place.layer and place.layer == around.layer else "")

    def _keep(self, frame: _Frame | None, path: tuple[str, ...], us: float, began_us: float) -> None:
        """Keeps a range's times for the trace: on the host, if `frame` has them, and on the GPU, if a GPU is timed."""
        if len(self.spans) >= _MOST_SPANS:
            self.lost += 1
            return
        if frame is not None:
            times = frame.host_start, frame.host_end
            self.spans.append(Activity("user_annotation", path[-1], *times, range=path, thread=frame.thread))
        if self._events is not None:
            start = self._begun_ns + round(1e3 * began_us)
            times = start, start + round(1e3 * us)
            self.spans.append(Activity("gpu_user_annotation", path[-1], *times, device=0, stream=RANGES, range=path))
