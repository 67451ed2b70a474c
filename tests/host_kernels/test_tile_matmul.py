"""Products of 16-bit matrices whose rows are no whole vectors, launched by the runtime, against float64."""

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
from lt_runtime.kernels import tile_matmul
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry
from lt_runtime.kernels.tile_matmul import TileMatmulPass, supports
from lt_runtime.problem import Activation, Compute, MatmulProblem
from lt_runtime.reference import activate, derivative
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, numbers, rounding, vector
from tests.host_kernels.cases import FEW, orders, seeds
from tests.host_kernels.harness import FORWARD, REVERSE, HostKernels, Turns
from tests.host_kernels.products import Memory, spec_of
from tests.host_kernels.products import on_a_small_gpu as on_a_small_gpu  # a fixture
from tests.host_kernels.variants import TILE, Tile
from tests.support.strategies import Placement, placements

Array = NDArray[np.float64]
_OPERANDS = ("a", "b", "c", "d", "aux")
_SLOPE = 1.2
"""Above the largest derivative of an activation."""

extents = st.one_of(st.integers(1, 40), st.sampled_from((63, 64, 65, 100, 129, 150)))


@dataclass(frozen=True)
class TileCase:
    """A product.

    Attributes:
        shape: M, N and K.
        c: where C is: nowhere, where D is, or apart.
        bias: whether there is one, where the epilogue may have one.
        sums: whether a bias gradient is wanted, where the epilogue may make one.
        keeps: whether the auxiliary matrix is written, where the epilogue may write one.
        together: parts of K up to which a block adds up all of them.
    """

    shape: tuple[int, int, int]
    alpha: float
    beta: float
    c: str
    bias: bool
    sums: bool
    keeps: bool
    together: int
    places: tuple[Placement, ...]
    order: int
    seed: int


cases = st.builds(
    TileCase,
    shape=st.tuples(extents, extents, st.one_of(extents, st.sampled_from((300, 700)))),
    alpha=st.sampled_from((1.0, 1.0, -0.75)),
    beta=st.sampled_from((1.0, 0.0, 0.5)),
    c=st.sampled_from(("nowhere", "in place", "apart")),
    bias=st.booleans(),
    sums=st.booleans(),
    keeps=st.booleans(),
    together=st.sampled_from((1, 2, 16)),
    places=st.tuples(*(placements for _ in _OPERANDS)),
    order=orders,
    seed=seeds,
)


def epilogue_of(case: TileCase, variant: Tile) -> Epilogue:
    """What the case asks of the variant's kernel."""
    name = variant.activation
    if variant.derivative:
        return Epilogue(f"d{name}{'_bgrad' if case.sums else ''}")
    if name == "none":
        sums = case.sums and not variant.b_along_k
        return Epilogue.BGRADA if sums else Epilogue.BIAS if case.bias else Epilogue.NONE
    aux = "_aux" if case.keeps and name == "gelu" else ""
    return Epilogue(f"{name}{aux}{'_bias' if case.bias else ''}")


