"""Times contenders alternately within one run; each time is a median with its interquartile range."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

WARM_UP: Final = 2
"""Number of rounds that run before the rounds that are counted."""

_REPLAY_US: Final = 2000.0  # A replay takes at least this long (µs), because events resolve half a microsecond.
_MAX_REPETITIONS: Final = 200  # A graph has at most this many repetitions of a task.
_BYTES_PER_US: Final = 4.8e6  # The bandwidth in the datasheet of an H200, which no kernel exceeds.
_LAUNCH_US: Final = 1.5  # A kernel in a graph takes at least this long (µs).
_CACHES: Final = 4  # Rotating buffers take at least this many times the size of the L2 cache.
_BY_HOST_US: Final = 10_000.0  # The shorter part of a turn by the wall clock takes at least about this long (µs).

Call = Callable[[], object]
Turn = Callable[[], float]
"""Type of a contender's turn: a function that runs it once and returns its microseconds."""


class Timing(NamedTuple):
    """A measured time in microseconds: the median, and the distance between the quartiles."""

    median: float
    spread: float


spent: Final[dict[str, float]] = {}
"""The seconds that parts of the present row took: building each contender, tuning, and all turns."""


@contextlib.contextmanager
def stopwatch(part: str) -> Iterator[None]:
    """Adds the seconds spent in a `with` block to those of one part of the present row, see `spent`."""
    start = time.monotonic()
    try:
        yield
    finally:
        spent[part] = spent.get(part, 0.0) + time.monotonic() - start


def summarise(samples: Sequence[float]) -> Timing:
    """The median of the samples and their interquartile range, which is 0 for a single sample."""
    if len(samples) == 1:
        return Timing(samples[0], 0.0)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(statistics.median(samples), high - low)


def take_turns(turns: Mapping[str, Turn], rounds: int, warm_up: int = WARM_UP) -> dict[str, Timing]:
    """Gives every contender one turn in each round; every other round goes through the contenders backwards.

    A machine that grows warmer or slower during the run thus affects all contenders alike, and no contender always
    follows the same one. The first `warm_up` rounds do not count.
    """
    samples: dict[str, list[float]] = {name: [] for name in turns}
    with stopwatch("turns"):
        for number in range(-warm_up, rounds):
            for name in list(turns)[:: -1 if number % 2 else 1]:
                sample = turns[name]()
                if number >= 0:
                    samples[name].append(sample)
    return {name: summarise(each) for name, each in samples.items()}


def buffer_sets(size: int, cache: int) -> int:
    """The number of buffer sets of `size` bytes through which a task must rotate to find none in the L2 cache."""
    return min(max(2, math.ceil(_CACHES * cache / size)), _MAX_REPETITIONS)


def repetitions(size: int, sets: int) -> int:
    """How often a graph repeats a task of `size` bytes: long enough to be timed well, and every set equally often."""
    expected = max(size / _BYTES_PER_US, _LAUNCH_US)
    wanted = min(math.ceil(_REPLAY_US / expected), _MAX_REPETITIONS)
    return math.ceil(wanted / sets) * sets


