"""Which algorithms of cuBLASLt are worth a measurement for one product.

What the heuristic offers comes first. At deep effort follow configurations that it did not offer, put together from
what each algorithm is capable of, in the order of an estimate of their time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Final, TypeVar

from lt_runtime import cublaslt
from lt_runtime.cublaslt import AlgoCapAttribute, AlgoConfigAttribute, Algorithm, MatmulTile, ReductionScheme
from lt_runtime.cublaslt.tiles import tile_shape
from lt_runtime.errors import ArgumentError, CublasLtError, PlanError
from lt_runtime.products.choose import configuration
from lt_runtime.products.library_terms import library_shape
from lt_runtime.products.matmul import MatmulPlan

MOST: Final = 16
"""Candidates at default effort: up to eight of the first query, the rest from the other queries."""
MOST_DEEP: Final = 64

_TILES: Final = 24
_REFINED: Final = 4
_SPLITS: Final = (2, 3, 4, 6, 8, 16)
_CLUSTERS: Final = tuple(
    cublaslt.ClusterShape[f"SHAPE_{shape}"] for shape in ("1x1x1", "2x1x1", "1x2x1", "2x2x1", "4x1x1", "1x4x1")
)
_INNER_SHAPES: Final = tuple(shape for shape in cublaslt.MatmulInnerShape if shape)
_CUSTOM_OPTIONS: Final = 4
_LOADING: Final = 64.0  # Loading one element takes about as long as this many multiplications.
_ADDING: Final = 256.0  # So does writing a partial sum and reading it again.

_T = TypeVar("_T")
_Changes = Mapping[AlgoConfigAttribute, int]
_Estimated = tuple[float, Algorithm]


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


def deep_candidates(plan: MatmulPlan, known: Iterable[Algorithm]) -> list[Algorithm]:
    """`known`, then configurations that no query has offered; `MOST_DEEP` in all.

    The algorithms' ids take turns, those that the heuristic has chosen from first: each with its most promising
    configuration, then its second, and so on. An estimate compares configurations of one id and says nothing about
    another id, so what the limit cuts off are the least promising ones of each id.
    """
    taken = [*known]
    configurations = [configuration(each.blob) for each in taken]
    chosen = [each.get(AlgoConfigAttribute.ID) for each in taken]
    ids = dict.fromkeys((*chosen, *cublaslt.algo_get_ids(plan.handle, plan.types)))
    for algorithm in _in_turns(*(configurations_of(plan, algo_id) for algo_id in ids)):
        if len(taken) >= MOST_DEEP:
            break
        if configuration(algorithm.blob) not in configurations:
            taken.append(algorithm)
            configurations.append(configuration(algorithm.blob))
    return taken


def configurations_of(plan: MatmulPlan, algo_id: int) -> list[Algorithm]:
    """Configurations of an id that the library and the plan accept for the product, the most promising first.

    Two kinds take turns: every pairing of stages with the `_TILES` most promising tiles; and around the `_REFINED` best
    of those, one change at a time: K split, blocks swizzled, another cluster, inner shape or custom option.
    """
    try:
        base = cublaslt.algo_init(plan.handle, plan.types, algo_id)
        coarse = sorted(_accepted(plan, base, _pairings(plan, base)), key=itemgetter(0))
        refined = [_accepted(plan, start, _refinements(start)) for _, start in coarse[:_REFINED]]
    except CublasLtError:  # The library does not have the algorithm for these types.
        return []
    fine = sorted(itertools.chain.from_iterable(refined), key=itemgetter(0))
    return [algorithm for _, algorithm in _in_turns(coarse, fine)]


def _in_turns(*lists: Iterable[_T]) -> Iterator[_T]:
    rounds = itertools.chain.from_iterable(itertools.zip_longest(*lists))
    return (each for each in rounds if each is not None)


def estimate(shape: tuple[int, int], k: int, tile: tuple[int, int], waves: float = 0.0, parts: int = 1) -> float:
    """A relative time, by what is lost at the edges of D, in the last wave, in loading operands and in adding parts.

    Args:
        shape: rows and columns of D.
        k: length of the sums.
        tile: rows and columns of D that a block works on.
        waves: how many times the blocks fill the GPU; 0.0 where that is not known.
        parts: how many parts K is split into.
    """
    padding = math.prod(-(-extent // step) * step / extent for extent, step in zip(shape, tile, strict=True))
    idle = math.ceil(waves) / waves if waves else 1.0
    # For each step along K, a block loads rows + columns elements and multiplies rows × columns times.
    loading = 1.0 + _LOADING * sum(1.0 / step for step in tile)
    adding = 1.0 + (_ADDING * parts / k if parts > 1 else 0.0)
    return padding * idle * loading * adding


def _accepted(plan: MatmulPlan, start: Algorithm, changes: Iterable[_Changes]) -> list[_Estimated]:
    found = []
    for change in changes:
        try:
            algorithm = start
            for attribute, value in change.items():
                algorithm = algorithm.set(attribute, value)
            algorithm = plan.check(algorithm)
        except (ArgumentError, CublasLtError, PlanError):
            continue
        tile = algorithm.tile or (1, 1)
        parts = algorithm.get(AlgoConfigAttribute.SPLITK_NUM)
        time = estimate(library_shape(plan.problem), plan.problem.k, tile, algorithm.waves_count, parts)
        found.append((time, algorithm))
    return found


def _pairings(plan: MatmulPlan, base: Algorithm) -> Iterator[_Changes]:
    d, k = library_shape(plan.problem), plan.problem.k
    shapes = {tile: tile_shape(tile) for tile in base.capabilities(AlgoCapAttribute.TILE_IDS)}
    known = {tile: estimate(d, k, shape) for tile, shape in shapes.items() if shape}
    tiles = sorted(known, key=known.__getitem__)[:_TILES] or [MatmulTile.UNDEFINED]
    stages = base.capabilities(AlgoCapAttribute.STAGES_IDS) or (0,)
    for tile, depth in itertools.product(tiles, stages):
        yield {AlgoConfigAttribute.TILE_ID: tile, AlgoConfigAttribute.STAGES_ID: depth}


def _refinements(start: Algorithm) -> Iterator[_Changes]:
    """One change each. No capability tells which clusters and inner shapes there are: `algo_check` refuses the rest."""
    config, capability = AlgoConfigAttribute, AlgoCapAttribute
    sums = ReductionScheme(start.capability(capability.REDUCTION_SCHEME_MASK))
    if start.capability(capability.SPLITK_SUPPORT) and ReductionScheme.COMPUTE_TYPE in sums:
        scheme = int(ReductionScheme.COMPUTE_TYPE)
        yield from ({config.SPLITK_NUM: parts, config.REDUCTION_SCHEME: scheme} for parts in _SPLITS)
    if start.capability(capability.CTA_SWIZZLING_SUPPORT):
        yield {config.CTA_SWIZZLING: 1}
    yield from ({config.CLUSTER_SHAPE_ID: shape} for shape in _CLUSTERS)
    yield from ({config.INNER_SHAPE_ID: shape} for shape in _INNER_SHAPES)
    most = min(start.capability(capability.CUSTOM_OPTION_MAX), _CUSTOM_OPTIONS)
    yield from ({config.CUSTOM_OPTION: option} for option in range(1, most + 1))
