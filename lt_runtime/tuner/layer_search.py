"""Measures how a layer's work is best split between cuBLASLt and our kernels, and picks the fastest correct split.

The search decides all problems of a part of a chain together, see `Part`. A split has one plan for each of the part's
problems. First the plans of each problem are timed alone, with untuned algorithms. Then the products of the promising
plans are tuned. Finally the best splits, each as a whole, race against the untuned split. The results of the winner
must agree with those of plain products followed by our kernels.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final, TypeAlias

from lt_runtime.errors import PlanError
from lt_runtime.kernels.narrow import supports
from lt_runtime.plans.cache import LayerPlan, LayerProblem, Strategy, plan_for, priors_of, strategies_of
from lt_runtime.problem import BackwardProblem, ForwardProblem, Saved
from lt_runtime.products.methods import Choose, heuristic_algorithm
from lt_runtime.store.entries import Alternative, LayerEntry, RejectedStrategy
from lt_runtime.store.keys import problem_key, to_json
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.tuner.chain import LayerChain, saved_kinds
from lt_runtime.tuner.chain_operands import OperandSets, Placed, disagreement
from lt_runtime.tuner.product_search import Products
from lt_runtime.tuner.report import Decided, Tuned, describe, rejection_in_words, strategy_in_words
from lt_runtime.tuner.roofline import floor_us
from lt_runtime.tuner.timing import Bench, Timing, fastest, race

# For each stage of a search: number of timing rounds, and seconds after which no further plan is timed.
_SCREENING: Final = 3, 0.5
_PLANS: Final = 5, 0.8
_FINALS: Final = 7, 0.8
_PRODUCTS_S: Final = 2.0
_LEAST_PRODUCT_S: Final = 0.05
# Plans are tuned if they take at most this factor of the fastest plan's time. Tuned algorithms gain 1 to 8 %, seldom
# more, so that a plan which is further behind with untuned algorithms will not win.
_PROMISING: Final = 1.4
_CLOSE: Final = 1.1
_MOST_FINALISTS: Final = 6
_MOST_BY_HEURISTIC: Final = 2

_Key: TypeAlias = tuple[LayerProblem, Strategy]
"""Key of a plan: its problem and strategy. A plan has the same key with untuned and with tuned algorithms."""
_Plans: TypeAlias = dict[_Key, LayerPlan]
_Split: TypeAlias = tuple[LayerPlan, ...]
"""A split of a part's work between cuBLASLt and our kernels: a plan for each of its problems, forward first."""


def decide_part(bench: Bench, store: PlanStore, part: LayerChain) -> Decided:
    """Finds the fastest split of a part's work between cuBLASLt and our kernels that computes right results.

    Returns the report and the entries for the plan cache.

    Args:
        part: a chain from `LayerChain.cut` without empty problems.

    Raises:
        PlanError: cuBLASLt has no algorithm even for products without epilogue.
        MemoryError: the GPU has not enough memory.
    """
    search = _Search(bench, store, part)
    while True:
        plans = len(search.before)
        search.time_alone(search.before, *_SCREENING)
        promising = search.promising()
        search.tune_products(promising)
        search.plan_tuned(promising)
        decided = search.conclude()
        if len(search.before) == plans:
            return decided
        # The race rejected a plan with wrong results, which may have been fast because it skips work. The search is
        # repeated without that plan, because correct plans may have been dropped for being much slower than it.


