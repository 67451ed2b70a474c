"""Tunes a chain of layers as a whole: what is fastest for a layer by itself need not be so between its neighbours."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final

from lt_runtime.errors import PlanError
from lt_runtime.plans.decisions import LayerPlan, LayerProblem, plan_for, stored_strategy
from lt_runtime.problem import ForwardProblem, MatmulProblem
from lt_runtime.products.choose import Choose, heuristic_algorithm
from lt_runtime.store.entries import Alternative, LayerEntry, ProductEntry, now
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.tuner.chain import Chain, Layer
from lt_runtime.tuner.chain_operands import OperandSets
from lt_runtime.tuner.layer_search import Decision
from lt_runtime.tuner.product_search import Products
from lt_runtime.tuner.report import describe, strategy_in_words
from lt_runtime.tuner.timing import Bench, Launch, fastest, take_times

_NEAR: Final = 1.25
_MOST_OPTIONS: Final = 5
_MOST_SWEEPS: Final = 2
_ROUNDS: Final = 9
_BUDGET_S: Final = 0.4
_AS_IT_IS: Final = "as it is"


def decide_chain(bench: Bench, store: PlanStore, chain: Chain, decided: Mapping[LayerProblem, LayerEntry]) -> Decision:
    """Tries for each problem in turn what else is nearly as fast by itself, the neighbours staying as they are.

    Args:
        decided: what was decided for each of the chain's problems by itself.

    Raises:
        PlanError: what was decided cannot be planned any more.
        MemoryError: the GPU has not enough memory for all operands of the chain.
    """
    search = _Search(bench, store, chain, decided)
    for _ in range(_MOST_SWEEPS):
        if not sum([search.improve(problem) for problem in chain.problems]):
            break
    return search.decision()


@dataclass(frozen=True, slots=True)
class _Option:
    """Another way to run a problem.

    Attributes:
        entry: what is remembered if the option is taken.
        products: entries of its products, where their algorithms are others than those known.
    """

    plan: LayerPlan
    entry: LayerEntry
    products: Mapping[MatmulProblem, ProductEntry]


class _Search:
    def __init__(
        self, bench: Bench, store: PlanStore, chain: Chain, decided: Mapping[LayerProblem, LayerEntry]
    ) -> None:
        self._bench, self._chain = bench, chain
        self._layers = {problem: replace(decided[problem], in_chain=True, when=now()) for problem in chain.problems}
        self._products = Products(store)
        self._plans = {problem: self._plan(problem, entry) for problem, entry in self._layers.items()}
        self._us: list[float] = []
        self._changes: list[str] = []
        self._measured = 0
        self._operands = OperandSets(bench, chain)

    def _plan(self, problem: LayerProblem, entry: LayerEntry, choose: Choose | None = None) -> LayerPlan:
        strategy = stored_strategy(problem, entry.strategy)
        return plan_for(problem, self._bench.device, strategy, choose or self._products.plan)

    def improve(self, problem: LayerProblem) -> bool:
        """Takes another way to run a problem if the whole chain is faster with it, and it computes the same."""
        options = self._options(problem)
        contenders = {_AS_IT_IS: self._launch(self._plans)}
        contenders |= {name: self._launch(self._plans | {problem: each.plan}) for name, each in options.items()}
        sets = len(self._operands)
        timings = take_times(contenders, self._bench.clock, sets, _BUDGET_S, _ROUNDS, in_a_loop=True)
        self._measured += len(timings)
        chosen = fastest(timings, _AS_IT_IS)
        takes = chosen != _AS_IT_IS and self._agrees(problem, options[chosen].plan)
        self._us += [timings[_AS_IT_IS].median_us, timings[chosen if takes else _AS_IT_IS].median_us]
        if takes:
            option = options[chosen]
            self._plans[problem], self._layers[problem] = option.plan, option.entry
            self._products.found |= option.products
            self._changes.append(f"{chosen} in {describe(problem)}")
        return takes

    def _launch(self, plans: Mapping[LayerProblem, LayerPlan]) -> Launch:
        return self._operands.launch([(layer, plans[problem]) for layer, problem in self._chain.runs])

    def _options(self, problem: LayerProblem) -> dict[str, _Option]:
        """Other strategies that are near by themselves, and the present one by the heuristic's algorithms."""
        entry, made = self._layers[problem], {}
        near = [each for each in entry.alternatives if each.us <= _NEAR * entry.us and _keeps_the_same(each, entry)]
        # Branches share caches and bandwidth with the neighbours. They come first, as they are the likeliest to change.
        near.sort(key=lambda each: not _differs_in_branches_alone(each, entry))
        for each in near[:_MOST_OPTIONS]:
            others = (Alternative(entry.strategy, entry.us), *(one for one in entry.alternatives if one is not each))
            changed = replace(entry, strategy=each.strategy, us=each.us, alternatives=others)
            with contextlib.suppress(PlanError):
                plan = self._plan(problem, changed)
                made[strategy_in_words(each.strategy)] = _Option(plan, changed, {})
        by_heuristic = self._by_heuristic(problem, entry)
        return made | ({"the heuristic's algorithms": by_heuristic} if by_heuristic is not None else {})

    def _by_heuristic(self, problem: LayerProblem, entry: LayerEntry) -> _Option | None:
        """None where the problem runs so already, or an algorithm was rejected or is missing."""
        try:
            plan = self._plan(problem, entry, heuristic_algorithm)
        except PlanError:
            return None
        products = {} if self._products.is_unsound(plan) else self._products.as_planned(plan)
        changed = {each: replace(product, in_chain=True) for each, product in products.items()}
        return _Option(plan, entry, changed) if changed else None

    def _agrees(self, problem: LayerProblem, option: LayerPlan) -> bool:
        alone = Layer(problem) if isinstance(problem, ForwardProblem) else Layer(None, problem)
        operands = OperandSets(self._bench, Chain((alone,)))
        return operands.disagreement([(0, option)], operands.results([(0, self._plans[problem])])) is None

    def decision(self) -> Decision:
        """What has been decided by now."""
        words = "as a chain: " + ("; ".join(self._changes) or "as decided")
        return Decision(self._products.found, self._layers, self._us[0], self._us[-1], words, self._measured)


def _keeps_the_same(option: Alternative, entry: LayerEntry) -> bool:
    """A forward pass may not keep anything else: backward has been decided for what it keeps."""
    return option.strategy.get("saved") == entry.strategy.get("saved")


def _differs_in_branches_alone(option: Alternative, entry: LayerEntry) -> bool:
    """Whether the strategies differ only in whether dw runs beside dx."""
    return {**option.strategy, "beside": entry.strategy.get("beside")} == entry.strategy
