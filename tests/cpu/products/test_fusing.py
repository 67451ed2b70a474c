"""Which epilogues cuBLASLt applies, and which of its algorithms launch few enough kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lt_runtime.cublaslt import AlgoConfigAttribute, Algorithm
from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import packed
from lt_runtime.problem import DType, MatmulProblem, Spec
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.product import library_may_fuse
from tests.support.algorithm_library import BOTH, WORKSPACE, FakeLibrary
from tests.support.product_problems import across, input_gradient

M, N, K = 512, 256, 64


def rows(m: int, n: int, **changes: Any) -> Spec:
    return replace(Spec(packed(m, n)), **changes)


def a_product(epilogue: Epilogue, dtype: DType = DType.FLOAT16, **changes: Any) -> MatmulProblem:
    return input_gradient(M, N, K, epilogue, dtype=dtype, **changes)


ALL = set(Epilogue)
WITH_VECTOR = {each for each in Epilogue if each.has_bias or each.has_bias_gradient}
SUMS = {Epilogue.BGRADA, Epilogue.BGRADB}
GRADIENTS = {each for each in Epilogue if each.has_bias_gradient}
WITH_AUX = {each for each in Epilogue if each.has_aux_output or each.is_derivative}


@pytest.mark.parametrize(
    ("changes", "fused"),
    [
        ({}, ALL - {Epilogue.BGRADA}),
        ({"a": across(M, K)}, ALL),
        ({"a": across(M, K), "b": across(K, N)}, ALL - {Epilogue.BGRADB}),
        ({"a": across(M, K), "d": across(M, N)}, ALL - (WITH_VECTOR - SUMS)),
        ({"a": across(M, K), "batch": 3}, ALL - GRADIENTS),
        ({"a": across(M, K), "c": rows(M, N)}, ALL),
        ({"a": across(M, K), "c": across(M, N)}, set()),
    ],
)
def test_what_is_left_to_the_library(changes: dict[str, Any], fused: set[Epilogue]) -> None:
    assert {each for each in Epilogue if library_may_fuse(a_product(each, **changes))} == fused


@pytest.mark.parametrize("alignment", [1, 8, 16, 256])
@pytest.mark.parametrize("epilogue", sorted(WITH_AUX, key=str))
def test_an_auxiliary_matrix_must_be_aligned(epilogue: Epilogue, alignment: int) -> None:
    problem = a_product(epilogue, aux=rows(M, N, alignment=alignment))
    assert library_may_fuse(problem) == (alignment >= 16)


def split(parts: int) -> Algorithm:
    return Algorithm(bytes(64)).set(AlgoConfigAttribute.SPLITK_NUM, parts)


@pytest.mark.parametrize(
    ("nodes", "parts", "dtype", "epilogue", "lean"),
    [
        (["KERNEL"], 1, DType.FLOAT16, Epilogue.BIAS, True),
        (["MEMSET", "KERNEL"], 1, DType.FLOAT16, Epilogue.BIAS, True),
        # With two kernels and no split K, the kernel of the epilogue reads a product that was rounded to 16 bits.
        (["KERNEL", "KERNEL"], 1, DType.FLOAT16, Epilogue.BIAS, False),
        (["KERNEL", "KERNEL"], 2, DType.FLOAT16, Epilogue.BIAS, True),
        (["KERNEL", "KERNEL"], 1, DType.FLOAT16, Epilogue.NONE, True),
        (["KERNEL", "KERNEL"], 1, DType.FLOAT16, Epilogue.BGRADB, True),
        (["KERNEL", "KERNEL"], 1, DType.FLOAT32, Epilogue.BIAS, True),
        (["KERNEL", "KERNEL", "KERNEL"], 4, DType.FLOAT32, Epilogue.BIAS, False),
        (["KERNEL", "MEMCPY"], 1, DType.FLOAT32, Epilogue.BIAS, False),
        ([], 1, DType.FLOAT32, Epilogue.NONE, False),
    ],
)
def test_lean_launches(
    nodes: list[str], parts: int, dtype: DType, epilogue: Epilogue, lean: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = FakeLibrary(monkeypatch)
    library.offered = {(WORKSPACE, BOTH): [1]}
    monkeypatch.setattr(MatmulPlan, "nodes", lambda *_: ["KERNEL"])
    plan = MatmulPlan(a_product(epilogue, dtype), 0)
    monkeypatch.setattr(MatmulPlan, "nodes", lambda *_: nodes)
    assert plan.launches_at_most_two_kernels_by(split(parts)) == lean
