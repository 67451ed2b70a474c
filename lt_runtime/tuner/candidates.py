"""The algorithms of cuBLASLt that are measured for one product: those that the heuristic offers to several queries."""

from __future__ import annotations

import itertools
from typing import Final

from lt_runtime.cublaslt import Algorithm, ReductionScheme
from lt_runtime.products.matmul import MatmulPlan

MOST: Final = 16
"""Candidates of a product at most: up to eight of the first query, the rest from the other queries."""


def heuristic_candidates(plan: MatmulPlan, workspace: int) -> list[Algorithm]:
    """The plan's own algorithm, then others that the heuristic offers; `MOST` in all.

    One query returns eight at the most. Queries with less workspace, or without a sum over the parts of a split K,
    return algorithms for which the first query had no room.

    Args:
        plan: of the product, its algorithm chosen by the heuristic.
        workspace: bytes that an algorithm may use.
    """
    schemes = dict.fromkeys((plan.reductions, ReductionScheme.NONE))
    limits = (workspace, workspace // 8, 0)
    queries = (plan.query(limit, scheme) for limit, scheme in itertools.product(limits, schemes))
    own = (plan.algorithm,) if plan.algorithm else ()
    distinct: dict[bytes, Algorithm] = {}
    for algorithm in itertools.chain(own, plan.candidates, itertools.chain.from_iterable(queries)):
        distinct.setdefault(algorithm.blob, algorithm)
        if len(distinct) == MOST:  # The queries that are left over are not made.
            break
    return list(distinct.values())
