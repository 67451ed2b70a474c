"""Timing contenders against each other with a clock that the tests set, and the rule that picks the winner.

The last tests run whole races between contenders: when a challenger replaces the present contender, and when a
difference is within the clock's error.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.tuner import operands
from lt_runtime.tuner.operands import buffer_sets
from lt_runtime.tuner.timing import Timing, fastest, race, take_times
from tests.support.fake_clock import FakeClock

FOREVER = float("inf")


def times(clock: FakeClock, contenders: dict[str, Any], sets: int = 1, budget_s: float = FOREVER) -> dict[str, Timing]:
    assert not clock.open
    measured = take_times(contenders, clock, sets, budget_s)  # type: ignore[arg-type]
    assert not clock.open
    return measured


def test_medians_and_spreads_are_of_one_launch() -> None:
    clock = FakeClock(iter([1.0, 1.1, 0.9, 1.2, 1.0, 1.05, 0.95]))
    measured = times(clock, clock.contenders(only=20.0))
    assert measured["only"].median_us == pytest.approx(20.0)
    assert measured["only"].spread_us == pytest.approx(20.0 * (1.075 - 0.975))
    assert not measured["only"].dropped


def test_contenders_take_turns_back_and_forth() -> None:
    clock = FakeClock()
    times(clock, clock.contenders(a=10.0, b=11.0, c=12.0))
    assert clock.rounds == [list("abc"), list("cba")] * 3 + [list("abc")]


def test_in_a_loop_what_is_left_in_the_caches_counts_for_who_left_it() -> None:
    clock = FakeClock()
    clock.leaves_us = {"saving": 12.0}
    contenders = clock.contenders(first=500.0, saving=500.0)
    in_turns = times(clock, contenders)
    assert in_turns["first"] == in_turns["saving"]  # in every second round the order of the contenders is reversed
    in_a_loop = take_times(contenders, clock, 1, FOREVER, in_a_loop=True)  # type: ignore[arg-type]
    assert in_a_loop == {"first": Timing(500.0, 0.0), "saving": Timing(488.0, 0.0)}


@pytest.mark.parametrize(("us", "sets", "saved"), [(1999.0, 1, 0.0), (2000.0, 1, 12.0), (1999.0, 2, 12.0)])
def test_in_a_loop_as_far_as_caches_matter(us: float, sets: int, saved: float) -> None:
    clock = FakeClock()
    clock.leaves_us = {"saving": 12.0 * sets}
    contenders = clock.contenders(saving=us, other=us)
    measured = take_times(contenders, clock, sets, FOREVER, rounds=3, in_a_loop=True)  # type: ignore[arg-type]
    assert measured["other"].median_us == us - saved


def test_one_far_behind_is_launched_alone_and_dropped() -> None:
    clock = FakeClock()
    measured = times(clock, clock.contenders(a=10.0, slow=31.0, b=29.0, slower=1031.0))
    assert measured["slow"] == Timing(31.0, 0.0, dropped=True)
    assert not measured["b"].dropped
    assert sum(name == "slow" for name, _ in clock.launched) == 2 + 13, "twice alone, and 400 µs more"
    assert sum(name == "slower" for name, _ in clock.launched) == 2, "the host cannot explain as much"
    assert list(measured) == ["a", "slow", "b", "slower"]


def test_the_host_s_time_to_launch_leaves_nobody_behind() -> None:
    clock = FakeClock()
    clock.graph_us = 40.0
    contenders = {"one kernel": clock.contender("one", 4.0, host_us=5.0)}
    contenders["some kernels"] = clock.contender("some", 3.0, host_us=60.0)
    measured = times(clock, contenders)
    assert measured == {"one kernel": Timing(4.0, 0.0), "some kernels": Timing(3.0, 0.0)}
    assert times(clock, {**contenders, "slow": clock.contender("slow", 40.0)})["slow"].dropped


def test_the_best_without_the_host_s_time_puts_others_in_doubt() -> None:
    clock = FakeClock()
    # Launched alone, C looks slowest, because of its host time. Only its time in a graph (3 µs) shows that A, at 20 µs,
    # is far slower than the fastest.
    hosts = {"a": (20.0, 7.0), "b": (4.0, 60.0), "c": (3.0, 100.0)}
    measured = times(clock, {name: clock.contender(name, us, host_us=host) for name, (us, host) in hosts.items()})
    assert measured == {"a": Timing(20.0, 0.0, dropped=True), "b": Timing(4.0, 0.0), "c": Timing(3.0, 0.0)}


def test_one_that_runs_for_seconds_is_launched_once() -> None:
    clock = FakeClock()
    measured = times(clock, clock.contenders(a=10.0, endless=3e6, b=9.0))
    assert measured["endless"].dropped
    assert clock.alone.count("endless") == 1
    assert clock.alone.count("b") == 2


def test_loading_a_kernel_counts_against_nobody() -> None:
    clock = FakeClock()
    contenders = {"a": clock.contender("a", 10.0), "b": clock.contender("b", 10.0, first_us=2e5)}
    assert not times(clock, contenders)["b"].dropped


@pytest.mark.parametrize(("us", "sets", "launches"), [(4.0, 1, 50), (100.0, 1, 4), (5e3, 1, 1), (100.0, 3, 6)])
def test_a_graph_holds_some_launches_of_every_set(us: float, sets: int, launches: int) -> None:
    clock = FakeClock()
    times(clock, clock.contenders(only=us), sets)
    captured = clock.launched[2:]
    assert [number for _, number in captured] == [index % sets for index in range(launches)]


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """A clock whose launches use up the tuner's time budget."""
    clock = FakeClock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    return clock


