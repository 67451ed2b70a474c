"""Which products are computed from padded copies of ragged operands, and the layouts of the copies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import ALIGNMENT, DType, MatmulProblem, Spec
from lt_runtime.products import methods as algorithms
from lt_runtime.products import padded
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.methods import configuration, plan_from_blob
from lt_runtime.products.padded import PaddedPlan, padded_problem
from tests.support.algorithm_library import BOTH, WORKSPACE, FakeLibrary
from tests.support.product_problems import TF32, across, forward, input_gradient, problem_of, weight_gradient

M, N, K = 2048, 1024, 479
COPIES = 1 << 20
SHAPES = [(2048, 1024, 479), (2048, 479, 1024), (479, 1024, 2048), (33, 35, 37), (1, 3, 1001)]


def found(problem: MatmulProblem) -> MatmulProblem:
    inner = padded_problem(problem)
    assert inner is not None
    return inner


@pytest.mark.parametrize("make", [forward, input_gradient, weight_gradient])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_all_that_is_contiguous_is_whole_octets(make: Any, shape: tuple[int, int, int], dtype: DType) -> None:
    problem = make(*shape, dtype=dtype)
    inner = padded_problem(problem) or problem
    for spec in (inner.a, inner.b, inner.d):
        rows, cols = spec.layout.shape
        assert (cols if spec.layout.order is Order.ROW else rows) % 8 == 0
        assert spec.layout.leading_dimension % 8 == 0
        assert spec.alignment == ALIGNMENT
    assert inner.a.layout.shape == (inner.m, inner.k)
    assert inner.b.layout.shape == (inner.k, inner.n)
    assert all(own <= wide < own + 8 for own, wide in zip(shape, (inner.m, inner.n, inner.k), strict=True))
    orders = [[each.layout.order for each in (one.a, one.b, one.d)] for one in (problem, inner)]
    assert orders[0] == orders[1]


def test_what_need_not_be_copied_is_used_where_it_is() -> None:
    problem = input_gradient(M, N, K)
    inner = found(problem)
    assert (inner.m, inner.n, inner.k) == (M, N, 480)
    assert inner.d == problem.d
    assert inner.b.layout == packed(480, N), "K is its other axis, and has to grow as well"
    assert found(weight_gradient(K, N, M)).b == weight_gradient(K, N, M).b


def test_lines_off_16_bytes_are_copied_too() -> None:
    gaps = Spec(Layout(64, 64, Order.ROW, 65))
    assert found(problem_of(gaps, across(64, 64))).a == Spec(packed(64, 64))
    off = Spec(packed(64, 64), alignment=2)
    assert found(problem_of(off, across(64, 64))).a == Spec(packed(64, 64))


def test_what_is_left_as_it_is() -> None:
    assert padded_problem(forward(M, N, 480)) is None
    problem = forward(M, N, K)
    for change in (
        {"dtype": DType.FLOAT32, "d_dtype": DType.FLOAT32},
        {"dtype": DType.FLOAT64, "d_dtype": DType.FLOAT64},
        {"d_dtype": DType.FLOAT32},
        {"batch": 2},
    ):
        assert padded_problem(replace(problem, **change)) is None, change
    assert padded_problem(forward(M, N, K, **TF32))
    assert padded_problem(forward(0, N, K)) is None


@pytest.mark.parametrize("epilogue", [Epilogue.GELU_AUX_BIAS, Epilogue.RELU, Epilogue.BGRADA])
def test_epilogues_where_only_k_grows(epilogue: Epilogue) -> None:
    problem = forward(M, N, K, epilogue=epilogue, c=Spec(packed(M, N)))
    assert found(problem).epilogue is epilogue
    assert found(problem).c == problem.c


def test_a_derivative_is_left_to_the_library_in_tf32_alone() -> None:
    """cuBLASLt may round a 16-bit product before it multiplies by the derivative."""
    assert padded_problem(forward(M, N, K, epilogue=Epilogue.DGELU)) is None
    assert found(forward(M, N, K, epilogue=Epilogue.DGELU, **TF32)).epilogue is Epilogue.DGELU


def test_a_column_major_d_grows_along_its_rows() -> None:
    inner = found(replace(input_gradient(35, 40, 48), d=across(35, 40)))
    assert [each.layout.shape for each in (inner.a, inner.b, inner.d)] == [(40, 48), (48, 40), (40, 40)]


def test_epilogues_where_d_grows() -> None:
    problem = forward(M, K, N)
    assert found(replace(problem, epilogue=Epilogue.BIAS, bias_alignment=2)).bias_alignment == 256
    assert padded_problem(replace(problem, epilogue=Epilogue.GELU_AUX_BIAS)) is None
    assert padded_problem(replace(problem, epilogue=Epilogue.BGRADA)) is None
    assert padded_problem(replace(problem, c=problem.d)) is None


def test_a_bias_that_a_padded_d_has_aligned_is_copied() -> None:
    d = Spec(Layout(256, 512, Order.ROW, 515), alignment=2)
    problem = forward(256, 512, 480, epilogue=Epilogue.BIAS, bias_alignment=2, d=d)
    inner = found(problem)
    assert (inner.n, inner.bias_alignment) == (512, 256)
    assert padded.copies_of(problem, inner).keys() == {"d", "vector"}
    aligned = replace(problem, bias_alignment=256)
    assert padded.copies_of(aligned, found(aligned)).keys() == {"d"}


@pytest.mark.parametrize("make", [input_gradient, weight_gradient])
@pytest.mark.parametrize("shape", [(256, 512, 384), (33, 35, 37)])
def test_copies_along_k(make: Any, shape: tuple[int, int, int]) -> None:
    problem = make(*shape, **TF32)
    inner = padded_problem(problem, k_major=True)
    assert inner is not None
    assert (inner.a.layout.order, inner.b.layout.order) == (Order.ROW, Order.COLUMN)
    assert inner.k % 8 == inner.n % 8 == 0
    assert inner.m == problem.m, "no contiguous axis"
    assert (inner.d == problem.d) is (shape[1] % 8 == 0)
    assert padded_problem(make(*shape), k_major=True) is None, "BF16 is read either way"


def test_what_lies_along_k_is_not_turned() -> None:
    assert padded_problem(forward(256, 512, 384, **TF32), k_major=True) is None
    assert padded_problem(weight_gradient(256, 512, 384, epilogue=Epilogue.BGRADA, **TF32), k_major=True) is None


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the compilation of copy kernels, and makes every algorithm launch few enough kernels to be accepted."""
    monkeypatch.setattr(padded, "ResizePass", lambda *_: None)
    monkeypatch.setattr(padded, "workspace_size", lambda _: WORKSPACE)
    monkeypatch.setattr(padded, "device_info", lambda _: DeviceInfo(0, "pretended", 90, 132, 1 << 33))
    monkeypatch.setattr(MatmulPlan, "launches_at_most_two_kernels_by", lambda *_: True)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    return FakeLibrary(monkeypatch)


