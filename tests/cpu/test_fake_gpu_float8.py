"""FP8 matrix products on the pretended GPU and on NumPy arrays, by the public interface, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import LtError
from tests.support.fake_gpu import FakeGpu

M, N, K = 32, 48, 64
E4M3, E5M2, BF16 = (np.dtype(each) for each in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16))
FP32, FP16 = np.dtype(np.float32), np.dtype(np.float16)
UNIT = {E4M3: 2.0**-4, E5M2: 2.0**-3, BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}


@dataclass(frozen=True)
class Case:
    """Types, epilogue, scales and options of a product."""

    a: np.dtype[Any] = E4M3
    b: np.dtype[Any] = E4M3
    d: np.dtype[Any] = BF16
    epilogue: Epilogue = Epilogue.NONE
    scales: tuple[float, float] | None = (0.5, 0.25)
    scale_d: float | None = None
    with_c: bool = False
    column_major: bool = False
    fast: bool = False
    batch: int | None = None


CASES = {
    "plain": Case(scales=None),
    "scales": Case(),
    "a negative scale": Case(scales=(-0.5, 3.0)),
    "e4m3 by e5m2": Case(b=E5M2),
    "e5m2 by e4m3, column-major": Case(a=E5M2, column_major=True),
    "to float16": Case(d=FP16),
    "to float32 with a bias": Case(d=FP32, epilogue=Epilogue.BIAS),
    "to e4m3": Case(d=E4M3, scale_d=2.0),
    "to e4m3, saturated": Case(d=E4M3, scale_d=4096.0),
    "to e5m2 with a bias": Case(b=E5M2, d=E5M2, scale_d=0.5, epilogue=Epilogue.RELU_BIAS),
    "adds c": Case(with_c=True),
    "fast": Case(fast=True),
    "batch": Case(batch=3),
    **{f"epilogue {each.value}": Case(epilogue=each) for each in Epilogue if not each.sums_operand},
    **{f"to e4m3, {each.value}": Case(d=E4M3, epilogue=each) for each in Epilogue if each.has_aux_output},
}


class Product:
    """A case's arrays in host memory, with the expected results."""

    def __init__(self, case: Case) -> None:
        self.case, generator = case, np.random.default_rng(7)
        lead = () if case.batch is None else (case.batch,)

        def draw(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
            return generator.normal(size=(*lead, *shape)).astype(dtype)

        self.a, self.b = draw((M, K), case.a), draw((N, K), case.b).swapaxes(-1, -2)
        narrow = BF16 if case.d.itemsize == 1 else case.d
        z, c = draw((M, N), narrow), draw((M, N), narrow)
        self.arrays: dict[str, Any] = {}
        if case.scales is not None:
            pair = zip(("scale_a", "scale_b"), case.scales, strict=True)
            self.arrays |= {name: np.array([value], np.float32) for name, value in pair}
        if case.scale_d is not None:
            self.arrays |= {"scale_d": np.array(case.scale_d, np.float32), "amax_d": np.full(1, np.nan, np.float32)}
        if case.with_c:
            self.arrays["c"] = c
        epilogue = case.epilogue
        if epilogue.has_bias:
            self.arrays["bias"] = generator.normal(size=N).astype(case.d if case.d.itemsize == 2 else BF16)
        if epilogue.has_bias_gradient:
            self.arrays["bias_gradient"] = np.full(N, np.nan, case.d)
        if epilogue.has_aux_output or epilogue.is_derivative:
            is_mask = epilogue.activation == "relu"
            aux = reference.pack_mask(z.astype(np.float64) > 0) if is_mask else z
            self.arrays["aux"] = aux if epilogue.is_derivative else np.zeros_like(aux)
        out = np.full((*lead, N, M) if case.column_major else (*lead, M, N), np.nan, case.d)
        self.arrays["out"] = out.swapaxes(-1, -2) if case.column_major else out
        factor = float(np.prod(case.scales or 1.0))
        named = {name: self.arrays.get(name) for name in ("c", "bias")}
        self.expected = reference.matmul(
            self.a,
            self.b,
            **named,
            alpha=factor,
            beta=1.0,
            epilogue=epilogue,
            aux=z if epilogue.is_derivative else None,
        )

    def options(self) -> dict[str, Any]:
        return {"epilogue": self.case.epilogue.value, "dtype": self.case.d.name, "fast_accumulation": self.case.fast}

    def check(self, made: dict[str, NDArray[Any]]) -> None:
        """Compares results with float64: one rounding to D's type, after the accumulation."""
        case, expected = self.case, self.expected.d
        inexact = 1e-4 * np.abs(expected).max()
        if case.d.itemsize == 1:
            largest = float(ml_dtypes.finfo(case.d).max)
            if case.scale_d is not None:
                np.testing.assert_allclose(made["amax_d"], np.abs(expected).max(), rtol=1e-5)
            expected = np.clip((case.scale_d or 1.0) * expected, -largest, largest)
            inexact += float(ml_dtypes.finfo(case.d).smallest_normal)
        error = np.abs(made["out"].astype(np.float64) - expected)
        assert (error <= UNIT[case.d] * np.abs(expected) + inexact).all(), error.max()
        if case.epilogue.has_bias_gradient:
            sums = self.expected.bias_gradient
            np.testing.assert_allclose(made["bias_gradient"].astype(np.float64), sums, rtol=0.01, atol=0.05)
        if case.epilogue.has_aux_output and case.epilogue.activation == "gelu":
            np.testing.assert_allclose(made["aux"].astype(np.float64), self.expected.aux, rtol=0.02, atol=0.02)
        elif case.epilogue.has_aux_output:
            assert self.expected.aux is not None
            np.testing.assert_array_equal(reference.unpack_mask(made["aux"], N), self.expected.aux > 0)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_numpy_arrays(case: Case) -> None:
    product = Product(case)
    lt.matmul(product.a, product.b, **product.arrays, **product.options())
    product.check(product.arrays)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_on_a_gpu(gpu: FakeGpu, case: Case) -> None:
    product = Product(case)
    placed = {name: _placed(gpu, array) for name, array in product.arrays.items()}
    gpu.lt.matmul(_placed(gpu, product.a), _placed(gpu, product.b), **placed, **product.options())
    gpu.synchronize()
    product.check({name: gpu.host_of(array) for name, array in placed.items()})
    assert bool(gpu.library.calls[-1].desc.fast_accumulation) == case.fast


def _placed(gpu: FakeGpu, array: NDArray[Any]) -> Any:
    """The array on the GPU, with the strides it has on the host."""
    is_row_major = array.ndim < 2 or array.strides[-1] == array.itemsize
    return gpu.cp.asarray(array) if is_row_major else gpu.cp.asarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)


