"""Our own product kernels on the GPU, against float64: products with a tiny dimension, or of ragged 16-bit rows."""

from __future__ import annotations

from typing import Any

import cupy as cp
import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.problem import Compute, DType
from lt_runtime.products.methods import NarrowPlan, TilePlan
from tests.support.gpu_products import Product
from tests.support.strategies import TYPES

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = (False, True), (False, False), (True, False)
"""For each product of a layer, whether A and B are column-major."""
TYPES_OF = {NarrowPlan: tuple(TYPES), TilePlan: (DType.BFLOAT16, DType.FLOAT16)}
PLACES = {
    NarrowPlan: {"aligned": (0, 0), "with gaps": (8, 8), "misaligned": (3, 1)},
    TilePlan: {"without gaps": (0, 0), "with gaps": (5, 8), "misaligned": (3, 1)},
}
NARROW_OUT = [(256, 10, 512), (2048, 1, 256), (1, 16, 7), (333, 7, 1001), (40_000, 10, 96), (3, 16, 5000), (64, 5, 1)]
NARROW_SUMS = [(256, 512, 10), (2048, 256, 1), (1, 7, 16), (333, 1001, 7), (20_000, 264, 10), (3, 1, 2)]
NARROW_ROWS = [(10, 512, 256), (1, 256, 2048), (16, 7, 1), (7, 1001, 333), (10, 264, 20_000), (16, 5000, 3)]
RAGGED = [(13830, 221, 48), (3904, 24, 21), (65, 63, 1000), (1, 1, 1), (200, 129, 33), (256, 17, 4099)]
LONG_SUMS = [(48, 221, 13830), (221, 48, 13830), (21, 24, 3904), (13, 77, 625), (65, 64, 100_000), (3, 2, 1)]
NONE, DRELU, DGELU, BGRADA = Epilogue.NONE, Epilogue.DRELU, Epilogue.DGELU, Epilogue.BGRADA
DERIVATIVES = (DRELU, Epilogue.DRELU_BGRAD, DGELU, Epilogue.DGELU_BGRAD)
ACTIVATIONS = (Epilogue.BIAS, Epilogue.RELU_BIAS, Epilogue.GELU, Epilogue.GELU_AUX_BIAS)
PRODUCTS = [
    (NarrowPlan, FORWARD, NARROW_OUT, (NONE, Epilogue.BIAS)),
    (NarrowPlan, INPUT_GRADIENT, NARROW_SUMS, (NONE, *DERIVATIVES)),
    (NarrowPlan, WEIGHT_GRADIENT, NARROW_ROWS, (NONE, BGRADA)),
    (TilePlan, FORWARD, RAGGED, (NONE, *ACTIVATIONS)),
    (TilePlan, INPUT_GRADIENT, RAGGED, (NONE, DGELU, Epilogue.DGELU_BGRAD)),
    (TilePlan, WEIGHT_GRADIENT, LONG_SUMS, (NONE, BGRADA)),
]
CASES = [
    (plan, shape, dtype, column_major, epilogue, place)
    for plan, column_major, shapes, epilogues in PRODUCTS
    for shape in shapes
    for dtype in TYPES_OF[plan]
    for epilogue in epilogues
    for place in PLACES[plan]
]
KINDS = [
    (NarrowPlan, (256, 10, 512), FORWARD, Epilogue.BIAS),
    (NarrowPlan, (256, 512, 10), INPUT_GRADIENT, NONE),
    (NarrowPlan, (256, 512, 10), INPUT_GRADIENT, Epilogue.DRELU_BGRAD),
    (NarrowPlan, (20_000, 264, 10), INPUT_GRADIENT, Epilogue.DGELU_BGRAD),
    (NarrowPlan, (10, 512, 256), WEIGHT_GRADIENT, BGRADA),
    (NarrowPlan, (10, 264, 20_000), WEIGHT_GRADIENT, BGRADA),
    (TilePlan, (700, 77, 45), FORWARD, Epilogue.GELU_AUX_BIAS),
    (TilePlan, (700, 77, 45), INPUT_GRADIENT, Epilogue.DGELU_BGRAD),
    (TilePlan, (33, 77, 7000), WEIGHT_GRADIENT, BGRADA),
    (TilePlan, (33, 77, 7000), (True, True), Epilogue.RELU),
]
NARROW_KINDS = [kind for kind in KINDS if kind[0] is NarrowPlan]
TYPED_KINDS = [(plan, shape, dtype, *more) for plan, shape, *more in KINDS for dtype in TYPES_OF[plan]]


def name_of(case: Any) -> str:
    """Name of a parametrised test: plan, shape, type, orders of A and B, epilogue, place."""
    orders = {FORWARD: "forward", INPUT_GRADIENT: "input gradient", WEIGHT_GRADIENT: "weight gradient"}
    names = ((orders.get(each) if isinstance(each, tuple) else None) or each for each in case)
    return " ".join(getattr(each, "__name__", None) or getattr(each, "value", None) or str(each) for each in names)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_products(gpu: Any, case: tuple[Any, ...]) -> None:
    *arguments, place = case
    product = Product(gpu, *arguments, place=PLACES[case[0]][place])
    product.run()
    product.check()


@pytest.mark.parametrize("kind", TYPED_KINDS, ids=name_of)
@pytest.mark.parametrize("c", ["in place", "apart"])
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 1.0), (1.0, 0.0), (-0.75, 0.5)])
def test_c_is_scaled_and_added(gpu: Any, kind: tuple[Any, ...], c: str, alpha: float, beta: float) -> None:
    product = Product(gpu, *kind, c=c, alpha=alpha, beta=beta)
    product.run()
    product.check()


@pytest.mark.parametrize(("plan", "shape", "column_major", "epilogue"), NARROW_KINDS)
def test_with_beta_0_c_is_not_read(gpu: Any, plan: Any, shape: Any, column_major: Any, epilogue: Epilogue) -> None:
    product = Product(gpu, plan, shape, DType.FLOAT32, column_major, epilogue, c="in place", beta=0.0)
    product.d_gpu.array[...] = cp.nan
    product.run()
    product.c[...] = 0.0
    product.check()


@pytest.mark.parametrize(("plan", "shape", "column_major", "epilogue"), KINDS)
def test_in_a_graph(gpu: Any, plan: Any, shape: Any, column_major: Any, epilogue: Epilogue) -> None:
    product = Product(gpu, plan, shape, DType.BFLOAT16, column_major, epilogue)
    product.run_in_a_graph()
    product.check()


@pytest.mark.parametrize(("plan", "shape", "column_major", "epilogue"), NARROW_KINDS)
def test_tf32_is_computed_in_full_fp32(gpu: Any, plan: Any, shape: Any, column_major: Any, epilogue: Epilogue) -> None:
    product = Product(gpu, plan, shape, DType.FLOAT32, column_major, epilogue, compute=Compute.TF32)
    product.run()
    product.check()


@pytest.mark.parametrize("kind", TYPED_KINDS, ids=name_of)
def test_the_tuner_s_verification_passes(gpu: Any, kind: tuple[Any, ...]) -> None:
    assert Product(gpu, *kind).tuner_objections() == {}
