"""Runs the passes of a two-layer block by given strategies, which no public call can do.

Only this module, `internals`, `priors` and `untuned` import private parts of lt_runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from benchmarks.layers import Arrays
from benchmarks.timing import Contender
from lt_runtime.errors import PlanError
from lt_runtime.kernels.call import Call
from lt_runtime.plans.cache import LayerProblem, make_layer_plan, prior_plan
from lt_runtime.plans.layers import BackwardPlan, ForwardPlan
from lt_runtime.plans.strategies import (
    BackwardStrategy,
    ForwardStrategy,
    MadeBy,
    backward_strategies,
    forward_strategies,
)
from lt_runtime.problem import Activation, BackwardProblem, Compute, DType, ForwardProblem, Saved
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.methods import Choose, heuristic_algorithm, known_algorithm
from lt_runtime.store.entries import LayerEntry
from lt_runtime.store.keys import Problem, from_json, problem_key
from lt_runtime.store.plan_store import plan_store
from lt_runtime.tuner.chain import LayerChain

DEVICE = 0
first_algorithm = partial(MatmulPlan, rank=0)
"""Makes the plan of a product by the first algorithm that cuBLASLt's heuristic offers, as other libraries do."""
_Strategy = TypeVar("_Strategy", ForwardStrategy, BackwardStrategy)
_Plan = TypeVar("_Plan", ForwardPlan, BackwardPlan)

Entries = dict[str, dict[str, float]]
"""Maps the name of a pass from `roles` to its measured microseconds by strategy, the chosen strategy first."""


def chain_of(case: Any) -> LayerChain:
    """Returns the layers of a block or of a training step."""
    activation, dtype, compute = Activation(case.activation), DType(case.dtype), Compute(case.compute)
    return LayerChain.of_mlp(case.rows, case.dims, activation, dtype, compute, input_gradient=case.input_gradient)


class Plans(NamedTuple):
    """Plans of the four passes of a block of two layers.

    The passes are forward of each layer, backward of the second layer, which includes the derivative of the first
    layer's activation, and backward of the first layer.
    """

    first: ForwardPlan
    second: ForwardPlan
    through: BackwardPlan
    last: BackwardPlan

    def contender(self, buffers: Sequence[Arrays]) -> Contender:
        """The contender that runs the block by these plans."""
        addresses = [Arrays(*(array.data.ptr for array in each)) for each in buffers]
        return Contender(lambda i, stream: self.run(addresses[i], stream))

    def run(self, at: Arrays, stream: int) -> None:
        """Launches forward of both layers, then backward of both; `at` holds the arrays' addresses."""
        saved = at.y1 if self.first.strategy.saved is Saved.OUTPUT else at.kept
        self.first.run(Call((at.x, at.w1, at.b1, at.y1, at.kept, 0), stream))
        self.second.run(Call((at.y1, at.w2, at.b2, at.y2, 0, 0), stream))
        self.through.run(Call((at.dy, at.y1, at.w2, 0, saved, at.dz1, at.dw2, at.db2, 0, at.db1), stream))
        self.last.run(Call((at.dz1, at.x, at.w1, 0, 0, at.dx, at.dw1, 0, 0, 0), stream))


class Split(NamedTuple):
    """The strategies of a block's four passes."""

    first: ForwardStrategy
    second: ForwardStrategy
    through: BackwardStrategy
    last: BackwardStrategy

    def __str__(self) -> str:
        return " | ".join(map(strategy_name, self))


def strategy_name(strategy: ForwardStrategy | BackwardStrategy) -> str:
    """The name of a strategy: its values in the order of their declaration.

    The last value of a backward strategy says whether dw is made beside dx or after it.
    """
    if isinstance(strategy, ForwardStrategy):
        return f"{strategy.epilogue.value} {strategy.saved.value}"
    parts = strategy.db.value, strategy.derivative.value, strategy.db_below.value
    return " ".join((*parts, "beside" if strategy.dw_concurrent else "after"))


def split_of(plans: Plans) -> Split:
    """Returns the strategies that the plans were made with."""
    return Split(plans.first.strategy, plans.second.strategy, plans.through.strategy, plans.last.strategy)


def decided(chain: LayerChain) -> Plans:
    """Makes plans by the strategies and algorithms in the plan cache."""
    return _plans(chain, lambda each: make_layer_plan(each, DEVICE))


def by_priors(chain: LayerChain) -> Plans:
    """Makes plans by the shipped priors and the library's heuristic, without regard to measurements."""
    return _plans(chain, lambda each: prior_plan(each, DEVICE, heuristic_algorithm))


def by_split(chain: LayerChain, split: Split, choose: Choose = known_algorithm) -> Plans:
    """Makes plans by the given strategies.

    Raises:
        PlanError: cuBLASLt refuses a product of one of the strategies.
    """
    forwards, backwards = iter(split[:2]), iter((split.last, split.through))
    return _plans(
        chain,
        lambda each: ForwardPlan(each, DEVICE, next(forwards), choose),
        lambda each: BackwardPlan(each, DEVICE, next(backwards), choose),
    )


