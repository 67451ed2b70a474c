"""Strategies for problems that nobody has measured: those of a problem, in the order in which to try them."""

from __future__ import annotations

from collections.abc import Iterable

from lt_runtime.planning.strategies import (
    BackwardStrategy,
    ForwardStrategy,
    MadeBy,
    backward_strategies,
    forward_strategies,
)
from lt_runtime.problem import BackwardProblem, ForwardProblem


def forward_priors(problem: ForwardProblem, device: int) -> Iterable[ForwardStrategy]:
    """Fused where nothing has to be kept; otherwise our kernel does what an auxiliary output would be for."""
    return sorted(forward_strategies(problem), key=lambda each: each.epilogue.has_aux_output)


def backward_priors(problem: BackwardProblem, device: int) -> Iterable[BackwardStrategy]:
    """Derivatives and bias gradients by our kernels, which on Hopper beat the library's epilogues up to four times."""
    return sorted(backward_strategies(problem), key=_by_library)


def _by_library(strategy: BackwardStrategy) -> int:
    return (strategy.db, strategy.derivative, strategy.db_below).count(MadeBy.EPILOGUE)
