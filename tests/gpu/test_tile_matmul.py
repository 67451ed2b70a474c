"""Products of 16-bit matrices with ragged rows, on a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cupy as cp
import numpy as np
import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.tile_matmul import supports
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem
from lt_runtime.products.own import TilePlan
from lt_runtime.reference import activate, derivative
from lt_runtime.tuner.memory import Memory
from lt_runtime.tuner.operands import ProductOperands
from lt_runtime.tuner.verification import verify
from tests.host_kernels.arrays import assert_close
from tests.support.gpu_arrays import EPSILON, Guarded, spec_of
from tests.support.strategies import Placement

EPS32 = EPSILON[DType.FLOAT32]
TYPES = (DType.BFLOAT16, DType.FLOAT16)
PLACES = {"without gaps": (0, 0), "with gaps": (5, 8), "misaligned": (3, 1)}
FORWARD = [(13830, 221, 48), (3904, 24, 21), (65, 63, 1000), (1, 1, 1), (200, 129, 33), (256, 17, 4099)]
EPILOGUES = (*(Epilogue.NONE, Epilogue.BIAS, Epilogue.RELU_BIAS, Epilogue.GELU), Epilogue.GELU_AUX_BIAS)
WEIGHT_GRADIENT = [(48, 221, 13830), (221, 48, 13830), (21, 24, 3904), (13, 77, 625), (65, 64, 100_000), (3, 2, 1)]


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
        epilogue: Epilogue,
        *,
        place: str = "without gaps",
        c: str = "nowhere",
        alpha: float = 1.0,
        beta: float = 1.0,
    ) -> None:
        m, n, k = shape
        self.dtype, self.epilogue, self.alpha, self.beta, self.has_c = dtype, epilogue, alpha, beta, c != "nowhere"
        generator = np.random.default_rng(m + n + k)
        gap, offset = PLACES[place]

        def draw(rows: int, cols: int, across: bool = False) -> Any:
            values = generator.standard_normal((rows, cols), np.float32).astype(dtype.numpy)
            return values, Guarded(values, Placement(across, gap, offset))

        (self.a, self.a_gpu), (self.b, self.b_gpu) = draw(m, k, column_major[0]), draw(k, n, column_major[1])
        (self.c, self.c_gpu), (self.z, self.z_gpu) = draw(m, n), draw(m, n)
        self.d_gpu = self.c_gpu if c == "in place" else draw(m, n)[1]
        self.vector, self.vector_gpu = draw(1, m if epilogue.sums_operand else n)
        guarded = (self.a_gpu, self.b_gpu, self.d_gpu, self.c_gpu, self.z_gpu)
        a, b, d, c_spec, z = (spec_of(each.array) for each in guarded)
        self.problem = MatmulProblem(
            dtype,
            dtype,
            Compute.FLOAT32,
            a,
            b,
            d,
            epilogue,
            c=c_spec if self.has_c else None,
            aux=z if epilogue.is_derivative or epilogue.has_aux_output else None,
        )
        assert supports(self.problem)
        self.plan = TilePlan(self.problem, 0)

    def run(self) -> None:
        """Puts the product on the current stream."""
        stream = cp.cuda.get_current_stream().ptr
        arrays = (self.a_gpu, self.b_gpu, self.c_gpu, self.vector_gpu, self.z_gpu, self.d_gpu)
        self.plan.run(Call(tuple(int(each.array.data.ptr) for each in arrays), stream, (self.alpha, self.beta)))

    def check(self) -> None:
        """Compares the results of one run with float64."""
        a, b, c, z = (each.astype(np.float64) for each in (self.a, self.b, self.c, self.z))
        expected, size = self.alpha * (a @ b), abs(self.alpha) * (np.abs(a) @ np.abs(b))
        if self.has_c:
            expected, size = expected + self.beta * c, size + np.abs(self.beta * c)
        vector = self.vector[0].astype(np.float64)
        if self.epilogue.has_bias:
            expected, size = expected + vector, size + np.abs(vector)
        if self.epilogue.has_aux_output:
            assert_close("aux", self.z_gpu.values(), expected, self._limit(expected, size, self.a.shape[1]))
        activation, terms = Activation(self.epilogue.activation), a.T
        if self.epilogue.is_derivative:
            expected, size = expected * derivative(z, activation), 4.0 * size * (1.0 + np.abs(z))
            terms = expected
        else:
            expected, size = activate(expected, activation), 2.0 * size
        assert_close("d", self.d_gpu.values(), expected, self._limit(expected, size, self.a.shape[1]))
        sums, sizes = vector, np.zeros(vector.shape)
        if self.epilogue.has_bias_gradient:
            sums, sizes = terms.sum(axis=0), (size if self.epilogue.is_derivative else np.abs(terms)).sum(axis=0)
        assert_close("vector", self.vector_gpu.values()[0], sums, self._limit(sums, sizes, len(terms)))

    def _limit(self, expected: Any, size: Any, additions: int) -> Any:
        """Error bound: half a unit of the result, and half a unit of each partial sum's largest magnitude."""
        return EPSILON[self.dtype] * np.abs(expected) + (additions + 4) * EPS32 * size + 1e-6


def _check(*arguments: Any, **options: Any) -> None:
    product = Product(*arguments, **options)
    product.run()
    product.check()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", FORWARD)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_forward(dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue) -> None:
    _check(shape, dtype, (False, True), epilogue, place=place)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", FORWARD)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.DGELU, Epilogue.DGELU_BGRAD])
def test_input_gradient(dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue) -> None:
    _check(shape, dtype, (False, False), epilogue, place=place)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", WEIGHT_GRADIENT)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("epilogue", [Epilogue.NONE, Epilogue.BGRADA])
def test_weight_gradient(dtype: DType, shape: tuple[int, int, int], place: str, epilogue: Epilogue) -> None:
    _check(shape, dtype, (True, False), epilogue, place=place)


KINDS = [
    ((700, 77, 45), (False, True), Epilogue.GELU_AUX_BIAS),
    ((700, 77, 45), (False, False), Epilogue.DGELU_BGRAD),
    ((33, 77, 7000), (True, False), Epilogue.BGRADA),
    ((33, 77, 7000), (True, True), Epilogue.RELU),
]


@pytest.mark.parametrize("dtype", TYPES)
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


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("shape", "column_major", "epilogue"), KINDS)
def test_the_tuner_has_nothing_against_them(
    dtype: DType, shape: tuple[int, int, int], column_major: tuple[bool, bool], epilogue: Epilogue
) -> None:
    product = Product(shape, dtype, column_major, epilogue)
    stream = cp.cuda.get_current_stream().ptr
    trial = ProductOperands(Memory(0, stream), product.problem)
    memory = stream_memory(0, stream)
    assert verify({"ours": lambda: product.plan.put(trial.call(stream), memory)}, trial) == {}


def test_whole_vectors_are_the_library_s() -> None:
    problem = Product((700, 77, 45), DType.BFLOAT16, (False, True), Epilogue.NONE).problem
    assert not supports(replace(problem, dtype=DType.FLOAT32, d_dtype=DType.FLOAT32))
