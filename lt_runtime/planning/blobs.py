"""Products' plans by the bytes that stand for them in the plan cache.

Those are an algorithm of the library's, such a one on padded copies, or our kernel for narrow products.
"""

from __future__ import annotations

from lt_runtime.cublaslt import AlgoConfigAttribute, Algorithm
from lt_runtime.planning.matmul import MatmulPlan
from lt_runtime.planning.narrow import NARROW, NarrowPlan
from lt_runtime.planning.padded import PADDED, PaddedPlan
from lt_runtime.problem import MatmulProblem


def plan_by(problem: MatmulProblem, device: int, blob: bytes) -> MatmulPlan:
    """The plan of a product that an earlier plan's `blob` stands for.

    Raises:
        PlanError: see `MatmulPlan`, `NarrowPlan` and `PaddedPlan`.
    """
    if blob == NARROW.blob:
        return NarrowPlan(problem, device)
    if blob.startswith(PADDED):
        return PaddedPlan(problem, device, algorithm=blob.removeprefix(PADDED))
    return MatmulPlan(problem, device, algorithm=blob)


def configuration(blob: bytes) -> dict[str, int]:
    """What an algorithm's configuration says, by attribute's name; PADDED on padded copies. Our own kernel has none."""
    if blob == NARROW.blob:
        return {}
    algorithm = Algorithm(blob.removeprefix(PADDED))
    found = {attribute.name: int(algorithm.get(attribute)) for attribute in AlgoConfigAttribute}
    return found | ({"PADDED": 1} if blob.startswith(PADDED) else {})
