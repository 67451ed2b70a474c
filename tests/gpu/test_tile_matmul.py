"""Products of 16-bit matrices with ragged rows, on a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.tile_matmul import supports
from lt_runtime.problem import DType
from lt_runtime.products.own import TilePlan
from tests.support.gpu_products import Product

TYPES = (DType.BFLOAT16, DType.FLOAT16)
PLACES = {"without gaps": (0, 0), "with gaps": (5, 8), "misaligned": (3, 1)}
FORWARD = [(13830, 221, 48), (3904, 24, 21), (65, 63, 1000), (1, 1, 1), (200, 129, 33), (256, 17, 4099)]
EPILOGUES = (*(Epilogue.NONE, Epilogue.BIAS, Epilogue.RELU_BIAS, Epilogue.GELU), Epilogue.GELU_AUX_BIAS)
WEIGHT_GRADIENT = [(48, 221, 13830), (221, 48, 13830), (21, 24, 3904), (13, 77, 625), (65, 64, 100_000), (3, 2, 1)]


def _check(*arguments: Any, **options: Any) -> None:
    product = Product(TilePlan, *arguments, **options)
    product.run()
    product.check()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", FORWARD)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_forward(dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue) -> None:
    _check(shape, dtype, (False, True), epilogue, place=PLACES[place])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", FORWARD)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.DGELU, Epilogue.DGELU_BGRAD])
def test_input_gradient(dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue) -> None:
    _check(shape, dtype, (False, False), epilogue, place=PLACES[place])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", WEIGHT_GRADIENT)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.BGRADA])
def test_weight_gradient(dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue) -> None:
    _check(shape, dtype, (True, False), epilogue, place=PLACES[place])


KINDS = [
    ((700, 77, 45), (False, True), Epilogue.GELU_AUX_BIAS),
    ((700, 77, 45), (False, False), Epilogue.DGELU_BGRAD),
    ((33, 77, 7000), (True, False), Epilogue.BGRADA),
    ((33, 77, 7000), (True, True), Epilogue.RELU),
]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "column_major", "epilogue"), KINDS)
@pytest.mark.parametrize("c", ["in place", "apart"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.0, 0.0), (-0.75, 0.5)])
def test_what_is_added_to(
    dtype: DType,
    shape: tuple[int, int, int],
    column_major: tuple[bool, bool],
    epilogue: Epilogue,
    c: str,
    alpha: float,
    beta: float,
) -> None:
    _check(shape, dtype, column_major, epilogue, c=c, alpha=alpha, beta=beta)


@pytest.mark.parametrize(("shape", "column_major", "epilogue"), KINDS)
def test_in_a_graph(shape: tuple[int, int, int], column_major: tuple[bool, bool], epilogue: Epilogue) -> None:
    product = Product(TilePlan, shape, DType.BFLOAT16, column_major, epilogue)
    product.run_in_a_graph()
    product.check()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "column_major", "epilogue"), KINDS)
def test_the_tuner_has_nothing_against_them(
    dtype: DType, shape: tuple[int, int, int], column_major: tuple[bool, bool], epilogue: Epilogue
) -> None:
    product = Product(TilePlan, shape, dtype, column_major, epilogue)
    assert product.tuner_objections() == {}


def test_whole_vectors_are_the_library_s() -> None:
    problem = Product(TilePlan, (700, 77, 45), DType.BFLOAT16, (False, True), Epilogue.NONE).problem
    assert not supports(replace(problem, dtype=DType.FLOAT32, d_dtype=DType.FLOAT32))
