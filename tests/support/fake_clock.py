"""A fake clock for tests of the tuner: launches of a contender take as long as the test says."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence

from lt_runtime.gpu.clock import Stopwatch

STREAM = 7


class FakeClock:
    """Stands in for `Clock`. A replay takes as long as all its launches together.

    Attributes:
        now: seconds that have passed.
        watch: the tuner's stopwatch; it follows `now` if the test makes `time.monotonic` return `now`.
        launched: the contender's name and the number of the buffer set of each launch.
        alone: names of the launches that were timed by `once`.
        open: number of graphs that are not freed.
        rounds: names of the graphs of each replay, in order.
        leaves_us: microseconds that a graph saves if it runs behind the named graph, whose data are in the cache.
        graph_us: the host's time to launch a graph: no replay takes less.
    """

    stream = STREAM

    def __init__(self, noise: Iterator[float] | None = None) -> None:
        self.now, self.watch = 0.0, Stopwatch()
        self.launched: list[tuple[str, int]] = []
        self.alone: list[str] = []
        self.open = 0
        self.rounds: list[list[str]] = []
        self.leaves_us: dict[str, float] = {}
        self.graph_us = 0.0
        self._spent = self._waited = 0.0
        self._noise = noise or itertools.repeat(1.0)

    def contender(
        self, name: str, us: float, first_us: float | None = None, host_us: float = 0.0
    ) -> Callable[[int, int], None]:
        """Makes a contender whose launches take `us`, and the first launch `first_us`.

        Timing by `once` adds the host's time to a launch.
        """
        costs = itertools.chain([us if first_us is None else first_us], itertools.repeat(us))

        def launch(number: int, stream: int) -> None:
            assert stream == STREAM
            self.launched.append((name, number))
            self._spent += next(costs)
            self._waited += host_us

        return launch

    def contenders(self, **us: float) -> dict[str, Callable[[int, int], None]]:
        return {name: self.contender(name, cost) for name, cost in us.items()}

    def _run(self, run: Callable[[int], object]) -> float:
        self._spent = 0.0
        run(STREAM)
        return self._spent

    def once(self, run: Callable[[int], object]) -> float:
        self._waited = 0.0
        us = self._run(run) + self._waited
        self.alone.append(self.launched[-1][0])
        self.now += us / 1e6
        return us

    @contextlib.contextmanager
    def capture(self, run: Callable[[int], object]) -> Iterator[tuple[str, float]]:
        us = self._run(run)
        self.open += 1
        yield self.launched[-1][0], us
        self.open -= 1

    def replay(self, graphs: Sequence[tuple[str, float]], *, behind_itself: bool = False) -> list[float]:
        names = [name for name, _ in graphs]
        self.rounds.append(names)
        before = names if behind_itself else [names[0], *names]
        saved = [self.leaves_us.get(name, 0.0) for name in before]
        own = [(us - less) * next(self._noise) for (_, us), less in zip(graphs, saved, strict=False)]
        times = [max(us, self.graph_us) for us in own]
        self.now += sum(times) / 1e6
        return times
