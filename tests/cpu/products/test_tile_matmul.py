"""Which products our kernel for ragged rows supports, and how its blocks share a product."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.gpu.memory import MAX_TICKETS
from lt_runtime.kernels import kernel as kernels
from lt_runtime.kernels import tiling
from lt_runtime.kernels.tile_matmul import shares_of, supports
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import DType, MatmulProblem, Spec
from lt_runtime.products import methods
from lt_runtime.products.methods import (
    METHODS,
    TILE_MATMUL,
    OwnPlan,
    TilePlan,
    configuration,
    plan_from_blob,
    plan_from_config,
)
from lt_runtime.tuner.report import algorithm_in_words
from tests.support.product_problems import across, forward, input_gradient, weight_gradient

H200 = DeviceInfo(0, "", 90, multiprocessors=132, memory=0)
TURING = replace(H200, capability=75)


GELU, DGELU, SUM = Epilogue.GELU_AUX_BIAS, Epilogue.DGELU_BGRAD, Epilogue.BGRADA
PRODUCTS = (forward(1000, 221, 48, GELU), input_gradient(1000, 221, 48, DGELU), weight_gradient(48, 221, 1000, SUM))


@pytest.mark.parametrize("problem", PRODUCTS)
def test_what_is_taken_and_what_is_refused(problem: MatmulProblem) -> None:
    assert supports(problem)
    assert supports(replace(problem, dtype=DType.FLOAT16, d_dtype=DType.FLOAT16))
    assert supports(replace(problem, c=problem.d))
    for change in (
        {"dtype": DType.FLOAT32, "d_dtype": DType.FLOAT32},
        {"d_dtype": DType.FLOAT32},
        {"batch": 2},
        {"device_scalars": True},
        {"epilogue": Epilogue.RELU_AUX},
        {"epilogue": Epilogue.DRELU},
        {"epilogue": Epilogue.BGRADB},
        {"aux": across(*problem.d.layout.shape)},
    ):
        assert not supports(replace(problem, **change)), change


@pytest.mark.parametrize("shape", [(1000, 224, 48), (0, 221, 48), (1000, 221, 0), (1 << 17, 221, 48)])
def test_whole_vectors_and_what_is_empty_or_large_are_the_library_s(shape: tuple[int, int, int]) -> None:
    assert not supports(forward(*shape, GELU))
    assert not supports(input_gradient(*shape, DGELU))


def test_rows_that_begin_anywhere_are_ragged() -> None:
    whole = forward(1000, 224, 48, GELU)
    assert supports(replace(whole, a=replace(whole.a, alignment=2)))
    assert supports(replace(whole, d=Spec(Layout(1000, 224, Order.ROW, 225))))


def test_a_gradient_s_weights_lie_in_rows() -> None:
    problem = forward(1000, 221, 48)
    assert supports(problem)
    assert not supports(replace(problem, epilogue=Epilogue.BGRADA))
    assert not supports(replace(problem, epilogue=Epilogue.DGELU, aux=problem.d))


@pytest.fixture
def _on_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "get_kernel", lambda *_: None)
    for module in (tiling, methods):
        monkeypatch.setattr(module, "device_info", lambda _: H200)
    monkeypatch.setattr(methods, "workspace_size", lambda _: 32 << 20)


@pytest.mark.usefixtures("_on_an_h200")
def test_it_is_an_algorithm_among_the_library_s() -> None:
    problem = PRODUCTS[0]
    assert [each.name for each in METHODS if each.is_own and each.supports(problem)] == ["TILE_MATMUL"]
    plan = plan_from_blob(problem, 0, TILE_MATMUL.blob)
    assert isinstance(plan, TilePlan)
    config = configuration(plan.blob)
    assert isinstance(plan_from_config(problem, 0, config), TilePlan)
    assert algorithm_in_words(config) == "our kernel for ragged rows"
    assert plan.launches_at_most_two_kernels
    assert not plan.adds_memsets


@pytest.mark.usefixtures("_on_an_h200")
def test_what_is_refused_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="does not take"):
        TilePlan(forward(1000, 224, 48, GELU), 0)
    monkeypatch.setattr(methods, "workspace_size", lambda _: 1 << 20)
    with pytest.raises(PlanError, match="no room"):
        TilePlan(weight_gradient(48, 63, 12_800, SUM), 0)
    monkeypatch.setattr(methods, "device_info", lambda _: TURING)
    with pytest.raises(PlanError, match="tensor cores"):
        TilePlan(PRODUCTS[0], 0)
    kernel: Any = SimpleNamespace(scratch_bytes=0, tickets=MAX_TICKETS)
    OwnPlan(PRODUCTS[0], 0, TILE_MATMUL, kernel)
    kernel.tickets += 1
    with pytest.raises(PlanError, match="no room"):
        OwnPlan(PRODUCTS[0], 0, TILE_MATMUL, kernel)


def test_marks_are_as_long_as_an_algorithm() -> None:
    assert {each.mark and len(each.mark) for each in METHODS} == {b"", 64}


def test_few_blocks_share_a_column_whose_sum_they_add_up() -> None:
    plain, with_sums = (shares_of(input_gradient(100000, 221, 48, each), 132) for each in (Epilogue.DGELU, DGELU))
    assert (plain.down, with_sums.down) == (-(-100000 // 64), 3 * 132 // plain.across)
