"""Decides by measurement between two ways to run consecutive layers: each by its plan, or all of them in another way.

A narrow MLP may run in fused kernels (`decide_mlp`), and layers may be in FP8 (`decide_fp8` in `fp8_search.py`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Final

from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.plans.cache import FUSED_MLP, make_layer_plan
from lt_runtime.plans.mlp import mlp_plans
from lt_runtime.problem import DType, MLPProblem
from lt_runtime.store.entries import Alternative, LayerEntry, RejectedStrategy
from lt_runtime.tuner.chain import LayerChain
from lt_runtime.tuner.chain_operands import ChainOperands, OperandSets, Placed, disagreement
from lt_runtime.tuner.operands import Memory
from lt_runtime.tuner.report import Decided, Tuned, choice_in_words, rejection_in_words
from lt_runtime.tuner.roofline import floor_us
from lt_runtime.tuner.timing import Bench, Timing, race

_ROUNDS: Final = 9
_BUDGET_S: Final = 0.4


class EndOperands(ChainOperands):
    """The operands of a chain whose results are the outputs, and the gradients of inputs and parameters.

    Tensors between the layers are not compared: the other way may compute different tensors, or write none.
    """

    def __init__(self, memory: Memory, chain: LayerChain) -> None:
        super().__init__(memory, chain)
        compared = ("output", len(chain.layers) - 1), ("gradient", -1)
        self._results = {
            name: each
            for name, each in self._results.items()
            if (each.role, each.layer) in compared or each.role in ("weight gradient", "bias gradient")
        }


@dataclass
class TwoWays:
    """The contenders of a race: False runs each layer by its plan; True runs an MLP in fused kernels, or layers in FP8.

    Attributes:
        problem: the problem that asks for the decision.
        key: name of the decision in the plan cache.
        plans: the plans of both contenders; the first runs without tuning. True is absent if it cannot run.
        operands: the operands of both, as `EndOperands`.
        checked: plans of the other way whose results are verified.
        tolerance: the type and the number of layers for `disagreement`.
        added_us: microseconds that the other way adds to a step elsewhere; they are added to its measured time.
        rejected: the other way with a reason, if it is rejected.
    """

    bench: Bench
    problem: MLPProblem | Fp8ChainProblem
    key: str
    plans: dict[bool, Placed]
    operands: OperandSets
    checked: Placed
    tolerance: tuple[DType, int]
    added_us: float = 0.0
    rejected: list[RejectedStrategy] = field(default_factory=list)

    def decide(self, *, untuned: bool, **options: float) -> Decided:
        """Holds the race; returns the report and the entry for the plan cache.

        Args:
            untuned: the contender that runs without tuning, for the report.
            options: of `race`.
        """
        winner, timings = race(self, **options)
        others = [name for name in self.names() if name is not winner and name in timings]
        slower = tuple(Alternative({self.key: name}, timings[name].median_us) for name in others)
        entry = LayerEntry({self.key: winner}, timings[winner].median_us, slower, tuple(self.rejected))
        before, reasons = timings.get(untuned, timings[winner]), tuple(map(rejection_in_words, self.rejected))
        us = before.median_us, entry.us
        tuned = Tuned((self.problem,), *us, choice_in_words(entry), self.operands.measured, reasons)
        return tuned, {self.problem: entry}

    def names(self) -> list[bool]:
        """See `Contenders`."""
        return [*self.plans]

    def take_times(self, names: Collection[bool]) -> dict[bool, Timing]:
        """See `Contenders`."""
        plans, least = {name: self.plans[name] for name in names}, floor_us([self.problem], self.bench.device)
        found = self.operands.take_times(plans, _BUDGET_S, _ROUNDS, in_a_loop=True, least_us=least)
        added = {name: self.added_us if name else 0.0 for name in found}
        return {name: replace(each, median_us=each.median_us + added[name]) for name, each in found.items()}

    def reject_wrong(self, names: Collection[bool]) -> list[bool]:
        """Compares the results of the other way with those of the layers' plans; see `Contenders`."""
        if True not in names:
            return []
        expected = self.operands.results(self.plans[False])
        wrong = disagreement(self.operands.results(self.checked), expected, *self.tolerance)
        if wrong is None:
            return []
        self.reject(f"wrong: {wrong[1]}")
        return [True]

    def reject(self, reason: str) -> None:
        """Removes the contender True, which runs the layers in the other way, and records the reason."""
        self.plans.pop(True, None)
        self.rejected.append(RejectedStrategy({self.key: True}, reason))


def as_planned(chain: LayerChain, device: int) -> tuple[LayerChain, Placed]:
    """The chain with the saved tensors of its layers' present plans, and the plans in the order in which they run.

    Raises:
        PlanError: cuBLASLt has no algorithm for one of the layers.
    """
    plans = {index: make_layer_plan(each, device) for index, each in chain.forwards.items()}
    chain = chain.keeping({index: plan.strategy.saved for index, plan in plans.items()})
    return chain, [(index, make_layer_plan(each, device)) for index, each in chain.runs]


def decide_mlp(bench: Bench, chain: LayerChain, problem: MLPProblem) -> Decided:
    """Measures whether a narrow MLP runs faster fused or layer by layer; returns the report and its plan-cache entry.

    Args:
        chain: the MLP's layers, which have been decided.
        problem: an MLP that the fused kernels support.

    Raises:
        PlanError: cuBLASLt has no algorithm for one of the layers.
        MemoryError: the GPU has not enough memory for all operands of the chain.
    """
    chain, layers = as_planned(chain, bench.device)
    passes = [(0, plan) for plan in mlp_plans(problem, bench.device)]
    # A fused backward pass that computes the loss also computes the outputs, so that no forward pass runs. Both
    # contenders are timed without the loss, which hardly changes their times.
    fused = passes[-1:] if problem.loss else passes
    operands, tolerance = OperandSets(bench, chain, EndOperands), (problem.dtype, len(problem.biases))
    ways = TwoWays(bench, problem, FUSED_MLP, {True: fused, False: layers}, operands, passes, tolerance)
    return ways.decide(untuned=True)
