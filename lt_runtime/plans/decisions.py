"""Which strategy a plan follows: the one that was measured, else the priors', else the first that works."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from lt_runtime.errors import PlanError
from lt_runtime.plans.backward import BackwardPlan
from lt_runtime.plans.forward import ForwardPlan
from lt_runtime.plans.priors import backward_priors, forward_priors
from lt_runtime.plans.strategies import BackwardStrategy, ForwardStrategy, from_entry
from lt_runtime.problem import BackwardProblem, ForwardProblem
from lt_runtime.products.choose import Choose, known_algorithm
from lt_runtime.store.entries import LayerEntry, Strategy
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import plan_store

_Strategy = TypeVar("_Strategy", ForwardStrategy, BackwardStrategy)
_Plan = TypeVar("_Plan", ForwardPlan, BackwardPlan)


def decide_forward(problem: ForwardProblem, device: int) -> ForwardPlan:
    """The plan for a problem, by what was measured or by the priors.

    Raises:
        PlanError: cuBLASLt has no algorithm even for the plain product.
    """
    made = _measured(problem, device, lambda values: ForwardPlan(problem, device, from_entry(ForwardStrategy, values)))
    return made or prior_forward(problem, device)


def decide_backward(problem: BackwardProblem, device: int) -> BackwardPlan:
    """As `decide_forward`."""
    made = _measured(
        problem, device, lambda values: BackwardPlan(problem, device, from_entry(BackwardStrategy, values))
    )
    return made or prior_backward(problem, device)


def prior_forward(problem: ForwardProblem, device: int, choose: Choose = known_algorithm) -> ForwardPlan:
    """By the priors, whatever was measured of strategies. Raises as `decide_forward`."""
    strategies = forward_priors(problem, device)
    return _first_that_works(strategies, lambda each: ForwardPlan(problem, device, each, choose))


def prior_backward(problem: BackwardProblem, device: int, choose: Choose = known_algorithm) -> BackwardPlan:
    """As `prior_forward`."""
    strategies = backward_priors(problem, device)
    return _first_that_works(strategies, lambda each: BackwardPlan(problem, device, each, choose))


def _measured(
    problem: ForwardProblem | BackwardProblem, device: int, make: Callable[[Strategy], _Plan]
) -> _Plan | None:
    """The plan in the plan cache; one that cannot be made any more is barred there."""
    made: list[_Plan] = []

    def validate(_: str, entry: LayerEntry) -> str | None:
        try:
            made.append(make(entry.strategy))
        except (PlanError, ValueError) as error:
            return str(error)
        return None

    plan_store(device).layer(problem_key(problem), validate)
    return made[0] if made else None


def _first_that_works(strategies: Iterable[_Strategy], make: Callable[[_Strategy], _Plan]) -> _Plan:
    refused: PlanError | None = None
    for strategy in strategies:
        try:
            return make(strategy)
        except PlanError as error:
            refused = error
    raise refused or PlanError("there is no strategy for the problem")