def _offer(library: FakeLibrary, *ids: int) -> None:
    library.offered = {(WORKSPACE, BOTH): [*ids]}


def test_the_library_keeps_to_the_workspace(library: FakeLibrary, passes: None) -> None:
    _offer(library, 1)
    library.workspace = lambda _: WORKSPACE
    blob = PaddedPlan(forward(M, N, K), 0).blob
    assert plan_from_blob(forward(M, N, K), 0, blob).blob == blob
    library.workspace = lambda _: WORKSPACE + 1
    with pytest.raises(PlanError, match="workspace"):
        plan_from_blob(forward(M, N, K), 0, blob)


def test_copies_take_a_small_part_of_the_memory_at_most(library: FakeLibrary, passes: None) -> None:
    _offer(library, 1)
    # The largest number of rows whose padded copies fit the workspace together with those of 64 x 480 weights.
    rows = (1 << 27) // (2 * 480) - 64
    PaddedPlan(forward(rows, 64, 479), 0)
    problem = forward(rows + 1, 64, 479)
    with pytest.raises(PlanError, match="copies take 134218752 bytes, more than 134217728"):
        PaddedPlan(problem, 0)
    assert type(algorithms.heuristic_algorithm(problem, 0)) is MatmulPlan


def test_untuned_large_ones_are_padded(library: FakeLibrary, passes: None) -> None:
    _offer(library, 1)
    assert type(algorithms.heuristic_algorithm(forward(M, N, K), 0)) is PaddedPlan
    library.offered = {(WORKSPACE, BOTH): [1]}
    assert type(algorithms.heuristic_algorithm(forward(64, 63, 479), 0)) is MatmulPlan


def test_copies_where_the_library_offers_nothing_else(
    library: FakeLibrary, passes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lt_runtime.kernels.tile_matmul.supports", lambda _: False)
    problem, query = forward(64, 63, 63), MatmulPlan.query
    monkeypatch.setattr(MatmulPlan, "query", lambda self, *of: query(self, *of) if self.problem.k == 64 else [])
    _offer(library, 1)
    assert type(algorithms.heuristic_algorithm(problem, 0)) is PaddedPlan
    # CuBLASLt does not apply the epilogue here, because a separate kernel does.
    with pytest.raises(PlanError, match="is not asked"):
        algorithms.heuristic_algorithm(replace(problem, epilogue=Epilogue.RELU), 0)
    library.offered = {}
    with pytest.raises(PlanError, match="offers 0"):
        algorithms.heuristic_algorithm(problem, 0)


def test_a_blob_of_another_version(library: FakeLibrary) -> None:
    with pytest.raises(PlanError, match="no method is known for the algorithm"):
        plan_from_blob(forward(M, N, K), 0, b"lt_runtime: tomorrow".ljust(128, b"\0"))


@pytest.mark.parametrize("k_major", [False, True])
def test_from_the_plan_cache_s_bytes(library: FakeLibrary, passes: None, k_major: bool) -> None:
    _offer(library, 7)
    plan = PaddedPlan(input_gradient(256, 510, 384, **TF32), 0, k_major=k_major)
    assert configuration(plan.blob) == configuration(plan.inner.blob) | {"K_MAJOR" if k_major else "PADDED": 1}
    again = plan_from_blob(plan.problem, 0, plan.blob)
    assert isinstance(again, PaddedPlan)
    assert (again.inner.problem, again.blob) == (plan.inner.problem, plan.blob)
    with pytest.raises(PlanError, match="padding"):
        plan_from_blob(forward(M, N, 480), 0, plan.blob)
