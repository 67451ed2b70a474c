"""Plans that copy a product's operands to a layout for which cuBLASLt has faster kernels.

For ragged rows cuBLASLt uses old, slow kernels: on an H200 (cuBLASLt 13.1) BF16 2048x1024x479 takes 22 µs, and
2048x1024x480 takes 5.7 µs. The matrices' extents decide which kernel is used, not their leading dimensions. So operands
are copied with zeros appended along their contiguous axis, which add nothing to any sum. If that makes D's rows longer
too, D is copied back without the added elements.

Hopper's tensor-core instructions read TF32 operands only if they are contiguous along K. If an operand of dx or dw is
not, cuBLASLt uses older instructions: TF32 256x512x512 takes 9.5 µs as an input gradient, 5.1 µs as a forward pass. So
a second method multiplies copies that are contiguous along K.

The tuner and the plan cache treat the copies as part of the algorithm. dx and dw share one copy of dz.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Self

from lt_runtime.errors import PlanError
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.memory import StreamMemory, aligned, workspace_size
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.resize import Resize, ResizePass
from lt_runtime.kernels.tiling import OCTET, moves_vectors
from lt_runtime.layout import Order, packed
from lt_runtime.problem import Compute, DType, MatmulProblem, Spec
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.plan import AlgorithmPlan

PADDED_MARK: Final = b"lt_runtime: padded".ljust(64, b"\0")
"""Bytes that precede cuBLASLt's algorithm in the plan cache if the product runs on padded copies."""
K_MAJOR_MARK: Final = b"lt_runtime: k-major".ljust(64, b"\0")
"""Bytes that precede cuBLASLt's algorithm in the plan cache if the padded copies are contiguous along K."""

# the copies may take 1/64 of a GPU's memory, because their buffer is never freed
_MEMORY_SHARE: Final = 64


def padded_problem(problem: MatmulProblem, *, k_major: bool = False) -> MatmulProblem | None:
    """The product of padded copies; None if no operand would change, or if padding does not support the product.

    An operand is copied only if its rows are ragged, or if its extents or its order change.

    Args:
        k_major: whether the copies of A and B are contiguous along K. Supported are TF32 products with
            an operand that is not contiguous along K, and with an epilogue that sums no operand.
    """
    if problem.dtype is not problem.d_dtype or problem.batch != 1 or not on_tensor_cores(problem):
        return None
    # cuBLASLt may round a 16-bit product before it multiplies by the derivative: it does so on an H200 (cuBLASLt 13.1)
    # with DGELU if K is padded from 1 to 8.
    if problem.epilogue.is_derivative and problem.d_dtype.itemsize == 2:
        return None
    lie_along_k = Order.ROW, Order.COLUMN
    orders = problem.a.layout.order, problem.b.layout.order
    if k_major and (problem.compute is not Compute.TF32 or orders == lie_along_k or problem.epilogue.sums_operand):
        return None
    orders = lie_along_k if k_major else orders
    (m, n, k), kind = _rounded(problem, *orders), problem.dtype
    a, b = _copied(problem.a, m, k, orders[0], kind), _copied(problem.b, k, n, orders[1], kind)
    d = _copied(problem.d, m, n, problem.d.layout.order, kind)
    if (a, b, d) == (problem.a, problem.b, problem.d):
        return None
    if d == problem.d:
        return replace(problem, a=a, b=b)
    # Not supported: C, an auxiliary matrix and a bias gradient would have to be padded as well.
    epilogue = problem.epilogue
    if problem.c is not None or epilogue.has_aux_output or epilogue.is_derivative or epilogue.has_bias_gradient:
        return None
    return replace(problem, a=a, b=b, d=d, bias_alignment=256)


def on_tensor_cores(problem: MatmulProblem) -> bool:
    """Whether tensor cores support the product's types, and no extent is 0."""
    sixteen_bits = problem.dtype.itemsize == 2
    return 0 not in (problem.m, problem.n, problem.k) and (sixteen_bits or problem.compute is Compute.TF32)


