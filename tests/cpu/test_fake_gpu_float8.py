"""FP8 matrix products on the pretended GPU and on NumPy arrays, by the public interface, against float64."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import LtError
from tests.support.fake_gpu import FakeGpu
from tests.support.float8_products import (
    BF16,
    CASES,
    E4M3,
    E5M2,
    FP32,
    Float8Case,
    Float8Product,
    K,
    M,
    N,
    host_of,
    placed,
)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_numpy_arrays(case: Float8Case) -> None:
    product = Float8Product(case)
    lt.matmul(product.a, product.b, **product.arrays, **product.options())
    product.check(product.arrays)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_a_gpu(gpu: FakeGpu, case: Float8Case) -> None:
    product = Float8Product(case)
    arrays = {name: placed(gpu, array) for name, array in product.arrays.items()}
    gpu.lt.matmul(placed(gpu, product.a), placed(gpu, product.b), **arrays, **product.options())
    gpu.synchronize()
    product.check({name: host_of(gpu, array) for name, array in arrays.items()})
    assert bool(gpu.library.calls[-1].desc.fast_accumulation) == case.fast


TUNED = {
    "fast": Float8Case(fast=True),
    "to e4m3": Float8Case(d=E4M3, scale_d=2.0),
    "gelu": Float8Case(b=E5M2, epilogue=Epilogue.GELU_AUX_BIAS),
    "scale vectors": Float8Case(scales=None, vectors=True),
}


@pytest.mark.parametrize("case", TUNED.values(), ids=TUNED)
def test_tuning_verifies_and_remembers_products(gpu: FakeGpu, case: Float8Case) -> None:
    product = Float8Product(case)
    arrays = {name: placed(gpu, array) for name, array in product.arrays.items()}
    matrices = placed(gpu, product.a), placed(gpu, product.b)
    with gpu.lt.tuning():
        gpu.lt.matmul(*matrices, **arrays, **product.options())
    gpu.synchronize_all()
    product.check({name: host_of(gpu, array) for name, array in arrays.items()})
    made = len(gpu.library.calls)
    with gpu.lt.tuning():  # the product has been measured, and is not measured again
        gpu.lt.matmul(*matrices, **arrays, **product.options())
    gpu.synchronize_all()
    assert len(gpu.library.calls) == made + 1


def test_a_scale_is_read_at_each_replay(gpu: FakeGpu) -> None:
    product = Float8Product(Float8Case())
    arrays = {name: placed(gpu, array) for name, array in product.arrays.items()}
    matrices = placed(gpu, product.a), placed(gpu, product.b)
    for factor in (1.0, 1.0, 1.0, 3.0):  # the third call is captured, the fourth replays it
        gpu.synchronize()
        gpu.host_of(arrays["scale_a"])[...] = factor
        gpu.lt.matmul(*matrices, **arrays, dtype=BF16)
        gpu.synchronize()
        wanted = factor * 0.25 * (product.a.astype(np.float64) @ product.b.astype(np.float64))
        np.testing.assert_allclose(gpu.host_of(arrays["out"]).astype(np.float64), wanted, rtol=0.01, atol=1e-6)


def test_a_new_result_is_bfloat16_or_of_the_type_asked_for(gpu: FakeGpu) -> None:
    product = Float8Product(Float8Case())
    matrices = placed(gpu, product.a), placed(gpu, product.b)
    assert [gpu.lt.matmul(*matrices, dtype=each).dtype for each in (None, "float8_e4m3fn")] == [BF16, E4M3]
    gpu.synchronize()


def _matrices(a: np.dtype[Any] = E4M3, b: np.dtype[Any] = E4M3, m: int = M, n: int = N, k: int = K) -> tuple[Any, Any]:
    return np.ones((m, k), a), np.ones((n, k), b).T


ONE = np.ones(1, np.float32)
REFUSED = {
    "two e5m2": ((_matrices(E5M2, E5M2), {}), "a and b are float8_e5m2; one of them must be float8_e4m3fn"),
    "e5m2 of e4m3": ((_matrices(), {"dtype": E5M2}), "dtype is float8_e5m2, and a and b are float8_e4m3fn"),
    "mixed with float32": ((_matrices(b=FP32), {}), "b is float32 but a is float8_e4m3fn"),
    "float64 result": ((_matrices(), {"dtype": "float64"}), "dtype is float64"),
    "row-major b": (((_matrices()[0], np.ones((K, N), E4M3)), {}), r"b = lt.contiguous\(b.T\).T copies it"),
    "column-major a": (((np.ones((K, M), E4M3).T, _matrices()[1]), {}), "a .* is not contiguous along K"),
    "odd m": ((_matrices(m=24), {}), "M is 24; with float8 it must be a positive multiple of 16"),
    "odd n": ((_matrices(n=8), {}), "N is 8"),
    "no k": ((_matrices(k=0), {}), "K is 0"),
    "odd rows": (((np.ones((M, K + 8), E4M3)[:, :K], _matrices()[1]), {}), r"a has strides \(72, 1\)"),
    "scale of two": ((_matrices(), {"scale_a": np.ones(2, np.float32)}), r"scale_a has shape \(2,\)"),
    "vector for a alone": (
        (_matrices(), {"scale_a": np.ones(M, np.float32), "scale_b": ONE}),
        rf"scale_a has .* and scale_b has shape \(1,\); both must be one number, or vectors \({M},\) and \({N},\)",
    ),
    "vector for b alone": (
        (_matrices(), {"scale_b": np.ones(N, np.float32)}),
        rf"scale_a is None and scale_b has shape \({N},\); both must be",
    ),
    "vector of float64": (
        (_matrices(), {"scale_a": np.ones(M), "scale_b": np.ones(N, np.float32)}),
        "scale_a is float64; it must be float32",
    ),
    "vector with gaps": (
        (_matrices(), {"scale_a": np.ones(2 * M, np.float32)[::2], "scale_b": np.ones(N, np.float32)}),
        r"scale_a has strides \(2,\)",
    ),
    "vectors and a batch": (
        ((np.ones((3, M, K), E4M3), _matrices()[1]), {name: np.ones(M, np.float32) for name in ("scale_a", "scale_b")}),
        "without a batch",
    ),
    "vectors and float8": (
        (_matrices(n=M), {name: np.ones(M, np.float32) for name in ("scale_a", "scale_b")} | {"dtype": E4M3}),
        "scale_a is a vector, and dtype is float8_e4m3fn",
    ),
    "scale of another type": ((_matrices(), {"scale_b": np.ones(1)}), "scale_b is float64; it must be float32"),
    "scale without float8": ((_matrices(FP32, FP32), {"scale_a": ONE}), "only float8 matrices have scales"),
    "fast without float8": ((_matrices(FP32, FP32), {"fast_accumulation": True}), "fast_accumulation is True"),
    "fast is no flag": ((_matrices(), {"fast_accumulation": "yes"}), "fast_accumulation"),
    "amax of bfloat16": ((_matrices(), {"amax_d": ONE.copy()}), "amax_d is given, and dtype is bfloat16"),
    "c for float8": (
        (_matrices(), {"dtype": E4M3, "c": np.ones((M, N), BF16)}),
        "c is given, and dtype is float8",
    ),
    "sums": (
        (_matrices(), {"epilogue": "bgrada", "bias_gradient": np.ones(M, BF16)}),
        "matrices are not summed",
    ),
    "bias of float32": (
        (_matrices(), {"dtype": FP32, "epilogue": "bias", "bias": np.ones(N, FP32)}),
        "bias is float32",
    ),
}


@pytest.mark.parametrize(("given", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(given: tuple[tuple[Any, Any], dict[str, Any]], message: str) -> None:
    matrices, options = given
    with pytest.raises(LtError, match=message):
        lt.matmul(*matrices, **options)


@pytest.mark.parametrize("offset", [4, 8])
def test_a_scale_needs_a_slot_of_16_bytes(gpu: FakeGpu, offset: int) -> None:
    slots = gpu.cp.asarray(np.ones(8, np.float32))
    a, b = (placed(gpu, each) for each in _matrices())
    with pytest.raises(gpu.lt.errors.AlignmentError, match=r"scale_a is at .* multiple of 16 bytes"):
        gpu.lt.matmul(a, b, scale_a=slots[offset // 4 :][:1])
    gpu.lt.matmul(a, b, scale_a=slots[4:5])
    gpu.synchronize()


def test_epilogues_that_nothing_computes_are_refused(gpu: FakeGpu) -> None:
    a, b = (placed(gpu, each) for each in _matrices())
    aux = gpu.cp.asarray(np.ones((M, N), BF16))
    with pytest.raises(gpu.lt.errors.PlanError, match=r"no epilogue 'dgelu' .* float8_e4m3fn; with dtype='bfloat16'"):
        gpu.lt.matmul(a, b, dtype=E4M3, epilogue="dgelu", aux=aux)


def test_an_older_gpu_is_named(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_runtime.gpu.devices._FP8_CAPABILITY", 999)
    a, b = (placed(gpu, each) for each in _matrices(m=16, n=16))
    with pytest.raises(gpu.lt.errors.GpuError, match=r"GPU 0 .*has compute capability 9.0; FP8 needs 99.9"):
        gpu.lt.matmul(a, b)


@pytest.mark.parametrize(("capability", "version"), [(100, 130100), (89, 130100), (90, 120803)])
def test_scale_vectors_are_refused_where_cublaslt_lacks_them(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, capability: int, version: int
) -> None:
    monkeypatch.setattr("lt_runtime.cublaslt.get_version", lambda: version)
    # No `DeviceInfo` can be made after its field is replaced, so that the GPU's is made before.
    importlib.import_module("lt_runtime.gpu.devices").device_info(0)
    monkeypatch.setattr("lt_runtime.gpu.devices.DeviceInfo.capability", capability)
    a, b = (placed(gpu, each) for each in _matrices(m=64, n=64))
    scale = gpu.cp.asarray(np.ones(64, np.float32))
    with pytest.raises(gpu.lt.errors.GpuError, match=r"vectors of scales need .* 9.0 and cuBLASLt 12.9"):
        gpu.lt.matmul(a, b, scale_a=scale, scale_b=scale)


def test_scales_of_swapped_operands_are_swapped(gpu: FakeGpu) -> None:
    """For a row-major D, cuBLASLt computes the transposed product, so that the scale of `a` is that of its B."""
    product = Float8Product(Float8Case())
    arrays = {name: placed(gpu, array) for name, array in product.arrays.items()}
    gpu.lt.matmul(placed(gpu, product.a), placed(gpu, product.b), **arrays, dtype=BF16)
    first, second, *_ = gpu.library.calls[-1].scales
    gpu.synchronize()
    assert (first, second) == (arrays["scale_b"].data.ptr, arrays["scale_a"].data.ptr)


OTHERS = {
    "linear_fwd": lambda x: lt.linear_fwd(x, x),
    "mse_loss": lambda x: lt.mse_loss(x, x),
    "add": lambda x: lt.add(x, x),
    "rms_norm_fwd": lambda x: lt.rms_norm_fwd(x, x[0]),
}


@pytest.mark.parametrize("call", OTHERS.values(), ids=OTHERS)
def test_other_operations_refuse_float8_by_name(call: Any) -> None:
    with pytest.raises(lt.errors.DTypeError, match="float8_e4m3fn; accepted are float32, float16, bfloat16"):
        call(np.ones((M, M), E4M3))
