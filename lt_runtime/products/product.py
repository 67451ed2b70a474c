"""A matrix product whose epilogue cuBLASLt applies if it does so correctly, and otherwise a pass of ours."""

from __future__ import annotations

from dataclasses import replace

from lt_runtime.epilogue import Epilogue
from lt_runtime.errors import PlanError
from lt_runtime.gpu.devices import check_fp8
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.matmul_epilogue import MatmulPass, c_lies_across, pass_supports
from lt_runtime.layout import Order, packed
from lt_runtime.problem import DType, MatmulProblem, Spec
from lt_runtime.products.methods import Choose, known_algorithm
from lt_runtime.products.plan import AlgorithmPlan, Plan

_AUX_ALIGNMENT = 16


def library_may_fuse(problem: MatmulProblem) -> bool:
    """Whether cuBLASLt may be asked for the problem's epilogue.

    cuBLASLt's bias and bias gradient have one element for each index of D's contiguous axis. A problem's bias always
    has N elements, so that D must be row-major. Otherwise cuBLASLt's heuristic decides whether it supports the
    epilogue, and the table of known faults whether the result is right.
    """
    epilogue, row_major = problem.epilogue, problem.d.layout.order is Order.ROW
    if c_lies_across(problem):
        return False
    if epilogue is Epilogue.NONE:
        return True
    if problem.aux is not None and problem.aux.alignment < _AUX_ALIGNMENT:
        return False
    if epilogue.sums_operand:
        # BGRADA and BGRADB: cuBLASLt sums an operand over K only if the operand is contiguous along its other axis.
        is_a = epilogue is Epilogue.BGRADA
        order = (problem.a if is_a else problem.b).layout.order
        return problem.batch == 1 and order is (Order.COLUMN if is_a else Order.ROW)
    if epilogue.has_bias or epilogue.has_bias_gradient:
        return row_major and (problem.batch == 1 or not epilogue.has_bias_gradient)
    return True


def plain_product(problem: MatmulProblem) -> MatmulProblem:
    """The product that cuBLASLt computes if a pass of ours applies the problem's epilogue, or adds C.

    A 16-bit product would be rounded when it is written, and the pass would round again. So the product of a 16-bit
    problem is written in FP32 to separate memory, and the pass adds C as well; see `is_separate`.
    """
    has_pass = _needs_pass(problem)
    plain = replace(problem, epilogue=Epilogue.NONE, aux=None, bias_alignment=256, no_split_k=has_pass)
    if not is_separate(problem):
        return replace(plain, c=None) if c_lies_across(problem) else plain
    layout = packed(problem.m, problem.n, order=problem.d.layout.order)
    d = Spec(layout, batch_stride=layout.size if problem.batch > 1 else 0)
    return replace(plain, c=None, d_dtype=DType.FLOAT32, d=d)


def is_separate(problem: MatmulProblem) -> bool:
    """Whether our pass reads the product in FP32 from separate memory instead of from D."""
    works_on_d = _needs_pass(problem) and not problem.epilogue.sums_operand
    return works_on_d and problem.d_dtype.itemsize == 2


def _needs_pass(problem: MatmulProblem) -> bool:
    """Whether cuBLASLt's plain product needs our pass: for an epilogue, or for a C that cuBLASLt does not support."""
    return problem.epilogue is not Epilogue.NONE or c_lies_across(problem)


class ProductPlan(Plan):
    """One product with its epilogue on one device, as a rule in at most two kernels besides copies of operands.

    If cuBLASLt's fused epilogue would need a memset that the plain product does not need, our pass applies the
    epilogue.

    Args:
        choose: function that makes the plan of the product.

    Attributes:
        product: the plan of the product, with the epilogue or without.

    Raises:
        PlanError: no method can compute even the plain product.
        GpuError: the operands are FP8, and the GPU has no instructions for it.
    """

    def __init__(self, problem: MatmulProblem, device: int, choose: Choose = known_algorithm) -> None:
        if problem.dtype.is_float8:
            check_fp8(device)
        self.problem, self.device = problem, device
        self._pass: MatmulPass | None = None
        self._scratch_bytes = 0
        needs_pass = _needs_pass(problem)
        fused = self._fused(choose) if needs_pass else choose(problem, device)
        if fused is None and not pass_supports(problem):
            by, of = f"cuBLASLt has no epilogue {problem.epilogue.value!r}", f"a D of {problem.d_dtype.value}"
            raise PlanError(f"{by} for these float8 matrices and {of}; with dtype='bfloat16' a pass of ours applies it")
        if fused is not None and not (needs_pass and fused.adds_memsets and pass_supports(problem)):
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
        a, b, c, _, _, d, *scales = call.addresses
        product = memory.scratch(self._scratch_bytes) if self._scratch_bytes else d
        self.product.put(Call((a, b, c, 0, 0, product, *scales), call.stream, call.scalars), memory)
        self._pass.launch(call, product, memory.stream)
