"""The host's time for a call: wall clock of calls back to back, none of which waits for the GPU."""

from __future__ import annotations

import cProfile
import io
import itertools
import pstats
import time
from collections.abc import Callable
from typing import Final

from lt_runtime.gpu.graphs import no_collection

Call = Callable[[], object]

_LINES: Final = 25  # of a profile


class HostTurn:
    """A contender's turn: that many calls in a row, once the GPU is idle, and the collector of garbage held off.

    Attributes:
        until_done: by turn, microseconds a call until the GPU is done as well. Where it is far above the host's own
            time, the GPU was behind, and the driver's queue held what was left.
    """

    def __init__(self, call: Call, calls: int, synchronize: Call) -> None:
        self._call, self._calls, self._synchronize = call, calls, synchronize
        self.until_done: list[float] = []

    def __call__(self) -> float:
        """The host's microseconds a call."""
        self._synchronize()
        with no_collection():
            start = time.perf_counter()
            repeat(self._call, self._calls)
            queued = time.perf_counter()
            self._synchronize()
            done = time.perf_counter()
        self.until_done.append((done - start) / self._calls * 1e6)
        return (queued - start) / self._calls * 1e6


def repeat(call: Call, calls: int) -> None:
    """Calls back to back."""
    for _ in itertools.repeat(None, calls):
        call()


def profile(call: Call, calls: int, turns: int, synchronize: Call) -> str:
    """What Python spends its time on in turns of so many calls: the functions that take most themselves.

    The profiler slows every call of Python's down, so that the shares are a guide, and no times.
    """
    profiler = cProfile.Profile()
    for _ in range(turns):
        synchronize()
        profiler.enable()
        repeat(call, calls)
        profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(_LINES)
    return f"{turns * calls} calls\n{text.getvalue().strip()}"
