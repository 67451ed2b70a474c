"""Finds the ranges that each record of a profile belongs to."""

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
"""Limit of an attribution's borders, of 16 bytes each; nothing is known after them."""
_LOCAL: Final = 0xFFFFFFFF


@dataclass
class Attribution:
    """Notes of a profile, by which records are given their ranges.

    Attributes:
        paths: paths of open ranges, by the ids that CUPTI links calls to.
        places: by the ids of a graph and of a node in it, the ranges that were open when the node was captured. The
            graph is an executable one, or one that an executable graph was made from.
        sources: the id of the graph that a graph, executable or not, was made from, by the id of the latter.
        threads: ids of the threads that opened ranges.
        borders: times of the begins and ends of ranges in the profiling thread, in nanoseconds.
        opened: the id of the path that is open from each of these times on; 0 for no range. Calls of a thread that
            has opened no range, such as PyTorch's threads for backward passes, get the ranges that were open in the
            profiling thread at the time.
    """

    paths: dict[int, Path] = field(default_factory=lambda: {0: ()})
    places: dict[tuple[int, int], Path] = field(default_factory=dict)
    sources: dict[int, int] = field(default_factory=dict)
    threads: set[int] = field(default_factory=set)
    borders: array[int] = field(default_factory=lambda: array("q"))
    opened: array[int] = field(default_factory=lambda: array("q"))

    def border(self, time_ns: int, number: int) -> None:
        """Notes that from this time on the path with this id is open in the profiling thread."""
        if len(self.borders) < MOST_BORDERS:
            self.borders.append(time_ns)
            self.opened.append(number)

    def place(self, node_id: int, path: Path, graph: int | None = None) -> None:
        """Notes the ranges that were open when a node was captured.

        Args:
            node_id: the graph's id in the upper 32 bits, the node's own in the lower.
            graph: the id of the graph to note the node for; by default the one in `node_id`.
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
            index = bisect_right(self.borders, call.start_ns)
            number = self.opened[index - 1] if index else 0
        return self.paths.get(number, ())

    def _within_graph(self, graph: int, node: int) -> Path:
        local = node & _LOCAL
        while (graph, local) not in self.places:
            if graph not in self.sources:
                return ()
            graph = self.sources[graph]
        return self.places[graph, local]
