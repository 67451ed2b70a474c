"""Times ranges: on the host by its clock, on a GPU by events, also within graphs of training steps.

An event in a graph is recorded anew by each replay, so that its times have to be read before the graph is launched
again. The profile's copy of a graph is therefore captured twice, and the two are launched in turn: one is read while
the other runs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from cuda.bindings import driver

from lt_runtime import ranges
from lt_runtime.errors import DriverError, GpuError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.direct import is_capturing, is_current
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.graphs import Graph
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.ranges import Place, place_of

_MOST_PENDING: Final = 2048  # ranges whose times have not been read
_MOST_SPANS: Final = 20_000  # kept for the trace
_MOST_PLACES: Final = 4096
_OTHERS: Final = Place("(other ranges)", "")
_EXTERNAL: Final = driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL


class Span(NamedTuple):
    """A range that is over, for the trace.

    Attributes:
        start_ns: when it began, on the host's monotonic clock. us: its length on the host.
        gpu_start_ns: when it began on the GPU, counted from the moment at which the profile began. gpu_us: its length
            there; None where no GPU is timed.
    """

    path: tuple[str, ...]
    start_ns: int
    us: float
    thread: int
    gpu_start_ns: int = 0
    gpu_us: float | None = None


@dataclass(slots=True)
class Cell:
    """What one step spent at one place, without what nested places spent.

    Attributes:
        works: what the operations there ran.
    """

    calls: int = 0
    us: float = 0.0
    host_us: float = 0.0
    works: list[Any] = field(default_factory=list)


Step = dict[Place, Cell]


class EventMarks:
    """Events on the stream that this thread's ranges are on, or else on the current one; the device is current."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._free: list[Any] = []
        self._captured: CapturedMarks | None = None
        self.captured_by_others = False
        self._start = self.take()

    def take(self) -> Any:
        """An event that marks this moment; None where another than the profile itself captures, or for another GPU."""
        if not is_current(self._device):
            return None
        stream = ranges.placed()
        stream = stream_handle(None, self._device) if stream is None else stream
        try:
            if stream and is_capturing(stream):
                if self._captured is None:
                    self.captured_by_others = True
                    return None
                return self._captured.take(stream)
            event = self._free.pop() if self._free else call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DEFAULT)
            call("cuEventRecord", event, stream)
        except DriverError:  # the default stream, while another that waits for it is captured
            return None
        return event

    def us(self, start: Any, end: Any) -> float:
        """Microseconds between two events; waits for the second."""
        if start is None or end is None:
            return 0.0
        call("cuEventSynchronize", end)
        return 1e3 * float(call("cuEventElapsedTime", start, end))

    def since_start(self, mark: Any) -> float:
        """Microseconds from the first event."""
        return self.us(self._start, mark)

    def drop(self, *marks: Any) -> None:
        """Says that the events are not read again."""
        self._free += [mark for mark in marks if mark is not None]

    def capture(self, marks: CapturedMarks | None) -> None:
        """Says that a capture which follows is the profile's own."""
        self._captured = marks

    def close(self) -> None:
        """Destroys the events; all have been dropped."""
        for event in filter(None, (*self._free, self._start)):
            call("cuEventDestroy", event)
        self._free.clear()


class CapturedMarks:
    """Events that the replays of one graph record.

    Two marks with no work between them are one event: a node of a graph takes about a microsecond.
    """

    def __init__(self) -> None:
        self.events: list[Any] = []
        self._tail: list[int] = []

    def take(self, stream: int) -> Any:
        """The event that marks this place of the capture."""
        if not self._tail or self._tail != _tail(stream):
            event = call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DEFAULT)
            self.events.append(event)
            call("cuEventRecordWithFlags", event, stream, _EXTERNAL)
            self._tail = _tail(stream)
        return self.events[-1]

    def close(self) -> None:
        """Destroys the events."""
        while self.events:
            call("cuEventDestroy", self.events.pop())


def _tail(stream: int) -> list[int]:
    """The nodes that the next one on a captured stream comes after."""
    *_, nodes, _, count = call("cuStreamGetCaptureInfo", stream)
    return sorted(int(node) for node in nodes[:count])


