"""Which algorithms a plan's products use: cuBLASLt's, on the operands or on copies, or kernels of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, TypeAlias

from lt_runtime import cublaslt
from lt_runtime.cublaslt import AlgoConfigAttribute, Algorithm
from lt_runtime.errors import CublasLtError, LtError, PlanError
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.cost import Way, fastest_first
from lt_runtime.products.library_terms import library_types
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.own import NARROW, OWN, TILE, NarrowPlan, TilePlan
from lt_runtime.products.padded import K_MAJOR, PADDED, PaddedPlan
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import plan_store

Choose: TypeAlias = Callable[[MatmulProblem, int], AlgorithmPlan]
"""Makes the plan of a product on a device, which is current; PlanError if neither cuBLASLt nor our kernels do it."""
_ALGORITHM: Final = 64  # bytes of the library's
_MARKS: Final = {PADDED: "PADDED", K_MAJOR: "K_MAJOR"}
_CONFIGURATIONS: Final[Mapping[bytes, Mapping[str, int]]] = {NARROW.blob: {}, TILE.blob: {"TILE_MATMUL": 1}}
"""What a plan cache's configuration says of each of our kernels."""
_MAKERS: Final[Mapping[Way, Choose]] = {
    Way.PLAIN: MatmulPlan,
    Way.PADDED: PaddedPlan,
    Way.K_MAJOR: partial(PaddedPlan, k_major=True),
    Way.NARROW: NarrowPlan,
    Way.TILE: TilePlan,
}


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
            return plan_from_blob(problem, device, entry.algorithm)
        except PlanError as error:
            store.bar(key, entry, str(error))
    return heuristic_algorithm(problem, device)


def heuristic_algorithm(problem: MatmulProblem, device: int) -> AlgorithmPlan:
    """In the way that `fastest_first` estimates to be the fastest of those that are possible, whatever was measured.

    Where the library makes it, by the most promising algorithm that the heuristic offers; see `MatmulPlan`.

    Raises:
        PlanError: why the library does not make the product as it is.
    """
    refused: PlanError | None = None
    for way in fastest_first(problem):
        try:
            return _MAKERS[way](problem, device)
        except PlanError as error:
            refused = error if way is Way.PLAIN or refused is None else refused
    assert refused is not None, "there is always a way"
    raise refused


def plan_from_blob(problem: MatmulProblem, device: int, blob: bytes) -> AlgorithmPlan:
    """The plan of a product that an earlier plan's `blob` stands for.

    Raises:
        PlanError: see `MatmulPlan`, `OwnPlan` and `PaddedPlan`; or another version wrote it.
    """
    if blob in OWN:
        return OWN[blob](problem, device)
    if blob[:-_ALGORITHM] in _MARKS:
        return PaddedPlan(problem, device, algorithm=blob[-_ALGORITHM:], k_major=blob.startswith(K_MAJOR))
    if len(blob) != _ALGORITHM:
        raise PlanError(f"it is not known what {blob[:-_ALGORITHM]!r} stands for")
    return MatmulPlan(problem, device, algorithm=blob)


def configuration(blob: bytes) -> dict[str, int]:
    """What an algorithm's configuration says, by attribute's name, and on which copies; or that it is our kernel's."""
    if blob in _CONFIGURATIONS:
        return dict(_CONFIGURATIONS[blob])
    algorithm, mark = Algorithm(blob[-_ALGORITHM:]), blob[:-_ALGORITHM]
    found = {attribute.name: int(algorithm.get(attribute)) for attribute in AlgoConfigAttribute}
    return found | ({_MARKS[mark]: 1} if mark else {})


def plan_from_config(problem: MatmulProblem, device: int, config: Mapping[str, int]) -> AlgorithmPlan:
    """The plan of a product by the algorithm that has a `configuration`, put together anew.

    Raises:
        PlanError: see `plan_from_blob`; or no algorithm has such a configuration.
        CublasLtError: the library failed, which says nothing of the algorithm.
    """
    for blob, own in _CONFIGURATIONS.items():
        if own == dict(config):
            return plan_from_blob(problem, device, blob)
    marks = [mark for mark, name in _MARKS.items() if name in config]
    values = {name: value for name, value in config.items() if name not in _MARKS.values()}
    try:
        algorithm = cublaslt.algo_init(cublaslt.handle(device), library_types(problem), values["ID"])
        for attribute in [AlgoConfigAttribute[name] for name in values]:
            if algorithm.get(attribute) != values[attribute.name]:
                algorithm = algorithm.set(attribute, values[attribute.name])
    except (KeyError, LtError) as error:
        if isinstance(error, CublasLtError) and not cublaslt.is_refusal(error):
            raise
        raise PlanError(f"no algorithm has the configuration {dict(config)} ({error})") from error
    return plan_from_blob(problem, device, b"".join(marks) + algorithm.blob)
