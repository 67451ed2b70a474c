"""To which ranges each record of a profile belongs."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from lt_runtime.profiling.cupti.records import Link
from lt_runtime.profiling.records import Activity

Path: TypeAlias = tuple[str, ...]

MOST_BORDERS: Final = 4_000_000
"""Borders of ranges that a timeline keeps, of 16 bytes each."""
_LOCAL: Final = 0xFFFFFFFF


class Timeline:
    """Which ranges were open in a thread, by time; what comes after `MOST_BORDERS` borders is not known."""

    def __init__(self) -> None:
        self._times, self._numbers = array("q"), array("q")

    def add(self, time_ns: int, number: int) -> bool:
        """From this time on the path of this number is open. False, and it is not kept, where there is no more room."""
        if len(self._times) >= MOST_BORDERS:
            return False
        self._times.append(time_ns)
        self._numbers.append(number)
        return True

    def at(self, time_ns: int) -> int:
        """The number of the path that was open; 0 before the first border."""
        index = bisect_right(self._times, time_ns)
        return self._numbers[index - 1] if index else 0


@dataclass
class Attribution:
    """What was noted while a profile ran.

    Attributes:
        paths: by number, the ranges that were open when the number was pushed.
        places: by the ids of a graph and of a node within it, the ranges within which the node was captured. The graph
            is an executable one, or one that such a graph was made from.
        sources: by the id of a graph, executable or not, that of the graph that it was made from.
        threads: ids of the threads that opened ranges.
        timeline: of the thread that profiles. A thread without ranges of its own works for it, as those do in which
            PyTorch runs backward passes.
    """

    paths: dict[int, Path] = field(default_factory=lambda: {0: ()})
    places: dict[tuple[int, int], Path] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    threads: set[int] = field(default_factory=set)
    timeline: Timeline = field(default_factory=Timeline)

    def place(self, node_id: int, path: Path, graph: int | None = None) -> None:
        """Notes within which ranges a node was captured.

        Args:
            graph: the id of the graph that the node is met in; the one in the node's own id if left out.
        """
        key = node_id >> 32 if graph is None else graph, node_id & _LOCAL
        self.places.setdefault(key, path)

    def attributed(self, records: Iterable[Activity | Link]) -> Iterator[Activity]:
        """The activities among the records, with their ranges."""
        activities, links = list[Activity](), dict[int, int]()
        for record in records:
            if isinstance(record, Link):
                links[record.correlation] = record.external
            else:
                activities.append(record)
        calls = {each.correlation: each for each in activities if each.kind == "call"}
        for each in activities:
            outer = self._of_call(links.get(each.correlation), calls.get(each.correlation))
            inner = self._within_graph(each.graph, each.node) if each.node else ()
            yield replace(each, range=(*outer, *inner))

    def _of_call(self, number: int | None, call: Activity | None) -> Path:
        if number is None:
            if call is None or call.thread in self.threads:
                return ()
            number = self.timeline.at(call.start_ns)
        return self.paths.get(number, ())

    def _within_graph(self, graph: int, node: int) -> Path:
        local = node & _LOCAL
        while (graph, local) not in self.places:
            if graph not in self.sources:
                return ()
            graph = self.sources[graph]
        return self.places[graph, local]
