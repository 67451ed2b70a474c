"""Measures the splits of a part of a chain against each other, and picks one.

The plans of each problem are timed first, by the heuristic's algorithms, and the products' algorithms are tuned in the
plans that are promising. The best splits are then timed as a whole against what runs untuned. The winner must compute
what plain products and our kernels do.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from lt_runtime.errors import PlanError
from lt_runtime.kernels.narrow import takes
from lt_runtime.plans.decisions import LayerPlan, LayerProblem, Strategy, plan_for, priors_of, strategies_of
from lt_runtime.problem import BackwardProblem, ForwardProblem
from lt_runtime.products.choose import Choose, heuristic_algorithm
from lt_runtime.store.entries import Alternative, Effort, Entry, LayerEntry, RejectedStrategy, is_as_deep
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.store.records import to_json
from lt_runtime.tuner.chain import Chain, saved_kinds
from lt_runtime.tuner.chain_operands import OperandSets, Placed
from lt_runtime.tuner.product_search import Products
from lt_runtime.tuner.report import Decided, Tuned, algorithm_in_words, describe, strategy_in_words
from lt_runtime.tuner.timing import Bench, Timing, fastest


class Budget(NamedTuple):
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

Split: TypeAlias = tuple[str, ...]
"""Names of the plans that run a part, forward first."""
Plans: TypeAlias = dict[str, LayerPlan]
"""Plans of a part's problems, by names that tell them apart."""


def decide_part(bench: Bench, store: PlanStore, part: Chain, effort: Effort) -> Decided:
    """The fastest split of a part whose results are right, and what the plan cache is to remember.

    Args:
        part: see `Chain.cut`; none of its problems is empty.

    Raises:
        PlanError: the library has no algorithm even for the plain products.
        MemoryError: the GPU has not enough memory.
    """
    search = _Search(bench, store, part, effort)
    search.time_alone(search.before, _SCREENING_ROUNDS, BUDGETS[effort].screening)
    promising = search.promising()
    search.tune_products(promising)
    search.plan_tuned(promising)
    return search.conclude()


