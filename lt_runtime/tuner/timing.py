"""Times contenders (several ways to do the same work) against each other, and picks the fastest correct one.

A contender is a function that launches its work on a stream, on the buffer set of a given number. Each contender is
first launched alone, and dropped if it is far slower than the fastest and the host's launch time cannot explain it. The
remaining contenders are captured, several launches in a graph, and the graphs are replayed in turn, in alternating
order. The time of a contender is the median of its replays. After three rounds, a contender whose shortest time is
20 % above the best median is no longer replayed, and keeps the times it has.

Each tuning decision is one `race`: between algorithms of a product, splits of a layer, or two ways to run several
layers. The fastest contender replaces the present one only if it is also faster in a second measurement against the
present one, and if its results are right.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from lt_runtime.arrays.libraries import cupy_stream
from lt_runtime.errors import PlanError
from lt_runtime.gpu.clock import Clock
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.memory import release
from lt_runtime.gpu.streams import beside_captures, relaxed_captures
from lt_runtime.tuner.operands import Memory

Name = TypeVar("Name", bound=Hashable)
"""The type of the contenders' names."""
Launch = Callable[[int, int], object]
"""Function that launches a contender's work: takes the number of the buffer set and the stream's handle."""

_FEWEST_ROUNDS: Final = 3
_FAR_BEHIND: Final = 3.0
_OUT_OF_REACH: Final = 1.2
# Upper bound of the time to load a kernel at its first launch, even from a busy disk.
_LOADING_US: Final = 2e6
# Upper bound of the host's time to launch the kernels of a plan one by one, while the GPU waits.
_HOST_US: Final = 500.0
_REPLAY_US: Final = 400.0
_MOST_LAUNCHES: Final = 50
_LEAST_GAIN: Final = 0.01
_ATTEMPTS: Final = 5
# For launches of at least this duration the state of the L2 cache matters little: refilling it takes 1 % of 2 ms.
_LONG_US: Final = 2e3

_lock: Final = threading.RLock()


@dataclass(frozen=True, slots=True)
class Timing:
    """The time of a contender.

    Attributes:
        median_us: microseconds of a launch: the median over the rounds.
        spread_us: interquartile range of the rounds, in microseconds.
        dropped: whether the contender was far slower than the fastest when it was launched alone; if so, `spread_us`
            is 0.
    """

    median_us: float
    spread_us: float
    dropped: bool = False


class Bench(NamedTuple):
    """Everything a measurement needs: a device, made current, a clock, whose stream is used, and memory."""

    device: int
    clock: Clock
    memory: Memory


@contextlib.contextmanager
def workbench(device: int) -> Iterator[Bench]:
    """Yields a `Bench`, to one thread at a time.

    The memory of the `Bench` comes from a separate CuPy pool, which is emptied at the end.

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
                    yield Bench(device, clock, Memory(device, clock.stream))
                finally:
                    clock.wait()
            pool.free_all_blocks()


def clear_bench(device: int) -> None:
    """Frees the workspace and scratch memory of the clock's stream."""
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
    least_us: float = 0.0,
) -> dict[Name, Timing]:
    """Times contenders against each other on the clock's stream.

    Args:
        contenders: the contenders by name, the present choice first. If the present choice is far slower than the
            fastest when it is launched alone, it is timed in a graph before it is dropped, since an interruption of the
            host may be the cause.
        sets: number of buffer sets, see `operands.buffer_sets`.
        budget_s: seconds of timing after which no further contender is tried and, after three rounds, no further round
            begins. Time that loading a kernel at its first launch can explain does not count.
        rounds: number of replays of each contender that is not far slower than the best.
        in_a_loop: whether each replay starts with caches as the same contender left them, which is like the loop of a
            training step. Without effect if several buffer sets are used in turn.
        least_us: lower bound of a launch's time. A shorter measurement is discarded and repeated. A contender whose
            every measurement is shorter, perhaps because it skips work, gets the time `least_us`.

    Returns:
        The times by name, in the order of `contenders`, without contenders that were not tried.

    Raises:
        Exception: any exception that a contender raises.
    """
    deadline = clock.watch.seconds + budget_s
    probes = _probe(contenders, clock, deadline, least_us)
    best = min(probes.values())
    launches, behind_itself = _launches(best, sets), in_a_loop and sets == 1 and best < _LONG_US
    times: dict[Name, list[float]] = {name: [] for name, us in probes.items() if us <= _FAR_BEHIND * best}
    with contextlib.ExitStack() as stack:
        runs = {name: partial(_repeat, contenders[name], launches, sets) for name in times}
        graphs = {name: stack.enter_context(clock.capture(run)) for name, run in runs.items()}
        for number in range(rounds):
            names = [*graphs]
            if number >= _FEWEST_ROUNDS:
                if clock.watch.seconds > deadline:
                    break
                limit = _OUT_OF_REACH * min(map(statistics.median, times.values()))
                names = [name for name, values in times.items() if min(values) <= limit]
            names = names if number % 2 == 0 else names[::-1]
            replay = partial(clock.replay, [graphs[name] for name in names], behind_itself=behind_itself)
            for name, us in zip(names, _measured(replay, clock, launches, least_us), strict=True):
                times[name].append(us)
    dropped = {name: Timing(us, 0.0, dropped=True) for name, us in probes.items()}
    quartiles = {name: statistics.quantiles(values, n=4, method="inclusive") for name, values in times.items()}
    return dropped | {name: Timing(median, high - low) for name, (low, median, high) in quartiles.items()}


