"""Collects all kernels, copies and calls of a block of code by CUPTI, and the ranges around each of them."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from array import array
from bisect import bisect_right
from typing import Final, Self, TypeAlias

from lt_runtime.arrays.libraries import TorchLibrary
from lt_runtime.errors import GpuError
from lt_runtime.gpu.devices import activated, current_device, device_count
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.graphs import CapturedNodes, graph_under_capture, graphs_with_ranges
from lt_runtime.gpu.streams import cupy_current
from lt_runtime.profiling.cupti import library as cupti
from lt_runtime.profiling.cupti.records import Activity, Link, read_records
from lt_runtime.ranges import listening

Path: TypeAlias = tuple[str, ...]

MOST_PATHS: Final = 65536
"""Limit of distinct paths of ranges in one profile; work in further ranges is assigned to the ranges around them."""
MOST_BORDERS: Final = 4_000_000
"""Limit of recorded begins and ends of ranges; each takes 16 bytes. After the limit, work of threads that open no
ranges themselves is assigned to no range.
"""

_NEVER_CAPTURED: Final = {0, 1, 2}
"""Handles of streams that cannot be captured: the default stream's, CU_STREAM_LEGACY and CU_STREAM_PER_THREAD."""
_LOCAL: Final = 0xFFFFFFFF
"""Mask of the lower 32 bits of a node's id, which identify the node in its graph; the upper 32 are the graph's."""

_numbers: Final = itertools.count(1)
"""Numbers for paths of ranges. No number is used twice, because CUPTI links calls to the ids of ranges that are still
open after a profile's end."""


class _Thread(threading.local):
    """One thread's open ranges, as (name, path, id of the path), and the captures of the thread's current streams."""

    def __init__(self) -> None:
        self.open: list[tuple[str, Path, int]] = []
        self.captures: dict[int, CapturedNodes] = {}


