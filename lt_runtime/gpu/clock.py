"""How long work takes on the GPU: events around it, on a stream that is used for nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cuda.bindings import driver

from lt_runtime.gpu.driver import call
from lt_runtime.gpu.graphs import Graph
from lt_runtime.gpu.stopwatch import Stopwatch
from lt_runtime.gpu.streams import private_stream


class Clock:
    """Times work on its own stream of a device, which must be current. One thread at a time.

    Attributes:
        stream: the handle, the same for every clock of a device, so that the memory which belongs to it is made once.
        watch: counts what the host spends on timing.
    """

    def __init__(self, device: int) -> None:
        self.stream = private_stream(device, "timing")
        self.watch = Stopwatch()

    def once(self, run: Callable[[int], object]) -> float:
        """Microseconds that `run(stream)` takes, the host's time to launch it included where the GPU waits for it."""
        with _events(2) as (start, end):
            call("cuEventRecord", start, self.stream)
            run(self.stream)
            call("cuEventRecord", end, self.stream)
            self.wait()
            return _microseconds(start, end)

    def capture(self, run: Callable[[int], object]) -> Graph:
        """What `run(stream)` puts on the stream, for `replay`."""
        return Graph(run, self.stream)

    def replay(self, graphs: Sequence[Graph], *, behind_itself: bool = False) -> list[float]:
        """Microseconds that each graph takes, launched one after the other.

        The first is launched once more before all, untimed: the GPU is then never waiting for the host where it counts.

        Args:
            behind_itself: whether each is, so that it finds in the caches what it leaves there itself.
        """
        with _events(2 * len(graphs)) as events:
            for index, graph in enumerate(graphs):
                if index == 0 or behind_itself:
                    graph.launch(self.stream)
                call("cuEventRecord", events[2 * index], self.stream)
                graph.launch(self.stream)
                call("cuEventRecord", events[2 * index + 1], self.stream)
            self.wait()
            return [_microseconds(*events[2 * index : 2 * index + 2]) for index in range(len(graphs))]

    def wait(self) -> None:
        """Returns when all that the stream was given is done."""
        call("cuStreamSynchronize", self.stream)


@contextlib.contextmanager
def _events(count: int) -> Iterator[list[Any]]:
    events = [call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DEFAULT) for _ in range(count)]
    try:
        yield events
    finally:
        for event in events:
            call("cuEventDestroy", event)


def _microseconds(start: Any, end: Any) -> float:
    return 1e3 * float(call("cuEventElapsedTime", start, end))