def test_when_time_is_up_what_was_not_tried_is_left_out(timed: FakeClock) -> None:
    measured = times(timed, timed.contenders(a=1e5, b=1e5, c=1e5), budget_s=0.15)
    assert list(measured) == ["a", "b"]
    assert len(timed.rounds) == 3
    assert list(times(timed, timed.contenders(a=1.0, b=1.0), budget_s=-1.0)) == ["a"], "at least the first is timed"


def test_what_is_compiled_and_loaded_takes_no_time_from_the_others(timed: FakeClock) -> None:
    contenders = {name: timed.contender(name, 1.0, first_us=4e5) for name in "abc"}
    measured = times(timed, contenders, budget_s=0.5)
    assert {name: timing.dropped for name, timing in measured.items()} == dict.fromkeys("abc", False)
    assert len(timed.rounds) > 3
    assert timed.watch.seconds < 0.5 < timed.now


def test_slow_ones_use_up_the_time_although_they_are_tried_but_once(timed: FakeClock) -> None:
    contenders = {"a": timed.contender("a", 1.0), **{f"slow {n}": timed.contender(f"slow {n}", 3e6) for n in range(9)}}
    assert list(times(timed, contenders, budget_s=1.5)) == ["a", "slow 0", "slow 1"]


def test_what_a_contender_raises_comes_through_and_graphs_are_freed() -> None:
    clock = FakeClock()
    calls = itertools.count()

    def breaks(number: int, stream: int) -> None:
        clock.launched.append(("b", number))
        if next(calls) == 2:  # the second launch, which is captured, fails
            raise RuntimeError("broken")

    contenders: dict[str, Any] = {"a": clock.contender("a", 1.0), "b": breaks}
    with pytest.raises(RuntimeError, match="broken"):
        take_times(contenders, clock, 1, FOREVER)  # type: ignore[arg-type]


FIRST = Timing(100.0, 0.5)