def built(builders: Mapping[str, Callable[[], Any]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Calls the builders; returns their results by name, and the first line of the error of each that fails."""
    made, left_out = {}, {}
    for name, build in builders.items():
        try:
            with stopwatch(str(name)):
                made[name] = build()
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return made, left_out


# Host time: the wall clock over calls made back to back, none of which waits for the GPU.


class HostTurn:
    """A contender's turn: a number of calls in a row, begun when the GPU is idle, without garbage collection."""

    def __init__(self, call: Call, calls: int, synchronize: Call) -> None:
        self._call, self._calls, self._synchronize = call, calls, synchronize

    def __call__(self) -> float:
        """Host time of the timed calls, in microseconds a call."""
        self._synchronize()
        with _no_collection():
            start = time.perf_counter()
            repeat(self._call, self._calls)
            return (time.perf_counter() - start) / self._calls * 1e6


def repeat(call: Call, calls: int) -> None:
    """Makes calls back to back."""
    for _ in itertools.repeat(None, calls):
        call()


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# GPU time: CUDA graphs that repeat a task, between two events.

Run = Callable[[int, int], object]
"""Type of a function that launches a task; it takes the number of the buffer set and the stream's handle."""
Replay = Callable[[], object]


def capture(run: Run, repetitions: int, sets: int, stream: Any) -> Replay:
    """Captures the launches of `run` on a CuPy stream into a graph.

    The results of `run` are kept until the same buffer set is used again, so that the results of consecutive
    repetitions lie in different memory. The last results of each set live as long as the graph.
    """
    kept: collections.deque[object] = collections.deque(maxlen=sets)
    with stream:
        warm_up(run, sets, stream)
        stream.begin_capture()
        try:
            for i in range(repetitions):
                kept.append(run(i % sets, stream.ptr))
        except BaseException:
            with contextlib.suppress(Exception):  # an error here would only repeat the one that is raised below
                stream.end_capture()
            raise
        graph = stream.end_capture()
    graph.upload(stream)

    def replay(_held: object = kept) -> None:
        graph.launch(stream)

    return replay


def warm_up(run: Run, sets: int, stream: Any) -> None:
    """Runs the task once on each buffer set, so that compiling, planning and allocating precede the capture."""
    synchronize()  # The buffers may have been filled on any stream.
    for i in range(sets):
        run(i, stream.ptr)
    stream.synchronize()


def timed(replay: Replay, repetitions: int, stream: Any, lead: Replay | None = None) -> Turn:
    """Times a replay of a graph by events: the GPU's microseconds for one repetition of the task.

    A first, untimed replay (or `lead`, if given) keeps the GPU busy until the host has queued the timed one, and leaves
    the caches as this contender leaves them.
    """
    import cupy as cp

    start, end = cp.cuda.Event(), cp.cuda.Event()

    def turn() -> float:
        (lead or replay)()
        start.record(stream)
        replay()
        end.record(stream)
        end.synchronize()
        return float(cp.cuda.get_elapsed_time(start, end)) * 1e3 / repetitions

    return turn


def timed_by_host(replay: Replay, repetitions: int, wait: Callable[[Any], object]) -> Turn:
    """Times a turn by the wall clock, for a library that launches on its own streams, which our events cannot time.

    The turn takes the difference between the times of 2 n and of n replays. The host's work before the first kernel and
    after the last is in both times, and its other work runs while the GPU is busy: the difference is the GPU's time.

    Args:
        replay: function that launches the repetitions; its result is given to `wait`.
    """

    def elapsed(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            done = replay()
        wait(done)
        return (time.perf_counter() - start) * 1e6

    elapsed(1)  # the first call also compiles
    count = max(1, math.ceil(_BY_HOST_US / elapsed(1)))

    def turn() -> float:
        once = elapsed(count)
        return (elapsed(2 * count) - once) / (count * repetitions)

    return turn


class Contender(NamedTuple):
    """One contender: functions that run its task, capture the task in a graph, and time the graph."""

    run: Run
    capture: Callable[[Run, int, int, Any], Replay] = capture
    timed: Callable[[Replay, int, Any], Turn] = timed


Builders = Mapping[str, Callable[[], Contender]]
"""Maps the names of contenders to functions that build them."""


class Measured(NamedTuple):
    """Result of a measurement: times by contender, and the reason for each contender without a time."""

    timings: dict[str, Timing]
    left_out: dict[str, str]


def measure(builders: Builders, sets: int, repetitions: int, rounds: int, stream: Any) -> Measured:
    """Captures every contender and times them alternately; contenders that fail are left out with the reason.

    Args:
        sets: the number of buffer sets through which the repetitions rotate.
        repetitions: how often one graph repeats the task.
        stream: a CuPy stream that can be captured, on which everything runs.
    """

    def turn(name: str, build: Callable[[], Contender]) -> Turn:
        contender = build()
        replay = contender.capture(contender.run, repetitions, sets, stream)
        kept.append(contender)
        return contender.timed(replay, repetitions, stream)

    kept: list[Contender] = []  # keeps the contenders alive: their tasks own the memory that the graphs read
    turns, left_out = built({name: partial(turn, name, build) for name, build in builders.items()})
    return Measured(take_turns(turns, rounds), left_out)


def has_gpu() -> bool:
    """Whether there is a GPU that CuPy can use."""
    try:
        import cupy as cp

        return bool(cp.cuda.runtime.getDeviceCount())
    except Exception:  # CuPy or the driver is missing, so that there is no usable GPU.
        return False


def cache_size() -> int:
    """Bytes of the GPU's L2 cache."""
    import cupy as cp

    return int(cp.cuda.runtime.getDeviceProperties(0)["l2CacheSize"])


def synchronize() -> None:
    """Waits for all work on the GPU, of every library."""
    import cupy as cp

    cp.cuda.Device().synchronize()


def release() -> None:
    """Gives unused memory of CuPy and PyTorch back to the GPU."""
    import cupy as cp

    gc.collect()
    cp.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
