"""Products' plans by the bytes that stand for them in the plan cache.

Those are an algorithm of the library's, such a one on padded copies, or our kernel for narrow products.
"""

from __future__ import annotations

from typing import Final

from lt_runtime.cublaslt import AlgoConfigAttribute, Algorithm
from lt_runtime.errors import PlanError
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.narrow import NARROW, NarrowPlan
from lt_runtime.products.padded import K_MAJOR, PADDED, PaddedPlan
from lt_runtime.products.plan import AlgorithmPlan

_ALGORITHM: Final = 64  # bytes of the library's
_MARKS: Final = {PADDED: "PADDED", K_MAJOR: "K_MAJOR"}


def plan_by(problem: MatmulProblem, device: int, blob: bytes) -> AlgorithmPlan:
    """The plan of a product that an earlier plan's `blob` stands for.

    Raises:
        PlanError: see `MatmulPlan`, `NarrowPlan` and `PaddedPlan`; or another version wrote it.
    """
    if blob == NARROW.blob:
        return NarrowPlan(problem, device)
    if blob[:-_ALGORITHM] in _MARKS:
        return PaddedPlan(problem, device, algorithm=blob[-_ALGORITHM:], k_major=blob.startswith(K_MAJOR))
    if len(blob) != _ALGORITHM:
        raise PlanError(f"it is not known what {blob[:-_ALGORITHM]!r} stands for")
    return MatmulPlan(problem, device, algorithm=blob)


def configuration(blob: bytes) -> dict[str, int]:
    """What an algorithm's configuration says, by attribute's name, and on which copies. Our own kernel has none."""
    if blob == NARROW.blob:
        return {}
    algorithm, mark = Algorithm(blob[-_ALGORITHM:]), blob[:-_ALGORITHM]
    found = {attribute.name: int(algorithm.get(attribute)) for attribute in AlgoConfigAttribute}
    return found | ({_MARKS[mark]: 1} if mark else {})
