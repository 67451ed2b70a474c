"""Measures how long work takes: on the GPU by events on a separate stream, on the host by a stopwatch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

from cuda.bindings import driver

from lt_runtime.gpu.driver import call
from lt_runtime.gpu.graphs import Graph
from lt_runtime.gpu.streams import private_stream


class Stopwatch:
    """Sums the host time that a search spends on timing, so that the search can keep to a time limit.

    Compiling and loading kernels are not counted: both happen only once on a machine, and on a busy machine they take
    longer than all timing together.

    Attributes:
        seconds: seconds so far. A caller may add time that it spent on timing without the stopwatch running.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Adds the host's time within the `with` block to `seconds`."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds += time.monotonic() - started


class Clock:
    """Times work on a separate stream of the current device. Only one thread at a time may use a clock.

    Attributes:
        stream: the stream's handle. All clocks of a device share the stream, so that its workspace is allocated once.
        watch: counts the host's time spent on timing.
    """

    def __init__(self, device: int) -> None:
        self.stream = private_stream(device, "timing")
        self.watch = Stopwatch()

    def once(self, run: Callable[[int], object]) -> float:
        """Microseconds that `run(stream)` takes on the GPU, including the time in which the GPU waits for launches."""
        return self._time([run], untimed=0)[0]

    def capture(self, run: Callable[[int], object]) -> Graph:
        """Captures the work that `run(stream)` puts on the stream into a graph, which `replay` can time."""
        return Graph(run, self.stream)

    def replay(self, graphs: Sequence[Graph], *, behind_itself: bool = False) -> list[float]:
        """Launches graphs one after the other; returns the microseconds that each takes.

        The first graph is launched once more before all others, untimed, so that the GPU does not wait for the host
        while it is timed.

        Args:
            behind_itself: launch every graph once, untimed, before its timed launch, so that the timed launch starts
                with the caches as the graph itself leaves them.
        """
        return self._time([graph.launch for graph in graphs], untimed=len(graphs) if behind_itself else 1)

    def _time(self, runs: Sequence[Callable[[int], object]], untimed: int) -> list[float]:
        """Microseconds that each run takes.

        The first `untimed` runs are each run once, untimed, before their timed run.
        """
        with contextlib.ExitStack() as stack:
            events = []
            for _ in range(2 * len(runs)):
                events.append(call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DEFAULT))
                stack.callback(call, "cuEventDestroy", events[-1])
            pairs = [*zip(events[::2], events[1::2], strict=True)]
            for index, (run, (start, end)) in enumerate(zip(runs, pairs, strict=True)):
                if index < untimed:
                    run(self.stream)
                call("cuEventRecord", start, self.stream)
                run(self.stream)
                call("cuEventRecord", end, self.stream)
            self.wait()
            return [1e3 * float(call("cuEventElapsedTime", *pair)) for pair in pairs]

    def wait(self) -> None:
        """Waits until the stream has done all its work."""
        call("cuStreamSynchronize", self.stream)
