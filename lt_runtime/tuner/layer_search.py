"""Measures the splits of a part of a chain against each other, and picks one.

The plans of each problem are timed first, by the heuristic's algorithms, and the products' algorithms are tuned in the
plans that are promising. The best splits are then timed as a whole against what runs untuned. The winner must compute
what plain products and our kernels do.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from lt_runtime.errors import PlanError
from lt_runtime.kernels.narrow import supports
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
from lt_runtime.tuner.report import Decided, Tuned, describe, rejection_in_words, strategy_in_words
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

_Key: TypeAlias = tuple[LayerProblem, Strategy]
"""What a plan is known by; the plans by the heuristic's algorithms and by the tuned ones have equal keys."""
_Plans: TypeAlias = dict[_Key, LayerPlan]
_Split: TypeAlias = tuple[LayerPlan, ...]
"""Plans that run a part, forward first."""


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
        self._timings: dict[_Key, Timing] = {}  # of single plans that are not rejected
        self.before = self._plans(heuristic_algorithm)
        self.after: _Plans = {}
        self._untuned, self._trusted = self._untuned_and_plainest(self.before)

    def _plans(self, choose: Choose, only: Collection[_Key] | None = None) -> _Plans:
        """Plans by every strategy, or only some of them; what the library refuses is rejected.

        A backward problem has plans for everything that forward may keep, each by itself.
        """
        choose, made = functools.cache(choose), {}
        for problem, rejected in self._rejected.items():
            out = [each.strategy for each in rejected]
            for strategy in strategies_of(problem):
                if to_json(strategy) in out or (only is not None and (problem, strategy) not in only):
                    continue
                try:
                    made[problem, strategy] = plan_for(problem, self._bench.device, strategy, choose)
                except PlanError as error:
                    self._reject(problem, strategy, f"refused: {error}")
        return made

    def _reject(self, problem: LayerProblem, strategy: Strategy, reason: str) -> None:
        self._rejected[problem].append(RejectedStrategy(to_json(strategy), reason))
        self._timings.pop((problem, strategy), None)

    def _splits(
        self, plans: _Plans, order: Callable[[LayerProblem], Iterable[Strategy]] = strategies_of
    ) -> list[_Split]:
        """Plans that go together, as backward reads what forward keeps; the first of each problem first."""
        keys = [[(each, one) for each in variants for one in order(each)] for variants in self._variants]
        there = ([plans[key] for key in of_layer if key in plans] for of_layer in keys)
        return [split for split in itertools.product(*there) if self._goes_together(split)]

    def _goes_together(self, split: _Split) -> bool:
        reader = self._part.reader(0)
        if reader is None:
            return True
        forward, backward = split
        return getattr(backward.problem, reader[1]).saved is forward.strategy.saved

    def _untuned_and_plainest(self, plans: _Plans) -> list[_Split]:
        """The split that the priors take, and that of plain products and our kernels.

        Raises:
            PlanError: no split is left.
        """
        by_priors = functools.partial(priors_of, device=self._bench.device)
        found = [split for order in (by_priors, _plainest_first) for split in self._splits(plans, order)[:1]]
        if not found:
            reasons = "; ".join(each.reason for rejected in self._rejected.values() for each in rejected)
            raise PlanError(f"no split is of use for {self._part.problems[0]}: {reasons}")
        return found

    def _placed(self, split: _Split) -> Placed:
        return [*zip(self._layers, split, strict=True)]

    def _us(self, plan: LayerPlan) -> float:
        """Microseconds of a plan by itself."""
        return self._timings[_key(plan)].median_us

    def _times(self, plans: _Plans) -> dict[_Split, float]:
        """Microseconds of all plans of a split, one after the other, of the splits whose plans were timed."""
        timed = (split for split in self._splits(plans) if self._timings.keys() >= {*map(_key, split)})
        return {split: sum(map(self._us, split)) for split in timed}

    def _timings_of(self, problem: LayerProblem) -> dict[Strategy, Timing]:
        """Those of a problem's plans, by their strategies."""
        return {key[1]: timing for key, timing in self._timings.items() if key[0] == problem}

    def time_alone(self, plans: _Plans, rounds: int, budget_s: float) -> None:
        """Times the plans of each direction against each other, the priors' first."""
        untuned, _ = self._untuned_and_plainest(plans)
        for first, layer, variants in zip(untuned, self._layers, self._variants, strict=True):
            contenders = [first, *(plan for plan in plans.values() if plan.problem in variants)]
            placed = {_key(plan): [(layer, plan)] for plan in contenders}
            self._timings |= self._operands.take_times(placed, budget_s, rounds)

    def promising(self) -> set[_Key]:
        """The priors' plans, and those that are not far behind, alone and with the plan they go with.

        The times are by the heuristic's algorithms. They say little where our kernel for narrow products takes one, so
        that all such plans are in.
        """
        times = self._times(self.before)
        limit = _PROMISING * min(times.values())
        best = {
            problem: min(each.median_us for each in self._timings_of(problem).values()) for problem, _ in self._timings
        }
        near = [plan for split, us in times.items() if us <= limit for plan in split]
        near = [plan for plan in near if self._us(plan) <= _PROMISING * best[plan.problem]]
        ours = [plan for plan in self.before.values() if any(supports(each.problem) for each in plan.products.values())]
        return {_key(plan) for plan in (*near, *ours, *self._untuned)}

    def tune_products(self, keys: Iterable[_Key]) -> None:
        """Finds the algorithms of the products of some plans, those that are not known already."""
        products = dict.fromkeys(each.problem for key in keys for each in self.before[key].products.values())
        entry, watch = self._products.entry, self._bench.clock.watch
        unknown = [each for each in products if not each.is_empty and not is_as_deep(entry(each), self._effort)]
        deadline = watch.seconds + self._budget.products
        for number, problem in enumerate(unknown):
            left = max(deadline - watch.seconds, 0.0) / (len(unknown) - number)
            self._products.search(self._bench, problem, self._effort, max(left, _LEAST_PRODUCT_S))

    def plan_tuned(self, keys: Iterable[_Key]) -> None:
        """Plans and times some plans by the tuned algorithms, and those of the plainest split."""
        self.after = self._plans(self._products.plan, {*keys, *map(_key, self._trusted)})
        self.time_alone(self.after, _PLANS_ROUNDS, self._budget.finals)

    def conclude(self) -> Decided:
        """Times the best splits against each other; what runs untuned stays if it is faster than their winner.

        Raises:
            PlanError: nothing is left.
        """
        expected = self._operands.results(self._placed(self._trusted))
        winner, timings = self._winner(expected)
        new, old = timings[winner], timings.get(self._untuned, timings[winner])
        if fastest({winner: new, self._untuned: old}, winner) == self._untuned and self._may_stay(expected):
            return self._decided(self._untuned, old, old, {})
        products = {**self._products.found}
        if winner in self._splits(self.before):
            for plan in winner:
                products |= self._products.as_planned(plan)
        return self._decided(winner, old, new, products)

    def _winner(self, expected: Mapping[str, Any]) -> tuple[_Split, dict[_Split, Timing]]:
        """The fastest of the finalists whose results are right, and the times of all, and of what runs untuned."""
        while True:
            finalists = self._finalists()
            contenders = {split: self._placed(split) for split in (finalists[0], self._untuned, *finalists)}
            timings = self._operands.take_times(contenders, self._budget.finals, _FINAL_ROUNDS)
            winner = fastest({split: timings[split] for split in finalists if split in timings}, finalists[0])
            fault = self._fault(winner, expected)
            if fault is None:
                return winner, timings
            output, words = fault
            wrong = self.after.pop(_key(winner[0 if output == "y" else -1]))
            self._reject(wrong.problem, wrong.strategy, f"wrong: {words}")

    def _finalists(self) -> list[_Split]:
        """The priors' split, the best, and the plainest; the best by the heuristic's algorithms as well.

        An algorithm that is the fastest by itself need not be so between others, because clocks, caches and what runs
        beside it are not the same.

        Raises:
            PlanError: no split is left.
        """
        untuned, plainest = self._untuned_and_plainest(self.after)
        times = self._times(self.after)
        best = sorted(times, key=times.__getitem__)[:_MOST_FINALISTS]
        close = [split for split in best if times[split] <= _CLOSE * times[best[0]]]
        by_heuristic = (tuple(self.before[_key(plan)] for plan in split) for split in close)
        sound = [split for split in by_heuristic if not any(map(self._products.is_unsound, split))]
        return [untuned, *close, plainest, *sound[:_MOST_BY_HEURISTIC]]

    def _may_stay(self, expected: Mapping[str, Any]) -> bool:
        """Whether what runs untuned is right, and neither its strategies nor its algorithms are rejected."""
        is_left = self.after.keys() >= {*map(_key, self._untuned)}
        is_sound = not any(map(self._products.is_unsound, self._untuned))
        return is_left and is_sound and self._fault(self._untuned, expected) is None

    def _fault(self, split: _Split, expected: Mapping[str, Any]) -> tuple[str, str] | None:
        """The output that is not what the plainest split makes, and by how much; None if all agree."""
        is_plainest = [*map(_key, split)] == [*map(_key, self._trusted)]
        return None if is_plainest else self._operands.disagreement(self._placed(split), expected)

    def _decided(self, split: _Split, old: Timing, new: Timing, products: Mapping[Any, Entry]) -> Decided:
        """What is reported of a split, with the entries that are to be remembered."""
        words = " | ".join(strategy_in_words(to_json(plan.strategy)) for plan in split)
        reasons = [rejection_in_words(each) for rejected in self._rejected.values() for each in rejected]
        slow = {key: each.median_us for key, each in self._timings.items() if key not in self.after}
        reasons += [f"{plan_name(*key)}: slow: {us:.1f} µs" for key, us in slow.items()]
        measured = self._operands.measured
        for problem, entry in self._products.found.items():
            measured += entry.candidates
            reasons += [f"{describe(problem)} by {rejection_in_words(each)}" for each in entry.rejected]
        tuned = Tuned((*self._part.problems,), old.median_us, new.median_us, words, measured, (*reasons,))
        return tuned, {**products, **self._entries(split, new)}

    def _entries(self, split: _Split, timing: Timing) -> dict[LayerProblem, LayerEntry]:
        """An entry of the forward problem, and of the backward problem for everything that may be kept.

        Args:
            timing: of the split, for a plan that was not timed by itself.
        """
        found = {}
        for problem, rejected in self._rejected.items():
            timings, priors = self._timings_of(problem), priors_of(problem, self._bench.device)
            best = next((fastest(timings, each) for each in priors if each in timings), None)
            chosen = next((plan.strategy for plan in split if plan.problem == problem), best)
            if chosen is not None:
                us = {strategy: each.median_us for strategy, each in timings.items()}
                own_us = us.pop(chosen, timing.median_us)
                slower = tuple(Alternative(to_json(each), us[each]) for each in sorted(us, key=us.__getitem__))
                found[problem] = LayerEntry(to_json(chosen), own_us, slower, tuple(rejected), effort=self._effort)
        return found


def _key(plan: LayerPlan) -> _Key:
    return plan.problem, plan.strategy


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
    saved = [each.saved.value for each in (problem.output_derivative, problem.input_derivative) if each is not None]
    return f"{words}, from {' and '.join(saved)}"
