"""Which algorithms of cuBLASLt are worth a measurement for one product."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from lt_runtime import cublaslt
from lt_runtime.cublaslt import AlgoConfigAttribute, Algorithm, ReductionScheme
from lt_runtime.products.blobs import configuration
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.store.entries import ProductEntry, now
from lt_runtime.tuner.guesses import guesses

MOST: Final = 16
"""Candidates at default effort: what the first query returns, and as many again from the others."""
MOST_DEEP: Final = 64


def heuristic_candidates(plan: MatmulPlan, workspace: int) -> list[Algorithm]:
    """The plan's own algorithm, then others that the heuristic offers; `MOST` in all.

    One query returns eight at the most. Those with less workspace, or without a sum over the parts of a split K, let
    through what the first has crowded out.

    Args:
        plan: of the product, its algorithm chosen by the heuristic.
        workspace: bytes that an algorithm may use.
    """
    schemes = dict.fromkeys((plan.reductions, ReductionScheme.NONE))
    limits = (workspace, workspace // 8, 0)
    queries = (plan.query(limit, scheme) for limit, scheme in itertools.product(limits, schemes))
    offered = itertools.chain(
        (plan.algorithm,) if plan.algorithm else (), plan.candidates, itertools.chain.from_iterable(queries)
    )
    distinct: dict[bytes, Algorithm] = {}
    for algorithm in offered:
        distinct.setdefault(algorithm.blob, algorithm)
        if len(distinct) == MOST:  # queries that are left over are not made
            break
    return list(distinct.values())


def deep_candidates(plan: MatmulPlan, known: Iterable[Algorithm]) -> list[Algorithm]:
    """`known`, then configurations that no query has offered; `MOST_DEEP` in all.

    The ids take turns, those that the heuristic has chosen from first, each with its best guess, then its second, and
    so on: a guess compares configurations of one id, and says nothing about another's. What the cap cuts off are the
    worst guesses of each.
    """
    taken = [*known]
    configurations = [configuration(each.blob) for each in taken]
    chosen = [each.get(AlgoConfigAttribute.ID) for each in taken]
    ids = dict.fromkeys((*chosen, *cublaslt.algo_get_ids(plan.handle, *plan.types)))
    by_id = [guesses(plan, algo_id) for algo_id in ids]
    for guess in itertools.chain.from_iterable(itertools.zip_longest(*by_id)):
        if len(taken) >= MOST_DEEP:
            break
        if guess is not None and configuration(guess.blob) not in configurations:
            taken.append(guess)
            configurations.append(configuration(guess.blob))
    return taken


def with_algorithm(entry: ProductEntry, blob: bytes) -> ProductEntry:
    """The entry with the heuristic's first algorithm in place of the one that was found."""
    return replace(entry, algorithm=blob, config=configuration(blob), us=entry.first_us, when=now())