def fused_first(chain: LayerChain) -> tuple[Plans, list[str]]:
    """Makes plans that use cuBLASLt's epilogues wherever possible, with the algorithms that its heuristic offers first.

    A library that only binds cuBLASLt would run the block in this way.

    Returns:
        The plans, and the strategies that cuBLASLt has refused; the plans use strategies with fewer epilogues instead.
    """
    refused: list[str] = []

    def forward(problem: ForwardProblem) -> ForwardPlan:
        strategies = sorted(forward_strategies(problem), key=lambda each: not each.epilogue.has_aux_output)
        return _most_fused(strategies, lambda each: ForwardPlan(problem, DEVICE, each, first_algorithm), refused)

    def backward(problem: BackwardProblem) -> BackwardPlan:
        strategies = sorted(_in_turn(problem), key=_left_to_kernels)
        return _most_fused(strategies, lambda each: BackwardPlan(problem, DEVICE, each, first_algorithm), refused)

    return _plans(chain, forward, backward), refused


def split_first(chain: LayerChain) -> Plans:
    """Makes plans of plain products by the heuristic's first algorithms; our kernels do everything else."""

    def forward(problem: ForwardProblem) -> ForwardPlan:
        *_, plainest = forward_strategies(problem)
        return ForwardPlan(problem, DEVICE, plainest, first_algorithm)

    return _plans(chain, forward, lambda each: BackwardPlan(each, DEVICE, next(_in_turn(each)), first_algorithm))


def _plans(chain: LayerChain, forward: Callable[[Any], Any], backward: Callable[[Any], Any] | None = None) -> Plans:
    """Makes the plans of both forward passes, and then of backward, which depends on the saved tensor.

    Args:
        forward: makes the plan of a forward problem, and of a backward problem where there is no `backward`.
    """
    first, second = (forward(layer.forward) for layer in chain.layers)
    layers = chain.keeping({0: first.strategy.saved, 1: second.strategy.saved}).layers
    last, through = ((backward or forward)(layer.backward) for layer in layers)
    return Plans(first, second, through, last)


def _most_fused(strategies: Iterable[_Strategy], make: Callable[[_Strategy], _Plan], refused: list[str]) -> _Plan:
    for strategy in strategies:
        try:
            return make(strategy)
        except PlanError:
            refused.append(strategy_name(strategy))
    raise PlanError(f"cuBLASLt refuses every strategy: {', '.join(refused)}")


def _in_turn(problem: BackwardProblem) -> Iterator[BackwardStrategy]:
    """Leaves out the strategies that need a second stream."""
    return (strategy for strategy in backward_strategies(problem) if not strategy.dw_concurrent)


def _left_to_kernels(strategy: BackwardStrategy) -> int:
    return (strategy.db, strategy.derivative, strategy.db_below).count(MadeBy.KERNEL)


def near(chain: LayerChain, entries: Entries, chosen: Split, factor: float, most: int) -> list[Split]:
    """Splits, other than the chosen one, that tuning measured as almost as fast as the best; the best come first.

    Args:
        entries: times by the pass of the block and by strategy, as `entries_of` gives them.
        most: how many splits at most.
    """
    estimates: dict[Split, float] = {}
    for first in forward_strategies(chain.layers[0].forward):
        backward = chain.keeping({0: first.saved}).layers[1].backward
        times = entries.get(f"backward {first.saved.value}", {})
        for through in backward_strategies(backward):
            parts = entries.get("forward", {}).get(strategy_name(first)), times.get(strategy_name(through))
            if None not in parts:
                estimates[chosen._replace(first=first, through=through)] = sum(parts)
    within = factor * min(estimates.values(), default=0.0)
    ranked = sorted(estimates, key=estimates.__getitem__)
    others = [chosen._replace(second=each) for each in forward_strategies(chain.layers[1].forward)]
    lasts = backward_strategies(chain.layers[0].backward)
    others += [chosen._replace(last=each) for each in lasts]
    return [each for each in others + [each for each in ranked if estimates[each] <= within] if each != chosen][:most]


def entries_of(chain: LayerChain) -> Entries:
    """Maps the name of each pass from `roles` to the times that the plan cache holds for its strategies.

    The backward pass through the first layer has a name for each kind of saved tensor.
    """
    store = plan_store(DEVICE)
    found = {role: (problem, store.layer(problem_key(problem))) for role, problem in roles(chain)}
    return {role: _times(problem, entry) for role, (problem, entry) in found.items() if entry is not None}


def roles(chain: LayerChain) -> Iterator[tuple[str, LayerProblem]]:
    """The problems of a block of two layers, each with a name for its place in the block.

    The problem named "backward KIND" goes back through the first layer's activation, from a saved tensor of that kind.
    """
    first, second = (layer.forward for layer in chain.layers)
    yield "forward", first
    yield "last forward", second
    for saved in dict.fromkeys(each.saved for each in forward_strategies(first)):
        yield f"backward {saved.value}", chain.keeping({0: saved}).layers[1].backward
    yield "last backward", chain.layers[0].backward


def _times(problem: Problem, entry: LayerEntry) -> dict[str, float]:
    kind = ForwardStrategy if isinstance(problem, ForwardProblem) else BackwardStrategy
    times = [(entry.strategy, entry.us), *((each.strategy, each.us) for each in entry.alternatives)]
    return {strategy_name(from_json(kind, strategy)): round(us, 3) for strategy, us in times}
