"""Collects all kernels, copies and calls of a block of code by CUPTI, each with the ranges that it belongs to."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final, Self

from lt_runtime.arrays.libraries import TorchLibrary
from lt_runtime.errors import GpuError
from lt_runtime.gpu.devices import activated, current_device, device_count
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.graphs import CapturedNodes, graph_under_capture, graphs_with_ranges
from lt_runtime.gpu.streams import cupy_current
from lt_runtime.profiling.attribution import Attribution, Path
from lt_runtime.profiling.cupti import library as cupti
from lt_runtime.profiling.cupti.records import Link, read_records
from lt_runtime.profiling.records import Activity
from lt_runtime.ranges import listening

MOST_PATHS: Final = 65536
"""Limit of different paths of ranges in one profile; work in further ranges counts to the ranges around them."""

_NEVER_CAPTURED: Final = {0, 1, 2}
"""Handles of the default stream, and of CU_STREAM_LEGACY and CU_STREAM_PER_THREAD."""

_numbers: Final = itertools.count(1)
"""Ids of paths, never used twice: CUPTI still links calls to the ids of ranges that are open after a profile's end."""


def _moment() -> tuple[int, int]:
    """The present on two clocks, CUPTI's and the host's monotonic one, in nanoseconds.

    Both are read several times; the reading that took the least time is the most accurate.
    """
    reads = [(time.monotonic_ns(), cupti.timestamp(), time.monotonic_ns()) for _ in range(5)]
    before, there, after = min(reads, key=lambda read: read[2] - read[0])
    return there, (before + after) // 2


class _Thread(threading.local):
    """A thread's open ranges, as (name, path, id of the path), and the captures of its current streams."""

    def __init__(self) -> None:
        self.open: list[tuple[str, Path, int]] = []
        self.captures: dict[int, CapturedNodes] = {}


class Collector:
    """A context manager that collects all work on the GPUs in its block, and a listener of `lt_runtime.ranges`.

    It waits for all GPUs at its begin and its end. A process can have one at a time.

    Attributes:
        activities: sorted by start, with their ranges, on the host's monotonic clock; empty before the end.
        dropped: how many records were lost, for lack of memory or because CUPTI could not time them.

    Raises:
        CuptiError: when it is entered, CUPTI cannot be used: no permission, another profiler, an unknown version.
        MissingLibraryError: CUPTI is not installed.
    """

    def __init__(self) -> None:
        self.activities: list[Activity] = []
        self.dropped = 0
        self._notes, self._by_path = Attribution(), dict[Path, int]()
        self._own_thread, self._thread = 0, _Thread()
        self._session = cupti.Session(self._notes.sources.__setitem__)
        self._exits = contextlib.ExitStack()

    def __enter__(self) -> Self:
        _wait_for_gpus()
        self._session.start()
        self._own_thread = threading.get_native_id()
        self._begun = _moment()
        self._note_graphs()
        self._exits.enter_context(listening(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()
        try:
            while self._thread.open:  # ranges that end after the profile
                self._thread.open.pop()
                cupti.pop_id()
            with contextlib.suppress(GpuError):  # an error of the program's own work, which its own calls will raise
                _wait_for_gpus()
                self._note_graphs()
            ended = _moment()
        finally:
            filled, self.dropped = self._session.stop()
        records = [
            record
            for buffer, offsets in filled
            for record in read_records(buffer, offsets, cupti.kernel_name, cupti.call_name)
        ]
        timed = [each for each in records if isinstance(each, Link) or each.start_ns]
        self.dropped += len(records) - len(timed)
        attributed = self._notes.attributed(_on_host_clock(timed, self._begun, ended))
        self.activities = sorted(attributed, key=lambda each: each.start_ns)

    def enter(self, name: str) -> None:
        """A range begins."""
        captures = self._captures()
        _, path, number = self._thread.open[-1] if self._thread.open else ("", (), 0)
        path, number = self._numbered((*path, name), number)
        cupti.push_id(number)
        self._thread.open.append((name, path, number))
        self._border(number)
        for nodes in captures:
            nodes.enter(name)
            self._place(nodes)

    def exit(self, name: str) -> None:
        """The innermost range ends; nothing happens if the range had begun before the profile."""
        if not self._thread.open or self._thread.open[-1][0] != name:
            return
        for nodes in self._captures():
            nodes.exit(name)
            self._place(nodes)
        cupti.pop_id()
        self._thread.open.pop()
        self._border(self._thread.open[-1][2] if self._thread.open else 0)

    def _numbered(self, path: Path, outer: int) -> tuple[Path, int]:
        """A path with its id; the path around it with that one's id, `outer`, if there are too many paths."""
        number = self._by_path.get(path)
        if number is None:
            if len(self._by_path) >= MOST_PATHS:
                return path[:-1], outer
            number = self._by_path[path] = next(_numbers)
            self._notes.paths[number] = path
        return path, number

    def _border(self, number: int) -> None:
        thread = threading.get_native_id()
        self._notes.threads.add(thread)
        if thread == self._own_thread:
            self._notes.border(time.monotonic_ns(), number)

    def _captures(self) -> list[CapturedNodes]:
        """The captures of the streams that are current in the calling thread."""
        graphs = {graph_under_capture(stream)[0]: stream for stream in _current_streams()}
        known = self._thread.captures
        self._thread.captures = {
            graph: known.get(graph) or CapturedNodes(stream) for graph, stream in graphs.items() if graph
        }
        return [*self._thread.captures.values()]

    def _place(self, nodes: CapturedNodes) -> None:
        """Notes the ids of new nodes at once, because the graph may be destroyed soon after its capture."""
        while nodes.paths:
            node, path = nodes.paths.popitem()
            self._notes.place(cupti.node_id(node), path)

    def _note_graphs(self) -> None:
        """Notes the nodes of the package's own graphs, including those captured before the profile."""
        for graph in graphs_with_ranges():
            executable = cupti.executable_id(graph.executable)
            for node, path in graph.ranges.items():
                self._notes.place(cupti.node_id(node), path, executable)


def _current_streams() -> set[int]:
    """The current streams of CuPy and PyTorch, if these are in use, without the default streams."""
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


def _on_host_clock(
    records: Iterable[Activity | Link], begun: tuple[int, int], ended: tuple[int, int]
) -> Iterator[Activity | Link]:
    """The records with their times converted to the host's clock, by two moments that were read on both clocks."""
    (cupti_begun, host_begun), (cupti_ended, host_ended) = begun, ended
    rate = (host_ended - host_begun) / max(cupti_ended - cupti_begun, 1)

    def on_host(cupti_ns: int) -> int:
        return host_begun + round((cupti_ns - cupti_begun) * rate)

    for each in records:
        if isinstance(each, Activity):
            yield replace(each, start_ns=on_host(each.start_ns), end_ns=on_host(each.end_ns))
        else:
            yield each
