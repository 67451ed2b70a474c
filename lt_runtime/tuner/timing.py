"""Times several ways to do one thing against each other, and says which to take.

A contender is a function of a number and a stream that puts its work on the stream, with the buffer set of that
number. It is launched alone at first, and dropped when it is far behind. The others are captured, some launches to a
graph, and the graphs replayed in turn, back and forth; what counts is the median of the rounds. Those that are out of
reach after a few rounds keep the times that they have.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from lt_runtime.gpu.clock import Clock
from lt_runtime.gpu.devices import activated, cache_size
from lt_runtime.gpu.streams import beside_captures

Launch = Callable[[int, int], object]
"""Puts a contender's work on a stream: takes the number of the buffer set and the stream's handle."""

_FEWEST_ROUNDS: Final = 3
_FAR_BEHIND: Final = 3.0
_OUT_OF_REACH: Final = 1.2
_LOADING_US: Final = 2e6  # a first launch may load a kernel, from a disk that others use
_REPLAY_US: Final = 400.0
_MOST_LAUNCHES: Final = 50
_LEAST_GAIN: Final = 0.01
_LONG_US: Final = 2e3  # to fill an L2 cache, and to write back what was there, takes 1 % of that
_CACHES: Final = 3
_MOST_SETS: Final = 16

_lock: Final = threading.RLock()


@dataclass(frozen=True, slots=True)
class Timing:
    """What a contender takes.

    Attributes:
        median_us: microseconds a launch, median of the rounds.
        spread_us: their interquartile range.
        dropped: it was far behind when it was launched alone, which is all that was measured: no rounds, no spread.
    """

    median_us: float
    spread_us: float
    dropped: bool = False


@contextlib.contextmanager
def timing_session(device: int) -> Iterator[Clock]:
    """The device's clock for one thread at a time, the device current, captures elsewhere left whole.

    Raises:
        CaptureError: see `beside_captures`.
    """
    with _lock, activated(device), beside_captures(device):
        yield Clock(device)


def measure(
    contenders: Mapping[str, Launch], device: int, *, sets: int = 1, rounds: int = 7, budget_s: float = 2.0
) -> dict[str, Timing]:
    """Times contenders against each other on a stream of their own.

    It allocates nothing itself. What belongs to a stream, such as cuBLASLt's workspace, stays with the one that all
    measurements on a device share.

    Args:
        contenders: by name; the first is the one to beat. They run on random data, not on zeros.
        device: ordinal of the GPU.
        sets: number of buffer sets, see `buffer_sets`; contenders get numbers below it.
        rounds: how often each is replayed, as long as it is within reach of the best.
        budget_s: seconds of timing after which no further contender is tried and, once there have been three, no
            further round begun. Of a contender's first launch, which may load what it needs, only that counts which
            loading cannot explain.

    Returns:
        By name, in the order of `contenders`; one that was not tried is left out.

    Raises:
        CaptureError: see `beside_captures`.
        Whatever a contender raises.
    """
    with timing_session(device) as clock:
        return take_times(contenders, clock, sets, budget_s, rounds)


def take_times(
    contenders: Mapping[str, Launch],
    clock: Clock,
    sets: int,
    budget_s: float,
    rounds: int = 7,
    *,
    in_a_loop: bool = False,
) -> dict[str, Timing]:
    """`measure` with a clock of one's own.

    Args:
        in_a_loop: whether contenders stand for what follows upon itself, as a training step does. What one leaves in
            the caches then counts for itself alone. Where sets of buffers take turns, nothing is left.
    """
    deadline = clock.watch.seconds + budget_s
    probes = _probe(contenders, clock, deadline)
    best = min(probes.values())
    near = {name: contenders[name] for name, us in probes.items() if us <= _FAR_BEHIND * best}
    behind_itself = in_a_loop and sets == 1 and best < _LONG_US
    replayed = _replay(near, clock, _launches(best, sets), sets, deadline, rounds, behind_itself=behind_itself)
    return {name: replayed.get(name) or Timing(us, 0.0, dropped=True) for name, us in probes.items()}


def _probe(contenders: Mapping[str, Launch], clock: Clock, deadline: float) -> dict[str, float]:
    """Microseconds of a single launch. Nothing is queued behind one of which no more is known: it may run for long."""
    times: dict[str, float] = {}
    for name, launch in contenders.items():
        if times and clock.watch.seconds > deadline:
            break
        run = partial(launch, 0)
        times[name] = clock.once(run)  # loads the kernel, and warms up
        if times[name] <= _FAR_BEHIND * min(times.values()) + _LOADING_US:
            with clock.watch.running():
                times[name] = clock.once(run)
        else:
            clock.watch.seconds += (times[name] - _LOADING_US) / 1e6
    return times


def _launches(best_us: float, sets: int) -> int:
    """How many launches to a graph: enough for the clock's resolution, all sets equally often."""
    enough = min(math.ceil(_REPLAY_US / max(best_us, 1.0)), _MOST_LAUNCHES)
    return -(-enough // sets) * sets


def _replay(
    contenders: Mapping[str, Launch],
    clock: Clock,
    launches: int,
    sets: int,
    deadline: float,
    rounds: int,
    *,
    behind_itself: bool,
) -> dict[str, Timing]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    with contextlib.ExitStack() as stack:
        graphs = {
            name: stack.enter_context(clock.capture(partial(_repeat, launch, launches, sets)))
            for name, launch in contenders.items()
        }
        for number in range(rounds):
            if number >= _FEWEST_ROUNDS and clock.watch.seconds > deadline:
                break
            names = _within_reach(times) if number >= _FEWEST_ROUNDS else list(graphs)
            names = names if number % 2 == 0 else names[::-1]
            with clock.watch.running():
                replayed = clock.replay([graphs[name] for name in names], behind_itself=behind_itself)
            for name, us in zip(names, replayed, strict=True):
                times[name].append(us / launches)
    return {name: _summary(values) for name, values in times.items()}


def _within_reach(times: Mapping[str, list[float]]) -> list[str]:
    """Those whose best round is not far from the best median."""
    limit = _OUT_OF_REACH * min(statistics.median(values) for values in times.values())
    return [name for name, values in times.items() if min(values) <= limit]


def _repeat(launch: Launch, launches: int, sets: int, stream: int) -> None:
    for number in range(launches):
        launch(number % sets, stream)


def _summary(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, high - low)


def buffer_sets(size: int, device: int) -> int:
    """How many sets of buffers of `size` bytes to rotate through, so that none is found in the L2 cache.

    One, where so many would be needed that what is so small will be in the cache in earnest too, or where a single
    set does not fit.
    """
    wanted = -(-_CACHES * cache_size(device) // max(size, 1))
    return wanted if wanted <= _MOST_SETS else 1


def fastest(timings: Mapping[str, Timing], first: str) -> str:
    """The name of the contender to take.

    Args:
        timings: at least one that was not dropped.
        first: the one that stays unless a challenger gains more than 1 % and more than the noise, which is the two
            spreads together. Where it was dropped or not timed at all, the fastest is taken.
    """
    timed = {name: timing for name, timing in timings.items() if not timing.dropped}
    if first not in timed:
        return min(timed, key=lambda name: timed[name].median_us)
    winners = {name: timing.median_us for name, timing in timed.items() if _beats(timing, timed[first])}
    return min(winners, key=winners.__getitem__, default=first)


def _beats(challenger: Timing, first: Timing) -> bool:
    noise = math.hypot(challenger.spread_us, first.spread_us)
    return first.median_us - challenger.median_us > max(_LEAST_GAIN * first.median_us, noise)
