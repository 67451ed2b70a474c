"""Products that are tiny in one dimension, by our kernels on the GPU, against float64."""

from __future__ import annotations

from typing import Any

import cupy as cp
import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import Compute, DType
from lt_runtime.products.own import NarrowPlan
from tests.support.gpu_products import Product
from tests.support.strategies import TYPES

FORWARD = [(256, 10, 512), (2048, 1, 256), (1, 16, 7), (333, 7, 1001), (40_000, 10, 96), (3, 16, 5000), (64, 5, 1)]
INPUT_GRADIENT = [(256, 512, 10), (2048, 256, 1), (1, 7, 16), (333, 1001, 7), (20_000, 264, 10), (3, 1, 2)]
WEIGHT_GRADIENT = [(10, 512, 256), (1, 256, 2048), (16, 7, 1), (7, 1001, 333), (10, 264, 20_000), (16, 5000, 3)]
PLACES = {
    "aligned": (0, 0),
    "with gaps": (8, 8),
    "misaligned": (3, 1),
}


def _check(*arguments: Any, **options: Any) -> None:
    product = Product(NarrowPlan, *arguments, **options)
    product.run()
    product.check()


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", FORWARD)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.BIAS])
def test_forward(dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue) -> None:
    _check(shape, dtype, (False, True), epilogue, place=PLACES[place])


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", INPUT_GRADIENT)
@pytest.mark.parametrize("place", PLACES)
def test_input_gradient(dtype: DType, shape: tuple[int, int, int], place: str) -> None:
    _check(shape, dtype, (False, False), place=PLACES[place])


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", INPUT_GRADIENT)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", [Epilogue.DRELU, Epilogue.DRELU_BGRAD, Epilogue.DGELU, Epilogue.DGELU_BGRAD])
def test_input_gradient_before_an_activation(
    dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue
) -> None:
    _check(shape, dtype, (False, False), epilogue, place=PLACES[place])


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", WEIGHT_GRADIENT)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.BGRADA])
def test_weight_gradient(dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue) -> None:
    _check(shape, dtype, (True, False), epilogue, place=PLACES[place])


KINDS = [
    ((256, 10, 512), (False, True), Epilogue.BIAS),
    ((256, 512, 10), (False, False), Epilogue.NONE),
    ((256, 512, 10), (False, False), Epilogue.DRELU_BGRAD),
    ((20_000, 264, 10), (False, False), Epilogue.DGELU_BGRAD),
    ((10, 512, 256), (True, False), Epilogue.BGRADA),
    ((10, 264, 20_000), (True, False), Epilogue.BGRADA),
]


@pytest.mark.parametrize("dtype", list(TYPES))
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
def test_without_beta_c_is_not_looked_at(
    shape: tuple[int, int, int], column_major: tuple[bool, bool], epilogue: Epilogue
) -> None:
    product = Product(NarrowPlan, shape, DType.FLOAT32, column_major, epilogue, c="in place", beta=0.0)
    product.d_gpu.array[...] = cp.nan
    product.run()
    product.c[...] = 0.0
    product.check()


@pytest.mark.parametrize(("shape", "column_major", "epilogue"), KINDS)
def test_in_a_graph(shape: tuple[int, int, int], column_major: tuple[bool, bool], epilogue: Epilogue) -> None:
    product = Product(NarrowPlan, shape, DType.BFLOAT16, column_major, epilogue)
    product.run_in_a_graph()
    product.check()


@pytest.mark.parametrize(("shape", "column_major", "epilogue"), KINDS)
def test_tf32_is_computed_in_full(
    shape: tuple[int, int, int], column_major: tuple[bool, bool], epilogue: Epilogue
) -> None:
    _check(shape, DType.FLOAT32, column_major, epilogue, compute=Compute.TF32)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize(("shape", "column_major", "epilogue"), KINDS)
def test_the_tuner_has_nothing_against_them(
    dtype: DType, shape: tuple[int, int, int], column_major: tuple[bool, bool], epilogue: Epilogue
) -> None:
    product = Product(NarrowPlan, shape, dtype, column_major, epilogue)
    assert product.tuner_objections() == {}
