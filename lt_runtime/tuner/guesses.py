"""Configurations of one of cuBLASLt's algorithms that may be fast for a product, by what the algorithm can do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Final

from lt_runtime import cublaslt
from lt_runtime.cublaslt import (
    AlgoCapAttribute,
    AlgoConfigAttribute,
    Algorithm,
    ClusterShape,
    MatmulInnerShape,
    MatmulTile,
    ReductionScheme,
)
from lt_runtime.errors import ArgumentError, CublasLtError, PlanError
from lt_runtime.products.matmul import MatmulPlan

_TILES: Final = 24
_REFINED: Final = 4
_SPLITS: Final = (2, 3, 4, 6, 8, 16)
_CLUSTERS: Final = (
    ClusterShape.SHAPE_1x1x1,
    ClusterShape.SHAPE_2x1x1,
    ClusterShape.SHAPE_1x2x1,
    ClusterShape.SHAPE_2x2x1,
    ClusterShape.SHAPE_4x1x1,
    ClusterShape.SHAPE_1x4x1,
)
_INNER_SHAPES: Final = tuple(shape for shape in MatmulInnerShape if shape)
_CUSTOM_OPTIONS: Final = 4
_LOADING: Final = 64.0
_ADDING: Final = 256.0  # multiplications that take as long as to write a partial sum and read it again, roughly

_Changes = Mapping[AlgoConfigAttribute, int]
_Guess = tuple[float, Algorithm]


def guesses(plan: MatmulPlan, algo_id: int) -> list[Algorithm]:
    """Configurations of an id that the library and the plan accept for the product, the best guess first.

    Two kinds take turns: every pairing of stages with the `_TILES` most promising tiles; and around the `_REFINED` best
    of those, one change at a time, K split, blocks swizzled, another cluster, inner shape or custom option.
    """
    try:
        base = cublaslt.algo_init(plan.handle, *plan.types, algo_id)
        coarse = sorted(_accepted(plan, base, _pairings(plan, base)), key=itemgetter(0))
        refined = [_accepted(plan, start, _refinements(start)) for _, start in coarse[:_REFINED]]
    except CublasLtError:  # not for these types
        return []
    fine = sorted(itertools.chain.from_iterable(refined), key=itemgetter(0))
    turns = itertools.chain.from_iterable(itertools.zip_longest(coarse, fine))
    return [guess[1] for guess in turns if guess is not None]


def estimate(shape: tuple[int, int], k: int, tile: tuple[int, int], waves: float = 0.0, parts: int = 1) -> float:
    """A relative time, by what is lost at the edges of D, in the last wave, in loading operands and in adding parts.

    Args:
        shape: rows and columns of D.
        k: length of the sums.
        tile: rows and columns of D that a block works on.
        waves: how many times the blocks fill the GPU; 0.0 where that is not known.
        parts: how many K is split into.
    """
    padding = math.prod(-(-extent // step) * step / extent for extent, step in zip(shape, tile, strict=True))
    idle = math.ceil(waves) / waves if waves else 1.0
    # A block loads tile rows + tile columns for each of K, and multiplies rows × columns.
    loading = 1.0 + _LOADING * sum(1.0 / step for step in tile)
    adding = 1.0 + (_ADDING * parts / k if parts > 1 else 0.0)
    return padding * idle * loading * adding


def tile_shape(tile: int) -> tuple[int, int] | None:
    """Rows and columns of a tile; None of one that is not known."""
    try:
        name = MatmulTile(tile).name
    except ValueError:
        return None
    rows, _, cols = name.removeprefix("TILE_").partition("x")
    return (int(rows), int(cols)) if cols else None


def _accepted(plan: MatmulPlan, start: Algorithm, changes: Iterable[_Changes]) -> list[_Guess]:
    found = []
    for change in changes:
        try:
            algorithm = start
            for attribute, value in change.items():
                algorithm = algorithm.set(attribute, value)
            algorithm = plan.check(algorithm)
        except (ArgumentError, CublasLtError, PlanError):
            continue
        tile = tile_shape(algorithm.get(AlgoConfigAttribute.TILE_ID)) or (1, 1)
        parts = algorithm.get(AlgoConfigAttribute.SPLITK_NUM)
        time = estimate(plan.library_shape, plan.problem.k, tile, algorithm.waves_count, parts)
        found.append((time, algorithm))
    return found


def _pairings(plan: MatmulPlan, base: Algorithm) -> Iterator[_Changes]:
    shapes = {tile: tile_shape(tile) for tile in base.capabilities(AlgoCapAttribute.TILE_IDS)}
    known = {tile: estimate(plan.library_shape, plan.problem.k, shape) for tile, shape in shapes.items() if shape}
    tiles = sorted(known, key=known.__getitem__)[:_TILES] or [MatmulTile.UNDEFINED]
    stages = base.capabilities(AlgoCapAttribute.STAGES_IDS) or (0,)
    for tile, depth in itertools.product(tiles, stages):
        yield {AlgoConfigAttribute.TILE_ID: tile, AlgoConfigAttribute.STAGES_ID: depth}


def _refinements(start: Algorithm) -> Iterator[_Changes]:
    """One change each; those that no capability tells of are for `algo_check` to judge."""
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
