"""A matrix product with an epilogue: the library's where it can be trusted with it, our own pass where it cannot."""

from __future__ import annotations

from dataclasses import replace

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.matmul_epilogue import MatmulPass, c_lies_across
from lt_runtime.layout import Order, packed
from lt_runtime.problem import DType, MatmulProblem, Spec
from lt_runtime.products.choose import Choose, known_algorithm
from lt_runtime.products.plan import AlgorithmPlan, Plan

_AUX_ALIGNMENT = 16


def library_may_fuse(problem: MatmulProblem) -> bool:
    """Whether cuBLASLt may be asked for the problem's epilogue.

    Its bias and bias gradient run along D's contiguous axis; ours always has N elements, so that only a row-major D
    fits. Whether it supports the rest, its heuristic says, and whether it gets it right, the known-bad table.
    """
    epilogue, row_major = problem.epilogue, problem.d.layout.order is Order.ROW
    if c_lies_across(problem):
        return False
    if epilogue is Epilogue.NONE:
        return True
    if problem.aux is not None and problem.aux.alignment < _AUX_ALIGNMENT:
        return False
    if epilogue.sums_operand:
        return problem.batch == 1 and _is_read_plainly(problem)
    if epilogue.has_bias or epilogue.has_bias_gradient:
        return row_major and (problem.batch == 1 or not epilogue.has_bias_gradient)
    return True


def _is_read_plainly(problem: MatmulProblem) -> bool:
    """Whether the operand to be summed over K lies with its other axis contiguous, as the library asks."""
    if problem.epilogue is Epilogue.BGRADA:
        return problem.a.layout.order is Order.COLUMN
    return problem.b.layout.order is Order.ROW


def plain_product(problem: MatmulProblem) -> MatmulProblem:
    """What is left to the library of a problem whose epilogue, or C, is left to our own pass.

    A product of 16 bits would be rounded before the pass works on it, and its result once more: there, the library
    makes a separate product in FP32, to which the pass adds C as well. See `is_separate`.
    """
    has_pass = _needs_pass(problem)
    plain = replace(problem, epilogue=Epilogue.NONE, aux=None, bias_alignment=256, no_split_k=has_pass)
    if not is_separate(problem):
        return replace(plain, c=None) if c_lies_across(problem) else plain
    layout = packed(problem.m, problem.n, order=problem.d.layout.order)
    d = Spec(layout, batch_stride=layout.size if problem.batch > 1 else 0)
    return replace(plain, c=None, d_dtype=DType.FLOAT32, d=d)


def is_separate(problem: MatmulProblem) -> bool:
    """Whether our own pass reads the product from another place than D, where it is in FP32."""
    works_on_d = _needs_pass(problem) and not problem.epilogue.sums_operand
    return works_on_d and problem.d_dtype.itemsize == 2


def _needs_pass(problem: MatmulProblem) -> bool:
    """Whether there is more to do than a plain product of the library's."""
    return problem.epilogue is not Epilogue.NONE or c_lies_across(problem)


class ProductPlan(Plan):
    """One product with its epilogue on one device, in at most two kernels besides copies of operands.

    Kernels alone where there is a way; a large product has a memset before its kernel, whoever does its epilogue.

    Args:
        choose: makes the plan of the library's part.

    Attributes:
        product: the plan of the library's part, with the epilogue or without.

    Raises:
        PlanError: there is no algorithm even for the plain product.
    """

    def __init__(self, problem: MatmulProblem, device: int, choose: Choose = known_algorithm) -> None:
        self.problem, self.device = problem, device
        self._pass: MatmulPass | None = None
        self._scratch_bytes = 0
        needs_pass = _needs_pass(problem)
        fused = self._fused(choose) if needs_pass else choose(problem, device)
        if fused is not None and not (needs_pass and fused.adds_memsets):
            self.product = fused
            return
        plain = choose(plain_product(problem), device)
        self.product = plain if fused is None or not plain.adds_memsets else fused
        if self.product is plain:
            product = plain.problem.d if is_separate(problem) else None
            self._pass = MatmulPass(problem, device, product)
            if product is not None:
                self._scratch_bytes = 4 * problem.batch * product.layout.size

    def _fused(self, choose: Choose) -> AlgorithmPlan | None:
        problem = self.problem
        if not library_may_fuse(problem) or 0 in (problem.k, problem.d.layout.size):
            return None
        try:
            return choose(problem, self.device)
        except PlanError:
            return None

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.scratch(self._scratch_bytes)
        self.product.reserve(memory)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        if self._pass is None:
            self.product.put(call, memory)
            return
        a, b, c, _, _, d = call.addresses
        product = memory.scratch(self._scratch_bytes) if self._scratch_bytes else d
        self.product.put(Call((a, b, c, 0, 0, product), call.stream, call.scalars), memory)
        self._pass.run(call, product, memory.stream)
