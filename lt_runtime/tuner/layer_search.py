"""Measures the splits of a part of a chain against each other, and picks one.

The plans of each problem are timed first, by the heuristic's algorithms, and the products' algorithms are tuned in the
plans that are promising. The best splits are then timed as a whole against what runs untuned. The winner must compute
what plain products and our kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from lt_runtime.errors import PlanError
from lt_runtime.kernels.narrow import takes
from lt_runtime.plans.decisions import LayerPlan, LayerProblem, priors_of
from lt_runtime.plans.strategies import to_entry
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.choose import Choose, heuristic_algorithm
from lt_runtime.store.entries import Alternative, Effort, LayerEntry, ProductEntry, is_as_deep
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.tuner.chain import Chain
from lt_runtime.tuner.chain_operands import OperandSets
from lt_runtime.tuner.product_search import Products
from lt_runtime.tuner.report import algorithm_in_words, describe, strategy_in_words
from lt_runtime.tuner.splits import Split, Splits, plan_name, variants_of
from lt_runtime.tuner.timing import Bench, Timing, fastest, take_times


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds of timing after which a stage times nothing more; see `Stopwatch`."""

    screening: float
    products: float
    finals: float


BUDGETS: Final[Mapping[str, Budget]] = {"default": Budget(0.5, 2.0, 0.8), "deep": Budget(2.0, 120.0, 3.0)}
"""By effort."""
_LEAST_PRODUCT_S: Final = 0.05
_SCREENING_ROUNDS: Final = 3
_PLANS_ROUNDS: Final = 5
_FINAL_ROUNDS: Final = 7
# Algorithms differ by 1 to 8 %, seldom by more. A plan that is further behind with the heuristic's algorithms will not
# win with the best ones.
_PROMISING: Final = 1.4
_CLOSE: Final = 1.1
_MOST_FINALISTS: Final = 6
_MOST_BY_HEURISTIC: Final = 2
_BEFORE: Final = "before"


@dataclass(frozen=True, slots=True)
class Decision:
    """What was found for problems that are decided together.

    Attributes:
        products, layers: for the plan cache, by problem.
        before_us: microseconds as the problems ran before. after_us: as decided.
        strategy: in words.
        measured: how many plans and algorithms were timed.
        rejected: in words.
    """

    products: Mapping[MatmulProblem, ProductEntry]
    layers: Mapping[LayerProblem, LayerEntry]
    before_us: float
    after_us: float
    strategy: str
    measured: int
    rejected: tuple[str, ...] = ()


def decide_part(bench: Bench, store: PlanStore, part: Chain, effort: Effort) -> Decision:
    """The fastest split of a part whose results are right.

    Args:
        part: see `Chain.cut`; none of its problems is empty.

    Raises:
        PlanError: the library has no algorithm even for the plain products.
        MemoryError: the GPU has not enough memory.
    """
    search = _Search(bench, store, part, effort)
    before = search.splits(heuristic_algorithm)
    search.time_plans(before, _SCREENING_ROUNDS, search.budget.screening)
    promising = search.promising(before)
    search.tune_products(before, promising)
    after = search.splits(search.products.plan, {*promising, *(before.plainest() or ())})
    search.time_plans(after, _PLANS_ROUNDS, search.budget.finals)
    return search.conclude(before, after)


_Placed: TypeAlias = list[tuple[int, LayerPlan]]
"""Plans that run one after the other, each with the index of its layer in the part."""


class _Finalist(NamedTuple):
    """A split in the finals, planned by the tuned algorithms or by the heuristic's.

    An algorithm that is the fastest by itself need not be so between others, because clocks, caches and what runs
    beside it are not the same.
    """

    split: Split
    splits: Splits

    @property
    def placed(self) -> _Placed:
        return self.splits.placed(self.split)


