"""Measures a narrow MLP in one kernel for each pass against its layers, and picks one."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from lt_runtime.plans.decisions import make_layer_plan
from lt_runtime.plans.mlp import FUSED_MLP, mlp_plans
from lt_runtime.problem import MLPProblem
from lt_runtime.store.entries import Alternative, LayerEntry, RejectedStrategy
from lt_runtime.tuner.chain import LayerChain
from lt_runtime.tuner.chain_operands import OperandSets, Placed
from lt_runtime.tuner.race import race
from lt_runtime.tuner.report import Decided, Tuned, rejection_in_words, strategy_in_words
from lt_runtime.tuner.roofline import floor_us
from lt_runtime.tuner.timing import Bench, Timing

_ROUNDS: Final = 9
_BUDGET_S: Final = 0.4


def decide_mlp(bench: Bench, chain: LayerChain, problem: MLPProblem) -> Decided:
    """The faster way to run a narrow MLP whose results are right, and the entry for the plan cache.

    Args:
        chain: the MLP's layers, which have been decided.
        problem: one that the kernels accept.

    Raises:
        PlanError: there is no algorithm for one of the layers.
        MemoryError: the GPU has not enough memory for all operands of the chain.
    """
    search = _Passes(bench, chain, problem)
    outcome = race(search)
    is_fused = outcome.winner
    strategy, other = {FUSED_MLP: is_fused}, {FUSED_MLP: not is_fused}
    rejected = tuple(RejectedStrategy(other, reason) for reason in search.rejected.values())
    slower = outcome.timings.get(not is_fused)
    measured = () if rejected or slower is None else (Alternative(other, slower.median_us),)
    before, after = (outcome.timings[name].median_us for name in (True, is_fused))
    words, reasons = strategy_in_words(strategy), tuple(map(rejection_in_words, rejected))
    tuned = Tuned((problem,), before, after, words, search.operands.measured, reasons)
    return tuned, {problem: LayerEntry(strategy, after, measured, rejected)}


class _Passes:
    """Two contenders: True is one kernel for each pass, which runs untuned, and False is layer by layer.

    Attributes:
        rejected: the reason, by contender.
    """

    def __init__(self, bench: Bench, chain: LayerChain, problem: MLPProblem) -> None:
        forwards = {index: make_layer_plan(each, bench.device) for index, each in chain.forwards.items()}
        chain = chain.keeping({index: plan.strategy.saved for index, plan in forwards.items()})
        fused: Placed = [(0, plan) for plan in mlp_plans(problem, bench.device)]
        layers: Placed = [(index, make_layer_plan(each, bench.device)) for index, each in chain.runs]
        self._plans = {True: fused, False: layers}
        self._chain, self._least_us, self._layers = chain, floor_us([problem], bench.device), len(problem.biases)
        self.operands = OperandSets(bench, chain)
        self.rejected: dict[bool, str] = {}

    def names(self) -> list[bool]:
        """See `Contenders`."""
        return [name for name in self._plans if name not in self.rejected]

    def take_times(self, names: Collection[bool]) -> dict[bool, Timing]:
        """See `Contenders`."""
        plans = {name: self._plans[name] for name in names}
        return self.operands.take_times(plans, _BUDGET_S, _ROUNDS, in_a_loop=True, least_us=self._least_us)

    def faults(self, names: Collection[bool]) -> dict[bool, str]:
        """Compares the kernels' outputs and gradients with those of the layers; see `Contenders`."""
        if True not in names:
            return {}
        results = self.operands.results(self._plans[False])
        expected = {name: each for name, each in results.items() if self._is_outcome(name)}
        wrong = self.operands.disagreement(self._plans[True], expected, self._layers)
        return {} if wrong is None else {True: f"wrong: {wrong[1]}"}

    def reject(self, name: bool, reason: str) -> None:
        """See `Contenders`."""
        self.rejected[name] = reason

    def _is_outcome(self, name: str) -> bool:
        """Whether a result is one of the whole MLP, and not one that only its own layers read."""
        return name.startswith(("dw", "db")) or name == f"y of layer {max(self._chain.forwards)}"