def test_a_scale_is_read_at_each_replay(gpu: FakeGpu) -> None:
    product = Product(Case())
    placed = {name: _placed(gpu, array) for name, array in product.arrays.items()}
    matrices = _placed(gpu, product.a), _placed(gpu, product.b)
    for factor in (1.0, 1.0, 1.0, 3.0):  # the third call is captured, the fourth replays it
        gpu.synchronize()
        gpu.host_of(placed["scale_a"])[...] = factor
        gpu.lt.matmul(*matrices, **placed, dtype=BF16)
        gpu.synchronize()
        wanted = factor * 0.25 * (product.a.astype(np.float64) @ product.b.astype(np.float64))
        np.testing.assert_allclose(gpu.host_of(placed["out"]).astype(np.float64), wanted, rtol=0.01, atol=1e-6)


def test_a_new_result_is_bfloat16_or_of_the_type_asked_for(gpu: FakeGpu) -> None:
    product = Product(Case())
    matrices = _placed(gpu, product.a), _placed(gpu, product.b)
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
    a, b = (_placed(gpu, each) for each in _matrices())
    with pytest.raises(gpu.lt.errors.AlignmentError, match=r"scale_a is at .* multiple of 16 bytes"):
        gpu.lt.matmul(a, b, scale_a=slots[offset // 4 :][:1])
    gpu.lt.matmul(a, b, scale_a=slots[4:5])
    gpu.synchronize()


def test_epilogues_that_nothing_computes_are_refused(gpu: FakeGpu) -> None:
    a, b = (_placed(gpu, each) for each in _matrices())
    aux = gpu.cp.asarray(np.ones((M, N), BF16))
    with pytest.raises(gpu.lt.errors.PlanError, match=r"no epilogue 'dgelu' .* float8_e4m3fn; with dtype='bfloat16'"):
        gpu.lt.matmul(a, b, dtype=E4M3, epilogue="dgelu", aux=aux)


def test_an_older_gpu_is_named(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_runtime.gpu.devices.FLOAT8_CAPABILITY", 999)
    a, b = (_placed(gpu, each) for each in _matrices(m=16, n=16))
    with pytest.raises(
        gpu.lt.errors.PlanError, match=r"GPU 0 .*has compute capability 9.0; float8 products need"
    ):
        gpu.lt.matmul(a, b)


def test_scales_of_swapped_operands_are_swapped(gpu: FakeGpu) -> None:
    """A row-major D is cuBLASLt's transposed product, so that the scale of `a` belongs to the library's B."""
    product = Product(Case())
    placed = {name: _placed(gpu, array) for name, array in product.arrays.items()}
    gpu.lt.matmul(_placed(gpu, product.a), _placed(gpu, product.b), **placed, dtype=BF16)
    first, second, *_ = gpu.library.calls[-1].scales
    gpu.synchronize()
    assert (first, second) == (placed["scale_b"].data.ptr, placed["scale_a"].data.ptr)


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