class _Search:
    """The search for the fastest split of one part of a chain: holds plans, times and rejections.

    It is the `Contenders` object of the race between splits.

    Attributes:
        before: all plans that cuBLASLt accepts and that are not known to be wrong, with untuned algorithms.
        after: the promising plans that are not rejected, with tuned algorithms.
    """

    def __init__(self, bench: Bench, store: PlanStore, part: LayerChain) -> None:
        self._bench, self._part = bench, part
        self._layers = [layer for layer, _ in part.runs]
        # The problems of the part, forward first; the backward problem in one variant for each kind of tensor that
        # forward may save.
        self._variants: list[tuple[LayerProblem, ...]] = [(problem,) for problem in part.problems]
        self._readers: dict[Saved, LayerProblem] = {}
        if part.reader(0) is not None:
            self._readers = {kind: part.keeping({0: kind}).problems[-1] for kind in saved_kinds(part.forwards[0])}
            self._variants[-1] = (*self._readers.values(),)
        known = {problem: store.layer(problem_key(problem)) for problem in itertools.chain(*self._variants)}
        self._rejected = {problem: [*entry.rejected] if entry else [] for problem, entry in known.items()}
        self._products, self._operands = Products(store), OperandSets(bench, part)
        self._floors_us = [floor_us([problem], bench.device) for problem in part.problems]
        self._timings: dict[_Key, Timing] = {}  # times of plans that were timed alone and are not rejected
        self.before = self._plans(heuristic_algorithm)
        self.after: _Plans = {}
        self._untuned, self._plainest = self._default_and_reference(self.before)
        self._screened: Mapping[_Split, float] = {}  # microseconds of each split with untuned algorithms
        self._expected: Mapping[str, Any] = {}

    def _plans(self, choose: Choose, only: Collection[_Key] | None = None) -> _Plans:
        """Makes a plan for each strategy, or for the keys in `only`; rejects strategies that cuBLASLt refuses.

        There are backward plans for each kind of tensor that forward may save.
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
                    self._reject_plan((problem, strategy), f"refused: {error}")
        return made

    def _reject_plan(self, key: _Key, reason: str) -> None:
        problem, strategy = key
        self._rejected[problem].append(RejectedStrategy(to_json(strategy), reason))
        self._timings.pop(key, None)

    def _splits(
        self, plans: _Plans, order: Callable[[LayerProblem], Iterable[Strategy]] = strategies_of
    ) -> list[_Split]:
        """All splits of the part (a plan for each problem) from these plans, in the order of their strategies."""
        keys = [[(each, one) for each in variants for one in order(each)] for variants in self._variants]
        there = ([plans[key] for key in of_layer if key in plans] for of_layer in keys)
        splits = [*itertools.product(*there)]
        if not self._readers:
            return splits
        return [split for split in splits if split[-1].problem == self._readers[split[0].strategy.saved]]

    def _default_and_reference(self, plans: _Plans) -> list[_Split]:
        """Two splits: the default (first by the fitted priors, used without tuning) and the reference.

        The reference split uses no epilogues of cuBLASLt.

        Raises:
            PlanError: all splits have been rejected.
        """
        by_priors = functools.partial(priors_of, device=self._bench.device)
        found = [split for order in (by_priors, _plainest_first) for split in self._splits(plans, order)[:1]]
        if not found:
            reasons = "; ".join(each.reason for rejected in self._rejected.values() for each in rejected)
            raise PlanError(f"no split is of use for {self._part.problems[0]}: {reasons}")
        return found

    def _placed(self, split: _Split) -> Placed:
        return [*zip(self._layers, split, strict=True)]

    def _times(self, plans: _Plans) -> dict[_Split, float]:
        """Microseconds of each split: the sum of the times of its plans, each timed alone.

        A split is left out if one of its plans was not timed.
        """
        timed = (split for split in self._splits(plans) if self._timings.keys() >= {*map(_key, split)})
        return {split: sum(self._timings[_key(plan)].median_us for plan in split) for split in timed}

    def _timings_of(self, problem: LayerProblem) -> dict[Strategy, Timing]:
        """Maps each strategy for a problem to the time of its plan."""
        return {key[1]: timing for key, timing in self._timings.items() if key[0] == problem}

    def time_alone(self, plans: _Plans, rounds: int, budget_s: float) -> None:
        """Times forward plans, and then backward plans, against each other; the plan that runs untuned comes first."""
        untuned, _ = self._default_and_reference(plans)
        for first, layer, variants, floor in zip(untuned, self._layers, self._variants, self._floors_us, strict=True):
            contenders = [first, *(plan for plan in plans.values() if plan.problem in variants)]
            placed = {_key(plan): [(layer, plan)] for plan in contenders}
            self._timings |= self._operands.take_times(placed, budget_s, rounds, least_us=floor)

    def promising(self) -> set[_Key]:
        """The plans to tune: the untuned split's, and those close to the fastest both alone and in their best split.

        A plan with a product that our narrow kernels support is always tuned, because its time with an untuned
        algorithm says little about its time with this kernel.
        """
        self._screened = times = self._times(self.before)
        limit = _PROMISING * min(times.values())
        near = {plan for split, us in times.items() if us <= limit for plan in split}
        best = {plan: min(each.median_us for each in self._timings_of(plan.problem).values()) for plan in near}
        near = {plan for plan in near if self._timings[_key(plan)].median_us <= _PROMISING * best[plan]}
        ours = [plan for plan in self.before.values() if any(supports(each.problem) for each in plan.products.values())]
        untuned, _ = self._default_and_reference(self.before)
        return {_key(plan) for plan in (*near, *ours, *untuned)}

    def tune_products(self, keys: Iterable[_Key]) -> None:
        """Finds the fastest algorithm of each product of the given plans, unless the plan cache has it."""
        products = dict.fromkeys(each.problem for key in keys for each in self.before[key].products.values())
        unknown = [each for each in products if not each.is_empty and self._products.entry(each) is None]
        watch = self._bench.clock.watch
        deadline = watch.seconds + _PRODUCTS_S
        for number, problem in enumerate(unknown):
            left = max(deadline - watch.seconds, 0.0) / (len(unknown) - number)
            self._products.search(self._bench, problem, max(left, _LEAST_PRODUCT_S))

    def plan_tuned(self, keys: Iterable[_Key]) -> None:
        """Makes the given plans, and those of the plainest split, with tuned algorithms, and times them."""
        self.after = self._plans(self._products.plan, {*keys, *map(_key, self._plainest)})
        self.time_alone(self.after, *_PLANS)

    def conclude(self) -> Decided:
        """Holds the race between the best splits and the untuned split; returns the report and the plan-cache entries.

        Raises:
            PlanError: all splits have been rejected.
        """
        self._expected = self._operands.results(self._placed(self._plainest))
        winner, timings = race(self)
        old, new, products = timings.get(self._untuned, timings[winner]), timings[winner], {**self._products.found}
        if winner in self._splits(self.before):
            for plan in winner:
                products |= self._products.as_planned(plan)
        words = " | ".join(strategy_in_words(to_json(plan.strategy)) for plan in winner)
        reasons = [rejection_in_words(each) for rejected in self._rejected.values() for each in rejected]
        slow = {key: each.median_us for key, each in self._timings.items() if key not in self.after}
        reasons += [f"{plan_name(*key)}: slow: {us:.1f} µs" for key, us in slow.items()]
        measured = self._operands.measured
        for problem, entry in self._products.found.items():
            measured += entry.candidates
            reasons += [f"{describe(problem)} by {rejection_in_words(each)}" for each in entry.rejected]
        tuned = Tuned((*self._part.problems,), old.median_us, new.median_us, words, measured, (*reasons,))
        return tuned, {**products, **self._entries(winner, new)}

    def names(self) -> list[_Split]:
        """The splits of the last race.

        They are the untuned split, unless rejected; with tuned algorithms the default split, the fastest few and the
        reference split; and with untuned algorithms the fastest two.

        The algorithm that is fastest alone need not be the fastest within a pass, where clocks, contents of caches and
        concurrent kernels differ: at 1600x256x1024 in TF32 the product with GELU's derivative takes 39 µs concurrently
        with the weight gradient by the algorithm that is 3 % faster alone, and 28 µs by the untuned algorithm (H200).
        """
        by_priors, plainest = self._default_and_reference(self.after)
        times = self._times(self.after)
        best = sorted(times, key=times.__getitem__)[:_MOST_FINALISTS]
        close = [split for split in best if times[split] <= _CLOSE * times[best[0]]]
        untuned = [split for split in self._screened if self.after.keys() >= {*map(_key, split)}]
        untuned.sort(key=self._screened.__getitem__)
        sound = [split for split in untuned if not any(map(self._products.is_unsound, split))]
        may_stay = self.after.keys() >= {*map(_key, self._untuned)}
        may_stay = may_stay and not any(map(self._products.is_unsound, self._untuned))
        finalists = [*[self._untuned] * may_stay, by_priors, *close, plainest, *sound[:_MOST_BY_HEURISTIC]]
        return [*dict.fromkeys(finalists)]

    def take_times(self, names: Collection[_Split]) -> dict[_Split, Timing]:
        """Times splits of the part; the untuned one is timed for the report even if rejected. See `Contenders`."""
        placed = {split: self._placed(split) for split in (*names, self._untuned)}
        rounds, budget_s = _FINALS
        return self._operands.take_times(placed, budget_s, rounds, least_us=sum(self._floors_us))

    def reject_wrong(self, names: Collection[_Split]) -> list[_Split]:
        """Compares each split's results with those of products without epilogues; see `Contenders`.

        If an output is wrong, the strategy of the plan that computed it is rejected.
        """
        found = []
        for split in names:
            if [*map(_key, split)] != [*map(_key, self._plainest)]:
                results = self._operands.results(self._placed(split))
                fault = disagreement(results, self._expected, split[0].problem.dtype)
                if fault is not None:
                    output, words = fault
                    found.append(split)
                    key = _key(split[0 if output == "y" else -1])
                    if self.after.pop(key, None) is not None:
                        self.before.pop(key)
                        self._reject_plan(key, f"wrong: {words}")
        return found

    def _entries(self, split: _Split, timing: Timing) -> dict[LayerProblem, LayerEntry]:
        """Entries of the forward problem, and of the backward problem for each tensor that forward may save.

        Args:
            timing: the split's time, which is stored for its plans that were not timed alone.
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
                found[problem] = LayerEntry(to_json(chosen), own_us, slower, tuple(rejected))
        return found


def _key(plan: LayerPlan) -> _Key:
    return plan.problem, plan.strategy


def _plainest_first(problem: LayerProblem) -> Iterable[Strategy]:
    strategies = [*strategies_of(problem)]
    return strategies[::-1] if isinstance(problem, ForwardProblem) else strategies


def plan_name(problem: LayerProblem, strategy: Strategy) -> str:
    """A plan's name in words, unique in its part, such as "db by kernel, from nothing and mask" (the saved tensors)."""
    words = strategy_in_words(to_json(strategy))
    if not isinstance(problem, BackwardProblem):
        return words
    saved = [each.saved.value for each in (problem.output_derivative, problem.input_derivative) if each is not None]
    return f"{words}, from {' and '.join(saved)}"
