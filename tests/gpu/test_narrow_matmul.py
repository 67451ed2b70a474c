"""Products that are tiny in one dimension, by our kernels on the GPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np
import pytest
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.narrow import NarrowPass, supports
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem, Spec
from lt_runtime.reference import derivative, pack_mask
from lt_runtime.tuner.memory import Memory
from lt_runtime.tuner.operands import ProductOperands
from lt_runtime.tuner.verification import verify
from tests.host_kernels.arrays import assert_close
from tests.support.gpu_arrays import EPSILON, Guarded, spec_of
from tests.support.strategies import TYPES, Placement

Array = NDArray[Any]
EPS32 = EPSILON[DType.FLOAT32]
_TINY = 1e-6

FORWARD = [(256, 10, 512), (2048, 1, 256), (1, 16, 7), (333, 7, 1001), (40_000, 10, 96), (3, 16, 5000), (64, 5, 1)]
INPUT_GRADIENT = [(256, 512, 10), (2048, 256, 1), (1, 7, 16), (333, 1001, 7), (20_000, 264, 10), (3, 1, 2)]
WEIGHT_GRADIENT = [(10, 512, 256), (1, 256, 2048), (16, 7, 1), (7, 1001, 333), (10, 264, 20_000), (16, 5000, 3)]
PLACES = {
    "aligned": (0, 0),
    "with gaps": (8, 8),
    "misaligned": (3, 1),
}


class Product:
    """A product's operands on the host and on the GPU.

    Args:
        shape: M, N, K.
        column_major: A and B.
        place: elements after each row (column), and before the first.
        c: "nowhere", where D is ("in place"), or "apart".
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        dtype: DType,
        column_major: tuple[bool, bool],
        epilogue: Epilogue = Epilogue.NONE,
        *,
        place: str = "aligned",
        c: str = "nowhere",
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        m, n, k = shape
        self.dtype, self.epilogue, self.alpha, self.beta = dtype, epilogue, alpha, beta
        generator = np.random.default_rng(m + n + k)
        gap, offset = PLACES[place]

        def draw(rows: int, cols: int, across: bool = False) -> tuple[Array, Guarded]:
            values = generator.standard_normal((rows, cols), np.float32).astype(dtype.numpy)
            return values, Guarded(values, Placement(across, gap, offset))

        (self.a, self.a_gpu), (self.b, self.b_gpu) = draw(m, k, column_major[0]), draw(k, n, column_major[1])
        self.c, self.c_gpu = draw(m, n)
        self.d_gpu = self.c_gpu if c == "in place" else draw(m, n)[1]
        self.has_c = c != "nowhere"
        self.bias, self.vector_gpu = draw(1, m if epilogue in (Epilogue.NONE, Epilogue.BGRADA) else n)
        self.z, self.z_gpu = draw(m, n)
        self.mask_gpu = cp.asarray(pack_mask(self.z > 0))
        specs = [spec_of(each.array) for each in (self.a_gpu, self.b_gpu, self.d_gpu)]
        c_spec = spec_of(self.c_gpu.array) if self.has_c else None
        aux = self._aux_spec() if epilogue.is_derivative else None
        self.problem = MatmulProblem(dtype, dtype, Compute.FLOAT32, *specs, epilogue, c=c_spec, aux=aux)
        assert supports(self.problem)
        self.plan = NarrowPass(self.problem, 0)

    def _aux_spec(self) -> Spec:
        """Layout of the auxiliary matrix; a mask counts in bits."""
        if self.epilogue.activation == "gelu":
            return spec_of(self.z_gpu.array)
        m, n = self.z.shape
        return Spec(Layout(m, n, Order.ROW, 8 * self.mask_gpu.shape[1]))

    def run(self) -> None:
        """Puts the product on the current stream."""
        stream = cp.cuda.get_current_stream().ptr
        arrays = (self.a_gpu, self.b_gpu, self.d_gpu, self.c_gpu, self.vector_gpu)
        a, b, d, c, vector = (int(each.array.data.ptr) for each in arrays)
        aux = self.z_gpu.array if self.epilogue.activation == "gelu" else self.mask_gpu
        memory = stream_memory(0, stream)
        with memory.lock:
            self.plan.run(Call((a, b, c, vector, int(aux.data.ptr), d), stream, (self.alpha, self.beta)), memory)

    def check(self) -> None:
        """Compares the results of one run with float64."""
        a, b, c = (each.astype(np.float64) for each in (self.a, self.b, self.c))
        expected, size = self.alpha * (a @ b), abs(self.alpha) * (np.abs(a) @ np.abs(b))
        if self.has_c:
            expected, size = expected + self.beta * c, size + np.abs(self.beta * c)
        if self.epilogue is Epilogue.BIAS:
            bias = self.bias.astype(np.float64)
            expected, size = expected + bias, size + np.abs(bias)
        terms = a.T  # error bound of the bias gradient
        if self.epilogue.is_derivative:
            z = self.z.astype(np.float64)
            expected = expected * derivative(z, Activation(self.epilogue.activation))
            # The error of GELU's approximation is relative to the product.
            size, terms = 4.0 * size * (1.0 + np.abs(z)), expected
        assert_close("d", self.d_gpu.values(), expected, self._limit(expected, size, self.a.shape[1]))
        sums, sizes = self.bias[0].astype(np.float64), np.abs(self.bias[0].astype(np.float64))
        if self.epilogue.has_bias_gradient:
            sums, sizes = terms.sum(axis=0), (size if self.epilogue.is_derivative else np.abs(terms)).sum(axis=0)
        assert_close("vector", self.vector_gpu.values()[0], sums, self._limit(sums, sizes, len(terms)))

    def _limit(self, expected: Array, size: Array, additions: int) -> Array:
        """Error bound: half a unit of the result, and half a unit of each partial sum's largest magnitude."""
        limit: Array = EPSILON[self.dtype] * np.abs(expected) + (additions + 4) * EPS32 * size + _TINY
        return limit


