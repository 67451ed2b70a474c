"""Tunes a chain of layers as a whole: what is fastest for a layer by itself need not be so between its neighbours."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from lt_runtime.errors import PlanError
from lt_runtime.plans.decisions import LayerPlan, LayerProblem, make_layer_plan, plan_for, stored_strategy
from lt_runtime.plans.mlp import FUSED_MLP, mlp_plans
from lt_runtime.problem import ForwardProblem, MatmulProblem, MLPProblem
from lt_runtime.products.choose import Choose, heuristic_algorithm
from lt_runtime.store.entries import Alternative, Effort, LayerEntry, ProductEntry, RejectedStrategy, now
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.tuner.chain import Chain, Layer
from lt_runtime.tuner.chain_operands import OperandSets, Placed
from lt_runtime.tuner.product_search import Products
from lt_runtime.tuner.report import Decided, Tuned, describe, rejection_in_words, strategy_in_words
from lt_runtime.tuner.timing import Bench, fastest

_NEAR: Final = 1.25
_MOST_OPTIONS: Final = 5
_MOST_SWEEPS: Final = 2
_ROUNDS: Final = 9
_BUDGET_S: Final = 0.4
_AS_IT_IS: Final = "as it is"

_Option: TypeAlias = tuple[LayerPlan, LayerEntry, dict[MatmulProblem, ProductEntry]]
"""Another way to run a problem, what is remembered if it is taken, and entries of products with another algorithm."""


def decide_chain(bench: Bench, store: PlanStore, chain: Chain, decided: Mapping[LayerProblem, LayerEntry]) -> Decided:
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


def decide_mlp(bench: Bench, chain: Chain, problem: MLPProblem, effort: Effort) -> Decided:
    """Times the passes of a narrow MLP, each in one kernel, against its layers as they run now.

    Args:
        chain: the MLP's layers.
        problem: one that the kernels take.

    Raises:
        PlanError: there is no algorithm for one of the layers.
        MemoryError: the GPU has not enough memory for all operands of the chain.
    """
    saved = {index: make_layer_plan(each, bench.device).strategy.saved for index, each in chain.forwards.items()}
    chain = chain.keeping(saved)
    layers: Placed = [(index, make_layer_plan(each, bench.device)) for index, each in chain.runs]
    fused: Placed = [(0, plan) for plan in mlp_plans(problem, bench.device)]
    operands = OperandSets(bench, chain)
    contenders = {by_layer: layers if by_layer else fused for by_layer in (True, False)}
    timings = operands.take_times(contenders, _BUDGET_S, _ROUNDS, in_a_loop=True)
    expected = {name: each for name, each in operands.results(layers).items() if _is_outcome(name, chain)}
    wrong = operands.disagreement(fused, expected, len(problem.biases))
    by_layer = wrong is not None or fastest(timings, True)
    us, strategy, other = timings[by_layer].median_us, {FUSED_MLP: not by_layer}, {FUSED_MLP: by_layer}
    rejected = () if wrong is None else (RejectedStrategy(other, f"wrong: {wrong[1]}"),)
    measured = () if rejected or len(timings) < 2 else (Alternative(other, timings[not by_layer].median_us),)
    words, reasons = strategy_in_words(strategy), tuple(map(rejection_in_words, rejected))
    tuned = Tuned((problem,), timings[True].median_us, us, words, operands.measured, reasons)
    return tuned, {problem: LayerEntry(strategy, us, measured, rejected, effort=effort)}


def _is_outcome(name: str, chain: Chain) -> bool:
    """Whether a result is one of the whole chain: not what only its own layers read."""
    last = max(chain.forwards)
    return name.startswith(("dw", "db")) or name == f"y of layer {last}"


class _Search:
    def __init__(
        self, bench: Bench, store: PlanStore, chain: Chain, decided: Mapping[LayerProblem, LayerEntry]
    ) -> None:
        self._bench, self._chain, self._products = bench, chain, Products(store)
        self._layers = {problem: replace(decided[problem], in_chain=True, when=now()) for problem in chain.problems}
        self._plans = {problem: self._plan(problem, entry) for problem, entry in self._layers.items()}
        self._before_us, self._left = 0.0, 1.0  # the share that is left, of ratios that were each taken side by side
        self._changes: list[str] = []
        self._operands = OperandSets(bench, chain)

    def _plan(self, problem: LayerProblem, entry: LayerEntry, choose: Choose | None = None) -> LayerPlan:
        strategy = stored_strategy(problem, entry.strategy)
        return plan_for(problem, self._bench.device, strategy, choose or self._products.plan)

    def improve(self, problem: LayerProblem) -> bool:
        """Takes another way to run a problem if the whole chain is faster with it, and it computes the same."""
        options = self._options(problem)
        contenders = {_AS_IT_IS: self._placed(self._plans)}
        contenders |= {name: self._placed({**self._plans, problem: plan}) for name, (plan, *_) in options.items()}
        timings = self._operands.take_times(contenders, _BUDGET_S, _ROUNDS, in_a_loop=True)
        chosen = fastest(timings, _AS_IT_IS)
        supports = chosen != _AS_IT_IS and self._agrees(problem, options[chosen][0])
        as_it_is = timings[_AS_IT_IS].median_us
        self._before_us = self._before_us or as_it_is
        if supports:
            self._left *= timings[chosen].median_us / as_it_is
            self._plans[problem], self._layers[problem], products = options[chosen]
            self._products.found |= products
            self._changes.append(f"{chosen} in {describe(problem)}")
        return supports

    def _placed(self, plans: Mapping[LayerProblem, LayerPlan]) -> Placed:
        return [(layer, plans[problem]) for layer, problem in self._chain.runs]

    def _options(self, problem: LayerProblem) -> dict[str, _Option]:
        """Other strategies that are near by themselves, and the present one by the heuristic's algorithms.

        A forward pass may not keep anything else, as backward has been decided for what it keeps.
        """
        entry, strategy, made = self._layers[problem], self._layers[problem].strategy, dict[str, _Option]()
        near = [
            each
            for each in entry.alternatives
            if each.us <= _NEAR * entry.us and each.strategy.get("saved") == strategy.get("saved")
        ]
        # Branches share caches and bandwidth with the neighbours. They come first, as they are the likeliest to change.
        near.sort(key=lambda each: {**each.strategy, "dw_concurrent": strategy.get("dw_concurrent")} != strategy)
        for each in near[:_MOST_OPTIONS]:
            others = (Alternative(strategy, entry.us), *(one for one in entry.alternatives if one is not each))
            changed = replace(entry, strategy=each.strategy, us=each.us, alternatives=others)
            with contextlib.suppress(PlanError, ValueError):  # the file need not offer what the problem offers
                made[strategy_in_words(each.strategy)] = self._plan(problem, changed), changed, {}
        with contextlib.suppress(PlanError):
            plan = self._plan(problem, entry, heuristic_algorithm)
            products = {} if self._products.is_unsound(plan) else self._products.as_planned(plan)
            if products:
                in_chain = {each: replace(product, in_chain=True) for each, product in products.items()}
                made["the heuristic's algorithms"] = plan, entry, in_chain
        return made

    def _agrees(self, problem: LayerProblem, option: LayerPlan) -> bool:
        alone = Layer(problem) if isinstance(problem, ForwardProblem) else Layer(None, problem)
        operands = OperandSets(self._bench, Chain((alone,)))
        return operands.disagreement([(0, option)], operands.results([(0, self._plans[problem])])) is None

    def decision(self) -> Decided:
        """What has been decided by now."""
        words = "as a chain: " + ("; ".join(self._changes) or "as decided")
        problems, measured = (*self._chain.problems,), self._operands.measured
        tuned = Tuned(problems, self._before_us, self._before_us * self._left, words, measured)
        return tuned, {**self._products.found, **self._layers}
