"""Times several ways to do one thing against each other, and says which to take.

A contender is a function that puts its work on a stream, using the buffer set of a given number. It is launched alone
at first, and dropped if it is far behind, by more than the host's time to launch it explains. The others are captured,
several launches to a graph, and the graphs are replayed in turn, back and forth. The median of the rounds counts. A
contender that is out of reach after three rounds is not replayed any more and keeps the times that it has.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from lt_runtime.arrays.libraries import cupy_stream
from lt_runtime.gpu.clock import Clock
from lt_runtime.gpu.devices import activated, device_attributes
from lt_runtime.gpu.memory import release
from lt_runtime.gpu.streams import beside_captures, relaxed_captures

Name = TypeVar("Name")
"""What tells contenders apart."""
Run = Callable[[int], object]
"""Puts work on a stream: takes the stream's handle."""
Launch = Callable[[int, int], object]
"""Puts a contender's work on a stream: takes the number of the buffer set and the stream's handle."""

_FEWEST_ROUNDS: Final = 3
_FAR_BEHIND: Final = 3.0
_OUT_OF_REACH: Final = 1.2
_LOADING_US: Final = 2e6  # A first launch may load a kernel, from a disk that others use too.
_HOST_US: Final = 500.0  # What the host may take to launch some kernels one by one, while the GPU waits for each.
_REPLAY_US: Final = 400.0
_MOST_LAUNCHES: Final = 50
_LEAST_GAIN: Final = 0.01
_LONG_US: Final = 2e3  # Filling an L2 cache, and writing back what was there, takes 1 % of this time.
_CACHES: Final = 3
_MOST_SETS: Final = 16

_lock: Final = threading.RLock()


@dataclass(frozen=True, slots=True)
class Timing:
    """What a contender takes.

    Attributes:
        median_us: microseconds a launch, median of the rounds.
        spread_us: their interquartile range.
        dropped: whether it was far behind when it was launched alone. Nothing more was measured then: no spread.
    """

    median_us: float
    spread_us: float
    dropped: bool = False


class Bench(NamedTuple):
    """What is measured on: a device, which is current, its clock, and CuPy, with the clock's stream current."""

    device: int
    clock: Clock
    xp: Any


@contextlib.contextmanager
def workbench(device: int) -> Iterator[Bench]:
    """A bench for one thread at a time. CuPy's memory comes from a pool of its own, which is emptied at the end.

    Raises:
        MissingLibraryError: CuPy is not installed.
        CaptureError: see `beside_captures`.
    """
    with _lock, activated(device), beside_captures(device):
        clock = Clock(device)
        with cupy_stream(device, clock.stream) as xp:
            pool = xp.cuda.MemoryPool()
            with xp.cuda.using_allocator(pool.malloc):
                try:
                    yield Bench(device, clock, xp)
                finally:
                    clock.wait()
            pool.free_all_blocks()


def clear_bench(device: int) -> None:
    """Gives back the memory that belongs to the clock's stream, once nothing more is to be measured."""
    with _lock, activated(device), relaxed_captures():
        release(device, Clock(device).stream)


def take_times(
    contenders: Mapping[Name, Launch],
    clock: Clock,
    sets: int,
    budget_s: float,
    rounds: int = 7,
    *,
    in_a_loop: bool = False,
) -> dict[Name, Timing]:
    """Times contenders against each other on the clock's stream.

    It allocates nothing itself. What belongs to a stream, such as cuBLASLt's workspace, stays with the clock's, which
    all measurements on a device share.

    Args:
        contenders: by name; the first is the one to beat. They run on random data, not on zeros.
        sets: number of buffer sets, see `buffer_sets`; contenders get numbers below it.
        budget_s: seconds of timing after which no further contender is tried and, once there have been three rounds, no
            further round is begun. Of a contender's first launch, which may load a kernel, only the time counts that
            loading cannot explain.
        rounds: how often each contender is replayed, as long as it is within reach of the best.
        in_a_loop: whether contenders stand for work that follows upon itself, as a training step does. What a contender
            leaves in the caches then counts for that contender. Where buffer sets take turns, nothing is left there.

    Returns:
        By name, in the order of `contenders`; a contender that was not tried is left out.

    Raises:
        Whatever a contender raises.
    """
    deadline = clock.watch.seconds + budget_s
    probes = _probe(contenders, clock, deadline)
    best = min(probes.values())
    launches, behind_itself = _launches(best, sets), in_a_loop and sets == 1 and best < _LONG_US
    times: dict[Name, list[float]] = {name: [] for name, us in probes.items() if us <= _FAR_BEHIND * best}
    with contextlib.ExitStack() as stack:
        runs = {name: partial(_repeat, contenders[name], launches, sets) for name in times}
        graphs = {name: stack.enter_context(clock.capture(run)) for name, run in runs.items()}
        for number in range(rounds):
            if number >= _FEWEST_ROUNDS and clock.watch.seconds > deadline:
                break
            names = _within_reach(times) if number >= _FEWEST_ROUNDS else list(graphs)
            names = names if number % 2 == 0 else names[::-1]
            with clock.watch.running():
                replayed = clock.replay([graphs[name] for name in names], behind_itself=behind_itself)
            for name, us in zip(names, replayed, strict=True):
                times[name].append(us / launches)
    dropped = {name: Timing(us, 0.0, dropped=True) for name, us in probes.items()}
    return dropped | {name: _summary(values) for name, values in times.items()}