def _check(*arguments: Any, **options: Any) -> None:
    product = Product(*arguments, **options)
    product.run()
    product.check()


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", FORWARD)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.BIAS])
def test_forward(dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue) -> None:
    _check(shape, dtype, (False, True), epilogue, place=place)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", INPUT_GRADIENT)
@pytest.mark.parametrize("place", PLACES)
def test_input_gradient(dtype: DType, shape: tuple[int, int, int], place: str) -> None:
    _check(shape, dtype, (False, False), place=place)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", INPUT_GRADIENT)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", [Epilogue.DRELU, Epilogue.DRELU_BGRAD, Epilogue.DGELU, Epilogue.DGELU_BGRAD])
def test_input_gradient_before_an_activation(
    dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue
) -> None:
    _check(shape, dtype, (False, False), epilogue, place=place)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", WEIGHT_GRADIENT)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.BGRADA])
def test_weight_gradient(dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue) -> None:
    _check(shape, dtype, (True, False), epilogue, place=place)


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
    product = Product(shape, DType.FLOAT32, column_major, epilogue, c="in place", beta=0.0)
    product.d_gpu.array[...] = cp.nan
    product.run()
    product.c[...] = 0.0
    product.check()


@pytest.mark.parametrize(("shape", "column_major", "epilogue"), KINDS)
def test_in_a_graph(shape: tuple[int, int, int], column_major: tuple[bool, bool], epilogue: Epilogue) -> None:
    product = Product(shape, DType.BFLOAT16, column_major, epilogue)
    cp.cuda.Device().synchronize()  # waits until the operands are written
    with cp.cuda.Stream(non_blocking=True) as stream:
        product.run()  # allocates the scratch memory before the capture
        stream.begin_capture()
        product.run()
        graph = stream.end_capture()
        product.d_gpu.array[...] = cp.zeros_like(product.d_gpu.array)
        graph.launch(stream)
        stream.synchronize()
    product.check()


@pytest.mark.parametrize(("shape", "column_major", "epilogue"), KINDS)
def test_tf32_is_computed_in_full(
    shape: tuple[int, int, int], column_major: tuple[bool, bool], epilogue: Epilogue
) -> None:
    product = Product(shape, DType.FLOAT32, column_major, epilogue)
    product.plan = NarrowPass(replace(product.problem, compute=Compute.TF32), 0)
    product.run()
    product.check()


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize(("shape", "column_major", "epilogue"), KINDS)
def test_the_tuner_has_nothing_against_them(
    dtype: DType, shape: tuple[int, int, int], column_major: tuple[bool, bool], epilogue: Epilogue
) -> None:
    product = Product(shape, dtype, column_major, epilogue)
    stream = cp.cuda.get_current_stream().ptr
    trial = ProductOperands(Memory(0, stream), product.problem)
    memory = stream_memory(0, stream)
    assert verify({"ours": lambda: product.plan.run(trial.call(stream), memory)}, trial) == {}
