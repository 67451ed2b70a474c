"""Checks matrix products on a pretended GPU against the float64 reference."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import Order, layout_of
from lt_runtime.problem import DType
from tests.host_kernels.arrays import assert_close
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import EPSILON, TINY
from tests.support.placed import FLAT, Placed, host_of
from tests.support.strategies import MatmulCase, Placement, lattice

Array = NDArray[Any]


def matmul_case(**changes: Any) -> MatmulCase:
    """Makes a case: a 24×40 by 40×32 product in FP32 without epilogue, with some fields replaced."""
    standard: dict[str, Any] = {
        "m": 24, "n": 32, "k": 40, "batches": (None, None, None), "dtype": DType.FLOAT32, "compute": "float32",
        "d_dtype": changes.get("dtype", DType.FLOAT32), "epilogue": Epilogue.NONE, "alpha": 1.0, "beta": 0.0,
        "with_c": False, "in_place": False, "device_scalars": False, "a": FLAT, "b": FLAT, "c": FLAT, "d": FLAT,
        "bias_offset": 0, "data_seed": 1,
    }  # fmt: skip
    return MatmulCase(**{**standard, **changes})


class Product:
    """Operands of a case on the host and on the GPU, and the reference's results."""

    def __init__(self, gpu: FakeGpu, case: MatmulCase, stream: Any = None) -> None:
        self.gpu, self.case, self.stream = gpu, case, stream
        self._generator = np.random.default_rng(case.data_seed)
        counts = {count for count in case.batches[:2] if count is not None}
        self.batch = max(counts) if counts else None
        m, n, k = case.m, case.n, case.k
        self.a = self._draw(case.batches[0], (m, k), case.dtype)
        self.b = self._draw(case.batches[1], (k, n), case.dtype)
        self.c = self._draw(self.batch, (m, n), case.d_dtype, np.sqrt(k)) if case.with_c else None
        self.bias = self._draw(None, (n,), case.d_dtype, np.sqrt(k)) if case.epilogue.has_bias else None
        # the pre-activation at which a backward epilogue evaluates the derivative
        self.z = self._draw(self.batch, (m, n), case.d_dtype)
        self._expect()
        self._place()

    def _draw(self, batch: int | None, shape: tuple[int, ...], dtype: DType, size: float = 1.0) -> Array:
        return self.draw(shape if batch is None else (batch, *shape), dtype, size)

    def draw(self, shape: tuple[int, ...], dtype: DType, size: float) -> Array:
        """Draws exact numbers. `size` is the magnitude of a sum that the numbers are added to, for subclasses."""
        return lattice(self._generator, shape, dtype)

    def _expect(self) -> None:
        case, scalars = self.case, {"alpha": self.case.alpha, "beta": self.case.beta}
        aux = self.z if case.epilogue.is_derivative else None
        self.expected = reference.matmul(
            self.a, self.b, self.c, **scalars, epilogue=case.epilogue, bias=self.bias, aux=aux
        )
        plain = Epilogue.NONE if self.bias is None else Epilogue.BIAS
        self.product = reference.matmul(self.a, self.b, self.c, **scalars, epilogue=plain, bias=self.bias).d

    def rescale(self, alpha: float, beta: float) -> None:
        """Gives the next product other values of alpha and beta, in new scalars; the matrices stay."""
        self.case = dataclasses.replace(self.case, alpha=alpha, beta=beta)
        self.operands |= {"alpha": self._scalar(alpha), "beta": self._scalar(beta)}
        self._expect()

    def overwrite_scalars(self, alpha: float, beta: float) -> None:
        """Writes other values of alpha and beta into the same device memory, from which the product reads them."""
        self.case = dataclasses.replace(self.case, alpha=alpha, beta=beta)
        for name, value in (("alpha", alpha), ("beta", beta)):
            host_of(self.gpu, self.operands[name])[...] = value
        self._expect()

    def _place(self) -> None:
        gpu, case = self.gpu, self.case
        start = np.full_like(self.z, np.nan) if self.c is None or not case.in_place else self.c
        self.out = Placed(gpu, start, case.d)
        self.operands: dict[str, Any] = {
            "a": Placed(gpu, self.a, case.a).array,
            "b": Placed(gpu, self.b, case.b).array,
            "epilogue": case.epilogue.value,
            "compute": case.compute,
            "dtype": case.d_dtype.value,
            "out": self.out.array,
            "alpha": self._scalar(case.alpha),
            "beta": self._scalar(case.beta),
        }
        if self.c is not None:
            self.operands["c"] = self.out.array if case.in_place else Placed(gpu, self.c, case.c).array
        if self.bias is not None:
            self.operands["bias"] = self._vector(self.bias)
        if case.epilogue.has_bias_gradient:
            rows = case.m if case.epilogue is Epilogue.BGRADA else case.n
            shape = (rows,) if self.batch is None else (self.batch, rows)
            self.operands["bias_gradient"] = self._vector(np.full(shape, np.nan, case.d_dtype.numpy))
        self._place_aux()

    def _scalar(self, value: float) -> Any:
        kind = np.float64 if self.case.dtype is DType.FLOAT64 else np.float32
        return self.gpu.cp.asarray([value], dtype=kind) if self.case.device_scalars else value

    def _vector(self, values: Array) -> Any:
        offset = self.case.bias_offset
        buffer = self.gpu.cp.asarray(np.concatenate([np.zeros(offset, values.dtype), values.ravel()]))
        return buffer[offset:].reshape(values.shape)

    @property
    def _flipped(self) -> bool:
        """Whether the package treats D as column-major. A matrix that is both row- and column-major counts as
        row-major.
        """
        array = self.out.array
        strides = [stride // array.itemsize for stride in array.strides]
        return layout_of("out", array.shape[-2:], strides[-2:]).order is Order.COLUMN

    def _place_aux(self) -> None:
        epilogue = self.case.epilogue
        if not (epilogue.has_aux_output or epilogue.is_derivative):
            return
        if epilogue.activation == "gelu":
            values = self.z if epilogue.is_derivative else np.zeros_like(self.z)
            self.aux = Placed(self.gpu, values, Placement(self._flipped, self.case.d.gap, 0), multiple=8)
            self.operands["aux"] = self.aux.array
            return
        positive = self.z.astype(np.float64) > 0
        mask = reference.pack_mask(np.swapaxes(positive, -1, -2) if self._flipped else positive)
        self.operands["aux"] = self.gpu.cp.asarray(mask if epilogue.is_derivative else np.zeros_like(mask))

    def run(self) -> Any:
        """Runs the product and returns D."""
        return self.gpu.lt.matmul(**self.operands, stream=self.stream)

    def wait(self) -> None:
        """Waits for the stream of the calls, and for no other stream."""
        current = self.gpu.cp.cuda.get_current_stream()
        self.gpu.synchronize((current if self.stream is None else self.stream).ptr)

    def check(self) -> None:
        """Runs the product and checks all results."""
        assert self.run() is self.operands["out"]
        self.check_results()

    def check_results(self, d: Any = None) -> None:
        """Checks D, the auxiliary output and the bias gradient.

        `d` is the array that the call returned for D; None if it has written D into the buffer of this case.
        """
        self.wait()
        tolerance = self._tolerance()
        made = self.out.values() if d is None else host_of(self.gpu, d).astype(np.float64)
        assert_close("d", made, self.expected.d, tolerance)
        if self.case.epilogue.has_aux_output:
            self._check_aux()
        if self.case.epilogue.has_bias_gradient:
            expected = self.expected.bias_gradient
            assert expected is not None
            summed = 0.0 if self.case.epilogue.sums_operand else tolerance.sum(axis=-2)
            limit = summed + 2 * EPSILON[self.case.d_dtype] * np.abs(expected) + TINY
            made = host_of(self.gpu, self.operands["bias_gradient"]).astype(np.float64)
            assert_close("bias_gradient", made, expected, limit)

    def _tolerance(self) -> Array:
        """Bounds the error of D: one rounding, and another one if our pass follows a rounded product."""
        case, d = self.case, np.abs(self.expected.d)
        epsilon = 2 * EPSILON[case.d_dtype]
        if case.dtype is DType.FLOAT64:
            return np.asarray(epsilon * d + 2.0**-50 * np.abs(self.product).max(initial=0.0))
        across = case.with_c and not case.in_place and case.c != case.d
        if case.epilogue is Epilogue.NONE and not across:
            return np.asarray(epsilon * d + TINY)
        rounded = (1.2 * np.abs(self.product) + abs(case.beta)) * (1 + np.abs(self.z.astype(np.float64)))
        inexact = self.gpu.gelu_error * np.abs(self.product) if case.epilogue.activation == "gelu" else 0.0
        return np.asarray(epsilon * (d + rounded) + inexact + TINY)

    def _check_aux(self) -> None:
        case = self.case
        if case.epilogue.activation == "gelu":
            addends = [] if self.bias is None else [np.abs(self.bias.astype(np.float64))]
            addends += [] if self.c is None else [abs(case.beta) * np.abs(self.c.astype(np.float64))]
            limit = 2 * EPSILON[case.d_dtype] * (2 * np.abs(self.product) + sum(addends))
            assert_close("aux", self.aux.values(), self.product, limit)
            return
        # For a product of exactly 0, either bit of ReLU's mask is right, because ReLU has no derivative there.
        np.testing.assert_array_equal(self.mask | (self.product == 0), (self.product > 0) | (self.product == 0))

    @property
    def mask(self) -> NDArray[np.bool_]:
        """Unpacks ReLU's mask as the call wrote it: a truth value for each element of D."""
        case = self.case
        bits = reference.unpack_mask(host_of(self.gpu, self.operands["aux"]), case.m if self._flipped else case.n)
        return np.swapaxes(bits, -1, -2) if self._flipped else bits
