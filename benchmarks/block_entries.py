"""What the tuner has left of a block in the plan cache, for the record and for the priors that are derived from it."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.block_lt import DEVICE, strategy_name
from lt_runtime.plans.strategies import BackwardStrategy, ForwardStrategy, forward_strategies, from_entry
from lt_runtime.problem import ForwardProblem, Saved
from lt_runtime.store.entries import LayerEntry
from lt_runtime.store.keys import Problem, problem_key
from lt_runtime.store.plan_store import plan_store
from lt_runtime.tuning.stacks import Stack

Entries = dict[str, dict[str, float]]
"""Microseconds by role and strategy; the chosen strategy comes first."""


def entries_of(stack: Stack) -> Entries:
    """The times of every pass's strategies; those of backward through the first layer by what that keeps."""
    store = plan_store(DEVICE)
    found = {role: (problem, store.layer(problem_key(problem))) for role, problem in _roles(stack)}
    return {role: _times(problem, entry) for role, (problem, entry) in found.items() if entry is not None}


def _roles(stack: Stack) -> Iterator[tuple[str, Problem]]:
    first, second = (stack.forward(i) for i in range(2))
    yield "forward", first
    yield "last forward", second
    for saved in dict.fromkeys(each.saved for each in forward_strategies(first)):
        yield f"backward {saved.value}", stack.backward(1, (saved, Saved.NOTHING))
    yield "last backward", stack.backward(0, (saved, Saved.NOTHING))


def _times(problem: Problem, entry: LayerEntry) -> dict[str, float]:
    kind = ForwardStrategy if isinstance(problem, ForwardProblem) else BackwardStrategy
    times = [(entry.strategy, entry.us), *((each.strategy, each.us) for each in entry.alternatives)]
    return {strategy_name(from_entry(kind, strategy)): round(us, 3) for strategy, us in times}