def _probe(contenders: Mapping[Name, Launch], clock: Clock, deadline: float) -> dict[Name, float]:
    """Microseconds of a single launch, by name. Each is waited for, because nobody knows yet how long it runs.

    A launch takes the host some time as well, which `_without_host` takes out of the results where it matters.
    """
    times: dict[Name, float] = {}
    for name, launch in contenders.items():
        if times and clock.watch.seconds > deadline:
            break
        run = partial(launch, 0)
        times[name] = clock.once(run)  # The first launch loads the kernel.
        if times[name] <= _FAR_BEHIND * min(times.values()) + _LOADING_US:
            with clock.watch.running():
                times[name] = clock.once(run)
        else:
            clock.watch.seconds += (times[name] - _LOADING_US) / 1e6
    return _without_host(times, contenders, clock)


def _without_host(alone: Mapping[Name, float], contenders: Mapping[Name, Launch], clock: Clock) -> dict[Name, float]:
    """The times of single launches, but for contenders that the host may have put far behind: those are timed anew.

    A graph of several launches is timed, since the host may take longer to launch a graph than one launch runs.
    Where a new time is the best of all, it puts further contenders in doubt that were launched alone.
    """
    times, anew = {**alone}, list[Name]()
    while doubtful := [name for name in _in_doubt(times) if name not in anew]:
        for name in doubtful:
            launches = _launches(times[name], 1)
            with clock.capture(partial(_repeat, contenders[name], launches, 1)) as graph, clock.watch.running():
                times[name] = clock.replay([graph])[0] / launches
        anew += doubtful
    return times


def _in_doubt(times: Mapping[Name, float]) -> list[Name]:
    """Names of the contenders that are far behind the best, by no more than the host may take to launch them."""
    limit = _FAR_BEHIND * min(times.values())
    return [name for name, us in times.items() if limit < us < limit + _HOST_US]


def _launches(best_us: float, sets: int) -> int:
    """How many launches to capture in a graph: enough for the clock's resolution, and equally many for each set."""
    enough = min(math.ceil(_REPLAY_US / max(best_us, 1.0)), _MOST_LAUNCHES)
    return -(-enough // sets) * sets


def _within_reach(times: Mapping[Name, list[float]]) -> list[Name]:
    """Names of the contenders whose best round is not far from the best median."""
    limit = _OUT_OF_REACH * min(statistics.median(values) for values in times.values())
    return [name for name, values in times.items() if min(values) <= limit]


def _repeat(launch: Launch, launches: int, sets: int, stream: int) -> None:
    for number in range(launches):
        launch(number % sets, stream)


def _summary(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, high - low)


def buffer_sets(size: int, device: int) -> int:
    """How many sets of buffers of `size` bytes must take turns so that none is found in the L2 cache.

    One set is enough where it does not fit into the cache. One is also right where it is so small that it stays in the
    cache in real use.
    """
    (cache,) = device_attributes(device, "L2_CACHE_SIZE")
    wanted = -(-_CACHES * cache // max(size, 1))
    return wanted if wanted <= _MOST_SETS else 1


def fastest(timings: Mapping[Name, Timing], first: Name) -> Name:
    """The name of the contender to take.

    Args:
        timings: at least one.
        first: the contender that stays unless another gains more than 1 % and more than the noise, which is the two
            spreads together. If it was dropped or not timed at all, the fastest is taken; if all were dropped, the
            fastest of their single launches.
    """
    timed = {name: timing for name, timing in timings.items() if not timing.dropped}
    if first not in timed:
        return min(timed or timings, key=lambda name: timings[name].median_us)
    winners = {name: timing.median_us for name, timing in timed.items() if _beats(timing, timed[first])}
    return min(winners, key=winners.__getitem__, default=first)


def _beats(challenger: Timing, first: Timing) -> bool:
    noise = math.hypot(challenger.spread_us, first.spread_us)
    return first.median_us - challenger.median_us > max(_LEAST_GAIN * first.median_us, noise)
