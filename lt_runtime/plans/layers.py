"""Plans of a linear layer's forward and backward pass: matrix products, and our own kernels before and after them."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import StreamMemory, aligned, branch
from lt_runtime.gpu.streams import is_captured
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.epilogue import BackwardPass, ForwardPass
from lt_runtime.kernels.resize import ResizePass
from lt_runtime.kernels.tiling import are_whole
from lt_runtime.layout import packed
from lt_runtime.plans.strategies import BackwardStrategy, ForwardStrategy, MadeBy, dz_spec, kept_spec, unchanged
from lt_runtime.problem import Activation, BackwardProblem, Derivative, DType, ForwardProblem, MatmulProblem, Spec
from lt_runtime.products.methods import Choose
from lt_runtime.products.padded import sharing_copy
from lt_runtime.products.plan import Plan


class ForwardPlan(Plan):
    """The plan of a forward problem on one device, split as its strategy states.

    Args:
        strategy: one of `forward_strategies`.
        choose: function that makes the plan of the product and so chooses its algorithm.

    Attributes:
        kept_spec: spec of the matrix that forward writes besides y, for backward; None if there is none.
        products: the plan of the product, under the name "y".

    Raises:
        PlanError: cuBLASLt refuses the strategy's product.
    """

    def __init__(self, problem: ForwardProblem, device: int, strategy: ForwardStrategy, choose: Choose) -> None:
        self.problem, self.device, self.strategy = problem, device, strategy
        self.kept_spec = kept_spec(problem, strategy.saved)
        self._adds_bias, self._writes_aux = strategy.epilogue.has_bias, strategy.epilogue.has_aux_output
        has_pass, pass_adds = leaves_a_pass(problem, strategy), problem.bias is not None and not self._adds_bias
        # If our kernel adds the bias, the product is stored in FP32, so that it is not rounded to 16 bits first.
        self._product_dtype = DType.FLOAT32 if pass_adds else problem.dtype
        is_exact = self._product_dtype is not problem.dtype
        # If the product has the problem's type, it is written into the buffer of the pre-activation, to save a copy.
        self._product_is_kept = has_pass and self.kept_spec is not None and not is_exact
        # The product must not overwrite y before our kernel has read the addend, because the two may share memory.
        is_apart = problem.addend is not None and has_pass and not self._product_is_kept
        self._scratch_bytes = self._product_dtype.itemsize * problem.y.layout.size if is_exact or is_apart else 0
        product = self._matmul_problem()
        self._product = choose(product, device)
        self.products = {"y": self._product}
        self._pass = None
        if has_pass and problem.y.layout.size:
            self._pass = ForwardPass(problem, product, self.kept_spec if pass_adds else None, device)

    def _matmul_problem(self) -> MatmulProblem:
        problem, d = self.problem, self.kept_spec if self._product_is_kept else None
        if self._scratch_bytes:  # the product is stored in y's order, because our kernel reads it to write y
            d = Spec(packed(*problem.y.layout.shape, order=problem.y.layout.order))
        kinds, c = (problem.dtype, self._product_dtype, problem.compute), None
        if self.strategy.product_adds:
            c = problem.addend
        plain = MatmulProblem(*kinds, problem.x, problem.w.transposed, d or problem.y, self.strategy.epilogue, c)
        alignment = problem.bias if problem.bias is not None and self._adds_bias else plain.bias_alignment
        return replace(plain, bias_alignment=alignment, aux=self.kept_spec if self._writes_aux else None)

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.scratch(self._scratch_bytes)
        self._product.reserve(memory)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        if call.computed[1] is not memory:  # `computed` keeps this plan's arguments: no other plan runs the call
            x, w, bias, y, kept, addend = call.addresses
            product = kept if self._product_is_kept else y
            if self._scratch_bytes:
                product = memory.scratch(self._scratch_bytes)
            vector, aux = (bias if self._adds_bias else 0), (kept if self._writes_aux else 0)
            scalars = 1.0, 1.0 if self.strategy.product_adds else 0.0
            inner = Call((x, w, addend, vector, aux, product), memory.stream, scalars)
            call.computed = self, memory, inner, (product, bias, y, kept, addend, call.dropouts[0], memory.stream)
        _, _, inner, of_pass = call.computed
        self._product.put(inner, memory)
        if self._pass is not None:
            self._pass.launch(*of_pass)


def leaves_a_pass(problem: ForwardProblem, strategy: ForwardStrategy) -> bool:
    """Whether a pass follows the product, for bias, activation, dropout, addend or a stored pre-activation."""
    epilogue = strategy.epilogue
    adds_bias = problem.bias is not None and not epilogue.has_bias
    activates = problem.activation != Activation() and epilogue.activation == "none"
    copies = problem.preactivation is not None and not epilogue.has_aux_output
    adds = problem.addend is not None and not strategy.product_adds
    return adds_bias or activates or problem.dropout or copies or adds


class BackwardPlan(Plan):
    """The plan of a backward problem on one device, split as its strategy states.

    Args:
        strategy: one of `backward_strategies`.
        choose: function that makes the plan of each product and so chooses its algorithm.

    Attributes:
        products: the products that compute "dx" and "dw", by these names; a gradient that is not requested is absent.
        shared: the copy of dz that both products read; None if they do not share a copy.

    Raises:
        PlanError: cuBLASLt refuses one of the strategy's products.
    """

    def __init__(self, problem: BackwardProblem, device: int, strategy: BackwardStrategy, choose: Choose) -> None:
        self.problem, self.device, self.strategy = problem, device, strategy
        self._dz = dz_spec(problem)
        wants_product = problem.dx is not None or problem.dw is not None
        self._needs_dz = problem.dz is not None or (not problem.output_derivative.is_identity and wants_product)
        dz = self._dz if self._needs_dz else None
        self._first = self._pass(problem.output_derivative, problem.dy, dz, sums=strategy.db is MadeBy.KERNEL)
        self._last, below = None, problem.input_derivative
        if below is not None and problem.dx is not None:
            # The pass for the layer below multiplies dx in place by the derivative of that layer's activation, sums
            # that layer's bias gradient, or does both.
            derives, sums = strategy.derivative is MadeBy.KERNEL, strategy.db_below is MadeBy.KERNEL
            derivative, target = (below, problem.dx) if derives else (unchanged(below.db), None)
            self._last = self._pass(derivative, problem.dx, target, sums=sums)
        keeps_dz = self._needs_dz and problem.dz is None
        self._dz_bytes = aligned(self._dz.layout.extent * problem.dtype.itemsize) if keeps_dz else 0
        # Both passes use the same scratch memory for partial sums, because they run one after the other.
        passes = [each for each in (self._first, self._last) if each is not None]
        self._partial_bytes = aligned(max((each.partial_bytes for each in passes), default=0))
        # If the first pass computes only a bias gradient, no product reads its result: it runs in the graph's branch
        # for dw, concurrently with dx.
        self._sums_beside = strategy.dw_concurrent and not self._needs_dz
        # If a kernel starts while another one fills the GPU, its blocks crowd on the few multiprocessors that become
        # free first: an FP32 product of 132 blocks takes 34 µs alone, and 172 µs if a pass that runs concurrently began
        # before it (H200). So the product with the longer sums, which has fewer blocks, starts first. Products with
        # ragged rows also have few blocks, and start before the pass for the bias gradient; other products end sooner
        # if they start after that pass.
        self._dx_first = problem.dy.layout.cols > problem.dy.layout.rows
        self._sums_last = not are_whole(problem.dtype, problem.dy, problem.x)
        products = self._product_problems(dz or problem.dy)
        self.products, self.shared = sharing_copy({name: choose(each, device) for name, each in products.items()})
        self._copy = ResizePass(problem.dtype, [self.shared], device) if self.shared else None
        self._copy_bytes = self.shared.target.size * problem.dtype.itemsize if self.shared else 0
        self._dx, self._dw = self.products.get("dx"), self.products.get("dw")

    def _pass(self, derivative: Derivative, dy: Spec, dz: Spec | None, *, sums: bool) -> BackwardPass | None:
        """The pass that computes dz, a bias gradient or both; None if neither has to be computed."""
        if not dy.layout.size or (dz is None and not sums):
            return None
        derivative, problem = derivative if sums else replace(derivative, db=None), self.problem
        return BackwardPass(problem.dtype, derivative, dy, dz, self.device, accumulate=problem.accumulate)

    def _product_problems(self, dz: Spec) -> dict[str, MatmulProblem]:
        """The products that compute the requested gradients from dz, with the epilogues that the strategy demands."""
        problem, strategy, below = self.problem, self.strategy, self.problem.input_derivative
        kinds, found = (problem.dtype, problem.dtype, problem.compute), dict[str, MatmulProblem]()
        if problem.dx is not None:
            c = problem.dx if problem.accumulate_dx else None
            found["dx"] = MatmulProblem(*kinds, dz, problem.w, problem.dx, c=c)
            if below is not None and strategy.derivative is MadeBy.EPILOGUE:
                sums = strategy.db_below is MadeBy.EPILOGUE
                epilogue = Epilogue(f"d{below.activation.name}{'_bgrad' if sums else ''}")
                vector = (below.db if sums else None) or found["dx"].bias_alignment
                found["dx"] = replace(found["dx"], epilogue=epilogue, aux=below.saved_spec, bias_alignment=vector)
        if problem.dw is not None:
            c = problem.dw if problem.accumulate else None
            found["dw"] = MatmulProblem(*kinds, dz.transposed, problem.x, problem.dw, c=c)
            if strategy.db is MadeBy.EPILOGUE:
                vector = problem.output_derivative.db or found["dw"].bias_alignment
                found["dw"] = replace(found["dw"], epilogue=Epilogue.BGRADA, bias_alignment=vector)
        return found

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.scratch(self._dz_bytes + self._partial_bytes + self._copy_bytes)
        for product in self.products.values():
            product.reserve(memory)
        self._reserve_branch(memory)

    def _has_branch(self, memory: StreamMemory) -> bool:
        """Whether a graph computes dw on a branch: beside dx or, without dx, beside later operations."""
        return self.strategy.dw_concurrent or (self._dx is None and memory.defers)

    def _reserve_branch(self, memory: StreamMemory) -> None:
        """Allocates the memory of the branch for dw before any capture, because a capture forbids allocations."""
        if self._dw is not None and self._has_branch(memory):
            self._dw.reserve(memory.branch)
            memory.branch.scratch(self._partial_bytes)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        dy, x, _, saved, _, _, dw, db, dz, _ = call.addresses
        scratch = memory.scratch(self._dz_bytes + self._partial_bytes + self._copy_bytes)
        partial = scratch + self._dz_bytes
        if self._first is not None:
            dz = (dz or scratch) if self._needs_dz else dy
            if not self._sums_beside:
                self._first.launch(dy, saved, dz, db, partial, call.dropouts[0], memory)
        else:
            dz = dy
            if self.strategy.db is MadeBy.KERNEL:
                self._zero(db, self.problem.dy.layout.cols, memory.stream)
        if self._copy is not None:
            copied = partial + self._partial_bytes
            self._copy.launch([(dz, copied)], memory.stream)
            dz = copied
        self._reserve_branch(memory)
        beside: contextlib.AbstractContextManager[StreamMemory] = contextlib.nullcontext(memory)
        if self._has_branch(memory) and is_captured(memory.stream):  # `branch` would check it too, but takes longer
            beside = branch(memory, reads_scratch=self._dz_bytes + self._copy_bytes > 0)
        with beside as other:
            dx_first = self._dx_first and other is not memory
            if dx_first:
                self._put_dx(call, dz, partial, memory)
            if self._sums_beside and not self._sums_last:
                self._put_sums(dy, db, partial, other, memory)
            if self._dw is not None:
                vector = db if self.strategy.db is MadeBy.EPILOGUE else 0
                beta = 1.0 if self.problem.accumulate else 0.0
                self._dw.put(Call((dz, x, dw, vector, 0, dw), other.stream, (1.0, beta)), other)
            if self._sums_beside and self._sums_last:
                self._put_sums(dy, db, partial, other, memory)
            if not dx_first:
                self._put_dx(call, dz, partial, memory)

    def _put_sums(self, dy: int, db: int, partial: int, other: StreamMemory, memory: StreamMemory) -> None:
        """Launches the pass for the bias gradient beside dw; `partial` is scratch memory of the stream of `memory`."""
        if self._first is not None:
            partial = partial if other is memory else other.scratch(self._partial_bytes)
            self._first.launch(dy, 0, 0, db, partial, None, other)

    def _put_dx(self, call: Call, dz: int, partial: int, memory: StreamMemory) -> None:
        """Launches the product dx, then the pass for the derivative and the bias gradient of the layer below."""
        if self._dx is None:
            return
        _, _, w, _, saved, dx, *_, db = call.addresses
        vector = db if self.strategy.db_below is MadeBy.EPILOGUE else 0
        aux = saved if self.strategy.derivative is MadeBy.EPILOGUE else 0
        scalars = 1.0, 1.0 if self.problem.accumulate_dx else 0.0
        self._dx.put(Call((dz, w, dx, vector, aux, dx), memory.stream, scalars), memory)
        if self._last is not None:
            self._last.launch(dx, saved, dx, db, partial, call.dropouts[1], memory)
        elif self.strategy.db_below is MadeBy.KERNEL:
            self._zero(db, self.problem.x.layout.cols, memory.stream)

    def _zero(self, db: int, cols: int, stream: int) -> None:
        """Sets the bias gradient of a batch without rows to zero, unless gradients are accumulated."""
        if cols and not self.problem.accumulate:
            call("cuMemsetD8Async", db, 0, cols * self.problem.dtype.itemsize, stream)
