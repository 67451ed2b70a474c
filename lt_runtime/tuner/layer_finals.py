"""The last stage of a layer's tuning: whole splits end to end, the winner's results, and what is remembered of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from lt_runtime.errors import PlanError
from lt_runtime.plans.strategies import to_entry
from lt_runtime.store.entries import Alternative, Effort, LayerEntry
from lt_runtime.tuner.alternatives import Alternatives, Half, Pair, half_name, priors_of
from lt_runtime.tuner.layer_trial import LayerTrial, disagreement
from lt_runtime.tuner.links import LayerProblem, Link
from lt_runtime.tuner.names import strategy_in_words
from lt_runtime.tuner.timing import Timing, buffer_sets, fastest, take_times
from lt_runtime.tuner.trial import NORMAL
from lt_runtime.tuner.workbench import Bench

_ROUNDS: Final = 7
_CLOSE: Final = 1.1
_MOST_FINALISTS: Final = 6
_MOST_BY_HEURISTIC: Final = 2
_BEFORE: Final = "before"


class Table:
    """A link's operands on a workbench, as many sets as it takes to keep them out of the cache."""

    def __init__(self, bench: Bench, link: Link) -> None:
        self._bench, self._dtype = bench, link.problems[0].dtype
        first = LayerTrial(bench.xp, link)
        others = range(1, buffer_sets(first.size, bench.device))
        self._trials = [first, *(LayerTrial(bench.xp, link) for _ in others)]
        for seed, trial in enumerate(self._trials):
            trial.fill(NORMAL, seed)

    def take_times(self, contenders: Mapping[str, Sequence[Half]], rounds: int, budget_s: float) -> dict[str, Timing]:
        """See `timing.take_times`; a contender is the plans that it runs one after the other."""
        launches = {name: partial(self._launch, plans) for name, plans in contenders.items()}
        return take_times(launches, self._bench.clock, len(self._trials), budget_s, rounds)

    def _launch(self, plans: Sequence[Half], number: int, stream: int) -> None:
        for plan in plans:
            self._trials[number].run(plan, stream)

    def results(self, plans: Sequence[Half]) -> dict[str, Any]:
        """What plans make of the data for comparison, by output's name: in a graph, where branches are branches."""
        clock, run = self._bench.clock, partial(self._launch, plans, 0)
        run(clock.stream)  # what loads kernels, or allocates, cannot be captured
        self._trials[0].prepare()
        with clock.capture(run) as graph:
            clock.replay([graph])
        found = self._trials[0].results()
        self._trials[0].fill(NORMAL, 0)
        return found

    def disagreement(self, plans: Sequence[Half], expected: Mapping[str, Any]) -> tuple[str, str] | None:
        """See `layer_trial.disagreement`."""
        return disagreement(self.results(plans), expected, self._dtype)


def sums_of(alternatives: Alternatives, halves: Mapping[str, Timing]) -> dict[Pair, float]:
    """Microseconds of both halves of the pairs that were timed, one after the other."""
    known = {name: timing.median_us for name, timing in halves.items()} | {"": 0.0}
    pairs = (pair for pair in alternatives.pairs() if all(name in known for name in pair))
    return {pair: sum(known[name] for name in pair) for pair in pairs}


@dataclass(frozen=True, slots=True)
class Finalist:
    """A pair in the finals.

    Attributes:
        alternatives: where its plans are: by the tuned algorithms, or by the heuristic's. An algorithm that is the
            fastest by itself need not be so between others, as clocks, caches and what runs beside it are not the same.
    """

    pair: Pair
    alternatives: Alternatives

    @property
    def plans(self) -> list[Half]:
        """Its halves, forward first."""
        return self.alternatives.plans(self.pair)


