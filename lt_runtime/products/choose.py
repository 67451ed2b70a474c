"""Which algorithms the products of a plan use: measured ones, or those that are estimated to be the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from lt_runtime import cublaslt
from lt_runtime.cublaslt import AlgoConfigAttribute, Algorithm
from lt_runtime.errors import CublasLtError, LtError, PlanError
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.library_terms import library_types
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.methods import LIBRARY, METHODS, fastest_first, split_blob
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import plan_store

Choose: TypeAlias = Callable[[MatmulProblem, int], AlgorithmPlan]
"""Makes the plan of a product on a device, which is current; PlanError if neither cuBLASLt nor our kernels do it."""


def known_algorithm(problem: MatmulProblem, device: int) -> AlgorithmPlan:
    """The plan by the algorithm that was measured to be the fastest; without a measurement, `heuristic_algorithm`.

    A measured algorithm that cuBLASLt refuses now, or that is known to be wrong by now, is barred in the plan cache.
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
    """The plan by the possible method that `fastest_first` puts first, whatever was measured.

    Raises:
        PlanError: why cuBLASLt does not make the product on the operands as they are.
    """
    refused: PlanError | None = None
    for method in fastest_first(problem):
        try:
            return method.build(problem, device)
        except PlanError as error:
            refused = error if method is LIBRARY or refused is None else refused
    assert refused is not None, "the library is always tried"
    raise refused


def plan_from_blob(problem: MatmulProblem, device: int, blob: bytes) -> AlgorithmPlan:
    """The plan of a product by an earlier plan's `blob`.

    Raises:
        PlanError: see `MatmulPlan`, `OwnPlan` and `PaddedPlan`; or another version wrote the blob.
    """
    method, algorithm = split_blob(blob)
    return method.build(problem, device, algorithm=algorithm) if algorithm else method.build(problem, device)


def configuration(blob: bytes) -> dict[str, int]:
    """An algorithm's configuration in the plan cache: cuBLASLt's attributes by name, and the method's name with 1."""
    method, algorithm = split_blob(blob)
    attributes = AlgoConfigAttribute if algorithm else ()
    found = {attribute.name: int(Algorithm(algorithm).get(attribute)) for attribute in attributes}
    return found | ({method.name: 1} if method.name else {})


def plan_from_config(problem: MatmulProblem, device: int, config: Mapping[str, int]) -> AlgorithmPlan:
    """The plan of a product by an algorithm that is made anew from its `configuration`.

    Raises:
        PlanError: see `plan_from_blob`; or no algorithm has the configuration.
        CublasLtError: the library failed, which says nothing of the algorithm.
    """
    marks = [each for each in METHODS if each.name in config]
    mark = b"".join(each.mark for each in marks)
    values = {name: value for name, value in config.items() if name not in {each.name for each in marks}}
    if not values and any(each.is_own for each in marks):
        return plan_from_blob(problem, device, mark)
    try:
        algorithm = cublaslt.algo_init(cublaslt.handle(device), library_types(problem), values["ID"])
        for attribute in [AlgoConfigAttribute[name] for name in values]:
            if algorithm.get(attribute) != values[attribute.name]:
                algorithm = algorithm.set(attribute, values[attribute.name])
    except (KeyError, LtError) as error:
        if isinstance(error, CublasLtError) and not cublaslt.is_refusal(error):
            raise
        raise PlanError(f"no algorithm has the configuration {dict(config)} ({error})") from error
    return plan_from_blob(problem, device, mark + algorithm.blob)
