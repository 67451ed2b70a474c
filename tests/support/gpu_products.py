"""Products by our own kernels on a GPU, with operands in guarded memory, against float64."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.kernels.call import Call
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem, Spec
from lt_runtime.products.methods import NarrowPlan, TilePlan
from lt_runtime.reference import activate, derivative, pack_mask
from lt_runtime.tuner.operands import Memory
from lt_runtime.tuner.verification import ProductOperands, verify
from tests.host_kernels.arrays import assert_close
from tests.support.gpu_arrays import EPSILON, spec_of
from tests.support.placed import Placed
from tests.support.strategies import Placement

Array = NDArray[Any]
EPS32 = EPSILON[DType.FLOAT32]
_TINY = 1e-6
_ROUNDINGS = {NarrowPlan: 1.0, TilePlan: 2.0}
"""The error of an addition in half units in the last place: 2 for tensor cores, because they truncate."""


class Product:
    """A product of one of our kernels, with its operands on the host and on the GPU.

    Args:
        kind: the plan that makes the product, NarrowPlan or TilePlan.
        shape: M, N, K.
        column_major: whether A, and whether B, is column-major.
        place: elements of padding after each row (column), and elements before the first row (column).
        c: where C is: "nowhere" (there is none), "in place" (in D), or "apart".
    """

    def __init__(
        self,
        gpu: Any,
        kind: type[NarrowPlan | TilePlan],
        shape: tuple[int, int, int],
        dtype: DType,
        column_major: tuple[bool, bool],
        epilogue: Epilogue = Epilogue.NONE,
        *,
        place: tuple[int, int] = (0, 0),
        c: str = "nowhere",
        alpha: float = 1.0,
        beta: float = 1.0,
        compute: Compute = Compute.FLOAT32,
    ) -> None:
        m, n, k = shape
        self.dtype, self.epilogue, self.alpha, self.beta, self.has_c = dtype, epilogue, alpha, beta, c != "nowhere"
        self._roundings = _ROUNDINGS[kind]
        generator = np.random.default_rng(m + n + k)

        def draw(rows: int, cols: int, across: bool = False) -> tuple[Array, Placed]:
            values = generator.standard_normal((rows, cols), np.float32).astype(dtype.numpy)
            return values, Placed(gpu, values, Placement(across, *place))

        (self.a, self.a_gpu), (self.b, self.b_gpu) = draw(m, k, column_major[0]), draw(k, n, column_major[1])
        (self.c, self.c_gpu), (self.z, self.z_gpu) = draw(m, n), draw(m, n)
        self.d_gpu = self.c_gpu if c == "in place" else draw(m, n)[1]
        self.vector, self.vector_gpu = draw(1, m if epilogue is Epilogue.BGRADA else n)
        self._mask = cp.asarray(pack_mask(self.z > 0)) if epilogue.activation == "relu" else None
        a, b, d, c_spec = (spec_of(each.array) for each in (self.a_gpu, self.b_gpu, self.d_gpu, self.c_gpu))
        has_aux = epilogue.is_derivative or epilogue.has_aux_output
        optional = {"c": c_spec if self.has_c else None, "aux": self._aux_spec() if has_aux else None}
        self.problem = MatmulProblem(dtype, dtype, compute, a, b, d, epilogue, **optional)
        self.plan = kind(self.problem, 0)

    def _aux_spec(self) -> Spec:
        """Returns the layout of the auxiliary matrix; a mask's strides count bits."""
        if self._mask is None:
            return spec_of(self.z_gpu.array)
        return Spec(Layout(len(self.z), self.z.shape[1], Order.ROW, 8 * self._mask.shape[1]))

    def run(self) -> None:
        """Launches the product on the current stream."""
        aux = self.z_gpu.array if self._mask is None else self._mask
        arrays = (self.a_gpu.array, self.b_gpu.array, self.c_gpu.array, self.vector_gpu.array, aux, self.d_gpu.array)
        stream = cp.cuda.get_current_stream().ptr
        self.plan.run(Call(tuple(int(each.data.ptr) for each in arrays), stream, (self.alpha, self.beta)))

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
        # `terms` are the terms that the bias gradient sums up.
        activation, terms = Activation(self.epilogue.activation), a.T
        if self.epilogue.is_derivative:
            # The error of GELU's approximation is relative to the product.
            expected, size = expected * derivative(z, activation), 4.0 * size * (1.0 + np.abs(z))
            terms = expected
        else:
            expected, size = activate(expected, activation), self._roundings * size
        assert_close("d", self.d_gpu.values(), expected, self._limit(expected, size, self.a.shape[1]))
        sums, sizes = vector, np.zeros(vector.shape)
        if self.epilogue.has_bias_gradient:
            sums, sizes = terms.sum(axis=0), (size if self.epilogue.is_derivative else np.abs(terms)).sum(axis=0)
        assert_close("vector", self.vector_gpu.values()[0], sums, self._limit(sums, sizes, len(terms)))

    def _limit(self, expected: Array, size: Array, additions: int) -> Array:
        """Bounds the error: half a unit of the result, and half a unit of each partial sum's largest magnitude."""
        limit: Array = EPSILON[self.dtype] * np.abs(expected) + (additions + 4) * EPS32 * size + _TINY
        return limit

    def run_in_a_graph(self) -> None:
        """Captures the product, and launches the graph once over a D of zeros."""
        cp.cuda.Device().synchronize()  # waits until the operands are written
        with cp.cuda.Stream(non_blocking=True) as stream:
            self.run()  # allocates the scratch memory before the capture
            stream.begin_capture()
            self.run()
            graph = stream.end_capture()
            self.d_gpu.array[...] = cp.zeros_like(self.d_gpu.array)
            graph.launch(stream)
            stream.synchronize()

    def tuner_objections(self) -> dict[str, str]:
        """Verifies the plan as the tuner does.

        Returns the tuner's messages about wrong results; empty if all results are right.
        """
        stream = cp.cuda.get_current_stream().ptr
        trial, memory = ProductOperands(Memory(0, stream), self.problem), stream_memory(0, stream)
        return verify({"ours": lambda: self.plan.put(trial.call(stream), memory)}, trial)