@pytest.mark.parametrize(
    ("timings", "winner"),
    [
        ({"first": FIRST, "challenger": Timing(98.0, 0.1)}, "challenger"),
        ({"first": FIRST, "challenger": Timing(99.5, 0.1)}, "first"),  # The challenger is faster by less than 1 %.
        ({"first": FIRST, "challenger": Timing(98.0, 5.0)}, "first"),  # The challenger is faster by less than noise.
        ({"first": FIRST, "challenger": Timing(94.0, 5.0)}, "challenger"),
        ({"first": FIRST, "challenger": Timing(101.0, 0.1)}, "first"),
        ({"first": FIRST, "challenger": Timing(50.0, 0.0, dropped=True)}, "first"),
        ({"first": Timing(100.0, 0.0, dropped=True), "challenger": FIRST}, "challenger"),
        ({"first": FIRST, "noisy": Timing(90.0, 20.0), "a": Timing(95.0, 0.5), "b": Timing(92.0, 0.5)}, "b"),
        ({"noisy": Timing(90.0, 20.0), "b": Timing(92.0, 0.5)}, "noisy"),
    ],
)
def test_a_challenger_must_win_by_more_than_the_noise(timings: dict[str, Timing], winner: str) -> None:
    assert fastest(timings, "first") == winner


positive = st.floats(0.1, 1e4)
timings_of = st.dictionaries(st.text(max_size=3), st.builds(Timing, positive, positive), min_size=1)


@given(timings=timings_of, data=st.data())
def test_the_winner_is_never_slower_than_the_first(timings: dict[str, Timing], data: st.DataObject) -> None:
    first = data.draw(st.sampled_from(sorted(timings)))
    assert timings[fastest(timings, first)].median_us <= timings[first].median_us


@pytest.mark.parametrize(("size", "sets"), [(1, 1), (9_000_000, 1), (10_000_000, 15), (75_000_000, 2), (10**9, 1)])
def test_buffer_sets_exceed_the_cache_if_that_takes_few(size: int, sets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operands, "device_attributes", lambda *_: (50_000_000,))
    assert buffer_sets(size, 0) == sets


def test_what_is_out_of_reach_after_three_rounds_is_left_alone() -> None:
    clock = FakeClock()
    measured = times(clock, clock.contenders(a=10.0, b=11.9, c=12.1))
    assert clock.rounds == [list("abc"), list("cba"), list("abc"), *([list("ba"), list("ab")] * 2)]
    assert measured["c"].median_us == pytest.approx(12.1)


class Few:
    """Contenders whose launches take as long as a test says."""

    def __init__(self, clock: FakeClock, launches: dict[str, Any], least_us: float = 0.0) -> None:
        self.clock, self.launches, self.least_us = clock, launches, least_us
        self.left, self.wrong, self.timed = [*launches], set[str](), list[tuple[str, ...]]()

    def names(self) -> list[str]:
        return self.left

    def take_times(self, names: Collection[str]) -> dict[str, Timing]:
        self.timed.append(tuple(names))
        contenders: Any = {name: self.launches[name] for name in names}
        return take_times(contenders, self.clock, 1, 1e9, least_us=self.least_us)  # type: ignore[arg-type]

    def reject_wrong(self, names: Collection[str]) -> set[str]:
        wrong = self.wrong.intersection(names)
        self.left = [name for name in self.left if name not in wrong]
        return wrong


def few(least_us: float = 0.0, **us: float) -> Few:
    clock = FakeClock()
    return Few(clock, clock.contenders(**us), least_us)


def test_the_fastest_is_timed_beside_the_present_one_a_second_time() -> None:
    contenders = few(present=10.0, fast=5.0, other=7.0)
    outcome = race(contenders)
    assert outcome.winner == "fast"
    assert contenders.timed == [("present", "fast", "other"), ("present", "fast")]


def test_what_is_faster_only_once_does_not_replace_the_present_one() -> None:
    # The readings of seven rounds, in which the order of the two contenders alternates.
    clock = FakeClock(iter([1.0, 0.5, 0.5, 1.0] * 3 + [1.0, 0.5] + [1.0] * 100))
    contenders = Few(clock, clock.contenders(present=500.0, lucky=500.0))
    outcome = race(contenders)
    assert (outcome.winner, len(contenders.timed)) == ("present", 2)


@pytest.mark.parametrize("interrupted_us", [600.0, 30_000.0])
def test_an_interruption_of_the_host_does_not_put_the_present_one_out(interrupted_us: float) -> None:
    """The present contender's two single launches are both interrupted for longer than a launch takes on the host."""
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
