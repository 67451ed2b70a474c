"""Our side of a two-layer block: plans of its four passes, split and chosen in different ways."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from benchmarks.blocks import Block
from benchmarks.buffers import normal
from lt_runtime.errors import PlanError
from lt_runtime.plans.backward import BackwardCall, BackwardPlan
from lt_runtime.plans.decisions import decide_backward, decide_forward, prior_backward, prior_forward
from lt_runtime.plans.forward import ForwardPlan
from lt_runtime.plans.strategies import (
    BackwardStrategy,
    ForwardStrategy,
    MadeBy,
    backward_strategies,
    forward_strategies,
)
from lt_runtime.problem import BackwardProblem, Saved
from lt_runtime.products.choose import Choose, first_algorithm, heuristic_algorithm, known_algorithm
from lt_runtime.tuning.stacks import Stack

DEVICE = 0
_Strategy = TypeVar("_Strategy", ForwardStrategy, BackwardStrategy)
_Plan = TypeVar("_Plan", ForwardPlan, BackwardPlan)


class Arrays(NamedTuple):
    """One buffer set: operands of the first layer and of the second, and what backward makes."""

    x: Any
    w1: Any
    b1: Any
    w2: Any
    b2: Any
    dy: Any
    y1: Any
    y2: Any
    kept: Any
    dx: Any
    dw1: Any
    db1: Any
    dz1: Any
    dw2: Any
    db2: Any


def arrays(block: Block) -> Arrays:
    """Random numbers, in what is to be written as well."""
    m, n, k = block.layer
    padded = -(-n // 8) * 8  # the rows of a pre-activation that is kept; a mask's take no more
    w1, w2 = (n, k), (k, n)
    shapes = ((m, k), w1, (n,), w2, (k,), (m, k), (m, n), (m, k), (m, padded), (m, k), w1, (n,), (m, n), w2, (k,))
    return Arrays(*(normal(shape, block.dtype) for shape in shapes))


@dataclass(frozen=True)
class Plans:
    """A block's four passes: forward of both layers, backward of the second through the first, and of the first."""

    first: ForwardPlan
    second: ForwardPlan
    through: BackwardPlan
    last: BackwardPlan

    def run(self, at: Arrays, stream: int) -> None:
        """Puts the block on `stream`; `at` holds addresses."""
        saved = at.y1 if self.first.saved is Saved.OUTPUT else at.kept
        self.first.run(at.x, at.w1, at.b1, at.y1, at.kept, None, stream)
        self.second.run(at.y1, at.w2, at.b2, at.y2, 0, None, stream)
        self.through.run(
            BackwardCall(
                at.dy, at.y1, at.w2, stream, dx=at.dz1, dw=at.dw2, db=at.db2, saved_below=saved, db_below=at.db1
            )
        )
        self.last.run(BackwardCall(at.dz1, at.x, at.w1, stream, dx=at.dx, dw=at.dw1))


class Split(NamedTuple):
    """A strategy for each of a block's passes."""

    first: ForwardStrategy
    second: ForwardStrategy
    through: BackwardStrategy
    last: BackwardStrategy

    def __str__(self) -> str:
        return " | ".join(map(strategy_name, self))


def strategy_name(strategy: ForwardStrategy | BackwardStrategy) -> str:
    """Its values in the order of their declaration; a weight gradient is made beside dx, or after it."""
    if isinstance(strategy, ForwardStrategy):
        return f"{strategy.epilogue.value} {strategy.saved.value}"
    parts = strategy.db.value, strategy.derivative.value, strategy.db_below.value
    return " ".join((*parts, "beside" if strategy.beside else "after"))


def decided(stack: Stack) -> Plans:
    """By what the tuner has left in the plan cache."""
    first, second = (decide_forward(stack.forward(i), DEVICE) for i in range(2))
    last, through = (decide_backward(stack.backward(i, (first.saved, second.saved)), DEVICE) for i in range(2))
    return Plans(first, second, through, last)


def by_priors(stack: Stack) -> Plans:
    """By the shipped priors and the heuristic, whatever was measured here."""
    first, second = (prior_forward(stack.forward(i), DEVICE, heuristic_algorithm) for i in range(2))
    last, through = (
        prior_backward(stack.backward(i, (first.saved, second.saved)), DEVICE, heuristic_algorithm) for i in range(2)
    )
    return Plans(first, second, through, last)