class _Search:
    def __init__(self, bench: Bench, store: PlanStore, part: Chain, effort: Effort) -> None:
        self.bench, self.part, self.effort, self.budget = bench, part, effort, BUDGETS[effort]
        self.products = Products(store)
        problems = [problem for variants in variants_of(part) for problem in variants]
        known = {problem: store.layer(problem_key(problem)) for problem in problems}
        self._rejected = {problem: [*entry.rejected] if entry else [] for problem, entry in known.items()}
        self._timings: dict[str, Timing] = {}  # of single plans
        self._measured = 0
        self._complaints: list[str] = []
        self._operands = OperandSets(bench, part)

    def splits(self, choose: Choose, only: Collection[str] | None = None) -> Splits:
        """Plans of all splits, or the named plans; what is refused stays out.

        Raises:
            PlanError: one of the problems has no plan left.
        """
        made = Splits(self.part, self.bench.device, choose, self._rejected, only)
        self._rejected = made.rejected
        if made.prior() is None:
            reasons = "; ".join(each.reason for rejected in made.rejected.values() for each in rejected)
            raise PlanError(f"no split is of use for {self.part.problems[0]}: {reasons}")
        return made

    def time_plans(self, splits: Splits, rounds: int, budget_s: float) -> None:
        """Times the plans of each direction against each other, the priors' first."""
        for first, plans in zip(splits.prior() or (), splits.directions, strict=True):
            names = sorted(plans, key=lambda name: name != first)
            self._timings |= self._take_times({name: splits.placed((name,)) for name in names}, rounds, budget_s)

    def _take_times(self, contenders: Mapping[str, _Placed], rounds: int, budget_s: float) -> dict[str, Timing]:
        launches = {name: self._operands.launch(plans) for name, plans in contenders.items()}
        timings = take_times(launches, self.bench.clock, len(self._operands), budget_s, rounds)
        self._measured += len(timings)
        return timings

    def promising(self, splits: Splits) -> set[str]:
        """Names of the priors' plans, and of those that are not far behind, alone and with the plan they go with.

        The times are by the heuristic's algorithms. They say little where our kernel takes a product, so that all such
        plans are in.
        """
        plans, times = splits.plans, splits.times(self._timings)
        best: dict[LayerProblem, float] = {}
        for name, timing in self._timings.items():
            problem = plans[name].problem
            best[problem] = min(best.get(problem, math.inf), timing.median_us)
        limit = _PROMISING * min(times.values())
        names = {name for split, us in times.items() if us <= limit for name in split}
        near = {name for name in names if self._timings[name].median_us <= _PROMISING * best[plans[name].problem]}
        ours = {name for name, plan in plans.items() if any(takes(each.problem) for each in plan.products.values())}
        return near | ours | set(splits.prior() or ())

    def tune_products(self, splits: Splits, names: Iterable[str]) -> None:
        """Finds the algorithms of the products of some plans, those that are not known already."""
        products = dict.fromkeys(each.problem for name in names for each in splits.plans[name].products.values())
        entry = self.products.entry
        unknown = [each for each in products if not each.is_empty and not is_as_deep(entry(each), self.effort)]
        watch = self.bench.clock.watch
        deadline = watch.seconds + self.budget.products
        for number, problem in enumerate(unknown):
            left = max(deadline - watch.seconds, 0.0) / (len(unknown) - number)
            found = self.products.search(self.bench, problem, self.effort, max(left, _LEAST_PRODUCT_S))
            if found is not None:
                self._measured += found.candidates
                name = describe(problem)
                self._complaints += [
                    f"{name} by {algorithm_in_words(each.config)}: {each.reason}" for each in found.rejected
                ]

    def conclude(self, before: Splits, after: Splits) -> Decision:
        """Times the best splits against each other; what runs untuned stays if it is faster than their winner.

        Raises:
            PlanError: nothing is left.
        """
        untuned, trusted = before.prior(), before.plainest()
        assert untuned is not None
        assert trusted is not None
        expected = self._operands.results(before.placed(trusted))
        unsound = {name for name, plan in before.plans.items() if self.products.is_unsound(plan)}
        while True:  # until the fastest is right
            finalists = self._finalists(before, after, unsound)
            timings = self._finals(finalists, before.placed(untuned))
            name = fastest({name: each for name, each in timings.items() if name != _BEFORE}, next(iter(finalists)))
            winner, new, old = finalists[name], timings[name], timings.get(_BEFORE, timings[name])
            fault = None if winner.split == trusted else self._operands.disagreement(winner.placed, expected)
            if fault is None:
                break
            output, words = fault
            after.reject(winner.split[0 if output == "y" else -1], f"wrong: {words}")
        stays = winner == (untuned, before)
        if fastest({name: new, _BEFORE: old}, name) == _BEFORE and untuned in after.splits:
            is_sound = unsound.isdisjoint(untuned)
            stays |= is_sound and self._operands.disagreement(before.placed(untuned), expected) is None
        winner = _Finalist(untuned, before) if stays else winner
        return self._decision(before, after, winner, old, new, stays=stays)

    def _decision(
        self, before: Splits, after: Splits, winner: _Finalist, old: Timing, new: Timing, *, stays: bool
    ) -> Decision:
        products = {} if stays else {**self.products.found}
        if winner.splits is before and not stays:
            for _, plan in winner.placed:
                products |= self.products.as_planned(plan)
        record = _Record(before, after, self._timings)
        words = " | ".join(strategy_in_words(to_entry(after.plans[name].strategy)) for name in winner.split)
        return Decision(
            products,
            record.entries(winner.split, new.median_us, self.effort),
            old.median_us,
            (old if stays else new).median_us,
            words,
            self._measured,
            (*record.rejections(), *self._complaints),
        )

    def _finalists(self, before: Splits, after: Splits, unsound: Set[str]) -> dict[str, _Finalist]:
        """The priors' split, the best, and the plainest, by name; the best by the heuristic's algorithms as well.

        Raises:
            PlanError: no split is left.
        """
        times = after.times(self._timings)
        best = sorted(times, key=times.__getitem__)[:_MOST_FINALISTS]
        close = [split for split in best if times[split] <= _CLOSE * times[best[0]]]
        tuned = [split for split in (after.prior(), *close, after.plainest()) if split is not None]
        sound = [split for split in close if unsound.isdisjoint(split)][:_MOST_BY_HEURISTIC]
        if not tuned:
            raise PlanError(f"no split computes the right results for {self.part.problems[0]}")
        found = {" | ".join(split): _Finalist(split, after) for split in tuned}
        return found | {f"{' | '.join(split)} by the heuristic": _Finalist(split, before) for split in sound}

    def _finals(self, finalists: Mapping[str, _Finalist], untuned: _Placed) -> dict[str, Timing]:
        first = next(iter(finalists))
        contenders = {first: finalists[first].placed, _BEFORE: untuned}
        contenders |= {name: each.placed for name, each in finalists.items()}
        return self._take_times(contenders, _FINAL_ROUNDS, self.budget.finals)


