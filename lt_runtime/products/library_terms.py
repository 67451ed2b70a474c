"""A matrix product in cuBLASLt's terms: its types, its epilogue, and column-major matrices."""

from __future__ import annotations

from typing import Final

from lt_runtime.cublaslt import ComputeType, DataType, MatrixLayout
from lt_runtime.cublaslt import Epilogue as LibraryEpilogue
from lt_runtime.cublaslt.algorithms import Types
from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import Order
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec

_DATA_TYPES: Final = {
    DType.FLOAT32: DataType.R_32F,
    DType.FLOAT16: DataType.R_16F,
    DType.BFLOAT16: DataType.R_16BF,
    DType.FLOAT64: DataType.R_64F,
}
_COMPUTE_TYPES: Final = {
    Compute.FLOAT32: ComputeType.COMPUTE_32F,
    Compute.TF32: ComputeType.COMPUTE_32F_FAST_TF32,
    Compute.FLOAT64: ComputeType.COMPUTE_64F,
}


def library_types(problem: MatmulProblem) -> Types:
    """The key of cuBLASLt's list of algorithms: compute type, type of α and β, types of A, B, C and D."""
    operand, result = _DATA_TYPES[problem.dtype], _DATA_TYPES[problem.d_dtype]
    scale = DataType.R_64F if problem.compute is Compute.FLOAT64 else DataType.R_32F
    return _COMPUTE_TYPES[problem.compute], scale, operand, operand, result, result


def library_epilogue(epilogue: Epilogue, swapped: bool) -> LibraryEpilogue:
    """cuBLASLt's name of an epilogue; if the operands are swapped, sums of A are sums of B and the other way round."""
    if epilogue is Epilogue.NONE:
        return LibraryEpilogue.DEFAULT
    if epilogue.sums_operand and swapped:
        return LibraryEpilogue.BGRADB if epilogue is Epilogue.BGRADA else LibraryEpilogue.BGRADA
    return LibraryEpilogue[epilogue.name]


def library_shape(problem: MatmulProblem) -> tuple[int, int]:
    """Rows and columns of D as cuBLASLt sees D: a row-major matrix is its transpose to the library."""
    return (problem.n, problem.m) if problem.d.layout.order is Order.ROW else (problem.m, problem.n)


def column_major(spec: Spec, data_type: DataType, batch: int) -> MatrixLayout:
    """The layout by which cuBLASLt reads a matrix or a batch: a row-major matrix is its transpose to the library."""
    layout = spec.layout
    rows, cols = layout.shape if layout.order is Order.COLUMN else (layout.cols, layout.rows)
    stride = spec.batch_stride if batch > 1 else 0
    return MatrixLayout(data_type, rows, cols, layout.leading_dimension, batch_count=batch, batch_stride=stride)
