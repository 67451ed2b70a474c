"""The race on a clock that the tests set: when a challenger replaces the present contender, and when a difference is
within the clock's error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest

from lt_runtime.tuner.timing import Timing, race, take_times
from tests.support.fake_clock import FakeClock


class Few:
    """Contenders whose launches take as long as a test says."""

    def __init__(
        self, clock: FakeClock, launches: dict[str, Callable[[int, int], None]], least_us: float = 0.0
    ) -> None:
        self.clock, self.launches, self.least_us = clock, launches, least_us
        self.left, self.wrong, self.timed = [*launches], set[str](), list[tuple[str, ...]]()

    def names(self) -> list[str]:
        return self.left

    def take_times(self, names: Collection[str]) -> dict[str, Timing]:
        self.timed.append(tuple(names))
        contenders: Any = {name: self.launches[name] for name in names}
        return take_times(contenders, self.clock, 1, 1e9, least_us=self.least_us)  # type: ignore[arg-type]

    def faults(self, names: Collection[str]) -> dict[str, str]:
        return {name: "wrong" for name in names if name in self.wrong}

    def reject(self, name: str, reason: str) -> None:
        self.left.remove(name)


def few(least_us: float = 0.0, **us: float) -> Few:
    clock = FakeClock()
    return Few(clock, clock.contenders(**us), least_us)


def test_the_fastest_is_timed_beside_the_present_one_a_second_time() -> None:
    contenders = few(present=10.0, fast=5.0, other=7.0)
    outcome = race(contenders)
    assert outcome.winner == "fast"
    assert contenders.timed == [("present", "fast", "other"), ("present", "fast")]


def test_what_is_faster_only_once_does_not_replace_the_present_one() -> None:
    # Seven rounds, alternately in both orders.
    clock = FakeClock(iter([1.0, 0.5, 0.5, 1.0] * 3 + [1.0, 0.5] + [1.0] * 100))
    contenders = Few(clock, clock.contenders(present=500.0, lucky=500.0))
    outcome = race(contenders)
    assert (outcome.winner, len(contenders.timed)) == ("present", 2)


@pytest.mark.parametrize("interrupted_us", [600.0, 30_000.0])
def test_an_interruption_of_the_host_does_not_put_the_present_one_out(interrupted_us: float) -> None:
    """Both single launches of the present contender are interrupted for longer than any launch takes the host."""
    clock = FakeClock()
    costs = iter([interrupted_us, interrupted_us])
    contenders = Few(clock, clock.contenders(present=26.9, other=32.9))
    quick = contenders.launches["present"]

    def present(number: int, stream: int) -> None:
        quick(number, stream)
        clock._waited += next(costs, 0.0)

    contenders.launches["present"] = present
    outcome = race(contenders)
    assert outcome.winner == "present"
    assert outcome.timings["present"].median_us == pytest.approx(26.9)


def test_a_time_below_the_floor_is_measured_again() -> None:
    clock = FakeClock(iter([1.0, 1.0, 1.0, 0.014] + [1.0] * 100))
    outcome = race(Few(clock, clock.contenders(present=500.0, other=500.0), least_us=10.0))
    assert outcome.winner == "present"
    assert {each.median_us for each in outcome.timings.values()} == {500.0}
    assert race(few(10.0, present=5.0)).timings["present"].median_us == 10.0
