"""Which algorithms a plan's products use: cuBLASLt's, on the operands or on copies, or our kernel for narrow ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeAlias

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.kernels.narrow import takes
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.blobs import plan_by
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.narrow import NarrowPlan
from lt_runtime.products.padded import PaddedPlan, pays_untuned
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import plan_store

Choose: TypeAlias = Callable[[MatmulProblem, int], AlgorithmPlan]
"""Makes the plan of a product on a device, which is current. PlanError if neither cuBLASLt nor our kernel does it."""


def known_algorithm(problem: MatmulProblem, device: int) -> AlgorithmPlan:
    """By the algorithm that was measured to be the fastest; as `heuristic_algorithm`, where nothing was measured.

    A measured one that the library refuses now, or that is known to be wrong by now, is barred in the plan cache.
    """
    if problem.is_empty:
        return MatmulPlan(problem, device)
    store, key = plan_store(device), problem_key(problem)
    entry = store.product(key)
    if entry is not None:
        try:
            return plan_by(problem, device, entry.algorithm)
        except PlanError as error:
            store.bar(key, entry, str(error))
    return heuristic_algorithm(problem, device)


def heuristic_algorithm(problem: MatmulProblem, device: int) -> AlgorithmPlan:
    """By the first that the heuristic offers that is lean, whatever was measured; on padded copies where that pays.

    Where the library offers none, by our kernel; or else a plain product is made on padded copies, and an epilogue is
    left to our own pass.
    """
    if pays_untuned(problem):
        with contextlib.suppress(PlanError):  # as where there is no room for the copies
            return PaddedPlan(problem, device)
    try:
        return MatmulPlan(problem, device)
    except PlanError:
        if takes(problem):
            return NarrowPlan(problem, device)
        if problem.epilogue is Epilogue.NONE:
            with contextlib.suppress(PlanError):
                return PaddedPlan(problem, device)
        raise


def first_algorithm(problem: MatmulProblem, device: int) -> AlgorithmPlan:
    """By the very first that the heuristic offers, whatever it puts on the stream: what others do."""
    return MatmulPlan(problem, device, rank=0)