class _Frame:
    """A range that is open, or whose times have not been read."""

    __slots__ = (
        "end", "host_end", "host_inside", "host_start", "inside", "name", "parent", "path", "phase", "start", "thread",
        "works",
    )  # fmt: skip

    def __init__(self, name: str, parent: _Frame | None) -> None:
        self.name, self.parent, self.thread = name, parent, threading.get_ident()
        self.path: tuple[str, ...] = (name,) if parent is None else (*parent.path, name)
        self.phase = ""
        self.works: list[Any] = []
        self.start: Any = None
        self.end: Any = None
        self.host_start = self.host_end = 0
        self.inside = self.host_inside = 0.0

    @property
    def host_us(self) -> float:
        return (self.host_end - self.host_start) / 1e3


class _Copy:
    """The profile's copy of a graph, and the ranges that were met while it was captured."""

    def __init__(self) -> None:
        self.marks = CapturedMarks()
        self.frames: list[_Frame] = []
        self.graph: Graph | None = None

    def close(self) -> None:
        if self.graph is not None:
            self.graph.close()
        self.marks.close()


class _Launch(NamedTuple):
    """A replay of a copy, within a range."""

    copy: _Copy
    parent: _Frame | None


class Timer:
    """A listener of ranges that times them step by step.

    Args:
        device: ordinal of the GPU, which is current; None to time the host alone.

    Attributes:
        steps: what each step spent where.
        spans: single ranges, as many as are kept.
        left_open: ranges that were never ended; each is taken to end with the range around it.
        discarded: steps in which graphs were captured, which are not in `steps`.
        notes: what a reader of the report should know.
    """

    def __init__(self, device: int | None) -> None:
        self.steps: list[Step] = []
        self.spans: list[Span] = []
        self.notes: list[str] = []
        self.left_open = self.discarded = self.lost = 0
        self._device = device
        self._events = None if device is None else EventMarks(device)
        self._begun_ns = time.monotonic_ns()
        self._local = threading.local()
        self._pending: deque[_Frame | _Launch] = deque()
        self._copies: dict[Graph, list[_Copy]] = {}
        self._step: Step = {}
        self._lock = threading.RLock()
        self._ends: deque[tuple[int, bool]] = deque()

    def enter(self, name: str) -> None:
        """A range begins."""
        frames = self._frames()
        frame = _Frame(name, frames[-1] if frames else None)
        frame.host_start = time.monotonic_ns()
        frame.start = frame.host_start if self._events is None else self._events.take()
        frames.append(frame)

    def exit(self, name: str) -> None:
        """A range ends, and with it those within that were left open."""
        frames = self._frames()
        if all(frame.name != name for frame in frames):
            return
        host_end = time.monotonic_ns()
        end = host_end if self._events is None else self._events.take()
        done = self._local.copy.frames if self._is_captured() else self._pending
        while True:
            frame = frames.pop()
            frame.end, frame.host_end = end, host_end
            done.append(frame)
            if frame.name == name:
                break
            self.left_open += 1
        if len(self._pending) > _MOST_PENDING:
            self._end_steps(0)
            self._resolve(len(self._pending) // 2)

    def ran(self, work: Any) -> None:
        """An operation says what it runs."""
        frames = self._frames()
        if frames:
            frames[-1].works.append(work)

    def end_step(self) -> None:
        """What has come since the last call is a step. Waits for the step before."""
        events = self._events
        self._ends.append((len(self._pending), events is not None and events.captured_by_others))
        if events is not None:
            events.captured_by_others = False
        self._end_steps(1)

    @property
    def count(self) -> int:
        """How many steps are over and count."""
        return len(self.steps) + sum(not was_captured for _, was_captured in self._ends)

    def finish(self) -> None:
        """Reads all times; the ranges that came after the last step count as one if there is no other."""
        if not self.steps and not self._ends and self._pending:
            self.end_step()
        self._end_steps(0)
        self._resolve(len(self._pending))
        if self._device is not None and self._events is not None:
            with activated(self._device):
                for copies in self._copies.values():
                    for each in copies:
                        each.close()
                self._copies.clear()
                self._events.close()

    def stand_in(self, graph: Graph, capture: Callable[[], Graph]) -> Graph:
        """The copy of a graph that is to be launched, whose events nobody has yet to read."""
        if graph not in self._copies:
            try:
                self._copies[graph] = [self._copied(capture) for _ in range(2)]
            except GpuError as error:
                self.notes.append(f"a training step's graph could not be captured with events in it ({error})")
                self._copies[graph] = []
        copies = self._copies[graph]
        if not copies:
            return graph
        copies.reverse()
        frames = self._frames()
        self._pending.append(_Launch(copies[0], frames[-1] if frames else None))
        assert copies[0].graph is not None
        return copies[0].graph

    def _copied(self, capture: Callable[[], Graph]) -> _Copy:
        assert self._events is not None
        made = _Copy()
        outside = self._frames()
        self._local.frames, self._local.copy = [], made
        self._events.capture(made.marks)
        try:
            made.graph = capture()
        except BaseException:
            made.close()
            raise
        finally:
            self._events.capture(None)
            self._local.frames, self._local.copy = outside, None
        return made

    def _is_captured(self) -> bool:
        return getattr(self._local, "copy", None) is not None

    def _frames(self) -> list[_Frame]:
        """The open ranges of this thread."""
        try:
            frames: list[_Frame] = self._local.frames
        except AttributeError:
            frames = self._local.frames = []
        return frames

    def _end_steps(self, but: int) -> None:
        """Reads the times of the steps that are over, except the last ones."""
        while len(self._ends) > but:
            count, was_captured = self._ends.popleft()
            self._resolve(count)
            if was_captured:
                self.discarded += 1
            else:
                self.steps.append(self._step)
            self._step = {}

    def _resolve(self, count: int) -> None:
        """Reads the times of what has been waiting for longest."""
        with self._lock:
            for _ in range(count):
                item = self._pending.popleft()
                for frame, parent, is_single in _frames_of(item):
                    self._read(frame, parent, is_single=is_single)
            self._ends = deque((end - count, was_captured) for end, was_captured in self._ends)

    def _read(self, frame: _Frame, parent: _Frame | None, *, is_single: bool) -> None:
        path = frame.path if is_single or parent is None else (*parent.path, *frame.path)
        host_us = frame.host_us if is_single else 0.0  # the host did what a copy holds when it was captured
        us = host_us if self._events is None else self._events.us(frame.start, frame.end)
        place, around = place_of(path), place_of(path[:-1])
        phase = place.phase or frame.phase
        cell = self._cell(Place(place.layer, phase))
        cell.calls += place.layer != around.layer or (not place.layer and place != around)
        cell.us += us - frame.inside
        cell.host_us += host_us - frame.host_inside
        cell.works += frame.works
        above = frame.parent or parent
        if above is not None:
            above.inside += us
            above.host_inside += host_us
            above.phase = above.phase or (phase if place.layer and place.layer == around.layer else "")
        self._keep(frame, path, us, host_us)
        frame.inside = frame.host_inside = 0.0  # a copy's frame is read again after its next replay
        if is_single and self._events is not None:
            self._events.drop(frame.start)
            if parent is None or parent.end is not frame.end:
                self._events.drop(frame.end)

    def _keep(self, frame: _Frame, path: tuple[str, ...], us: float, host_us: float) -> None:
        if len(self.spans) >= _MOST_SPANS:
            self.lost += 1
        elif self._events is None:
            self.spans.append(Span(path, frame.host_start, host_us, frame.thread))
        elif frame.start is not None:
            began = self._begun_ns + round(1e3 * self._events.since_start(frame.start))
            self.spans.append(Span(path, frame.host_start, host_us, frame.thread, began, us))

    def _cell(self, place: Place) -> Cell:
        if place not in self._step and len(self._step) >= _MOST_PLACES:
            place = _OTHERS
        return self._step.setdefault(place, Cell())


def _frames_of(item: _Frame | _Launch) -> Iterator[tuple[_Frame, _Frame | None, bool]]:
    if isinstance(item, _Frame):
        yield item, item.parent, True
    else:
        for frame in item.copy.frames:
            yield frame, item.parent, False
