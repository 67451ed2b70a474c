"""Candidates for a product, found with a library that answers as the tests say."""

from __future__ import annotations

from typing import Any

import pytest

from lt_runtime.cublaslt import AlgoConfigAttribute, Algorithm, MatmulTile, ReductionScheme
from lt_runtime.errors import PlanError
from lt_runtime.layout import packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.tuner.product_search import MOST, heuristic_candidates
from tests.support.algorithm_library import BOTH, NONE, WORKSPACE, FakeLibrary, waves

ID, TILE, SPLITK, SCHEME = (
    AlgoConfigAttribute.ID,
    AlgoConfigAttribute.TILE_ID,
    AlgoConfigAttribute.SPLITK_NUM,
    AlgoConfigAttribute.REDUCTION_SCHEME,
)


def a_problem(**changes: Any) -> MatmulProblem:
    specs = [Spec(packed(*shape)) for shape in ((512, 769), (769, 1024), (512, 1024))]
    return MatmulProblem(DType.BFLOAT16, DType.BFLOAT16, Compute.FLOAT32, *specs, **changes)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return FakeLibrary(monkeypatch)


def ids(algorithms: list[Algorithm]) -> list[int]:
    return [algorithm.get(ID) for algorithm in algorithms]


@pytest.mark.parametrize(("masks", "changes"), [((BOTH, NONE), {}), ((NONE,), {"no_split_k": True})])
def test_queries_differ_in_workspace_and_reductions(
    library: FakeLibrary, masks: tuple[int, ...], changes: dict[str, Any]
) -> None:
    library.offered = {(WORKSPACE, masks[0]): [1, 2]}
    heuristic_candidates(MatmulPlan(a_problem(**changes), 0), WORKSPACE)
    first, *others = library.asked
    assert first == (WORKSPACE, masks[0])
    assert others == [(limit, mask) for limit in (WORKSPACE, 4 << 20, 0) for mask in masks]


def test_the_plans_own_is_first_and_no_algorithm_comes_twice(library: FakeLibrary) -> None:
    library.offered = {(WORKSPACE, BOTH): [3, 1, 2], (0, NONE): [2, 5], (4 << 20, BOTH): [1, 4]}
    plan = MatmulPlan(a_problem(), 0, rank=1)
    assert ids(heuristic_candidates(plan, WORKSPACE)) == [1, 3, 2, 4, 5]


def test_no_more_than_the_most(library: FakeLibrary) -> None:
    library.offered = {
        (WORKSPACE, BOTH): list(range(8)),
        (4 << 20, BOTH): list(range(20, 28)),
        (0, NONE): list(range(40, 48)),
    }
    found = heuristic_candidates(MatmulPlan(a_problem(), 0), WORKSPACE)
    assert ids(found) == [*range(8), *range(20, 28)]
    assert len(found) == MOST
    assert (0, NONE) not in library.asked


def known_bad(number: int) -> Algorithm:
    """The split of K that drops its tail: 769 = 12·64 + 1 is in 12 parts of 64."""
    bad = Algorithm(number.to_bytes(8, "little") + bytes(56)).set(SPLITK, 12)
    return bad.set(AlgoConfigAttribute.STAGES_ID, 35)


def test_a_plan_of_a_given_algorithm_asks_no_heuristic(library: FakeLibrary) -> None:
    library.workspace = lambda _: 4096
    given = Algorithm((21).to_bytes(8, "little") + bytes(56)).set(TILE, MatmulTile.TILE_128x64)
    plan = MatmulPlan(a_problem(), 0, algorithm=given.blob)
    assert (plan.algorithm.blob, plan.algorithm.workspace_size) == (given.blob, 4096)
    assert plan.algorithm.waves_count == pytest.approx(waves(given))
    assert library.asked == []
    specs = [Spec(packed(*shape)) for shape in ((5, 0), (0, 6), (5, 6))]
    without_terms = MatmulProblem(DType.FLOAT32, DType.FLOAT32, Compute.FLOAT32, *specs)
    assert MatmulPlan(without_terms, 0, algorithm=given.blob).algorithm is None


def test_what_speaks_against_a_given_algorithm(library: FakeLibrary) -> None:
    plain = Algorithm((21).to_bytes(8, "little") + bytes(56))
    with pytest.raises(PlanError, match=r"known to be wrong.*drops the tail of K"):
        MatmulPlan(a_problem(), 0, algorithm=known_bad(66).blob)
    split = plain.set(SPLITK, 2).set(SCHEME, ReductionScheme.COMPUTE_TYPE)
    assert MatmulPlan(a_problem(), 0, algorithm=split.blob).algorithm.blob == split.blob
    with pytest.raises(PlanError, match=r"sums the parts of a split K as .*COMPUTE_TYPE"):
        MatmulPlan(a_problem(no_split_k=True), 0, algorithm=split.blob)
    narrow = plain.set(SPLITK, 2).set(SCHEME, ReductionScheme.OUTPUT_TYPE)
    with pytest.raises(PlanError, match=r"sums the parts of a split K as .*OUTPUT_TYPE"):
        MatmulPlan(a_problem(), 0, algorithm=narrow.blob)
    library.workspace = lambda _: WORKSPACE + 1
    with pytest.raises(PlanError, match=f"needs {WORKSPACE + 1} bytes of workspace; there are {WORKSPACE}"):
        MatmulPlan(a_problem(), 0, algorithm=plain.blob)
    library.refuses = lambda _: True
    with pytest.raises(PlanError, match="cuBLASLt refuses the algorithm"):
        MatmulPlan(a_problem(), 0, algorithm=plain.blob)