def split_of(plans: Plans) -> Split:
    """The strategies that plans follow."""
    return Split(plans.first.strategy, plans.second.strategy, plans.through.strategy, plans.last.strategy)


def by_split(stack: Stack, split: Split, choose: Choose = known_algorithm) -> Plans:
    """By strategies of the caller's choice.

    Raises:
        PlanError: the library refuses one.
    """
    saved = split.first.saved, split.second.saved
    first, second = (ForwardPlan(stack.forward(i), DEVICE, split[i], choose) for i in range(2))
    through = BackwardPlan(stack.backward(1, saved), DEVICE, split.through, choose)
    return Plans(first, second, through, BackwardPlan(stack.backward(0, saved), DEVICE, split.last, choose))


def fused_first(stack: Stack) -> tuple[Plans, list[str]]:
    """All that cuBLASLt can fuse, by the first algorithm that it offers; and what it refused, for which less came in.

    So do libraries that are bindings alone.
    """
    refused: list[str] = []
    first, second = (
        _most_fused(
            sorted(forward_strategies(problem), key=lambda each: not each.epilogue.has_aux_output),
            lambda each, problem=problem: ForwardPlan(problem, DEVICE, each, first_algorithm),
            refused,
        )
        for problem in map(stack.forward, range(2))
    )
    last, through = (
        _most_fused(
            sorted(_in_turn(problem), key=_left_to_kernels),
            lambda each, problem=problem: BackwardPlan(problem, DEVICE, each, first_algorithm),
            refused,
        )
        for problem in (stack.backward(i, (first.saved, second.saved)) for i in range(2))
    )
    return Plans(first, second, through, last), refused


def _most_fused(strategies: Iterable[_Strategy], make: Callable[[_Strategy], _Plan], refused: list[str]) -> _Plan:
    for strategy in strategies:
        try:
            return make(strategy)
        except PlanError:
            refused.append(strategy_name(strategy))
    raise PlanError(f"cuBLASLt refuses every strategy: {', '.join(refused)}")


def _in_turn(problem: BackwardProblem) -> Iterator[BackwardStrategy]:
    """What needs no second stream."""
    return (strategy for strategy in backward_strategies(problem) if not strategy.beside)


def _left_to_kernels(strategy: BackwardStrategy) -> int:
    return (strategy.db, strategy.derivative, strategy.db_below).count(MadeBy.KERNEL)


def split_first(stack: Stack) -> Plans:
    """Plain products by the first algorithm offered, all else by our kernels."""
    *_, first = forward_strategies(stack.forward(0))
    *_, second = forward_strategies(stack.forward(1))
    last, through = (next(_in_turn(stack.backward(i, (first.saved, second.saved)))) for i in range(2))
    return by_split(stack, Split(first, second, through, last), first_algorithm)


def near(
    stack: Stack, entries: Mapping[str, Mapping[str, float]], chosen: Split, factor: float, most: int
) -> list[Split]:
    """Splits that by the tuner's times of their parts come within `factor` of the best, the best first; not the chosen.

    Args:
        entries: times by role and strategy, as `entries_of` gives them.
        most: how many at the most.
    """
    estimates: dict[Split, float] = {}
    for first in forward_strategies(stack.forward(0)):
        backward = stack.backward(1, (first.saved, Saved.NOTHING))
        times = entries.get(f"backward {first.saved.value}", {})
        for through in backward_strategies(backward):
            parts = entries.get("forward", {}).get(strategy_name(first)), times.get(strategy_name(through))
            if None not in parts:
                estimates[chosen._replace(first=first, through=through)] = sum(parts)
    within = factor * min(estimates.values(), default=0.0)
    ranked = sorted(estimates, key=estimates.__getitem__)
    others = [chosen._replace(second=each) for each in forward_strategies(stack.forward(1))]
    lasts = backward_strategies(stack.backward(0, (chosen.first.saved, Saved.NOTHING)))
    others += [chosen._replace(last=each) for each in lasts]
    return [each for each in others + [each for each in ranked if estimates[each] <= within] if each != chosen][:most]
