"""matmul_epilogue.cu: cuBLASLt's epilogues, applied by a kernel of ours to a product that is already stored."""

from __future__ import annotations

from typing import Any, Final

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.epilogue import ACTIVATION_NAMES
from lt_runtime.kernels.kernel import Entry, Launches, Matrix, Struct, define
from lt_runtime.kernels.tiling import MAX_GRID_Z, Tiling, grid_for
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import DType, MatmulProblem, Spec

_BITS: Final = 8


MATMUL_FORWARD: Final = Entry("matmul_forward", "matmul_epilogue.cu")
MATMUL_BACKWARD: Final = Entry("matmul_backward", "matmul_epilogue.cu")
OPERAND_SUM: Final = Entry("operand_sum", "matmul_epilogue.cu")


def c_lies_across(problem: MatmulProblem) -> bool:
    """Whether C and D have different orders: one is row-major, the other column-major."""
    return problem.c is not None and problem.c.layout.order is not problem.d.layout.order


def pass_supports(problem: MatmulProblem) -> bool:
    """Whether `MatmulPass` can apply a problem's epilogue: D is not FP8, and the bias has D's type."""
    return not problem.d_dtype.is_float8 and problem.bias_dtype is problem.d_dtype


class MatmulPass:
    """Applies the epilogue of a problem in one kernel, after cuBLASLt has computed the plain product.

    The pass supports every layout and size, also those that cuBLASLt refuses or computes wrongly.

    Args:
        product: spec of an FP32 product in separate memory, of D's shape and in any layout, so that the result is
            rounded only once; None for a product of D's type that is stored in D, which the pass overwrites. The pass
            adds β·C to a product in separate memory, and to a product in D only if C and D have different orders.
            Otherwise cuBLASLt has added β·C.
    """

    def __init__(self, problem: MatmulProblem, device: int, product: Spec | None = None) -> None:
        self._problem, self._product, epilogue = problem, product or problem.d, problem.epilogue
        self._adds_c = problem.c is not None and (product is not None or c_lies_across(problem))
        self._has_mask = epilogue.activation == "relu" and problem.aux is not None
        # The forward kernel treats the contiguous axis of D as its columns, so that one thread writes whole bytes of
        # ReLU's mask.
        self._flips = problem.d.layout.order is Order.COLUMN and not epilogue.is_derivative
        product_dtype, function = DType.FLOAT32 if product else problem.d_dtype, ACTIVATION_NAMES[epilogue.activation]
        # The macro OPERAND matters only to the kernel operand_sum; for other kernels one value saves compilations.
        operand = problem.dtype if epilogue.sums_operand else problem.d_dtype
        macros = define(SCALAR=problem.d_dtype, PRODUCT=product_dtype, OPERAND=operand, ACTIVATION=function)
        if epilogue.sums_operand:
            entry, params, self._write = OPERAND_SUM, self._operand_sum_params(), self._write_operand_sum
        else:
            entry = MATMUL_BACKWARD if epilogue.is_derivative else MATMUL_FORWARD
            params, self._write = self._epilogue_params(), self._write_epilogue
        grid, block = grid_for(packed(params.rows, params.cols))
        if epilogue.has_bias_gradient:
            grid = (grid[0], 1)  # one block reads all rows of the columns that it sums up
        self._itemsizes = product_dtype.itemsize, problem.d_dtype.itemsize
        # A launch has one matrix for each block in z, so that a large batch needs several launches.
        firsts = range(0, 0 if 0 in grid else problem.batch, MAX_GRID_Z)
        sizes, tiling = [min(MAX_GRID_Z, problem.batch - first) for first in firsts], Tiling(grid, block)
        parts = [Launches(entry, macros, device, tiling, params, batch=size) for size in sizes]
        self._parts = list(zip(firsts, parts, strict=True))

    def launch(self, call: Call, product: int, stream: int) -> None:
        """Launches the pass on `stream`, after the plain product. The caller holds the lock of the stream's memory.

        Args:
            call: the call of the whole problem; its attribute `stream` is not read.
            product: address of the product: D's address, unless the pass was made for a product in separate memory.
        """
        for first, launches in self._parts:
            params, launch = launches[stream]
            self._write(params, call, product)
            if first:
                self._move_to(params, first)
            launch()

    def _move_to(self, params: Any, first: int) -> None:
        """Moves the addresses in `params` from the first matrix of the batch to the matrix of index `first`."""
        epilogue, (product_size, size) = self._problem.epilogue, self._itemsizes
        if epilogue.sums_operand:
            params.operand.data += first * params.batch_stride * self._problem.dtype.itemsize
            params.sum += first * params.cols * size
            return
        moved = [(params.product, params.product_batch_stride * product_size), (params.d, params.d_batch_stride * size)]
        moved += [(params.addend.c, params.addend.batch_stride * size), (params.aux, params.aux_batch_stride * size)]
        for matrix, step in (*moved, (params.mask, params.mask.batch_stride)):
            if matrix.data:
                matrix.data += first * step
        if epilogue.has_bias_gradient:
            params.bias_gradient += first * params.cols * size

    def _write_operand_sum(self, params: Any, call: Call, product: int) -> None:
        a, b, _, params.sum, _, _ = call.addresses
        params.operand.data = a if self._problem.epilogue is Epilogue.BGRADA else b

    def _write_epilogue(self, params: Any, call: Call, product: int) -> None:
        _, _, c, vector, aux, d, *_ = call.addresses
        params.product.data, params.d.data = product, d
        # bias and bias_gradient share an address: each kernel uses only one of them
        params.bias.data = params.bias_gradient = vector
        if self._has_mask:
            params.mask.data = aux
        elif self._problem.aux is not None:
            params.aux.data = aux
        if self._adds_c:
            addend, beta = params.addend, call.scalars[1]
            addend.c.data = c
            addend.beta_pointer, addend.beta = (beta, 0.0) if self._problem.device_scalars else (0, beta)

    def _operand_sum_params(self) -> Struct:
        problem = self._problem
        spec = problem.a.transposed if problem.epilogue is Epilogue.BGRADA else problem.b
        layout = spec.layout
        return OPERAND_SUM.params(Matrix.of(layout), spec.batch_stride, 0, layout.rows, layout.cols)

    def _epilogue_params(self) -> Struct:
        problem, layout, c, aux = self._problem, self._turned(self._problem.d), self._problem.c, self._problem.aux
        params = MATMUL_FORWARD.params(d=Matrix.of(layout), rows=layout.rows, cols=layout.cols)
        params.product, params.bias = Matrix.of(self._turned(self._product)), Matrix(0, self._flips, not self._flips)
        params.product_batch_stride, params.d_batch_stride = self._product.batch_stride, problem.d.batch_stride
        if c is not None and self._adds_c:
            params.addend = Matrix.of(self._turned(c)), c.batch_stride
        if aux is not None and self._has_mask:
            along_rows = problem.d.layout.order is Order.COLUMN and not self._flips
            params.mask = 0, aux.layout.leading_dimension // _BITS, aux.batch_stride // _BITS, along_rows
        elif aux is not None:
            params.aux, params.aux_batch_stride = Matrix.of(self._turned(aux)), aux.batch_stride
        return params

    def _turned(self, spec: Spec) -> Layout:
        """The layout of a matrix as the kernel sees it: transposed if the pass exchanges rows and columns."""
        return spec.layout.transposed if self._flips else spec.layout
