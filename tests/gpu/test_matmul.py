"""Matrix products with every epilogue on the GPU, against the float64 reference."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections import Counter
from typing import Any

import cupy as cp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import lt_runtime as lt
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.gpu.graphs import captured_nodes
from lt_runtime.kernels.call import Call
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.methods import configuration
from lt_runtime.tuner.product_search import heuristic_candidates
from tests.support.matmul_checks import Product, matmul_case
from tests.support.placed import FLAT
from tests.support.strategies import MatmulCase, Placement, matmul_cases


@functools.cache
def _capture_stream() -> Any:
    return cp.cuda.Stream(non_blocking=True)


@settings(
    max_examples=3200,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(case=matmul_cases())
def test_matmul_agrees_with_reference_and_launches_kernels_only(
    gpu: Any, case: MatmulCase, examples: Counter[str]
) -> None:
    product = Product(gpu, case)
    try:
        product.check()
    except cp.cuda.runtime.CUDARuntimeError as error:  # after this error, no call to the GPU succeeds in this process
        raise AssertionError(f"{case} is the end of the context") from error
    lt.matmul(**product.operands, stream=_capture_stream())  # Allocates the stream's workspace before the capture.
    _capture_stream().synchronize()  # Waits for this product, before the next example reuses the operands' memory.
    nodes = captured_nodes(lambda stream: lt.matmul(**product.operands, stream=stream), _capture_stream().ptr)
    assert set(nodes) == {"KERNEL"}, nodes
    assert len(nodes) <= 3, nodes  # at most three launches: a copy of the operands, the product, and our pass
    examples["matmul"] += 1


# sizes (n, m, k) for which some version of cuBLASLt gave wrong results
_AWKWARD = [(1, 1, 1), (1, 2, 3), (3, 2, 1), (2, 1, 3), (65, 43, 21), (40, 50, 60), (9, 2, 1), (4, 1, 2)]


@pytest.mark.parametrize(("n", "m", "k"), _AWKWARD)
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_awkward_sizes(gpu: Any, n: int, m: int, k: int, epilogue: Epilogue, dtype: DType) -> None:
    Product(gpu, matmul_case(m=m, n=n, k=k, epilogue=epilogue, dtype=dtype)).check()


@pytest.mark.parametrize("k", [384, 1000, 4096])
@pytest.mark.parametrize(("m", "n"), [(1, 2), (1, 64), (2, 1), (64, 1)])
@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_d_of_one_row_or_column(gpu: Any, m: int, n: int, k: int, epilogue: Epilogue, dtype: DType) -> None:
    # cuBLASLt sums A only if it is column-major, and B only if it is row-major.
    a = Placement(column_major=epilogue is Epilogue.BGRADA)
    for d in (FLAT, Placement(column_major=True, gap=1), Placement(column_major=False, gap=1)):
        Product(gpu, matmul_case(m=m, n=n, k=k, epilogue=epilogue, dtype=dtype, a=a, d=d)).check()


@pytest.mark.parametrize("k", [129, 257, 1000, 4097])
@pytest.mark.parametrize(
    ("dtype", "compute"), [("float32", "float32"), ("float32", "tf32"), ("bfloat16", "float32"), ("float16", "float32")]
)
@pytest.mark.parametrize(("m", "n"), [(256, 256), (16, 64)])
def test_all_ones_give_exactly_k_with_every_candidate(k: int, dtype: str, compute: str, m: int, n: int) -> None:
    kind = DType(dtype)
    a, b, d = cp.ones((m, k), kind.numpy), cp.ones((k, n), kind.numpy), cp.empty((m, n), cp.float32)
    problem = MatmulProblem(
        kind, DType.FLOAT32, Compute(compute), Spec(packed(m, k)), Spec(packed(k, n)), Spec(packed(m, n))
    )
    count = len(MatmulPlan(problem, 0).candidates)
    assert count > 0
    for rank in range(count):
        d.fill(cp.nan)
        plan = MatmulPlan(problem, 0, rank)
        plan.run(Call((a.data.ptr, b.data.ptr, 0, 0, 0, d.data.ptr), 0))
        assert (d == k).all(), f"candidate {rank}"


@pytest.mark.parametrize("epilogue", Epilogue)
@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_rows_of_d_less_aligned_than_those_of_c(gpu: Any, epilogue: Epilogue, dtype: DType) -> None:
    pitched = Placement(column_major=False, gap=1, offset=0)
    scalars = {"alpha": 2.0, "beta": -0.5, "device_scalars": True}
    case = matmul_case(dtype=dtype, d_dtype=DType.FLOAT32, epilogue=epilogue, with_c=True, d=pitched, **scalars)
    if epilogue.sums_operand:
        # For an epilogue that sums A or B, the computed tolerance holds only if C lies in memory as D does.
        case = dataclasses.replace(case, c=pitched)
    Product(gpu, case).check()


@pytest.mark.parametrize("gap", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "compute", "d_dtype"),
    [("float32", "tf32", "float32"), ("bfloat16", "float32", "float32"), ("float16", "float32", "float16")],
)
def test_rows_of_d_less_aligned_than_those_of_c_with_every_candidate(
    dtype: str, compute: str, d_dtype: str, gap: int
) -> None:
    # An algorithm that stores vectors to D because C's rows are aligned for it fails with a misaligned address, after
    # which no call to the GPU succeeds in this process.
    m, n, k, kind, result = 64, 128, 96, DType(dtype), DType(d_dtype)
    a, b, c = cp.ones((m, k), kind.numpy), cp.ones((k, n), kind.numpy), cp.ones((m, n), result.numpy)
    d = cp.empty((m, n + gap), result.numpy)[:, :n]
    pitched = Spec(Layout(m, n, Order.ROW, n + gap))
    flat = [Spec(packed(*array.shape)) for array in (a, b, c)]
    problem = MatmulProblem(kind, result, Compute(compute), flat[0], flat[1], pitched, c=flat[2])
    first, count = MatmulPlan(problem, 0), 0
    for algorithm in heuristic_candidates(first, first.workspace_size):
        with contextlib.suppress(PlanError):
            plan = MatmulPlan(problem, 0, algorithm=algorithm.blob)
            if plan.launches_at_most_two_kernels:
                d.fill(cp.nan)
                plan.run(Call((a.data.ptr, b.data.ptr, c.data.ptr, 0, 0, d.data.ptr), 0, (1.0, 2.0)))
                assert (d == k + 2).all(), configuration(algorithm.blob)
                count += 1
    assert count >= 4


def test_broadcast_batch_is_not_copied() -> None:
    a, b = cp.ones((4, 8, 16), cp.float32), cp.arange(16 * 8, dtype=cp.float32).reshape(16, 8)
    everywhere = cp.broadcast_to(b, (4, 16, 8))
    np.testing.assert_array_equal(cp.asnumpy(lt.matmul(a, everywhere)), cp.asnumpy(lt.matmul(a, b)))
