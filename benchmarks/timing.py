"""How times are taken: contenders take turns within one run, and each figure is a median with its spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

WARM_UP: Final = 2
"""Rounds before those that count."""

_REPLAY_US: Final = 2000.0  # one replay takes at least this long: an event's resolution is half a microsecond
_MAX_REPETITIONS: Final = 200  # of a task in one graph
_BYTES_PER_US: Final = 4.8e6  # the datasheet's bandwidth of an H200, which no kernel exceeds
_LAUNCH_US: Final = 1.5  # nor does one take less than this in a graph
_CACHES: Final = 4  # what the repetitions go round is at least this many times the L2 cache


class Timing(NamedTuple):
    """Microseconds: the median, and the distance between the quartiles."""

    median: float
    spread: float


def summarise(samples: Sequence[float]) -> Timing:
    """The median of some samples and their interquartile range, which is 0 for a single one."""
    if len(samples) == 1:
        return Timing(samples[0], 0.0)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(statistics.median(samples), high - low)


def take_turns(
    turns: Mapping[str, Callable[[], float]], rounds: int, advance: Callable[[], None] = lambda: None
) -> dict[str, Timing]:
    """Lets every contender have a turn in each round; every other round goes through them backwards.

    So a machine that grows warmer or slower does so for all of them, and nobody always follows the same one.

    Args:
        turns: run a contender once and return the microseconds that count.
        advance: is told of every round.
    """
    samples: dict[str, list[float]] = {name: [] for name in turns}
    for round_ in range(-WARM_UP, rounds):
        for name in list(turns)[:: -1 if round_ % 2 else 1]:
            sample = turns[name]()
            if round_ >= 0:
                samples[name].append(sample)
        advance()
    return {name: summarise(each) for name, each in samples.items()}


def buffer_sets(size: int, cache: int) -> int:
    """How many sets of buffers, of `size` bytes each, a task has to go round so that none is found in the cache."""
    return min(max(2, math.ceil(_CACHES * cache / size)), _MAX_REPETITIONS)


def repetitions(size: int, sets: int) -> int:
    """How often a graph repeats a task of `size` bytes: long enough to be timed well, and every set as often."""
    expected = max(size / _BYTES_PER_US, _LAUNCH_US)
    wanted = min(math.ceil(_REPLAY_US / expected), _MAX_REPETITIONS)
    return math.ceil(wanted / sets) * sets
