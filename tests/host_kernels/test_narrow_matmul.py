"""Products that are tiny in one dimension, launched by the runtime, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.compiler import Macros
from lt_runtime.kernels import kernel as kernels
from lt_runtime.kernels import narrow as narrow_pass
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry
from lt_runtime.kernels.narrow import NarrowPass, supports
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import Activation, Compute, MatmulProblem, Spec
from lt_runtime.reference import derivative, unpack_mask
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, mask, numbers, rounding, vector
from tests.host_kernels.cases import FEW, axes, orders, seeds, suit_place
from tests.host_kernels.harness import FORWARD, REVERSE, HostKernels, Turns
from tests.host_kernels.products import Memory, spec_of
from tests.host_kernels.products import on_a_small_gpu as on_a_small_gpu  # a fixture
from tests.host_kernels.variants import F32, NARROW, Narrow
from tests.support.strategies import Placement, placements

Array = NDArray[np.float64]
_TRANSPOSED = {"narrow_n": (False, True), "narrow_k": (False, False), "narrow_m": (True, False)}
"""Whether A and B are column-major."""
_MOVED = {"narrow_n": ("a", "b"), "narrow_k": ("b", "c", "d", "aux"), "narrow_m": ("b",)}
"""Which matrices a kernel moves in vectors."""
_EPILOGUE = {"narrow_n": Epilogue.BIAS, "narrow_m": Epilogue.BGRADA}
_OPERANDS = ("a", "b", "c", "d", "aux")

Asked = list[tuple[str, Macros]]


@dataclass(frozen=True)
class NarrowCase:
    """A product.

    Attributes:
        tiny: the dimension that is tiny, counted down from the variant's width.
        long: the two others, in the order M, N, K.
        c: where C is: nowhere, where D is, or apart.
        vector: whether there is a bias, or a bias gradient is wanted, where a kernel is not compiled for one of both.
        busy: the GPU has few threads, and blocks share K early.
    """

    tiny: int
    long: tuple[int, int]
    alpha: float
    beta: float
    c: str
    vector: bool
    busy: bool
    places: tuple[Placement, ...]
    order: int
    seed: int

    def shape(self, variant: Narrow) -> tuple[int, int, int]:
        """M, N and K; where the variant is aligned the contiguous axis of what it moves is whole octets."""
        width = max(variant.width - self.tiny, variant.width // 2 + 1)
        first, second = self.long
        if variant.aligned:
            second = -(-second // 8) * 8
        axis = "nkm".index(variant.entry[-1])
        return ((first, width, second), (first, second, width), (width, second, first))[axis]


cases = st.builds(
    NarrowCase,
    tiny=st.integers(0, 7),
    long=st.tuples(st.one_of(axes, st.sampled_from((257, 700))), st.one_of(axes, st.sampled_from((264, 1030)))),
    alpha=st.sampled_from((1.0, 1.0, -0.75)),
    beta=st.sampled_from((1.0, 1.0, 0.0, 0.5)),
    c=st.sampled_from(("nowhere", "in place", "apart")),
    vector=st.booleans(),
    busy=st.booleans(),
    places=st.tuples(*(placements for _ in _OPERANDS)),
    order=orders,
    seed=seeds,
)


class Product:
    """Operands of a case, and what is to come of them."""

    def __init__(self, case: NarrowCase, variant: Narrow) -> None:
        self.case, self.variant = case, variant
        (m, n, k), generator = case.shape(variant), np.random.default_rng(case.seed)
        shapes = dict(zip(_OPERANDS, ((m, k), (k, n), (m, n), (m, n), (m, n)), strict=True))
        across = dict(zip("ab", _TRANSPOSED[variant.entry], strict=True))
        self.operands: dict[str, Guarded] = {}
        for (name, shape), place in zip(shapes.items(), case.places, strict=True):
            at = self._suited(name, shape, place, column_major=across.get(name, False))
            self.operands[name] = Guarded(numbers(generator, shape, variant.dtype), at)
        if case.c == "in place":
            self.operands["c"] = self.operands["d"]
        self.epilogue = variant.epilogue or (_EPILOGUE[variant.entry] if case.vector else Epilogue.NONE)
        self.has_mask = self.epilogue.activation == "relu"
        if self.has_mask:
            self.operands["aux"] = mask(self.operands["aux"].array > 0, case.places[-1].gap)
        length = m if variant.entry == "narrow_m" else n
        self.vector = vector(numbers(generator, (length,), variant.dtype), variant.dtype)
        self._expect()

    def _suited(self, name: str, shape: tuple[int, int], place: Placement, *, column_major: bool) -> Placement:
        aligned = self.variant.aligned and name in _MOVED[self.variant.entry]
        suited = suit_place(place, shape, self.variant.dtype, aligned=aligned, column_major=column_major)
        if name == "b" and not aligned:  # so that the fast path is not taken by chance
            return replace(suited, offset=suited.offset | 1)
        return suited

    def _expect(self) -> None:
        a, b, c = (self.operands[name].array.astype(np.float64) for name in "abc")
        bias = self.vector.array[0].astype(np.float64) if self.epilogue is Epilogue.BIAS else 0.0
        beta = 0.0 if self.case.c == "nowhere" else self.case.beta
        expected = self.case.alpha * (a @ b) + beta * c + bias
        size = abs(self.case.alpha) * (np.abs(a) @ np.abs(b)) + np.abs(beta * c) + np.abs(bias)
        # each term is rounded, and each addition off by half a unit of at most the sum of magnitudes
        error = (a.shape[1] + 4) * EPS32 * size
        terms, errors = a.T, np.zeros(a.T.shape)  # of the bias gradient
        if self.epilogue.is_derivative:
            slopes = self._slopes()
            approximation = 0.0 if self.has_mask else 16 * EPS32 * (1.0 + np.abs(self.operands["aux"].array))
            expected, error = expected * slopes, error * np.abs(slopes) + size * approximation
            terms, errors = expected, error
        self.expected, self.limit = expected, rounding(self.variant.dtype, expected) + error
        self.sums, magnitudes = terms.sum(axis=0), np.abs(terms).sum(axis=0)
        self.sums_limit = rounding(self.variant.dtype, self.sums) + len(terms) * EPS32 * magnitudes + errors.sum(axis=0)

    def _slopes(self) -> Array:
        """What D is multiplied by."""
        aux = self.operands["aux"].array
        if self.has_mask:
            return unpack_mask(aux, self.vector.array.shape[1]).astype(np.float64)
        return derivative(aux.astype(np.float64), Activation("gelu"))

    @property
    def problem(self) -> MatmulProblem:
        a, b, c, d = (spec_of(self.operands[name]) for name in "abcd")
        dtype, has_c = self.variant.dtype, self.case.c != "nowhere"
        aux = self._aux_spec() if self.epilogue.is_derivative else None
        return MatmulProblem(dtype, dtype, Compute.FLOAT32, a, b, d, self.epilogue, c=c if has_c else None, aux=aux)

    def _aux_spec(self) -> Spec:
        """How the auxiliary matrix lies, a mask in bits."""
        aux = self.operands["aux"]
        if not self.has_mask:
            return spec_of(aux)
        m, n, _ = self.case.shape(self.variant)
        return Spec(Layout(m, n, Order.ROW, 8 * aux.array.strides[0]))

    @property
    def call(self) -> Call:
        a, b, c, d, aux = (self.operands[name].address for name in _OPERANDS)
        return Call((a, b, c, self.vector.address, aux, d), 0, (self.case.alpha, self.case.beta))

    def run(self, host: HostKernels, order: int) -> Asked:
        """Runs the product; returns the kernel that it asked for."""
        asked: Asked = []

        def get(entry: Entry, macros: Macros, device: int) -> Turns:
            asked.append((entry.name, macros))
            assume(self.variant.matches(entry.name, macros))
            return Turns(host, entry, macros, order)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "get_kernel", get)
            if self.case.busy:
                patch.setattr(narrow_pass, "_BUSY_THREADS", 64)
                patch.setattr(narrow_pass, "_LONG", 1)
            product = NarrowPass(self.problem, 0)
        memory = Memory(product.scratch_bytes)
        product.run(self.call, memory)  # type: ignore[arg-type]
        memory.check()
        return asked

    def check(self) -> None:
        """Compares the results, and fails if anything else was written."""
        assert_close("d", self.operands["d"].values(), self.expected, self.limit)
        if self.epilogue.has_bias_gradient:
            assert_close("sums", self.vector.values()[0], self.sums, self.sums_limit)
        else:
            self.vector.assert_unchanged()
        for operand in self.operands.values():
            if operand is not self.operands["d"]:
                operand.assert_unchanged()


MANY = NarrowCase(3, (700, 264), 1.0, 1.0, "in place", True, True, (FLAT,) * len(_OPERANDS), FORWARD, 0)
"""Threads have several rows of D, and blocks share K."""
LONG = replace(MANY, long=(800, 32), c="nowhere")
"""Blocks share M, and their threads have several rows."""


@pytest.mark.parametrize("variant", NARROW, ids=str)
@FEW
@example(case=MANY)
@example(case=LONG)
@example(case=replace(LONG, c="in place"))
@example(case=replace(LONG, long=(700, 8)))
@example(case=replace(MANY, busy=False, c="nowhere"))
@example(case=replace(MANY, busy=False, long=(3, 1030)))
@given(case=cases)
def test_products(host: HostKernels, variant: Narrow, case: NarrowCase) -> None:
    product = Product(case, variant)
    assert supports(product.problem)
    product.run(host, case.order)
    product.check()


@pytest.mark.parametrize("variant", [each for each in NARROW if each.dtype is F32], ids=str)
@FEW
@example(case=MANY)
@example(case=LONG)
@given(case=cases)
def test_the_order_of_execution_does_not_reach_the_bits(host: HostKernels, variant: Narrow, case: NarrowCase) -> None:
    runs = []
    for order in (FORWARD, REVERSE, 2 + case.order):
        product = Product(case, variant)
        product.run(host, order)
        runs.append(product.operands["d"].array.tobytes() + product.vector.array.tobytes())
    assert runs[0] == runs[1] == runs[2]
