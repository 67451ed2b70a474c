"""Cases of FP8 matrix products with their expected results, for the pretended GPU and a real one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.epilogue import Epilogue

M, N, K = 32, 48, 64
E4M3, E5M2, BF16 = (np.dtype(each) for each in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.bfloat16))
FP32, FP16 = np.dtype(np.float32), np.dtype(np.float16)
UNIT = {E4M3: 2.0**-4, E5M2: 2.0**-3, BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}
ACCUMULATION = 2.0**-11
"""Error bound relative to the largest element: tensor cores add FP8 products with about 14 bits.

Errors up to 2^-12.5 were seen on an H200.
"""


@dataclass(frozen=True)
class Float8Case:
    """A test case: types, epilogue, scales and options of an FP8 product."""

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
    vectors: bool = False


CASES = {
    "plain": Float8Case(scales=None),
    "scales": Float8Case(),
    "a negative scale": Float8Case(scales=(-0.5, 3.0)),
    "e4m3 by e5m2": Float8Case(b=E5M2),
    "e5m2 by e4m3, column-major": Float8Case(a=E5M2, column_major=True),
    "to float16": Float8Case(d=FP16),
    "to float32 with a bias": Float8Case(d=FP32, epilogue=Epilogue.BIAS),
    "to e4m3": Float8Case(d=E4M3, scale_d=2.0),
    "to e4m3, saturated": Float8Case(d=E4M3, scale_d=4096.0),
    "to e5m2 with a bias": Float8Case(b=E5M2, d=E5M2, scale_d=0.5, epilogue=Epilogue.RELU_BIAS),
    "adds c": Float8Case(with_c=True),
    "fast": Float8Case(fast=True),
    "batch": Float8Case(batch=3),
    "a scale for each row and column": Float8Case(vectors=True, scales=None),
    "scale vectors, column-major": Float8Case(vectors=True, scales=None, b=E5M2, d=FP16, column_major=True),
    "scale vectors with c": Float8Case(vectors=True, scales=None, d=FP32, with_c=True, fast=True),
    "scale vectors with a bias": Float8Case(vectors=True, scales=None, epilogue=Epilogue.BIAS),
    "scale vectors and a pass": Float8Case(vectors=True, scales=None, epilogue=Epilogue.GELU_AUX_BIAS),
    **{f"epilogue {each.value}": Float8Case(epilogue=each) for each in Epilogue if not each.sums_operand},
    **{f"to e4m3, {each.value}": Float8Case(d=E4M3, epilogue=each) for each in Epilogue if each.has_aux_output},
}


class Float8Product:
    """A case's arrays in host memory, with the expected results."""

    def __init__(self, case: Float8Case) -> None:
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
        factor: Any = float(np.prod(case.scales or 1.0))
        if case.vectors:  # a scale for each row and column; the scales differ by factors of up to 2^12
            scales = [np.exp2(generator.uniform(-6, 6, size)).astype(np.float32) for size in (M, N)]
            self.arrays |= dict(zip(("scale_a", "scale_b"), scales, strict=True))
            factor = np.multiply.outer(*(each.astype(np.float64) for each in scales))
        self.scaled_by = factor
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
        """Compares results with float64, allowing errors of the accumulation and one rounding to the type of D."""
        case, expected = self.case, self.expected.d
        inexact = ACCUMULATION * np.abs(expected).max()
        if case.vectors:
            inexact = (
                ACCUMULATION * np.abs(self.a.astype(np.float64) @ self.b.astype(np.float64)).max() * self.scaled_by
            )
        if case.d.itemsize == 1:
            largest = float(ml_dtypes.finfo(case.d).max)
            if case.scale_d is not None:
                np.testing.assert_allclose(made["amax_d"], np.abs(expected).max(), rtol=ACCUMULATION)
            expected = np.clip((case.scale_d or 1.0) * expected, -largest, largest)
            inexact *= case.scale_d or 1.0
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


def placed(gpu: Any, array: NDArray[Any]) -> Any:
    """The array on the GPU, with the strides it has on the host. CuPy copies FP8 only as bytes."""
    if array.ndim > 1 and array.strides[-1] != array.itemsize:
        return placed(gpu, array.swapaxes(-1, -2)).swapaxes(-1, -2)
    return gpu.cp.asarray(np.ascontiguousarray(array).view(f"u{array.itemsize}")).view(array.dtype)


def host_of(gpu: Any, array: Any) -> NDArray[Any]:
    """Copies the values of an array that `placed` made to the host."""
    if array.ndim > 1 and array.strides[-1] != array.itemsize:
        return host_of(gpu, array.swapaxes(-1, -2)).swapaxes(-1, -2)
    host: NDArray[Any] = gpu.host_of(array)
    return host