class Collector:
    """A context manager that collects all work on the GPUs in its block, and a listener of `lt_runtime.ranges`.

    The collector waits for all GPUs at the begin and the end of its block. A process can have one collector at a time.

    Attributes:
        activities: the collected work with its ranges, sorted by start, on the host's monotonic clock; empty before the
            block ends.
        dropped: how many records were lost, for lack of memory or because CUPTI could not time them.

    Raises:
        CuptiError: at the begin of the block CUPTI cannot be used: no permission, another profiler, an unknown version.
        MissingLibraryError: CUPTI is not installed.
    """

    def __init__(self) -> None:
        self.activities: list[Activity] = []
        self.dropped = 0
        self._thread, self._own_thread = _Thread(), 0
        self._threads = set[int]()  # ids of the threads that have opened ranges during the profile
        self._ids, self._paths = dict[Path, int](), dict[int, Path]({0: ()})
        # Changes of the innermost open range in the thread that made the profile: times (ns), ids of the ranges' paths.
        self._borders, self._opened = array("q"), array("q")
        # Maps the id of a graph and of a node in it to the ranges in which the node was captured. A cloned or
        # executable graph is traced back to its source, which is the graph that it was made from.
        self._places, self._sources = dict[tuple[int, int], Path](), dict[int, int]()
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        _wait_for_gpus()
        cupti.session.start(self._sources.__setitem__)
        self._own_thread = threading.get_native_id()
        self._begun = _moment()
        self._note_graphs()
        self._exits.enter_context(listening(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()
        try:
            while self._thread.open:  # ranges that are still open: they will end after the profile
                self._thread.open.pop()
                cupti.pop_id()
            # a failure of the profiled program's own kernels is not reported here: the program's next call raises it
            with contextlib.suppress(GpuError):
                _wait_for_gpus()
                self._note_graphs()
            ended = _moment()
        finally:
            filled, self.dropped = cupti.session.stop()
        links, found = dict[int, int](), list[Activity]()
        for buffer, offsets in filled:
            for record in read_records(buffer, offsets, cupti.kernel_name, cupti.call_name):
                if isinstance(record, Link):
                    links[record.correlation] = record.external
                elif record.start_ns:
                    found.append(record)
                else:
                    self.dropped += 1
        self._convert_times(found, ended)
        calls = {each.correlation: each for each in found if each.kind == "call"}
        for each in found:
            outer = self._range_of_call(links.get(each.correlation), calls.get(each.correlation))
            each.range = (*outer, *(self._range_in_graph(each.graph, each.node) if each.node else ()))
        self.activities = sorted(found, key=lambda each: each.start_ns)

    def enter(self, name: str) -> None:
        """A range begins."""
        captures = self._captures()
        _, path, number = self._thread.open[-1] if self._thread.open else ("", (), 0)
        known = self._ids.get((*path, name))
        if known is None and len(self._ids) < MOST_PATHS:
            known = self._ids[*path, name] = next(_numbers)
            self._paths[known] = (*path, name)
        if known is not None:
            path, number = (*path, name), known
        cupti.push_id(number)
        self._thread.open.append((name, path, number))
        self._note_border(number)
        for nodes in captures:
            nodes.enter(name)
            self._note_nodes(nodes)

    def exit(self, name: str) -> None:
        """The innermost range ends; nothing happens if the range had begun before the profile."""
        if not self._thread.open or self._thread.open[-1][0] != name:
            return
        for nodes in self._captures():
            nodes.exit(name)
            self._note_nodes(nodes)
        cupti.pop_id()
        self._thread.open.pop()
        self._note_border(self._thread.open[-1][2] if self._thread.open else 0)

    def _note_border(self, number: int) -> None:
        """Records the time and the id of the path that is now open, if the calling thread made the profile."""
        thread = threading.get_native_id()
        self._threads.add(thread)
        if thread == self._own_thread and len(self._borders) < MOST_BORDERS:
            self._borders.append(time.monotonic_ns())
            self._opened.append(number)

    def _captures(self) -> list[CapturedNodes]:
        """The captures that are under way on the calling thread's current streams."""
        graphs = {graph_under_capture(stream)[0]: stream for stream in _current_streams()}
        known = self._thread.captures
        found = {graph: known.get(graph) or CapturedNodes(stream) for graph, stream in graphs.items() if graph}
        self._thread.captures = found
        return [*found.values()]

    def _note_nodes(self, nodes: CapturedNodes) -> None:
        """Records the open ranges of newly captured nodes at once, because the graph may soon be destroyed."""
        while nodes.paths:
            node, path = nodes.paths.popitem()
            number = cupti.node_id(node)
            self._places.setdefault((number >> 32, number & _LOCAL), path)

    def _note_graphs(self) -> None:
        """Records the ranges of all nodes of the package's own graphs, including those captured before the profile."""
        for graph in graphs_with_ranges():
            executable = cupti.executable_id(graph.executable)
            for node, path in graph.ranges.items():
                self._places.setdefault((executable, cupti.node_id(node) & _LOCAL), path)

    def _convert_times(self, activities: list[Activity], ended: tuple[int, int]) -> None:
        """Converts the times of activities to the host's clock, by the profile's begin and end on both clocks."""
        (cupti_begun, host_begun), (cupti_ended, host_ended) = self._begun, ended
        rate = (host_ended - host_begun) / max(cupti_ended - cupti_begun, 1)
        for each in activities:
            each.start_ns = host_begun + round((each.start_ns - cupti_begun) * rate)
            each.end_ns = host_begun + round((each.end_ns - cupti_begun) * rate)

    def _range_of_call(self, number: int | None, call: Activity | None) -> Path:
        """The ranges that were open at a call; `number` is the id of their path.

        CUPTI records the id with the call, as its external correlation id; `number` is None if it recorded none.

        A call of a thread that has opened no range, such as PyTorch's threads for backward passes, gets the ranges that
        were open at the time in the thread that made the profile.
        """
        if number is None:
            if call is None or call.thread in self._threads:
                return ()
            index = bisect_right(self._borders, call.start_ns)
            number = self._opened[index - 1] if index else 0
        return self._paths.get(number, ())

    def _range_in_graph(self, graph: int, node: int) -> Path:
        """The ranges in which a launched graph's node was captured."""
        while (graph, node & _LOCAL) not in self._places:
            if graph not in self._sources:
                return ()
            graph = self._sources[graph]
        return self._places[graph, node & _LOCAL]


def _moment() -> tuple[int, int]:
    """Reads CUPTI's clock and the host's monotonic clock at the same moment, in nanoseconds.

    Both clocks are read several times; the reading that took the least time is the most accurate and is returned.
    """
    reads = [(time.monotonic_ns(), cupti.timestamp(), time.monotonic_ns()) for _ in range(5)]
    before, there, after = min(reads, key=lambda read: read[2] - read[0])
    return there, (before + after) // 2


def _current_streams() -> set[int]:
    """Current streams of CuPy and PyTorch, if the process has imported these, except default streams."""
    device = current_device()
    streams = {cupy_current(device)}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        streams.add(TorchLibrary().current_stream(device))
    return streams - _NEVER_CAPTURED


def _wait_for_gpus() -> None:
    """Waits for all work of this process on all GPUs."""
    for ordinal in range(device_count()):
        _, is_active = call("cuDevicePrimaryCtxGetState", call("cuDeviceGet", ordinal))
        if is_active:
            with activated(ordinal):
                call("cuCtxSynchronize")
