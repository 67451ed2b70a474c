"""Records CUDA events at the begin and the end of ranges, on a stream and in graphs of training steps.

A moment is the begin or the end of a range in a captured graph. An event at a moment costs the GPU a few µs. Therefore
a graph is copied eight times, each copy has events at an eighth of the moments, and the copies are launched in turn.
The cost of an event is measured, and subtracted from every time.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

from cuda.bindings import driver

from lt_runtime import ranges
from lt_runtime.errors import DriverError, GpuError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call, is_capturing, is_current
from lt_runtime.gpu.graphs import Graph
from lt_runtime.gpu.streams import stream_handle

_COPIES: Final = 8
_EMPTY: Final = 9
"""Number of consecutive events with no work between them, whose median distance is the cost of an event."""
_EXTERNAL: Final = driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL


class EventMarks:
    """Records the events of a profile on the stream that `ranges.on` names, or else on the current stream.

    The profile's device must be current.

    Attributes:
        start: the event at the profile's begin.
        own: the copy of a graph that the profile is capturing to time it; None while it captures no copy.
        captured_by_others: whether a range has begun or ended in a capture that the profile does not make itself.
    """

    def __init__(self, device: int) -> None:
        self._device = device
        self._free: list[Any] = []
        self.own: MarkedCopy | None = None
        self.captured_by_others = False
        with activated(device):
            self.start = self.take()

    def take(self) -> Any:
        """Records an event on the current stream and returns the event.

        While the profile captures a copy of a graph, the result is the number of the present moment, and an event
        becomes part of the copy only if the copy records this moment, see `MarkedCopy`. The result is None in any other
        capture, and while another GPU is current.
        """
        if not is_current(self._device):
            return None
        stream = ranges.placed()
        stream = stream_handle(None, self._device) if stream is None else stream
        try:
            if not stream or not is_capturing(stream):
                event = self._free.pop() if self._free else _new_event()
                call("cuEventRecord", event, stream)
                return event
            if self.own is not None:
                return self.own.take(stream)
            self.captured_by_others = True
        # The default stream cannot record an event while another stream that waits for it is captured.
        except DriverError:
            pass
        return None

    def us(self, start: Any, end: Any) -> float:
        """Microseconds between two events; waits for the second event."""
        if start is None or end is None:
            return 0.0
        call("cuEventSynchronize", end)
        return 1e3 * float(call("cuEventElapsedTime", start, end))

    def drop(self, mark: Any) -> None:
        """Takes back an event whose time has been read, to record it again later."""
        if mark is not None:
            self._free.append(mark)

    def close(self) -> None:
        """Destroys the events; the caller must have given all of them back by `drop`."""
        self.drop(self.start)
        _destroy(self._free)


class MarkedCopy:
    """A copy of a graph with events in it, which every launch of the copy records anew.

    A moment is the begin or the end of a range. Moments are numbered in the order of capture; consecutive moments with
    no work between them share a number.

    Args:
        moments: range of numbers of moments; the copy records an event at each moment in it.
        empty: number of additional events recorded just before moment 0, to measure the cost of an event.

    Attributes:
        graph: the captured copy; None until it is captured.
        moments, empty: the arguments.
        count: number of moments captured so far.
        events: the copy's events, in the order in which a launch records them.
        frames: the ranges that ended in the capture, as the timer describes them.
        is_unread: true from a launch of the copy until the launch's times are read.
    """

    def __init__(self, moments: range, *, empty: int = 0) -> None:
        self.graph: Graph | None = None
        self.moments, self.empty, self.count, self.is_unread = moments, empty, 0, False
        self.events, self.frames, self._tail = list[Any](), list[Any](), list[int]()

    def take(self, stream: int) -> int:
        """Returns the present moment's number; captures an event on the stream if the copy has one for this moment."""
        if not self.count or self._tail != _tail(stream):
            if self.count in self.moments:
                for _ in range(1 if self.count else 1 + self.empty):
                    self.events.append(_new_event())
                    call("cuEventRecordWithFlags", self.events[-1], stream, _EXTERNAL)
            self.count += 1
            self._tail = _tail(stream)
        return self.count - 1

    def close(self) -> None:
        """Frees the captured graph and its events."""
        if self.graph is not None:
            self.graph.close()
        _destroy(self.events)


def _new_event() -> Any:
    return call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DEFAULT)


def _destroy(events: list[Any]) -> None:
    while events:
        call("cuEventDestroy", events.pop())


def _tail(stream: int) -> list[int]:
    """The graph nodes on which the next node captured from a stream will depend."""
    *_, nodes, _, count = call("cuStreamGetCaptureInfo", stream)
    return sorted(int(node) for node in nodes[:count])


class MarkedGraph:
    """The copies of one graph that a profile launches in the graph's place in order to time it.

    The first copy records an event at the begin and the end of every range, and is launched once: afterwards every time
    is known. The other copies record events at an eighth of these moments each, and are launched in turn: each launch
    updates the times of its eighth.

    Args:
        capture: function that captures the graph again, with the events of the `MarkedCopy` that it gets.

    Attributes:
        cost_us: the cost of an event.
        times_us: microseconds from each moment to the next, without the cost of events.

    Raises:
        GpuError: the graph could not be captured, or a later capture of it has another number of moments.
    """

    def __init__(self, capture: Callable[[MarkedCopy], Graph]) -> None:
        self.cost_us = 0.0
        self._copies = [MarkedCopy(range(sys.maxsize), empty=_EMPTY)]
        try:
            self._copies[0].graph = capture(self._copies[0])
            moments = self._copies[0].count
            self.times_us = [0.0] * max(0, moments - 1)
            size = -(-len(self.times_us) // _COPIES) or 1
            for first in range(0, len(self.times_us), size):
                copy = MarkedCopy(range(first, first + size + 1))
                self._copies.append(copy)
                copy.graph = capture(copy)
                if copy.count != moments:
                    raise GpuError(f"it has {moments} moments, and {copy.count} when it is captured again")
        except BaseException:
            self.close()
            raise
        self._turns = deque(self._copies if self.times_us else ())

    @property
    def next(self) -> MarkedCopy | None:
        """The copy of the graph to launch next; None if the graph has no range, so that nothing is timed."""
        return self._turns[0] if self._turns else None

    def launch(self, copy: MarkedCopy) -> None:
        """Notes that `copy`, the first of the queue, was launched, and that its times have not been read.

        The copy moves to the end of the queue, unless it is the copy with all events, which is launched only once.
        """
        copy.is_unread = True
        self._turns.popleft()
        if not copy.empty:
            self._turns.append(copy)

    def read(self, copy: MarkedCopy, events: EventMarks) -> float:
        """Reads a launch's times; returns the time of its first moment, in microseconds since the profile's begin."""
        copy.is_unread = False
        first, empty = copy.moments.start, copy.empty
        times = [events.us(start, end) for start, end in pairwise(copy.events)]
        if empty:
            self.cost_us = statistics.median(times[:empty])
        self.times_us[first : first + len(times) - empty] = [max(0.0, us - self.cost_us) for us in times[empty:]]
        return events.us(events.start, copy.events[empty]) - sum(self.times_us[:first])

    def close(self) -> None:
        """Frees all copies of the graph."""
        while self._copies:
            self._copies.pop().close()
