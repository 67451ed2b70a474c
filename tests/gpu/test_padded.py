"""Products on padded copies of ragged operands, against float64: alone, and as the default of large layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products.methods import LIBRARY, PADDED, fastest_first
from lt_runtime.products.padded import PaddedPlan
from lt_runtime.tuner.operands import Memory
from lt_runtime.tuner.product_search import Candidates
from lt_runtime.tuner.timing import workbench
from lt_runtime.tuner.verification import ProductOperands, verify
from tests.support.gpu_arrays import to_host

BF16, FP16, FP32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
TYPES = [(BF16, Compute.FLOAT32), (FP16, Compute.FLOAT32), (FP32, Compute.TF32)]
SHAPES = [(255, 513, 479), (257, 479, 511), (479, 511, 257), (33, 35, 37), (7, 1001, 3), (1, 13, 1)]
ORDERS = {"forward": "rc", "input gradient": "rr", "weight gradient": "cr"}
"""Orders of A and B in each of a layer's products: "r" is row-major, "c" column-major."""


def a_problem(
    shape: tuple[int, int, int],
    orders: str = "rc",
    types: tuple[DType, Compute] = TYPES[0],
    epilogue: Epilogue = Epilogue.NONE,
    *,
    gap: int = 0,
    alignment: int = 256,
    **changes: Any,
) -> MatmulProblem:
    m, n, k = shape

    def spec(rows: int, cols: int, order: str) -> Spec:
        at = Order.ROW if order == "r" else Order.COLUMN
        return Spec(Layout(rows, cols, at, (cols if order == "r" else rows) + gap), alignment)

    specs = spec(m, k, orders[0]), spec(k, n, orders[1]), spec(m, n, "r")
    return replace(MatmulProblem(types[0], types[0], types[1], *specs, epilogue), **changes)


def faults(problem: MatmulProblem, plan: PaddedPlan | None = None) -> dict[str, str]:
    """Runs a product whose workspace and copies hold NaN before each launch; returns a message if the result is
    wrong.
    """
    plan, stream = plan or PaddedPlan(problem, 0), cp.cuda.get_current_stream().ptr
    memory, trial = stream_memory(0, stream), ProductOperands(Memory(0, stream), problem)

    def launch() -> None:
        with memory.lock:
            call("cuMemsetD8Async", memory.workspace, 0xFF, memory.workspace_size, stream)
            call("cuMemsetD8Async", memory.copies(plan._size), 0xFF, plan._size, stream)
            plan.put(trial.call(stream), memory)

    return verify({"padded": launch}, trial)


@pytest.mark.parametrize("types", TYPES, ids=lambda each: each[0].value)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("orders", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize(("gap", "alignment"), [(0, 256), (3, 4)])
def test_products(
    shape: tuple[int, int, int], orders: str, types: tuple[DType, Compute], gap: int, alignment: int
) -> None:
    assert not faults(a_problem(shape, orders, types, gap=gap, alignment=alignment))


@pytest.mark.parametrize("epilogue", [Epilogue.BIAS, Epilogue.RELU_BIAS, Epilogue.GELU_BIAS, Epilogue.RELU])
@pytest.mark.parametrize("shape", [(256, 512, 479), (256, 479, 512)])
@pytest.mark.parametrize("types", TYPES, ids=lambda each: each[0].value)
def test_epilogues(epilogue: Epilogue, shape: tuple[int, int, int], types: tuple[DType, Compute]) -> None:
    assert not faults(a_problem(shape, types=types, epilogue=epilogue))


@pytest.mark.parametrize("types", TYPES, ids=lambda each: each[0].value)
def test_a_bias_off_its_boundary(types: tuple[DType, Compute]) -> None:
    assert not faults(
        a_problem((256, 512, 512), types=types, epilogue=Epilogue.BIAS, gap=3, alignment=4, bias_alignment=4)
    )


def test_an_epilogue_with_more_outputs() -> None:
    aux = Spec(packed(256, 512))
    assert not faults(a_problem((256, 512, 479), epilogue=Epilogue.GELU_AUX_BIAS, aux=aux))


def test_what_is_added_to() -> None:
    assert not faults(a_problem((256, 512, 479), "rr", c=Spec(packed(256, 512))))


@pytest.mark.parametrize("shape", [(256, 512, 384), *SHAPES])
@pytest.mark.parametrize("orders", ["rr", "cr", "cc"])
def test_copies_along_k(shape: tuple[int, int, int], orders: str) -> None:
    problem = a_problem(shape, orders, (FP32, Compute.TF32))
    assert not faults(problem, PaddedPlan(problem, 0, k_major=True))


def test_the_tuner_tries_it() -> None:
    large, small = a_problem((2048, 1024, 479)), a_problem((64, 63, 63))
    assert fastest_first(large)[0] is not LIBRARY
    assert fastest_first(small)[0] is not PADDED
    for problem, is_first in ((large, True), (small, False)):
        with workbench(0) as bench:
            plans = [*Candidates(problem, bench).plans.values()]
        padded = [isinstance(each, PaddedPlan) for each in plans]
        assert any(padded)
        assert not all(padded)
        assert padded[0] is is_first


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_large_layer_is_padded_by_default(dtype: str) -> None:
    kind, generator = DType(dtype).numpy, np.random.default_rng(1)
    x, w, b, dy = (
        (generator.standard_normal(shape) / 16).astype(kind)
        for shape in ((2048, 479), (1024, 479), (1024,), (2048, 1024))
    )
    compute = "tf32" if dtype == "float32" else "float32"
    on_gpu = [cp.asarray(each) for each in (x, w, b, dy)]
    runs = []
    for _ in range(3):
        y, ctx = lt.linear_fwd(*on_gpu[:3], activation="gelu", compute=compute)
        gradients = lt.linear_bwd(on_gpu[3], ctx)
        runs.append([to_host(each) for each in (y, gradients.dx, gradients.dw, gradients.db)])
    for again in runs[1:]:
        assert all(np.array_equal(one, other) for one, other in zip(runs[0], again, strict=True))
    gelu = lt.Activation("gelu")  # the activation's derivative is continuous, so that a rounding changes it little
    y_exact, z = reference.linear_fwd(x, w, b, gelu)
    exact = reference.linear_bwd(dy, x, w, z, gelu)
    limit = 1e-2 if dtype == "bfloat16" else 1e-3
    for actual, wanted in zip(runs[0], (y_exact, exact.dx, exact.dw, exact.db), strict=True):
        assert np.linalg.norm(actual - wanted) <= limit * np.linalg.norm(wanted)
