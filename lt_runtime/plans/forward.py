"""Plans of a linear layer's forward pass: the product and the kernel that may follow, ready to launch."""

from __future__ import annotations

from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.kernels.call import ProductCall
from lt_runtime.kernels.epilogue import DropoutState, ForwardPass
from lt_runtime.plans.strategies import ForwardStrategy, kept_spec
from lt_runtime.problem import Activation, ForwardProblem, MatmulProblem
from lt_runtime.products.choose import Choose, known_algorithm


class ForwardPlan:
    """One forward problem on one device, split as a strategy says; immutable, and safe to share between threads.

    Args:
        strategy: one of `forward_strategies`.
        choose: makes the plan of its product.

    Attributes:
        saved: what is kept for backward.
        kept_spec: how the matrix lies that `run` writes besides y; None if there is none.

    Raises:
        PlanError: cuBLASLt refuses the strategy's product.
    """

    def __init__(
        self, problem: ForwardProblem, device: int, strategy: ForwardStrategy, choose: Choose = known_algorithm
    ) -> None:
        self.problem, self.device, self.strategy = problem, device, strategy
        self.saved, self.kept_spec = strategy.saved, kept_spec(problem, strategy.saved)
        self._adds_bias, self._writes_aux = strategy.epilogue.has_bias, strategy.epilogue.has_aux_output
        self._has_pass = leaves_a_pass(problem, strategy)
        # What the pass reads is kept by storing the product there.
        self._product_is_kept = self._has_pass and self.kept_spec is not None
        self.product = choose(self._matmul_problem(), device)
        self._pass = self._own_pass() if self._has_pass and problem.y.layout.size else None

    def _own_pass(self) -> ForwardPass:
        problem, adds_bias = self.problem, self.problem.bias is not None and not self._adds_bias
        kept = self.kept_spec if self._product_is_kept else None
        return ForwardPass(
            problem,
            self.device,
            product=kept or problem.y,
            product_dtype=problem.dtype,
            kept=kept if adds_bias else None,
            adds_bias=adds_bias,
        )

    def _matmul_problem(self) -> MatmulProblem:
        problem = self.problem
        target = self.kept_spec if self._product_is_kept else None
        return MatmulProblem(
            problem.dtype,
            problem.dtype,
            problem.compute,
            problem.x,
            problem.w.transposed,
            target or problem.y,
            self.strategy.epilogue,
            vector=problem.bias if problem.bias is not None and self._adds_bias else 256,
            aux=self.kept_spec if self._writes_aux else None,
        )

    def run(self, x: int, w: int, bias: int, y: int, kept: int, dropout: DropoutState | None, stream: int) -> None:
        """Puts the forward pass on `stream`; addresses are as the problem says, 0 where it has no such operand.

        Args:
            kept: address of a matrix that lies as `kept_spec` says.
        """
        memory = stream_memory(self.device, stream)
        target = kept if self._product_is_kept else y
        vector, aux = (bias if self._adds_bias else 0), (kept if self._writes_aux else 0)
        with memory.lock:
            self.product.run(ProductCall(x, w, target, stream, 0, vector, aux), memory)
            if self._pass is not None:
                self._pass.run(target, bias, y, kept, dropout, stream)

    def bind(
        self, x: int, w: int, bias: int, y: int, kept: int, dropout: DropoutState | None, stream: int
    ) -> BoundPlan:
        """What does as `run` would with these arguments at each call, at the least cost to the host."""
        return BoundPlan(lambda handle: self.run(x, w, bias, y, kept, dropout, handle), self.device, stream)


def leaves_a_pass(problem: ForwardProblem, strategy: ForwardStrategy) -> bool:
    """Whether the epilogue leaves something to our kernel."""
    epilogue = strategy.epilogue
    adds_bias = problem.bias is not None and not epilogue.has_bias
    activates = problem.activation != Activation() and epilogue.activation == "none"
    copies = problem.preactivation is not None and not epilogue.has_aux_output
    return adds_bias or activates or problem.dropout or copies
