"""Finds races on the pretended GPU: two accesses to the same memory whose order no stream, event or wait decides.

An operation is anything that runs on a stream: a kernel, a copy, a node of a graph. The driver's stand-in gives each
operation a stamp, which names the operations that streams, events and waits of the host order before it. When an
operation runs, each of its accesses to memory is compared with the earlier accesses to the same memory.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple, TypeAlias

HOST: Final = -1
"""The number that stands for the host where streams are numbered."""
Known: TypeAlias = Mapping[int, int]
"""Type: for each stream, the number of the last of its operations that are ordered before a point in time."""


class Stamp(NamedTuple):
    """The place of an operation in the order of all operations.

    Attributes:
        number: the number of the call that put the operation on a stream, counted over all streams.
        known: the operations that are ordered before this one.
        node: the index of the operation if it is a graph's node; all nodes of a graph's launch have the same `number`.
        before: a bit for each of the graph's nodes that come before this one.
    """

    stream: int
    number: int
    known: Known
    node: int = 0
    before: int = 0


class History:
    """The accesses so far to the memory at an address.

    An allocation that a pool returns at the same address later continues this list.
    """

    def __init__(self) -> None:
        self.accesses: list[Access] = []


class Touch(NamedTuple):
    """Bytes of an allocation that an operation reads, or that it writes and perhaps reads too.

    Attributes:
        history: the accesses so far to the allocation.
        start, end: the bytes' range within the allocation.
        operand: the operation's name for these bytes.
    """

    history: History
    start: int
    end: int
    writes: bool
    operand: str


class Access(NamedTuple):
    """An access to the bytes `touch` by the operation with the stamp `stamp` and the name `work`."""

    touch: Touch
    stamp: Stamp
    work: str

    def precedes(self, stamp: Stamp) -> bool:
        """Whether this access is ordered before the operation with the stamp `stamp`, or belongs to that operation."""
        own = self.stamp
        if own.number == stamp.number:
            return own.node == stamp.node or bool(stamp.before >> own.node & 1)
        return own.number <= stamp.known.get(own.stream, 0)

    def __str__(self) -> str:
        stream = "on the host" if self.stamp.stream == HOST else f"on stream {self.stamp.stream:#x}"
        node = f" in node {self.stamp.node} of a graph" if self.stamp.before or self.stamp.node else ""
        verb = "writes" if self.touch.writes else "reads"
        return f"{self.work} {stream}{node} {verb} {self.touch.operand}, bytes {self.touch.start} to {self.touch.end}"


class Races:
    """The order of all operations of a pretended GPU, and the races found so far."""

    def __init__(self) -> None:
        self._numbers, self._lock = itertools.count(1), threading.Lock()
        self._known: dict[int, dict[int, int]] = {HOST: {}}
        self._found: dict[tuple[str, ...], str] = {}

    def put(self, stream: int) -> Stamp:
        """Called when an operation is put on a stream: returns the operation's stamp."""
        with self._lock:
            known, number = self._known.setdefault(stream, {}), next(self._numbers)
            _merge(known, self._known[HOST])
            known[stream] = known[HOST] = number
            return Stamp(stream, number, dict(known))

    def recorded(self, stream: int) -> Known:
        """Returns the operations that are ordered before an event, if that event is recorded on `stream` now."""
        with self._lock:
            return dict(self._known.get(stream, {}))

    def wait(self, stream: int, known: Known) -> None:
        """Called when a stream, or the host, waits for an event or for all operations of another stream.

        `known` are the operations that are ordered before the event, or before the other stream's end.
        """
        with self._lock:
            _merge(self._known.setdefault(stream, {}), known)

    def wait_for_all(self) -> None:
        """Called when the host waits for all streams."""
        for stream in list(self._known):
            self.wait(HOST, self.recorded(stream))

    def add(self, stamp: Stamp, work: str, touches: Iterable[Touch]) -> None:
        """Called when an operation runs, after all that are ordered before it: checks the operation's accesses."""
        with self._lock:
            for touch in touches:
                new, accesses = Access(touch, stamp, work), touch.history.accesses
                # Usual case, without comparisons: the only earlier access is the same one by the same stream.
                if len(accesses) == 1 and accesses[0].touch is touch and accesses[0].stamp.stream == stamp.stream:
                    kept = []
                else:
                    kept = [each for each in accesses if not self._compared(each, new)]
                accesses[:] = *kept, new

    def _compared(self, old: Access, new: Access) -> bool:
        """Compares two accesses, and records a race if they conflict and nothing orders them.

        Returns:
            Whether `old` may be forgotten, because every later access that races with it races with `new` too.
        """
        first, last = old.touch, new.touch
        if not old.precedes(new.stamp):
            conflicts = first.start < last.end and last.start < first.end and (first.writes or last.writes)
            # No race if `new` is ordered before `old`, although it runs later: the pretended CuPy writes arrays from
            # the host when it is called, before earlier operations of the stream have run.
            if conflicts and not new.precedes(old.stamp):
                key = old.work, first.operand, new.work, last.operand
                self._found.setdefault(key, f"{old}; {new}; nothing orders the two")
            return False
        return last.start <= first.start and first.end <= last.end and (last.writes or not first.writes)

    def take(self) -> list[str]:
        """Descriptions of the races since the last call; forgets the order of all work, which has been waited for."""
        with self._lock:
            found = [*self._found.values()]
            self._found.clear()
            self._known = {HOST: {}}
        return found


def _merge(known: dict[int, int], more: Known) -> None:
    for stream, number in more.items():
        if known.get(stream, 0) < number:
            known[stream] = number