class _Record:
    """What is remembered of the plans of a part.

    Args:
        before: all plans, by the heuristic's algorithms. after: those that are left.
        timings: of plans by themselves.
    """

    def __init__(self, before: Splits, after: Splits, timings: Mapping[str, Timing]) -> None:
        self._after, self._device = after, before.device
        self._plans = before.plans
        self._timed = {problem: self._of(problem, timings) for problem in before.rejected}

    def _of(self, problem: LayerProblem, timings: Mapping[str, Timing]) -> dict[str, Timing]:
        """Timings of the problem's plans that are not rejected."""
        out = [each.strategy for each in self._after.rejected[problem]]
        plans = {name: plan for name, plan in self._plans.items() if plan.problem == problem and name in timings}
        return {name: timings[name] for name, plan in plans.items() if to_entry(plan.strategy) not in out}

    def entries(self, split: Split, us: float, effort: Effort) -> dict[LayerProblem, LayerEntry]:
        """An entry of the forward problem, and of the backward problem for everything that may be kept.

        Args:
            us: that the split takes, for a plan that was not timed by itself.
        """
        chosen = {self._plans[name].problem: name for name in split}
        names = {problem: chosen.get(problem) or self._best(problem) for problem in self._timed}
        return {problem: self._entry(problem, name, us, effort) for problem, name in names.items() if name is not None}

    def _best(self, problem: LayerProblem) -> str | None:
        timed = self._timed[problem]
        names = (plan_name(problem, each) for each in priors_of(problem, self._device))
        first = next((name for name in names if name in timed), None)
        return fastest(timed, first) if first is not None else None

    def _entry(self, problem: LayerProblem, chosen: str, us: float, effort: Effort) -> LayerEntry:
        timed = {name: timing.median_us for name, timing in self._timed[problem].items()}
        strategies = {name: to_entry(self._plans[name].strategy) for name in (chosen, *timed)}
        others = [name for name in sorted(timed, key=timed.__getitem__) if name != chosen]
        alternatives = tuple(Alternative(strategies[name], timed[name]) for name in others)
        rejected = tuple(self._after.rejected[problem])
        return LayerEntry(strategies[chosen], timed.get(chosen, us), alternatives, rejected, effort=effort)

    def rejections(self) -> list[str]:
        """What is out, and why, in words."""
        out = [each for rejected in self._after.rejected.values() for each in rejected]
        timed = {name: timing.median_us for timings in self._timed.values() for name, timing in timings.items()}
        slow = [f"{name}: slow: {us:.1f} µs" for name, us in timed.items() if name not in self._after.plans]
        return [*(f"{strategy_in_words(each.strategy)}: {each.reason}" for each in out), *slow]