class _Search:
    """The plans of a part, and what is known of them.

    Attributes:
        before: all plans that can be made, by the heuristic's algorithms.
        after: the promising ones by the tuned algorithms, as far as they are not rejected.
    """

    def __init__(self, bench: Bench, store: PlanStore, part: Chain, effort: Effort) -> None:
        self._bench, self._part, self._effort, self._budget = bench, part, effort, BUDGETS[effort]
        self._variants, self._layers = variants_of(part), [layer for layer, _ in part.runs]
        known = {problem: store.layer(problem_key(problem)) for problem in itertools.chain(*self._variants)}
        self._rejected = {problem: [*entry.rejected] if entry else [] for problem, entry in known.items()}
        self._products, self._operands = Products(store), OperandSets(bench, part)
        self._timings: dict[str, Timing] = {}  # of single plans that are not rejected
        self.before = self._plans(heuristic_algorithm)
        self.after: Plans = {}

    def _plans(self, choose: Choose, only: Collection[str] | None = None) -> Plans:
        """Plans by every strategy, or the named plans; what the library refuses is rejected.

        A backward problem has plans for everything that forward may keep, each by itself.

        Raises:
            PlanError: no split is left.
        """
        choose, made = functools.cache(choose), {}
        for problem, rejected in self._rejected.items():
            out = [each.strategy for each in rejected]
            for strategy in strategies_of(problem):
                name = plan_name(problem, strategy)
                if to_json(strategy) in out or (only is not None and name not in only):
                    continue
                try:
                    made[name] = plan_for(problem, self._bench.device, strategy, choose)
                except PlanError as error:
                    self._reject(problem, strategy, f"refused: {error}")
        if not self._splits(made):
            reasons = "; ".join(each.reason for rejected in self._rejected.values() for each in rejected)
            raise PlanError(f"no split is of use for {self._part.problems[0]}: {reasons}")
        return made

    def _reject(self, problem: LayerProblem, strategy: Strategy, reason: str) -> None:
        self._rejected[problem].append(RejectedStrategy(to_json(strategy), reason))
        self._timings.pop(plan_name(problem, strategy), None)

    def _splits(self, plans: Plans, order: Callable[[LayerProblem], Iterable[Strategy]] = strategies_of) -> list[Split]:
        """Plans that go together, as backward reads what forward keeps; the first of each problem first."""
        named = [[plan_name(each, one) for each in variants for one in order(each)] for variants in self._variants]
        there = ([name for name in names if name in plans] for names in named)
        return [split for split in itertools.product(*there) if self._goes_together(plans, split)]

    def _goes_together(self, plans: Plans, split: Split) -> bool:
        reader = self._part.reader(0)
        if reader is None:
            return True
        forward, backward = (plans[name] for name in split)
        return getattr(backward.problem, reader[1]).saved is forward.strategy.saved

    def _untuned_and_plainest(self, plans: Plans) -> list[Split]:
        """The split that the priors take, and that of plain products and our kernels; neither if no split is left."""
        by_priors = functools.partial(priors_of, device=self._bench.device)
        return [split for order in (by_priors, _plainest_first) for split in self._splits(plans, order)[:1]]

    def _placed(self, plans: Plans, split: Split) -> Placed:
        return [*zip(self._layers, (plans[name] for name in split), strict=True)]

    def _times(self, plans: Plans) -> dict[Split, float]:
        """Microseconds of all plans of a split, one after the other, of the splits whose plans were timed."""
        timed = [split for split in self._splits(plans) if self._timings.keys() >= {*split}]
        return {split: sum(self._timings[name].median_us for name in split) for split in timed}

    def time_alone(self, plans: Plans, rounds: int, budget_s: float) -> None:
        """Times the plans of each direction against each other, the priors' first."""
        untuned, _ = self._untuned_and_plainest(plans)
        for first, layer, variants in zip(untuned, self._layers, self._variants, strict=True):
            names = [first, *(name for name in plans if plans[name].problem in variants)]
            contenders = {name: [(layer, plans[name])] for name in names}
            self._timings |= self._operands.take_times(contenders, budget_s, rounds)

    def promising(self) -> set[str]:
        """Names of the priors' plans, and of those that are not far behind, alone and with the plan they go with.

        The times are by the heuristic's algorithms. They say little where our kernel takes a product, so that all such
        plans are in.
        """
        times = self._times(self.before)
        best: dict[LayerProblem, float] = {}
        for name, timing in self._timings.items():
            problem = self.before[name].problem
            best[problem] = min(best.get(problem, math.inf), timing.median_us)
        limit = _PROMISING * min(times.values())
        names = {name for split, us in times.items() if us <= limit for name in split}
        near = {name for name in names if self._timings[name].median_us <= _PROMISING * best[self.before[name].problem]}
        ours = {
            name for name, plan in self.before.items() if any(takes(each.problem) for each in plan.products.values())
        }
        return near | ours | {*self._untuned_and_plainest(self.before)[0]}

    def tune_products(self, names: Iterable[str]) -> None:
        """Finds the algorithms of the products of some plans, those that are not known already."""
        products = dict.fromkeys(each.problem for name in names for each in self.before[name].products.values())
        entry, watch = self._products.entry, self._bench.clock.watch
        unknown = [each for each in products if not each.is_empty and not is_as_deep(entry(each), self._effort)]
        deadline = watch.seconds + self._budget.products
        for number, problem in enumerate(unknown):
            left = max(deadline - watch.seconds, 0.0) / (len(unknown) - number)
            self._products.search(self._bench, problem, self._effort, max(left, _LEAST_PRODUCT_S))

    def plan_tuned(self, names: Iterable[str]) -> None:
        """Plans and times some plans by the tuned algorithms, and those of the plainest split."""
        _, plainest = self._untuned_and_plainest(self.before)
        self.after = self._plans(self._products.plan, {*names, *plainest})
        self.time_alone(self.after, _PLANS_ROUNDS, self._budget.finals)

    def conclude(self) -> Decided:
        """Times the best splits against each other; what runs untuned stays if it is faster than their winner.

        Raises:
            PlanError: nothing is left.
        """
        untuned, trusted = self._untuned_and_plainest(self.before)
        untuned_plans, trusted_plans = (self._placed(self.before, split) for split in (untuned, trusted))
        expected = self._operands.results(trusted_plans)
        unsound = {name for name, plan in self.before.items() if self._products.is_unsound(plan)}
        while True:  # until the fastest is right
            finalists = self._finalists(unsound)
            placed = {name: self._placed(plans, split) for name, (plans, split) in finalists.items()}
            first = next(iter(placed))
            contenders = {first: placed[first], _BEFORE: untuned_plans} | placed
            timings = self._operands.take_times(contenders, self._budget.finals, _FINAL_ROUNDS)
            name = fastest({name: each for name, each in timings.items() if name != _BEFORE}, first)
            new, old = timings[name], timings.get(_BEFORE, timings[name])
            plans, split = finalists[name]
            fault = None if split == trusted else self._operands.disagreement(placed[name], expected)
            if fault is None:
                break
            output, words = fault
            wrong = self.after.pop(split[0 if output == "y" else -1])
            self._reject(wrong.problem, wrong.strategy, f"wrong: {words}")
        stays = plans is self.before and split == untuned
        if not stays and fastest({name: new, _BEFORE: old}, name) == _BEFORE and untuned in self._splits(self.after):
            is_sound = unsound.isdisjoint(untuned)
            stays = is_sound and self._operands.disagreement(untuned_plans, expected) is None
        if stays:
            return self._decided(untuned, old, old, self._entries(untuned, new))
        products = {**self._products.found}
        if plans is self.before:
            for name in split:
                products |= self._products.as_planned(plans[name])
        return self._decided(split, old, new, {**products, **self._entries(split, new)})

    def _decided(self, split: Split, old: Timing, new: Timing, entries: Mapping[Any, Entry]) -> Decided:
        """What is reported of a split, with the entries that are to be remembered."""
        words = " | ".join(strategy_in_words(to_json(self.before[name].strategy)) for name in split)
        out = [each for rejected in self._rejected.values() for each in rejected]
        reasons = [f"{strategy_in_words(each.strategy)}: {each.reason}" for each in out]
        slow = {name: each.median_us for name, each in self._timings.items() if name not in self.after}
        reasons += [f"{name}: slow: {us:.1f} µs" for name, us in slow.items()]
        measured = self._operands.measured
        for problem, entry in self._products.found.items():
            measured += entry.candidates
            reasons += [
                f"{describe(problem)} by {algorithm_in_words(each.config)}: {each.reason}" for each in entry.rejected
            ]
        times = old.median_us, new.median_us
        return Tuned((*self._part.problems,), *times, words, measured, (*reasons,)), entries

    def _finalists(self, unsound: Collection[str]) -> dict[str, tuple[Plans, Split]]:
        """The priors' split, the best, and the plainest, by name; the best by the heuristic's algorithms as well.

        An algorithm that is the fastest by itself need not be so between others, because clocks, caches and what runs
        beside it are not the same.

        Args:
            unsound: names of the plans by an algorithm of the heuristic's that was rejected.

        Raises:
            PlanError: no split is left.
        """
        times = self._times(self.after)
        best = sorted(times, key=times.__getitem__)[:_MOST_FINALISTS]
        close = [split for split in best if times[split] <= _CLOSE * times[best[0]]]
        untuned_and_plainest = self._untuned_and_plainest(self.after)
        tuned = [*untuned_and_plainest[:1], *close, *untuned_and_plainest[1:]]
        sound = [split for split in close if {*split}.isdisjoint(unsound)][:_MOST_BY_HEURISTIC]
        if not tuned:
            raise PlanError(f"no split computes the right results for {self._part.problems[0]}")
        found = {" | ".join(split): (self.after, split) for split in tuned}
        return found | {f"{' | '.join(split)} by the heuristic": (self.before, split) for split in sound}

    def _entries(self, split: Split, timing: Timing) -> dict[LayerProblem, LayerEntry]:
        """An entry of the forward problem, and of the backward problem for everything that may be kept.

        Args:
            timing: of the split, for a plan that was not timed by itself.
        """
        found = {}
        for problem, rejected in self._rejected.items():
            stored = {name: to_json(plan.strategy) for name, plan in self.before.items() if plan.problem == problem}
            timings = {name: self._timings[name] for name in stored if name in self._timings}
            names = (plan_name(problem, each) for each in priors_of(problem, self._bench.device))
            best = next((fastest(timings, name) for name in names if name in timings), None)
            chosen = next((name for name in split if name in stored), best)
            if chosen is not None:
                us = {name: each.median_us for name, each in timings.items()}
                others = [name for name in sorted(us, key=us.__getitem__) if name != chosen]
                alternatives = tuple(Alternative(stored[name], us[name]) for name in others)
                own_us, out = us.get(chosen, timing.median_us), tuple(rejected)
                found[problem] = LayerEntry(stored[chosen], own_us, alternatives, out, effort=self._effort)
        return found


def variants_of(part: Chain) -> list[tuple[LayerProblem, ...]]:
    """The problems of a part, forward first; a backward problem for everything that forward may keep."""
    found: list[tuple[LayerProblem, ...]] = [(problem,) for problem in part.problems]
    if part.reader(0) is not None:
        found[-1] = tuple(part.keeping({0: saved}).problems[-1] for saved in saved_kinds(part.forwards[0]))
    return found


def _plainest_first(problem: LayerProblem) -> Iterable[Strategy]:
    strategies = [*strategies_of(problem)]
    return strategies[::-1] if isinstance(problem, ForwardProblem) else strategies


def plan_name(problem: LayerProblem, strategy: Strategy) -> str:
    """A name among all plans of a part, such as "bias, keeps output" or "db by kernel, from nothing and mask"."""
    words = strategy_in_words(to_json(strategy))
    if not isinstance(problem, BackwardProblem):
        return words
    saved = [each.saved.value for each in (problem.own, problem.through) if each is not None]
    return f"{words}, from {' and '.join(saved)}"
