"""Candidates for a product, found with a library that answers as the tests say."""

from __future__ import annotations

import struct
from typing import Any

import pytest

from lt_runtime import cublaslt
from lt_runtime.cublaslt import (
    AlgoCapAttribute,
    AlgoConfigAttribute,
    Algorithm,
    MatmulTile,
    ReductionScheme,
)
from lt_runtime.cublaslt.tiles import tile_shape
from lt_runtime.errors import PlanError
from lt_runtime.layout import packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products.choose import configuration
from lt_runtime.products.library_terms import library_shape
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.tuner import candidates
from lt_runtime.tuner.candidates import MOST, MOST_DEEP, deep_candidates, heuristic_candidates
from tests.support.algorithm_library import BOTH, NONE, TILES, WORKSPACE, FakeLibrary, waves

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


def test_queries_differ_in_workspace_and_reductions(library: FakeLibrary) -> None:
    library.offered = {(WORKSPACE, BOTH): [1, 2]}
    heuristic_candidates(MatmulPlan(a_problem(), 0), WORKSPACE)
    first, *others = library.asked
    assert first == (WORKSPACE, BOTH)
    assert others == [(limit, mask) for limit in (WORKSPACE, 4 << 20, 0) for mask in (BOTH, NONE)]


def test_one_kernel_asks_for_no_reduction(library: FakeLibrary) -> None:
    library.offered = {(WORKSPACE, NONE): [1]}
    heuristic_candidates(MatmulPlan(a_problem(no_split_k=True), 0), WORKSPACE)
    assert {mask for _, mask in library.asked} == {NONE}


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


def test_what_is_known_to_be_wrong_is_never_a_candidate(library: FakeLibrary) -> None:
    library.offered = {(WORKSPACE, BOTH): [66, 1]}
    query = library._query

    def with_bad(*arguments: Any) -> int:
        status = query(*arguments)
        for result in arguments[8]._obj:
            if result.algo[0] == 66:
                result.algo[:] = struct.unpack("8Q", known_bad(66).blob)
        return status

    library.recorder._stand_ins["cublasLtMatmulAlgoGetHeuristic"] = with_bad
    assert ids(heuristic_candidates(MatmulPlan(a_problem(), 0), WORKSPACE)) == [1]


def test_a_plan_of_a_given_algorithm_asks_no_heuristic(library: FakeLibrary) -> None:
    library.workspace = lambda _: 4096
    given = Algorithm((21).to_bytes(8, "little") + bytes(56)).set(TILE, MatmulTile.TILE_128x64)
    plan = MatmulPlan(a_problem(), 0, algorithm=given.blob)
    assert (plan.algorithm.blob, plan.algorithm.workspace_size) == (given.blob, 4096)
    assert plan.algorithm.waves_count == pytest.approx(waves(given))
    assert library.asked == []
    assert MatmulPlan(a_problem_without_terms(), 0, algorithm=given.blob).algorithm is None


def a_problem_without_terms() -> MatmulProblem:
    specs = [Spec(packed(*shape)) for shape in ((5, 0), (0, 6), (5, 6))]
    return MatmulProblem(DType.FLOAT32, DType.FLOAT32, Compute.FLOAT32, *specs)


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


def deep(library: FakeLibrary, problem: MatmulProblem | None = None) -> list[Algorithm]:
    plan = MatmulPlan(problem or a_problem(), 0)
    return deep_candidates(plan, heuristic_candidates(plan, WORKSPACE))


def test_deep_candidates_are_configurations_of_all_ids(library: FakeLibrary) -> None:
    library.offered = {(WORKSPACE, BOTH): [1, 2]}
    library.ids = [7, 2]
    found = deep(library)
    assert ids(found[:2]) == [1, 2]  # no configuration of 1: it is not listed
    assert ids(found[2:6]) == [2, 7, 2, 7]
    assert set(ids(found[2:])) == {2, 7}
    configurations = [configuration(each.blob) for each in found]
    assert all(configurations.count(each) == 1 for each in configurations)
    tiles = {each["TILE_ID"] for each in configurations[2:]}
    assert tiles == set(TILES) - {5000}  # whose shape is not known
    varied = {name for name in configurations[0] if len({each[name] for each in configurations[2:]}) > 1}
    assert varied == {each.name for each in AlgoConfigAttribute}


def test_no_configuration_comes_twice(library: FakeLibrary) -> None:
    library.offered, library.ids = {(WORKSPACE, BOTH): [1]}, [1, 2]
    library.capabilities[AlgoCapAttribute.STAGES_IDS] = struct.pack("3I", 35, 36, 35)
    configurations = [configuration(each.blob) for each in deep(library)]
    assert len(configurations) > 10
    assert all(configurations.count(each) == 1 for each in configurations)


