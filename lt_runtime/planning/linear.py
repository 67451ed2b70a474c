"""Plans of a linear layer: which products and passes run, in which order."""

from __future__ import annotations

from lt_runtime.errors import PlanError
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.kernels import VECTOR_BYTES
from lt_runtime.gpu.memory import aligned, stream_memory
from lt_runtime.layout import Layout, Order
from lt_runtime.planning.call import ProductCall
from lt_runtime.planning.launches import BackwardPass, DropoutState, ForwardPass
from lt_runtime.planning.matmul import MatmulPlan
from lt_runtime.planning.strategies import BackwardStrategy, ForwardStrategy, backward_strategy, forward_strategies
from lt_runtime.problem import BackwardProblem, ForwardProblem, MatmulProblem, Spec


class ForwardPlan:
    """One forward problem on one device, ready to launch; immutable, and safe to share between threads.

    Raises:
        PlanError: cuBLASLt has no algorithm even for the plain product.
    """

    def __init__(self, problem: ForwardProblem, device: int) -> None:
        self.problem = problem
        self.device = device
        self.strategy, self._product = self._settle()
        self._pass = self._own_pass() if self.strategy.own_pass and problem.y.layout.size else None

    def _own_pass(self) -> ForwardPass:
        strategy = self.strategy
        in_place, adds_bias = not strategy.keep_preactivation, strategy.own_bias
        return ForwardPass(self.problem, self.device, in_place=in_place, adds_bias=adds_bias)

    def _settle(self) -> tuple[ForwardStrategy, MatmulPlan]:
        """The first strategy whose product cuBLASLt supports."""
        refused: PlanError | None = None
        for strategy in forward_strategies(self.problem):
            try:
                return strategy, MatmulPlan(self._matmul_problem(strategy), self.device)
            except PlanError as error:
                refused = error
        raise refused or PlanError(f"no strategy for {self.problem}")

    def _matmul_problem(self, strategy: ForwardStrategy) -> MatmulProblem:
        problem = self.problem
        target = problem.preactivation if strategy.keep_preactivation else None
        return MatmulProblem(
            problem.dtype,
            problem.dtype,
            problem.compute,
            problem.x,
            problem.w.transposed,
            target or problem.y,
            strategy.epilogue,
            vector=problem.bias or 256,
        )

    def run(
        self, x: int, w: int, bias: int, y: int, preactivation: int, dropout: DropoutState | None, stream: int
    ) -> None:
        """Puts the forward pass on `stream`; addresses are as the problem says, 0 where it has no such operand."""
        memory = stream_memory(self.device, stream)
        kept = self.strategy.keep_preactivation
        product_bias = 0 if self.strategy.own_bias else bias
        target = preactivation if kept else y
        self._product.run(ProductCall(x, w, target, stream, vector=product_bias), memory)
        if self._pass is not None:
            self._pass.run(target, bias, y, dropout=dropout, stream=stream)


class BackwardPlan:
    """One backward problem on one device, ready to launch; immutable, and safe to share between threads.

    Raises:
        PlanError: cuBLASLt has no algorithm for one of the products.
    """

    def __init__(self, problem: BackwardProblem, device: int) -> None:
        self.problem = problem
        self.device = device
        self.strategy: BackwardStrategy = backward_strategy(problem)
        self._dz = self._dz_spec()
        has_rows = problem.dy.layout.size > 0
        self._pass: BackwardPass | None = None
        if self.strategy.own_pass and has_rows:
            self._pass = BackwardPass(problem, self._dz if self.strategy.needs_dz else None, device)
        self._dx = self._product(problem.w, problem.dx, self._dz, accumulate=False)
        self._dw = self._product(problem.x, problem.dw, self._dz.transposed, accumulate=problem.accumulate)

    def _dz_spec(self) -> Spec:
        problem = self.problem
        if not self.strategy.needs_dz:
            return problem.dy
        if problem.dz is not None:
            return problem.dz
        rows, cols = problem.dy.layout.shape
        # Rows padded to 16 bytes keep both products on the tensor cores, whatever N is.
        step = VECTOR_BYTES // problem.dtype.itemsize
        return Spec(Layout(rows, cols, Order.ROW, max(-(-cols // step) * step, 1)))

    def _product(self, b: Spec, d: Spec | None, a: Spec, *, accumulate: bool) -> MatmulPlan | None:
        if d is None:
            return None
        problem = self.problem
        c = d if accumulate else None
        return MatmulPlan(MatmulProblem(problem.dtype, problem.dtype, problem.compute, a, b, d, c=c), self.device)

    def run(
        self,
        dy: int,
        x: int,
        w: int,
        saved: int,
        dx: int,
        dw: int,
        db: int,
        dz: int,
        dropout: DropoutState | None,
        stream: int,
    ) -> None:
        """Puts the backward pass on `stream`; addresses are as the problem says, 0 where it has no such operand."""
        memory = stream_memory(self.device, stream)
        with memory.lock:
            dz, partial = self._scratch(dy, dz, memory.scratch(self._scratch_bytes()))
            if self._pass is not None:
                self._pass.run(dy, saved, dz, db, partial, memory.tickets, dropout, stream)
            elif self.problem.db and not self.problem.accumulate:
                self._zero_bias_gradient(db, stream)
            if self._dx is not None:
                self._dx.run(ProductCall(dz, w, dx, stream), memory)
            if self._dw is not None:
                beta = 1.0 if self.problem.accumulate else 0.0
                self._dw.run(ProductCall(dz, x, dw, stream, c=dw, beta=beta), memory)

    def _dz_bytes(self) -> int:
        in_scratch = self.strategy.needs_dz and self.problem.dz is None
        return aligned(self._dz.layout.extent * self.problem.dtype.itemsize) if in_scratch else 0

    def _scratch_bytes(self) -> int:
        return self._dz_bytes() + (self._pass.partial_bytes if self._pass else 0)

    def _scratch(self, dy: int, dz: int, scratch: int) -> tuple[int, int]:
        """Addresses of dz and of the partial sums."""
        if not self.strategy.needs_dz:
            return dy, scratch
        return (dz or scratch), scratch + self._dz_bytes()

    def _zero_bias_gradient(self, db: int, stream: int) -> None:
        """A sum over no rows."""
        size = self.problem.dy.layout.cols * self.problem.dtype.itemsize
        if size:
            call("cuMemsetD8Async", db, 0, size, stream)
