"""`ForwardPlan`: a linear layer's forward pass as a matrix product and, if needed, a kernel of ours after it."""

from __future__ import annotations

from dataclasses import replace

from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.epilogue import ForwardPass
from lt_runtime.layout import packed
from lt_runtime.plans.strategies import ForwardStrategy, kept_spec
from lt_runtime.problem import Activation, DType, ForwardProblem, MatmulProblem, Spec
from lt_runtime.products.methods import Choose, known_algorithm
from lt_runtime.products.plan import Plan


class ForwardPlan(Plan):
    """The plan of a forward problem on one device, split as its strategy states.

    Args:
        strategy: one of `forward_strategies`.
        choose: makes the plan of the product, which decides the product's algorithm.

    Attributes:
        kept_spec: layout of the matrix that is written besides y for backward; None if there is none.
        products: the product, by the name "y".

    Raises:
        PlanError: cuBLASLt refuses the strategy's product.
    """

    def __init__(
        self, problem: ForwardProblem, device: int, strategy: ForwardStrategy, choose: Choose = known_algorithm
    ) -> None:
        self.problem, self.device, self.strategy = problem, device, strategy
        self.kept_spec = kept_spec(problem, strategy.saved)
        self._adds_bias, self._writes_aux = strategy.epilogue.has_bias, strategy.epilogue.has_aux_output
        has_pass, pass_adds = leaves_a_pass(problem, strategy), problem.bias is not None and not self._adds_bias
        # The product is stored in FP32: otherwise our kernel would add the bias to a product rounded to 16 bits.
        self._scratch_bytes = 4 * problem.y.layout.size if pass_adds and problem.dtype is not DType.FLOAT32 else 0
        # A product of the problem's type is written into the buffer of the pre-activation, which saves a copy.
        self._product_is_kept = has_pass and self.kept_spec is not None and not self._scratch_bytes
        product = self._matmul_problem()
        self._product = choose(product, device)
        self.products = {"y": self._product}
        self._pass = None
        if has_pass and problem.y.layout.size:
            kept = self.kept_spec if pass_adds else None
            self._pass = ForwardPass(
                problem, device, product=product.d, product_dtype=product.d_dtype, kept=kept, adds_bias=pass_adds
            )

    def _matmul_problem(self) -> MatmulProblem:
        problem, is_exact = self.problem, self._scratch_bytes > 0
        d = self.kept_spec if self._product_is_kept else None
        if is_exact:  # the product lies in scratch memory, in the order of y, which our kernel writes
            d = Spec(packed(*problem.y.layout.shape, order=problem.y.layout.order))
        kinds = problem.dtype, DType.FLOAT32 if is_exact else problem.dtype, problem.compute
        plain = MatmulProblem(*kinds, problem.x, problem.w.transposed, d or problem.y, self.strategy.epilogue)
        alignment = problem.bias if problem.bias is not None and self._adds_bias else plain.bias_alignment
        return replace(plain, bias_alignment=alignment, aux=self.kept_spec if self._writes_aux else None)

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.scratch(self._scratch_bytes)
        self._product.reserve(memory)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        if call.computed[0] is not self or call.computed[1] is not memory:
            x, w, bias, y, kept = call.addresses
            product = kept if self._product_is_kept else y
            if self._scratch_bytes:
                product = memory.scratch(self._scratch_bytes)
            vector, aux = (bias if self._adds_bias else 0), (kept if self._writes_aux else 0)
            inner = Call((x, w, 0, vector, aux, product), memory.stream)
            call.computed = self, memory, inner, (product, bias, y, kept, call.dropouts[0], memory.stream)
        _, _, inner, of_pass = call.computed
        self._product.put(inner, memory)
        if self._pass is not None:
            self._pass.run(*of_pass)


def leaves_a_pass(problem: ForwardProblem, strategy: ForwardStrategy) -> bool:
    """Whether the epilogue leaves bias, activation, dropout or a copy of the pre-activation to our kernel."""
    epilogue = strategy.epilogue
    adds_bias = problem.bias is not None and not epilogue.has_bias
    activates = problem.activation != Activation() and epilogue.activation == "none"
    copies = problem.preactivation is not None and not epilogue.has_aux_output
    return adds_bias or activates or problem.dropout or copies