class Product:
    """Operands of a case, and the expected results."""

    def __init__(self, case: TileCase, variant: Tile) -> None:
        self.case, self.variant, self.epilogue = case, variant, epilogue_of(case, variant)
        (m, n, k), generator = case.shape, np.random.default_rng(case.seed)
        shapes = dict(zip(_OPERANDS, ((m, k), (k, n), (m, n), (m, n), (m, n)), strict=True))
        across = {"a": not variant.a_along_k, "b": variant.b_along_k}
        self.operands: dict[str, Guarded] = {}
        for (name, shape), place in zip(shapes.items(), case.places, strict=True):
            at = replace(place, column_major=across.get(name, False))
            self.operands[name] = Guarded(numbers(generator, shape, variant.dtype), at)
        if case.c == "in place":
            self.operands["c"] = self.operands["d"]
        length = m if self.epilogue.sums_operand else n
        self.vector = vector(numbers(generator, (length,), variant.dtype), variant.dtype)
        self._expect()

    def _expect(self) -> None:
        a, b, c, _, aux = (self.operands[name].array.astype(np.float64) for name in _OPERANDS)
        bias = self.vector.array[0].astype(np.float64) if self.epilogue.has_bias else 0.0
        beta = 0.0 if self.case.c == "nowhere" else self.case.beta
        z = self.case.alpha * (a @ b) + beta * c + bias
        size = abs(self.case.alpha) * (np.abs(a) @ np.abs(b)) + np.abs(beta * c) + np.abs(bias)
        # each term is rounded, and each addition off by half a unit of at most the sum of magnitudes
        error = (a.shape[1] + 4) * EPS32 * size
        self.z, self.z_limit = z, rounding(self.variant.dtype, z) + error
        activation = Activation(self.variant.activation)
        terms, errors = a.T, np.zeros(a.T.shape)  # of the bias gradient
        if self.variant.derivative:
            slopes = derivative(aux, activation)
            expected = z * slopes
            error = error * np.abs(slopes) + size * 16 * EPS32 * (1.0 + np.abs(aux))
            terms, errors = expected, error
        else:
            expected = activate(z, activation)
            error = _SLOPE * error + 16 * EPS32 * np.abs(z)
        self.expected, self.limit = expected, rounding(self.variant.dtype, expected) + error
        self.sums, magnitudes = terms.sum(axis=0), np.abs(terms).sum(axis=0)
        self.sums_limit = rounding(self.variant.dtype, self.sums) + len(terms) * EPS32 * magnitudes + errors.sum(axis=0)

    @property
    def problem(self) -> MatmulProblem:
        a, b, c, d, aux = (spec_of(self.operands[name]) for name in _OPERANDS)
        reads_aux = self.epilogue.is_derivative or self.epilogue.has_aux_output
        return MatmulProblem(
            self.variant.dtype,
            self.variant.dtype,
            Compute.FLOAT32,
            a,
            b,
            d,
            self.epilogue,
            c=None if self.case.c == "nowhere" else c,
            aux=aux if reads_aux else None,
        )

    @property
    def call(self) -> Call:
        a, b, c, d, aux = (self.operands[name].address for name in _OPERANDS)
        return Call((a, b, c, self.vector.address, aux, d), 0, (self.case.alpha, self.case.beta))

    def run(self, host: HostKernels, order: int) -> None:
        """Runs the product."""

        def get(entry: Entry, macros: Macros, device: int) -> Turns:
            assume(macros == self.variant.macros)  # a single row or column may lie either way
            return Turns(host, entry, macros, order)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "get_kernel", get)
            patch.setattr(tile_matmul, "_ONE_GROUP", self.case.together)
            product = TileMatmulPass(self.problem, 0)
        memory = Memory(product.scratch_bytes)
        product.run(self.call, memory)  # type: ignore[arg-type]
        memory.check()

    def check(self) -> None:
        """Compares the results, and fails if anything else was written."""
        assert_close("d", self.operands["d"].values(), self.expected, self.limit)
        if self.epilogue.has_bias_gradient:
            assert_close("sums", self.vector.values()[0], self.sums, self.sums_limit)
        else:
            self.vector.assert_unchanged()
        if self.epilogue.has_aux_output:
            assert_close("aux", self.operands["aux"].values(), self.z, self.z_limit)
        for name, operand in self.operands.items():
            is_written = name == "aux" and self.epilogue.has_aux_output
            if operand is not self.operands["d"] and not is_written:
                operand.assert_unchanged()


LONG = TileCase((70, 67, 700), 1.0, 1.0, "in place", True, True, True, 2, (FLAT,) * len(_OPERANDS), FORWARD, 0)
"""Four tiles; with fewer, blocks share K, in groups of groups."""
SHARED = replace(LONG, shape=(30, 21, 700))
TALL = replace(LONG, shape=(700, 65, 21), c="nowhere")
"""Tiles share the sums of columns."""


@pytest.mark.parametrize("variant", TILE, ids=str)
@FEW
@example(case=LONG)
@example(case=SHARED)
@example(case=replace(SHARED, together=16, c="apart"))
@example(case=TALL)
@example(case=replace(TALL, shape=(129, 64, 64), bias=False, keeps=False))
@given(case=cases)
def test_products(host: HostKernels, variant: Tile, case: TileCase) -> None:
    product = Product(case, variant)
    assume(supports(product.problem))
    product.run(host, case.order)
    product.check()


@pytest.mark.parametrize("variant", TILE[:3], ids=str)
@FEW
@example(case=LONG)
@example(case=SHARED)
@example(case=TALL)
@given(case=cases)
def test_the_order_of_execution_does_not_reach_the_bits(host: HostKernels, variant: Tile, case: TileCase) -> None:
    runs = []
    for order in (FORWARD, REVERSE, 2 + case.order):
        product = Product(case, variant)
        assume(supports(product.problem))
        product.run(host, order)
        written = (product.operands["d"], product.operands["aux"], product.vector)
        runs.append(b"".join(each.array.tobytes() for each in written))
    assert runs[0] == runs[1] == runs[2]
