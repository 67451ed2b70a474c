"""Epilogues that cuBLASLt does not run: GELU in full FP32, and 16-bit epilogues with ragged rows.

cuBLASLt's GELU is less accurate than FP32, so that plans use it only in narrower types. With ragged rows cuBLASLt
rounds a 16-bit product before the epilogue.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.plans.cache import prior_plan
from lt_runtime.plans.layers import BackwardPlan, ForwardPlan
from lt_runtime.plans.strategies import MadeBy, backward_strategies, forward_strategies, unchanged
from lt_runtime.problem import (
    Activation,
    BackwardProblem,
    Compute,
    Derivative,
    DType,
    ForwardProblem,
    MatmulProblem,
    Saved,
    Spec,
)
from lt_runtime.products import methods
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.methods import LIBRARY, NARROW, heuristic_algorithm
from tests.support.algorithm_library import BOTH, WORKSPACE, FakeLibrary
from tests.support.product_problems import input_gradient

GELU = [epilogue for epilogue in Epilogue if epilogue.activation == "gelu"]
DERIVATIVES = [epilogue for epilogue in GELU if epilogue.is_derivative]
FULL = (DType.FLOAT32, Compute.FLOAT32)
NARROWER = [(DType.FLOAT32, Compute.TF32), (DType.BFLOAT16, Compute.FLOAT32), (DType.FLOAT16, Compute.FLOAT32)]
Kind = tuple[DType, Compute]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Replaces cuBLASLt by a fake with one algorithm for every product, and replaces all other calls to a GPU."""
    made = FakeLibrary(monkeypatch)
    made.offered = {(WORKSPACE, BOTH): [1]}
    monkeypatch.setattr(MatmulPlan, "launches_at_most_two_kernels_by", lambda *_: True)
    monkeypatch.setattr("lt_runtime.plans.layers.ForwardPass", lambda *_, **__: None)
    monkeypatch.setattr(BackwardPlan, "_pass", lambda *_, **__: None)
    return made


def a_product(kind: Kind, epilogue: Epilogue, k: int = 64, **changes: Any) -> MatmulProblem:
    return input_gradient(512, 256, k, epilogue, dtype=kind[0], compute=kind[1], **changes)


def a_forward(kind: Kind, *, backward: bool = False) -> ForwardProblem:
    x, w, y = (Spec(packed(*shape)) for shape in ((512, 64), (256, 64), (512, 256)))
    return ForwardProblem(*kind, Activation("gelu"), x, w, y, bias=256, backward=backward)


def a_backward(kind: Kind) -> BackwardProblem:
    x, w, dy = (Spec(packed(*shape)) for shape in ((512, 256), (64, 256), (512, 64)))
    below = Derivative(Activation("gelu"), Saved.PREACTIVATION, x, 256)
    return BackwardProblem(*kind, x, w, dy, unchanged(None), x, w, input_derivative=below)


@pytest.mark.parametrize("epilogue", GELU)
@pytest.mark.parametrize("options", [{}, {"rank": 0}, {"algorithm": bytes(64)}])
def test_full_fp32_has_no_candidate_of_the_library(
    epilogue: Epilogue, options: dict[str, Any], library: FakeLibrary
) -> None:
    """cuBLASLt's GELU in full FP32 is refused, for algorithms from a file too, before its heuristic is called."""
    with pytest.raises(PlanError, match=r"cuBLASLt's GELU is off by 5e-6"):
        MatmulPlan(a_product(FULL, epilogue), 0, **options)
    with pytest.raises(PlanError, match=r"cuBLASLt's GELU is off by 5e-6"):
        heuristic_algorithm(a_product(FULL, epilogue), 0)
    assert library.asked == []


@pytest.mark.parametrize("epilogue", GELU)
@pytest.mark.parametrize("kind", NARROWER)
def test_tf32_and_16_bits_keep_theirs(kind: Kind, epilogue: Epilogue, library: FakeLibrary) -> None:
    assert len(MatmulPlan(a_product(kind, epilogue), 0).candidates) == 1