def test_deep_candidates_respect_what_an_algorithm_can_do(library: FakeLibrary) -> None:
    library.offered, library.ids = {(WORKSPACE, BOTH): [1]}, [1]
    library.capabilities[AlgoCapAttribute.SPLITK_SUPPORT] = struct.pack("i", 0)
    library.capabilities[AlgoCapAttribute.CTA_SWIZZLING_SUPPORT] = struct.pack("I", 0)
    library.capabilities[AlgoCapAttribute.CUSTOM_OPTION_MAX] = struct.pack("i", 0)
    library.capabilities[AlgoCapAttribute.STAGES_IDS] = b""
    library.capabilities[AlgoCapAttribute.TILE_IDS] = b""
    for each in (configuration(one.blob) for one in deep(library)[1:]):
        assert (each["SPLITK_NUM"], each["CTA_SWIZZLING"], each["CUSTOM_OPTION"], each["STAGES_ID"]) == (0, 0, 0, 0)
        assert each["TILE_ID"] == MatmulTile.UNDEFINED


def test_deep_candidates_are_checked(library: FakeLibrary) -> None:
    library.offered, library.ids = {(WORKSPACE, BOTH): [1]}, [66, 70]
    library.refuses = lambda algorithm: algorithm.get(TILE) == MatmulTile.TILE_64x64
    found = deep(library)
    assert all(each.get(TILE) != MatmulTile.TILE_64x64 for each in found)
    assert any(each.get(SPLITK) > 1 for each in found)
    library.offered = {(WORKSPACE, NONE): [1]}
    assert all(each.get(SPLITK) <= 1 for each in deep(library, a_problem(no_split_k=True)))


def test_known_bad_splits_are_not_guessed(library: FakeLibrary) -> None:
    library.offered, library.ids = {(WORKSPACE, BOTH): [1]}, [66]
    specs = [Spec(packed(*shape)) for shape in ((512, 129), (129, 1024), (512, 1024))]
    problem = MatmulProblem(DType.BFLOAT16, DType.BFLOAT16, Compute.FLOAT32, *specs)
    found = [each for each in deep(library, problem) if each.get(AlgoConfigAttribute.STAGES_ID) == 35]
    assert 2 not in {each.get(SPLITK) for each in found}  # 129 div 2 is one stage of 64
    assert 3 in {each.get(SPLITK) for each in found}


def test_deep_candidates_are_capped(library: FakeLibrary) -> None:
    library.offered, library.ids = {(WORKSPACE, BOTH): [1]}, list(range(2, 14))
    found = deep(library)
    assert len(found) == MOST_DEEP
    assert set(ids(found)) == set(range(1, 14))


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (((1024, 1024), 512, (128, 128), 1.0), ((1024, 1024), 512, (64, 64), 1.0)),  # loads less
        (((1024, 1024), 512, (128, 128), 1.0), ((1024, 1024), 512, (128, 128), 1.1)),  # a second wave, nearly empty
        (((1024, 1024), 512, (64, 64), 0.8), ((1024, 1024), 512, (128, 128), 0.2)),  # most of the GPU idle
        (((10, 512), 512, (16, 128)), ((10, 512), 512, (128, 128))),  # hangs over the edge
        (((512, 512), 16384, (64, 64), 0.9, 4), ((512, 512), 16384, (64, 64), 0.3, 1)),  # fills the GPU
        (((512, 512), 256, (64, 64), 0.5, 1), ((512, 512), 256, (64, 64), 0.9, 4)),  # too short to be worth it
    ],
)
def test_estimates(better: Any, worse: Any) -> None:
    assert candidates.estimate(*better) < candidates.estimate(*worse)


def test_configurations_are_by_name() -> None:
    found = configuration(Algorithm(bytes(64)).set(SPLITK, 3).blob)
    assert found["SPLITK_NUM"] == 3
    assert list(found) == [attribute.name for attribute in cublaslt.AlgoConfigAttribute]
    assert {type(value) for value in found.values()} == {int}


def test_the_most_promising_tiles_are_tried(library: FakeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "_TILES", 1)
    library.offered, library.ids = {(WORKSPACE, BOTH): [1]}, [7]
    plan = MatmulPlan(a_problem(), 0)
    tried = {each.get(TILE) for each in candidates.configurations_of(plan, 7)}
    shapes = {tile: tile_shape(tile) for tile in TILES}
    d = library_shape(plan.problem)
    times = {tile: candidates.estimate(d, 769, shape) for tile, shape in shapes.items() if shape}
    assert tried == {min(times, key=times.__getitem__)}