def _measured(measure: Callable[[], Sequence[float]], clock: Clock, launches: int, least_us: float) -> list[float]:
    """Microseconds of one launch, for each time that `measure` returns; measures again if a time is impossibly short.

    After the last attempt, times below `least_us` are replaced by `least_us`: the contender stays in the race, and its
    verification decides whether it skips work.
    """
    for _ in range(_ATTEMPTS):
        with clock.watch.running():
            times = [us / launches for us in measure()]
        if min(times) >= least_us:
            break
    return [max(us, least_us) for us in times]


def _probe(contenders: Mapping[Name, Launch], clock: Clock, deadline: float, least_us: float) -> dict[Name, float]:
    """Microseconds of a single launch of each contender, by name, including the host's launch time.

    The host waits for each launch to end. `_without_host` repeats the timing where the host's time may be the reason
    for a slow result.
    """
    times: dict[Name, float] = {}
    for name, launch in contenders.items():
        if times and clock.watch.seconds > deadline:
            break
        run = partial(launch, 0)
        times[name] = clock.once(run)  # the time of the first launch includes loading the kernel
        if times[name] <= _FAR_BEHIND * min(times.values()) + _LOADING_US:
            (again,) = _measured(lambda: [clock.once(run)], clock, 1, least_us)  # noqa: B023
            times[name] = min(times[name], again) if times[name] >= least_us else again
        else:
            clock.watch.seconds += (times[name] - _LOADING_US) / 1e6
    return _without_host(times, contenders, clock, least_us)


def _without_host(
    alone: Mapping[Name, float], contenders: Mapping[Name, Launch], clock: Clock, least_us: float
) -> dict[Name, float]:
    """Times again, in a graph, contenders that may be far slower than the fastest only because of the host's launches.

    The graph holds several launches, since launching a graph may take longer than one launch runs. If a new time is the
    shortest of all, further contenders may have become far slower than the fastest, and are timed too.
    """
    times, anew = {**alone}, list[Name]()
    while doubtful := [name for name in _in_doubt(times) if name not in anew]:
        for name in doubtful:
            launches = _launches(times[name], 1)
            with clock.capture(partial(_repeat, contenders[name], launches, 1)) as graph:
                (times[name],) = _measured(partial(clock.replay, [graph]), clock, launches, least_us)
        anew += doubtful
    return times


def _in_doubt(times: Mapping[Name, float]) -> list[Name]:
    """Contenders slower than the fastest by more than `_FAR_BEHIND`, if the host's launch time may explain the excess.

    The first contender, which is the present choice, is included whatever the excess.
    """
    limit, first = _FAR_BEHIND * min(times.values()), next(iter(times))
    return [name for name, us in times.items() if limit < us and (us < limit + _HOST_US or name == first)]


def _launches(best_us: float, sets: int) -> int:
    """Number of launches in a graph: enough for the clock's resolution, and equally many for each buffer set."""
    enough = min(math.ceil(_REPLAY_US / max(best_us, 1.0)), _MOST_LAUNCHES)
    return -(-enough // sets) * sets


def _repeat(launch: Launch, launches: int, sets: int, stream: int) -> None:
    for number in range(launches):
        launch(number % sets, stream)


def fastest(timings: Mapping[Name, Timing], first: Name, least_gain: float = _LEAST_GAIN) -> Name:
    """The name of the fastest contender, or `first` if no other is clearly faster than `first`.

    Another contender must gain more than `least_gain`, and more than the noise: the root of the sum of both spreads'
    squares. If `first` was dropped or not timed, the fastest is returned; if all were dropped, the contender with the
    fastest single launch.

    Args:
        timings: times of at least one contender.
        first: name of the present choice.
        least_gain: fraction of the present choice's time.
    """
    timed = {name: timing for name, timing in timings.items() if not timing.dropped}
    if first not in timed:
        return min(timed or timings, key=lambda name: timings[name].median_us)
    present, winners = timed[first], dict[Name, float]()
    for name, timing in timed.items():
        noise = math.hypot(timing.spread_us, present.spread_us)
        if present.median_us - timing.median_us > max(least_gain * present.median_us, noise):
            winners[name] = timing.median_us
    return min(winners, key=winners.__getitem__, default=first)


class Contenders(Protocol[Name]):
    """The contenders of a race."""

    def names(self) -> Sequence[Name]:
        """Names of the contenders that are not rejected; the first is the choice that runs without tuning."""

    def take_times(self, names: Collection[Name]) -> Mapping[Name, Timing]:
        """Times contenders against each other; returns the times of the contenders that were tried."""

    def reject_wrong(self, names: Collection[Name]) -> Collection[Name]:
        """Runs contenders; returns those with wrong results, which `names` lists no longer.

        Other contenders that contain the same wrong plan or algorithm are removed from `names` too.
        """


class Outcome(NamedTuple, Generic[Name]):
    """The result of a race: the winner, and the latest times by name, rejected contenders included."""

    winner: Name
    timings: Mapping[Name, Timing]


def race(contenders: Contenders[Name], least_gain: float = _LEAST_GAIN) -> Outcome[Name]:
    """Decides a race: the fastest contender whose results are right.

    The first contender, the present choice, is verified too, and stays unless another one is clearly faster (see
    `fastest`) in two measurements. If the winner's results are wrong, all other contenders are timed again, since they
    may have been dropped for being far slower than a contender that skips work.

    Raises:
        PlanError: all contenders have been rejected.
    """
    timings: dict[Name, Timing] = {}
    while names := [*contenders.names()]:
        present = names[0]
        timings |= contenders.take_times(names)
        winner = fastest({name: timings[name] for name in names if name in timings}, present, least_gain)
        if winner != present:
            timings |= contenders.take_times([present, winner])
            winner = fastest({name: timings[name] for name in (present, winner)}, present, least_gain)
        if winner not in contenders.reject_wrong(list(dict.fromkeys((winner, present)))):
            return Outcome(winner, timings)
    raise PlanError("every contender is rejected")
