"""FP8 matrix products on the GPU against float64, with every case also verified and tuned."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.gpu.graphs import captured_nodes
from tests.support.float8_products import (
    ACCUMULATION,
    CASES,
    E4M3,
    E5M2,
    FP32,
    Float8Case,
    Float8Product,
    host_of,
    placed,
)

pytestmark = pytest.mark.usefixtures("fp8_products")


@pytest.mark.parametrize("tuned", [False, True])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_products(gpu: Any, case: Float8Case, tuned: bool) -> None:
    product = Float8Product(case)
    arrays = {name: placed(gpu, array) for name, array in product.arrays.items()}
    a, b = placed(gpu, product.a), placed(gpu, product.b)

    def run(stream: int = 0) -> Any:
        return lt.matmul(a, b, **arrays, **product.options(), stream=stream)

    try:
        if tuned:
            with lt.tuning():
                run()
        run()
    except PlanError:
        if case.d.itemsize != 1 or case.epilogue is Epilogue.NONE:
            raise
        pytest.skip("this version of cuBLASLt has no such epilogue with a result in FP8")
    gpu.synchronize()
    product.check({name: host_of(gpu, array) for name, array in arrays.items()})
    run(gpu.stream.ptr)
    gpu.synchronize(gpu.stream.ptr)
    assert set(captured_nodes(run, gpu.stream.ptr)) <= {"KERNEL", "MEMSET"}


def _random(gpu: Any, rows: int, cols: int, dtype: Any, seed: int) -> tuple[Any, Any]:
    host = np.random.default_rng(seed).standard_normal((rows, cols), np.float32).astype(dtype)
    return host, placed(gpu, host)


@pytest.mark.parametrize("types", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)])
@pytest.mark.parametrize(("fast", "limit"), [(True, 2.0**-10), (False, 2.0**-11)])
@pytest.mark.parametrize("k", [256, 4096, 14336])
def test_errors_of_accumulation(gpu: Any, k: int, fast: bool, limit: float, types: tuple[Any, Any]) -> None:
    """Fast accumulation has about 14 bits: on an H200, errors up to 3.8e-4 of the norms' product were seen."""
    (a, on_a), (b, on_b) = (_random(gpu, 512, k, dtype, seed) for seed, dtype in enumerate(types))
    made = lt.matmul(on_a, on_b.T, dtype=FP32, fast_accumulation=fast)
    gpu.synchronize()
    x, y = a.astype(np.float64), b.astype(np.float64)
    error = np.abs(host_of(gpu, made) - x @ y.T) / np.outer(np.linalg.norm(x, axis=1), np.linalg.norm(y, axis=1))
    assert error.max() <= limit


def test_the_scale_of_c_is_not_set(gpu: Any) -> None:
    """cuBLASLt 13.1 hangs on Hopper if β is not 0 and C has a scale: a product with C, which has none, must end."""
    case = Float8Case(with_c=True, scales=(0.0, 1.0))
    product = Float8Product(case)
    arrays = {name: placed(gpu, array) for name, array in product.arrays.items()}
    lt.matmul(placed(gpu, product.a), placed(gpu, product.b), **arrays, **product.options())
    gpu.synchronize()
    product.check({name: host_of(gpu, array) for name, array in arrays.items()})


def test_what_is_too_large_for_a_result_in_float8_is_saturated(gpu: Any) -> None:
    a, b = np.full((16, 16), 448, E4M3), np.full((16, 16), 448, E4M3)
    made = lt.matmul(placed(gpu, a), placed(gpu, b).T, dtype=E4M3)
    gpu.synchronize()
    assert (host_of(gpu, made) == ml_dtypes.finfo(E4M3).max).all()


def test_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    x, w = (torch.randn(64, 128, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    scale = torch.full((1,), 0.5, device="cuda")
    made = lt.matmul(x, w.T, scale_a=scale, dtype=torch.bfloat16)
    wanted = 0.5 * x.double() @ w.double().T
    assert made.dtype is torch.bfloat16
    torch.testing.assert_close(made.double(), wanted, rtol=2.0**-8, atol=ACCUMULATION * float(wanted.abs().max()))