def test_it_is_the_type_of_the_result_that_counts(library: FakeLibrary) -> None:
    """GELU's error matters in a product of 16-bit matrices that is stored in FP32; other epilogues are accurate."""
    with pytest.raises(PlanError, match="GELU"):
        MatmulPlan(a_product(NARROWER[1], Epilogue.GELU, d_dtype=DType.FLOAT32), 0)
    for epilogue in (Epilogue.NONE, Epilogue.BIAS, Epilogue.RELU_BIAS):
        assert len(MatmulPlan(a_product(FULL, epilogue), 0).candidates) == 1


def test_nothing_is_refused_where_nothing_is_multiplied(library: FakeLibrary) -> None:
    assert MatmulPlan(a_product(FULL, Epilogue.GELU, k=0), 0).algorithm is None


C_LIES = {
    "two bytes after a vector": Spec(packed(512, 256), alignment=2),
    "rows four bytes longer than vectors": Spec(Layout(512, 256, Order.ROW, 258)),
}


@pytest.mark.parametrize("c", C_LIES.values(), ids=C_LIES)
@pytest.mark.parametrize("kind", NARROWER[1:])
@pytest.mark.parametrize("epilogue", [Epilogue.BIAS, Epilogue.RELU_BIAS, Epilogue.GELU_AUX_BIAS])
def test_a_16_bit_product_would_be_rounded_before_a_ragged_c(
    epilogue: Epilogue, kind: Kind, c: Spec, library: FakeLibrary
) -> None:
    """cuBLASLt is used if there is no epilogue, the result has 32 bits, or no operand is ragged."""
    problem = a_product(kind, epilogue, c=c)
    with pytest.raises(PlanError, match="rounds the product to 16 bits"):
        MatmulPlan(problem, 0)
    for sound in (
        replace(problem, epilogue=Epilogue.NONE, aux=None),
        replace(problem, c=Spec(packed(512, 256))),
        a_product((DType.FLOAT32, Compute.TF32), epilogue, c=c),
    ):
        assert len(MatmulPlan(sound, 0).candidates) == 1


@pytest.mark.parametrize("epilogue", DERIVATIVES)
def test_our_kernel_for_narrow_products_keeps_its_derivative(
    epilogue: Epilogue, library: FakeLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel for narrow products applies GELU's derivative in FP32, as accurately as our elementwise kernel."""
    ours = replace(NARROW, build=lambda problem, _: SimpleNamespace(narrow=problem))
    monkeypatch.setattr(methods, "fastest_first", lambda _: [LIBRARY, ours])
    problem = a_product(FULL, epilogue, k=8)
    assert heuristic_algorithm(problem, 0).narrow is problem  # type: ignore[attr-defined]


@pytest.mark.parametrize("backward", [False, True])
def test_forward_leaves_gelu_to_our_pass(backward: bool, library: FakeLibrary) -> None:
    problem = a_forward(FULL, backward=backward)
    assert prior_plan(problem, 0, heuristic_algorithm).strategy.epilogue is Epilogue.BIAS
    made = set()
    for strategy in forward_strategies(problem):
        with contextlib.suppress(PlanError):
            made.add(ForwardPlan(problem, 0, strategy, heuristic_algorithm).strategy.epilogue)
    assert made == {Epilogue.BIAS, Epilogue.NONE}


@pytest.mark.parametrize("kind", NARROWER)
def test_forward_in_narrower_types_is_fused(kind: Kind, library: FakeLibrary) -> None:
    assert prior_plan(a_forward(kind), 0, heuristic_algorithm).strategy.epilogue is Epilogue.GELU_BIAS


@pytest.mark.parametrize(("kind", "fused"), [(FULL, set()), *((kind, {MadeBy.EPILOGUE}) for kind in NARROWER)])
def test_backward_leaves_the_derivative_to_our_pass(kind: Kind, fused: set[MadeBy], library: FakeLibrary) -> None:
    problem, made = a_backward(kind), set()
    for strategy in backward_strategies(problem):
        with contextlib.suppress(PlanError):
            made.add(BackwardPlan(problem, 0, strategy, heuristic_algorithm).strategy.derivative)
    assert made == {MadeBy.KERNEL} | fused
    assert prior_plan(problem, 0, heuristic_algorithm).strategy.derivative in made
