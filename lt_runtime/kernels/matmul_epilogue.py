"""cuBLASLt's epilogues as a pass of our own over a product that is already stored."""

from __future__ import annotations

from typing import Any

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.epilogue import ACTIVATION_NAMES
from lt_runtime.kernels.kernel import get_kernel
from lt_runtime.kernels.params import (
    SCALAR,
    Addend,
    Mask,
    MatmulBackwardParams,
    MatmulForwardParams,
    Matrix,
    OperandSumParams,
)
from lt_runtime.kernels.tiling import grid_for
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import MatmulProblem, Spec

_BITS = 8


def c_lies_across(problem: MatmulProblem) -> bool:
    """Whether C is column-major where D is row-major, or the other way round."""
    return problem.c is not None and problem.c.layout.order is not problem.d.layout.order


class MatmulPass:
    """What the epilogue of a problem does, in one kernel after the plain product.

    For outputs, sizes and layouts that the library refuses or gets wrong; it takes any.
    """

    def __init__(self, problem: MatmulProblem, device: int) -> None:
        self._problem = problem
        self._mask = problem.epilogue.activation == "relu" and problem.aux is not None
        macros = (
            ("SCALAR", SCALAR[problem.d_dtype]),
            ("OPERAND", SCALAR[problem.dtype]),
            ("ACTIVATION", ACTIVATION_NAMES[problem.epilogue.activation]),
        )
        if problem.epilogue.sums_operand:
            entry, self._launch = "operand_sum", self._launch_operand_sum
        elif problem.epilogue.is_derivative:
            entry, self._launch = "matmul_backward", self._launch_backward
        else:
            entry, self._launch = "matmul_forward", self._launch_forward
        self._kernel = get_kernel(entry, macros, device)

    def run(self, call: Call) -> None:
        """Puts the pass on the call's stream, after the plain product."""
        self._launch(call)

    def _launch_forward(self, call: Call) -> None:
        problem = self._problem
        _, _, _, vector, aux, d = call.addresses
        # The kernel's columns are D's contiguous axis, so that a byte of ReLU's mask is one thread's.
        flipped = problem.d.layout.order is Order.COLUMN
        spec = problem.d.transposed if flipped else problem.d
        layout = spec.layout
        params = MatmulForwardParams(
            d=Matrix.at(d, layout),
            d_batch_stride=spec.batch_stride,
            addend=self._addend(call, transposed=flipped),
            bias=Matrix(vector, int(flipped), int(not flipped)),
            aux=self._aux(aux, transposed=flipped),
            aux_batch_stride=problem.aux.batch_stride if problem.aux else 0,
            mask=self._mask_at(aux, along_rows=False),
            rows=layout.rows,
            cols=layout.cols,
        )
        self._put(*grid_for(layout), params, call.stream)

    def _launch_backward(self, call: Call) -> None:
        problem, layout = self._problem, self._problem.d.layout
        _, _, _, vector, aux, d = call.addresses
        params = MatmulBackwardParams(
            d=Matrix.at(d, layout),
            d_batch_stride=problem.d.batch_stride,
            addend=self._addend(call, transposed=False),
            aux=self._aux(aux, transposed=False),
            aux_batch_stride=problem.aux.batch_stride if problem.aux else 0,
            mask=self._mask_at(aux, along_rows=layout.order is Order.COLUMN),
            bias_gradient=vector,
            rows=layout.rows,
            cols=layout.cols,
        )
        grid, block = grid_for(layout)
        if problem.epilogue.has_bias_gradient:
            grid = (grid[0], 1)
        self._put(grid, block, params, call.stream)

    def _launch_operand_sum(self, call: Call) -> None:
        problem = self._problem
        of_a = problem.epilogue is Epilogue.BGRADA
        spec: Spec = problem.a.transposed if of_a else problem.b
        layout: Layout = spec.layout
        a, b, _, vector, _, _ = call.addresses
        operand = Matrix.at(a if of_a else b, layout)
        params = OperandSumParams(operand, spec.batch_stride, vector, layout.rows, layout.cols)
        grid, block = grid_for(layout)
        self._put((grid[0], 1), block, params, call.stream)

    def _put(self, grid: tuple[int, int], block: tuple[int, int], params: Any, stream: int) -> None:
        if 0 not in grid and self._problem.batch:
            self._kernel.prepare(grid, block, params, stream, self._problem.batch)()

    def _addend(self, call: Call, *, transposed: bool) -> Addend:
        """β·C, where the product has left it to this pass."""
        problem = self._problem
        if problem.c is None or not c_lies_across(problem):
            return Addend()
        layout = problem.c.layout.transposed if transposed else problem.c.layout
        c, beta = call.addresses[2], call.scalars[1]
        pointer, beta = (int(beta), 0.0) if problem.device_scalars else (0, beta)
        return Addend(Matrix.at(c, layout), problem.c.batch_stride, pointer, beta)

    def _aux(self, address: int, *, transposed: bool) -> Matrix:
        spec = self._problem.aux
        if spec is None or self._mask:
            return Matrix()
        return Matrix.at(address, spec.layout.transposed if transposed else spec.layout)

    def _mask_at(self, address: int, *, along_rows: bool) -> Mask:
        spec = self._problem.aux
        if spec is None or not self._mask:
            return Mask()
        return Mask(address, spec.layout.leading_dimension // _BITS, spec.batch_stride // _BITS, int(along_rows))
