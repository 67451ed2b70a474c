"""A matrix product ready to launch: descriptors made, algorithm chosen."""

from __future__ import annotations

import threading
from typing import Final

from lt_runtime import cublaslt
from lt_runtime.errors import PlanError
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import StreamMemory, workspace_size
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec

_DATA_TYPES: Final = {
    DType.FLOAT32: cublaslt.DataType.R_32F,
    DType.FLOAT16: cublaslt.DataType.R_16F,
    DType.BFLOAT16: cublaslt.DataType.R_16BF,
}
_COMPUTE_TYPES: Final = {
    Compute.FLOAT32: cublaslt.ComputeType.F32,
    Compute.TF32: cublaslt.ComputeType.F32_FAST_TF32,
}
_EPILOGUES: Final = {
    "none": cublaslt.Epilogue.DEFAULT,
    "bias": cublaslt.Epilogue.BIAS,
    "relu": cublaslt.Epilogue.RELU,
    "relu_bias": cublaslt.Epilogue.RELU_BIAS,
    "gelu": cublaslt.Epilogue.GELU,
    "gelu_bias": cublaslt.Epilogue.GELU_BIAS,
}
_REQUESTED: Final = 8
# Partial sums of a split K are kept in FP32; in the output type they would lose precision.
_REDUCTIONS: Final = cublaslt.ReductionScheme.NONE | cublaslt.ReductionScheme.COMPUTE_TYPE


class MatmulPlan:
    """D = α·A·B + β·D for one problem on one device, on cuBLASLt's first sound heuristic.

    cuBLASLt thinks in column-major matrices. A row-major D is its column-major transpose, and Dᵀ = Bᵀ·Aᵀ, so that
    the operands swap; an operand that lies the way D does is then read plainly, one that lies the other way by the
    transpose flag. Nothing is ever transposed in memory.

    Raises:
        PlanError: the library has no usable algorithm.
    """

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        self.problem = problem
        self._device = device
        self._beta = 1.0 if problem.accumulate else 0.0
        self._swapped = problem.d.layout.order is Order.ROW
        self._lock = threading.Lock()
        if problem.m and problem.n and problem.k:
            self._prepare()

    def _prepare(self) -> None:
        problem = self.problem
        self._handle = cublaslt.handle(self._device)
        first, second = (problem.b, problem.a) if self._swapped else (problem.a, problem.b)
        self._desc = self._describe(first.layout.order, second.layout.order)
        data_type = _DATA_TYPES[problem.dtype]
        self._first = _column_major(first.layout, data_type)
        self._second = _column_major(second.layout, data_type)
        self._d = _column_major(problem.d.layout, data_type)
        self.algorithm = self._choose(first, second)

    def _describe(self, first: Order, second: Order) -> cublaslt.MatmulDesc:
        problem, own = self.problem, self.problem.d.layout.order
        desc = cublaslt.MatmulDesc(_COMPUTE_TYPES[problem.compute], cublaslt.DataType.R_32F)
        desc.set(cublaslt.MatmulDescAttribute.TRANSA, cublaslt.Operation.N if first is own else cublaslt.Operation.T)
        desc.set(cublaslt.MatmulDescAttribute.TRANSB, cublaslt.Operation.N if second is own else cublaslt.Operation.T)
        desc.set(cublaslt.MatmulDescAttribute.EPILOGUE, _EPILOGUES[problem.epilogue])
        if problem.epilogue.endswith("bias"):
            # The heuristic looks at the pointer's value; any aligned one stands for those that run will set.
            desc.set(cublaslt.MatmulDescAttribute.BIAS_POINTER, 256)
        return desc

    def _choose(self, first: Spec, second: Spec) -> cublaslt.Algorithm:
        attribute = cublaslt.PreferenceAttribute
        d = self.problem.d
        with cublaslt.MatmulPreference() as preference:
            preference.set(attribute.MAX_WORKSPACE_BYTES, workspace_size(self._device))
            preference.set(attribute.REDUCTION_SCHEME_MASK, _REDUCTIONS)
            preference.set(attribute.MIN_ALIGNMENT_A_BYTES, first.alignment)
            preference.set(attribute.MIN_ALIGNMENT_B_BYTES, second.alignment)
            preference.set(attribute.MIN_ALIGNMENT_C_BYTES, d.alignment)
            preference.set(attribute.MIN_ALIGNMENT_D_BYTES, d.alignment)
            candidates = cublaslt.get_heuristics(
                self._handle, self._desc, self._first, self._second, self._d, preference, _REQUESTED
            )
        for candidate in candidates:
            if cublaslt.is_known_bad(self._facts(candidate)) is None:
                return candidate
        raise PlanError(f"cuBLASLt offers {len(candidates)} algorithms, none usable, for {self.problem}")

    def _facts(self, algorithm: cublaslt.Algorithm) -> cublaslt.Candidate:
        problem, config = self.problem, cublaslt.AlgoConfigAttribute
        leading = max(spec.layout.leading_dimension for spec in (problem.a, problem.b, problem.d))
        return cublaslt.Candidate(
            version=cublaslt.get_version(),
            capability=device_info(self._device).capability,
            m=problem.m,
            n=problem.n,
            k=problem.k,
            has_bias=problem.epilogue.endswith("bias"),
            largest_span=leading * problem.dtype.itemsize,
            algo_id=cublaslt.algo_config(algorithm, config.ID),
            splitk=cublaslt.algo_config(algorithm, config.SPLITK_NUM),
            stages=cublaslt.algo_config(algorithm, config.STAGES_ID),
        )

    def run(self, a: int, b: int, d: int, bias: int, stream: int, memory: StreamMemory) -> None:
        """Puts the product on `stream`. Addresses are as the problem says; `bias` is 0 without one.

        Any number of threads may call this at once, each with a stream and memory of its own.
        """
        if not (self.problem.m and self.problem.n):
            return
        if self.problem.k == 0:
            self._run_empty(d, stream)
            return
        first, second = (b, a) if self._swapped else (a, b)
        with self._lock:  # the bias pointer is part of the shared descriptor until the call has returned
            if bias:
                self._desc.set(cublaslt.MatmulDescAttribute.BIAS_POINTER, bias)
            cublaslt.matmul(
                self._handle,
                self._desc,
                1.0,
                first,
                self._first,
                second,
                self._second,
                self._beta,
                d,
                self._d,
                self.algorithm,
                memory.workspace,
                memory.workspace_size,
                stream,
            )

    def _run_empty(self, d: int, stream: int) -> None:
        """A sum over no terms is zero, which cuBLASLt leaves to the caller."""
        if self.problem.accumulate:
            return
        layout, itemsize = self.problem.d.layout, self.problem.dtype.itemsize
        lines, width = (layout.rows, layout.cols) if layout.order is Order.ROW else (layout.cols, layout.rows)
        call("cuMemsetD2D8Async", d, layout.leading_dimension * itemsize, 0, width * itemsize, lines, stream)


def _column_major(layout: Layout, data_type: cublaslt.DataType) -> cublaslt.MatrixLayout:
    """The memory of `layout` as the column-major matrix that cuBLASLt sees."""
    rows, cols = layout.shape if layout.order is Order.COLUMN else (layout.cols, layout.rows)
    return cublaslt.MatrixLayout(data_type, rows, cols, layout.leading_dimension)