class Finals:
    """Times the best pairs against each other, and what runs untuned, until the fastest is right.

    Args:
        before: by the heuristic's algorithms. after: those that are still in, by the tuned ones.
        halves: what each half takes by itself.
        unsound: names of halves that may not be used by the heuristic's algorithms.
        budget_s: see `Budget`.

    Attributes:
        pair: the winner; what runs untuned where that stays.
        by_heuristic: whether its products had better use the heuristic's algorithms.
        untuned_stays: whether it is faster than the winner among the tuned.
        before, after: what the untuned and the winner take.
        measured: how many were timed.

    Raises:
        PlanError: nothing is left.
    """

    def __init__(
        self,
        table: Table,
        before: Alternatives,
        after: Alternatives,
        halves: Mapping[str, Timing],
        unsound: Set[str],
        budget_s: float,
    ) -> None:
        self._table, self._halves, self._budget_s = table, halves, budget_s
        self._unsound = unsound
        self._all, self._left = before, after
        untuned, self._trusted = before.prior(), before.plainest()
        assert untuned is not None
        assert self._trusted is not None
        self._untuned = before.plans(untuned)
        self._expected = table.results(before.plans(self._trusted))
        self.measured = 0
        timings, chosen = self._compete()
        name, winner = chosen
        self.after = timings[name]
        self.before = timings.get(_BEFORE, self.after)
        is_faster = _winner({name: self.after, _BEFORE: self.before}, name) == _BEFORE
        stays = is_faster and self._may_stay(untuned)
        by_heuristic = winner.alternatives is before
        self.untuned_stays = stays or (by_heuristic and winner.pair == untuned)
        self.by_heuristic = by_heuristic and not self.untuned_stays
        self.pair = untuned if self.untuned_stays else winner.pair

    def _compete(self) -> tuple[dict[str, Timing], tuple[str, Finalist]]:
        while finalists := self._finalists():
            first = next(iter(finalists))
            contenders = {first: finalists[first].plans, _BEFORE: self._untuned}
            contenders |= {name: each.plans for name, each in finalists.items()}
            timings = self._table.take_times(contenders, _ROUNDS, self._budget_s)
            self.measured += len(timings)
            chosen = _winner({name: each for name, each in timings.items() if name != _BEFORE}, first)
            if not self._is_wrong(finalists[chosen]):
                return timings, (chosen, finalists[chosen])
        raise PlanError(f"no split computes the right results for {self._all.link.problems[0]}")

    def _finalists(self) -> dict[str, Finalist]:
        """The priors' pair, the best, and the plainest, by name; the best by the heuristic's algorithms as well."""
        sums = sums_of(self._left, self._halves)
        best = sorted(sums, key=sums.__getitem__)[:_MOST_FINALISTS]
        close = [pair for pair in best if sums[pair] <= _CLOSE * sums[best[0]]]
        pairs = (self._left.prior(), *close, self._left.plainest())
        tuned = {_name(pair): Finalist(pair, self._left) for pair in pairs if pair is not None}
        first = [pair for pair in close if self._unsound.isdisjoint(pair)][:_MOST_BY_HEURISTIC]
        return tuned | {f"{_name(pair)} by the heuristic": Finalist(pair, self._all) for pair in first}

    def _is_wrong(self, finalist: Finalist) -> bool:
        """Whether a pair's results are not those of plain products and our kernels; the half at fault is then out."""
        if finalist.pair == self._trusted:
            return False
        fault = self._table.disagreement(finalist.plans, self._expected)
        if fault is None:
            return False
        output, words = fault
        forward, backward = finalist.pair
        name = forward if output == "y" or not backward else backward
        self._left.reject(name, f"wrong: {words}")
        return True

    def _may_stay(self, untuned: Pair) -> bool:
        is_left = untuned in self._left.pairs() and self._unsound.isdisjoint(untuned)
        return is_left and self._table.disagreement(self._untuned, self._expected) is None

    def entries(self, effort: Effort) -> dict[LayerProblem, LayerEntry]:
        """What is to be remembered of the forward problem, and of the backward problem for all that may be kept."""
        chosen = {self._all.halves[name].problem: name for name in self.pair if name}
        found = {problem: chosen.get(problem) or self._best(problem) for problem in self._all.rejected}
        return {problem: self._entry(problem, name, effort) for problem, name in found.items() if name is not None}

    def _timed(self, problem: LayerProblem) -> dict[str, Timing]:
        """What the halves take that a problem may be split into."""
        out = [each.strategy for each in self._left.rejected[problem]]
        halves = {name: half for name, half in self._all.halves.items() if half.problem == problem}
        return {
            name: self._halves[name]
            for name, half in halves.items()
            if name in self._halves and to_entry(half.strategy) not in out
        }

    def _best(self, problem: LayerProblem) -> str | None:
        timed = self._timed(problem)
        names = (half_name(problem, each) for each in priors_of(problem, self._all.device))
        first = next((name for name in names if name in timed), None)
        return _winner(timed, first) if first is not None else None

    def _entry(self, problem: LayerProblem, chosen: str, effort: Effort) -> LayerEntry:
        halves, timed = self._all.halves, self._timed(problem)
        others = [name for name in sorted(timed, key=lambda name: timed[name].median_us) if name != chosen]
        return LayerEntry(
            to_entry(halves[chosen].strategy),
            timed.get(chosen, self.after).median_us,
            tuple(Alternative(to_entry(halves[name].strategy), timed[name].median_us) for name in others),
            tuple(self._left.rejected[problem]),
            effort=effort,
        )

    def rejections(self) -> list[str]:
        """What is out, and why, in words."""
        out = [each for rejected in self._left.rejected.values() for each in rejected]
        timed = {name: timing for problem in self._all.rejected for name, timing in self._timed(problem).items()}
        slow = [
            f"{name}: slow: {each.median_us:.1f} µs" for name, each in timed.items() if name not in self._left.halves
        ]
        return [*(f"{strategy_in_words(each.strategy)}: {each.reason}" for each in out), *slow]


def _name(pair: Pair) -> str:
    return " | ".join(filter(None, pair))


def _winner(timings: Mapping[str, Timing], first: str) -> str:
    """`fastest`, also where all that are left were dropped."""
    if all(each.dropped for each in timings.values()):
        return min(timings, key=lambda name: timings[name].median_us)
    return fastest(timings, first)
