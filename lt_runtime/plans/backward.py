"""Plans of a linear layer's backward pass: kernels and products, ready to launch in their order."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import NamedTuple

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.gpu.branches import branch
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import StreamMemory, aligned, stream_memory
from lt_runtime.kernels.call import ProductCall
from lt_runtime.kernels.epilogue import BackwardPass, DropoutState, Sums
from lt_runtime.plans.strategies import BackwardStrategy, MadeBy, dz_spec, unchanged
from lt_runtime.problem import BackwardProblem, Derivative, MatmulProblem, Spec
from lt_runtime.products.choose import Choose, known_algorithm
from lt_runtime.products.matmul import MatmulPlan


class BackwardCall(NamedTuple):
    """Addresses of a backward pass's operands, as the problem says; 0 where it has no such operand.

    Attributes:
        saved_below, db_below, dropout_below: of the layer that the gradient is taken through.
        dropout: what forward's masks were drawn from.
    """

    dy: int
    x: int
    w: int
    stream: int
    saved: int = 0
    dx: int = 0
    dw: int = 0
    db: int = 0
    dz: int = 0
    saved_below: int = 0
    db_below: int = 0
    dropout: DropoutState | None = None
    dropout_below: DropoutState | None = None


class BackwardPlan:
    """One backward problem on one device, split as a strategy says; immutable, and safe to share between threads.

    Args:
        strategy: one of `backward_strategies`.
        choose: makes the plans of its products.

    Attributes:
        products: the plans of dx and dw, by those names, where they are wanted.

    Raises:
        PlanError: cuBLASLt refuses one of the strategy's products.
    """

    def __init__(
        self, problem: BackwardProblem, device: int, strategy: BackwardStrategy, choose: Choose = known_algorithm
    ) -> None:
        self.problem, self.device, self.strategy = problem, device, strategy
        self._dz = dz_spec(problem)
        wants_product = problem.dx is not None or problem.dw is not None
        self._needs_dz = problem.dz is not None or (problem.own.changes and wants_product)
        self._first, self._last = self._own_pass(), self._pass_below()
        self._dz_bytes = self._scratch_for_dz()
        # The two passes have their partial sums one after the other, in one place.
        self._partial_bytes = max((each.partial_bytes for each in (self._first, self._last) if each), default=0)
        problems = {"dx": self._dx_problem(), "dw": self._dw_problem()}
        self.products: dict[str, MatmulPlan] = {
            name: choose(each, device) for name, each in problems.items() if each is not None
        }

    def _scratch_for_dz(self) -> int:
        if not self._needs_dz or self.problem.dz is not None:
            return 0
        return aligned(self._dz.layout.extent * self.problem.dtype.itemsize)

    def _own_pass(self) -> BackwardPass | None:
        problem, own = self.problem, self.problem.own
        sums = self.strategy.db is MadeBy.KERNEL
        if not problem.dy.layout.size or not (sums or self._needs_dz):
            return None
        dz = self._dz if self._needs_dz else None
        return self._pass(own, problem.dy, dz, sums=sums)

    def _pass_below(self) -> BackwardPass | None:
        """Our kernel over dx, in place; or over what the product has made of it, for the bias gradient alone."""
        problem, strategy, below = self.problem, self.strategy, self.problem.through
        if below is None or problem.dx is None or not problem.dx.layout.size:
            return None
        derives, sums = strategy.derivative is MadeBy.KERNEL, strategy.db_below is MadeBy.KERNEL
        if derives:
            return self._pass(below, problem.dx, problem.dx, sums=sums)
        return self._pass(unchanged(below.db), problem.dx, None, sums=True) if sums else None

    def _pass(self, derivative: Derivative, dy: Spec, dz: Spec | None, *, sums: bool) -> BackwardPass:
        kind = Sums(self.problem.accumulate) if sums else None
        return BackwardPass(self.problem.dtype, derivative, dy, dz, self.device, sums=kind)

    def _dx_problem(self) -> MatmulProblem | None:
        problem, below, strategy = self.problem, self.problem.through, self.strategy
        if problem.dx is None:
            return None
        plain = MatmulProblem(problem.dtype, problem.dtype, problem.compute, self._product_dz, problem.w, problem.dx)
        if below is None or strategy.derivative is not MadeBy.EPILOGUE:
            return plain
        sums = strategy.db_below is MadeBy.EPILOGUE
        epilogue = Epilogue(f"d{below.activation.name}{'_bgrad' if sums else ''}")
        vector = below.db if sums and below.db is not None else 256
        return replace(plain, epilogue=epilogue, aux=below.saved_spec, vector=vector)

    def _dw_problem(self) -> MatmulProblem | None:
        problem = self.problem
        if problem.dw is None:
            return None
        c = problem.dw if problem.accumulate else None
        dz, kind = self._product_dz.transposed, problem.dtype
        plain = MatmulProblem(kind, kind, problem.compute, dz, problem.x, problem.dw, c=c)
        if self.strategy.db is not MadeBy.EPILOGUE:
            return plain
        return replace(plain, epilogue=Epilogue.BGRADA, vector=problem.own.db or 256)

    @property
    def _product_dz(self) -> Spec:
        return self._dz if self._needs_dz else self.problem.dy

    def run(self, operands: BackwardCall) -> None:
        """Puts the backward pass on the call's stream."""
        memory = stream_memory(self.device, operands.stream)
        with memory.lock:
            dz, partial = self._scratch(operands, memory)
            self._make_dz(operands, dz, partial, memory)
            beside = branch(memory) if self.strategy.beside else contextlib.nullcontext(memory)
            with beside as other:
                self._make_dw(operands, dz, other)
                self._make_dx(operands, dz, partial, memory)

    def bind(self, operands: BackwardCall) -> BoundPlan:
        """What does as `run` would with these arguments at each call, at the least cost to the host."""
        run, stream = (lambda handle: self.run(operands._replace(stream=handle))), operands.stream
        return BoundPlan(run, self.device, stream, self._reserve)

    def _reserve(self, memory: StreamMemory) -> None:
        """Has a stream's memory ready for `run`."""
        memory.scratch(self._dz_bytes + self._partial_bytes)
        if self.strategy.beside:
            _ = memory.branch

    def _make_dz(self, at: BackwardCall, dz: int, partial: int, memory: StreamMemory) -> None:
        if self._first is not None:
            self._first.run(at.dy, at.saved, dz, at.db, partial, memory.tickets, at.dropout, at.stream)
        elif self.strategy.db is MadeBy.KERNEL:
            self._zero(at.db, self.problem.dy.layout.cols, at.stream)

    def _make_dx(self, at: BackwardCall, dz: int, partial: int, memory: StreamMemory) -> None:
        plan, strategy = self.products.get("dx"), self.strategy
        if plan is None:
            return
        vector = at.db_below if strategy.db_below is MadeBy.EPILOGUE else 0
        aux = at.saved_below if strategy.derivative is MadeBy.EPILOGUE else 0
        plan.run(ProductCall(dz, at.w, at.dx, at.stream, vector=vector, aux=aux), memory)
        if self._last is not None:
            self._last.run(
                at.dx, at.saved_below, at.dx, at.db_below, partial, memory.tickets, at.dropout_below, at.stream
            )
        elif strategy.db_below is MadeBy.KERNEL:
            self._zero(at.db_below, plan.problem.n, at.stream)

    def _make_dw(self, at: BackwardCall, dz: int, memory: StreamMemory) -> None:
        plan = self.products.get("dw")
        if plan is not None:
            vector = at.db if self.strategy.db is MadeBy.EPILOGUE else 0
            beta = 1.0 if self.problem.accumulate else 0.0
            plan.run(ProductCall(dz, at.x, at.dw, memory.stream, c=at.dw, beta=beta, vector=vector), memory)

    def _scratch(self, at: BackwardCall, memory: StreamMemory) -> tuple[int, int]:
        """Addresses of dz and of the partial sums."""
        scratch = memory.scratch(self._dz_bytes + self._partial_bytes)
        if not self._needs_dz:
            return at.dy, scratch
        return (at.dz or scratch), scratch + self._dz_bytes

    def _zero(self, db: int, cols: int, stream: int) -> None:
        """A sum over no rows."""
        if cols and not self.problem.accumulate:
            call("cuMemsetD8Async", db, 0, cols * self.problem.dtype.itemsize, stream)