def _rounded(problem: MatmulProblem, a: Order, b: Order) -> tuple[int, int, int]:
    """M, N and K, rounded up to multiples of 8 where D, or A or B in the order `a` or `b`, is contiguous along them."""
    d = problem.d.layout.order
    grows_m = Order.COLUMN in (a, d)
    grows_n, grows_k = Order.ROW in (b, d), a is Order.ROW or b is Order.COLUMN
    extents = ((problem.m, grows_m), (problem.n, grows_n), (problem.k, grows_k))
    m, n, k = (-(-extent // OCTET) * OCTET if grows else extent for extent, grows in extents)
    return m, n, k


def _copied(spec: Spec, rows: int, cols: int, order: Order, dtype: DType) -> Spec:
    """The operand's spec if it already has the given size and order and is not ragged; otherwise a packed copy's."""
    layout = spec.layout
    if layout.shape == (rows, cols) and layout.order is order and moves_vectors(spec, dtype):
        return spec
    return Spec(packed(rows, cols, order=order))


class PaddedPlan(AlgorithmPlan):
    """A product by cuBLASLt on padded copies, which are stored in a buffer of the stream.

    Args:
        algorithm: cuBLASLt's algorithm for the product of the copies, 64 bytes; None for the heuristic's choice.
        k_major: see `padded_problem`.

    Attributes:
        inner: the plan of the product of the copies.
        sources: maps an operand's name to its copy before the product.
        result: the copy of the result into D after the product; None if the product writes D itself.

    Raises:
        PlanError: there is nothing to copy; the copies take more than a 64th of the GPU's memory; or cuBLASLt cannot
            compute the product, see `MatmulPlan`.
    """

    def __init__(
        self, problem: MatmulProblem, device: int, *, algorithm: bytes | None = None, k_major: bool = False
    ) -> None:
        padded = padded_problem(problem, k_major=k_major)
        if padded is None:
            raise PlanError(f"padding is not for {problem}")
        self._mark = K_MAJOR_MARK if k_major else PADDED_MARK
        self.problem, self.device = problem, device
        self.sources, self._offsets, self._size = copies_of(problem, padded), dict[str, int](), 0
        for name, resize in self.sources.items():
            self._offsets[name] = self._size
            self._size += aligned(resize.target.size * problem.dtype.itemsize)
        most = max(workspace_size(device), device_info(device).memory // _MEMORY_SHARE)
        if self._size > most:
            raise PlanError(f"padded copies take {self._size} bytes, more than {most}: {problem}")
        self.inner = MatmulPlan(padded, device, algorithm=algorithm)
        self.algorithm = self.inner.algorithm
        back = self.sources.pop("d", None)
        self.result = Resize(back.target, back.source) if back else None
        self._before = self._copying()
        self._after = ResizePass(problem.dtype, [self.result], device) if self.result else None

    def _copying(self) -> ResizePass | None:
        return ResizePass(self.problem.dtype, [*self.sources.values()], self.device) if self.sources else None

    def given_a(self) -> Self:
        """A plan like this one for calls that pass the address of A's padded copy instead of A's."""
        given = copy.copy(self)
        given.sources = {name: resize for name, resize in self.sources.items() if name != "a"}
        given._offsets = {name: offset for name, offset in self._offsets.items() if name != "a"}
        given._before = given._copying()
        return given

    @property
    def blob(self) -> bytes:
        """See `AlgorithmPlan`."""
        return self._mark + super().blob

    @property
    def adds_memsets(self) -> bool:
        """See `AlgorithmPlan`."""
        return self.inner.adds_memsets

    @property
    def launches_at_most_two_kernels(self) -> bool:
        """See `AlgorithmPlan`; the kernels that make the copies are not counted."""
        return self.inner.launches_at_most_two_kernels

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.copies(self._size)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        base = memory.copies(self._size)
        own = dict(zip(self.problem.operands, call.addresses, strict=True))
        copies = {name: base + offset for name, offset in self._offsets.items()}
        if self._before is not None:
            self._before.launch([(own[name], copies[name]) for name in self.sources], memory.stream)
        self.inner.put(Call(tuple({**own, **copies}.values()), call.stream, call.scalars), memory)
        if self._after is not None:
            self._after.launch([(copies["d"], own["d"])], memory.stream)


def sharing_copy(products: Mapping[str, AlgorithmPlan]) -> tuple[dict[str, AlgorithmPlan], Resize | None]:
    """Lets products of one matrix A share its copy.

    Returns:
        Products that read the address of a shared copy instead of A's, and that copy. If the products do not all need
        an equal copy of A: the products as given, and None.
    """
    padded = {name: each for name, each in products.items() if isinstance(each, PaddedPlan) and "a" in each.sources}
    copies = {each.sources["a"].by_rows for each in padded.values()}
    if len(products) < 2 or len(padded) < len(products) or len(copies) > 1:
        return dict(products), None
    return {name: each.given_a() for name, each in padded.items()}, copies.pop()


def copies_of(problem: MatmulProblem, inner: MatmulProblem) -> dict[str, Resize]:
    """Maps operand names to the copies between a product's operand and its padded product's, `inner`."""
    pairs = {name: (getattr(problem, name), getattr(inner, name)) for name in ("a", "b", "d")}
    found = {name: Resize(own.layout, copy.layout) for name, (own, copy) in pairs.items() if own != copy}
    if problem.epilogue.has_bias and (inner.n, inner.bias_alignment) != (problem.n, problem.bias_alignment):
        found["vector"] = Resize(packed(1, problem.n), packed(1, inner.n))
    return found
