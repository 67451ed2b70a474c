"""Helpers for tests of elementwise and of product kernels: a stream's memory, launches of known variants."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

from lt_runtime.epilogue import Epilogue
from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.memory import MAX_TICKETS
from lt_runtime.kernels import kernel as kernels
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.kernel import Entry
from lt_runtime.kernels.narrow import NarrowPass
from lt_runtime.kernels.tile_matmul import TileMatmulPass
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import ALIGNMENT, Activation, Compute, DType, MatmulProblem, Spec
from lt_runtime.reference import activate, derivative, unpack_mask
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, mask, numbers, rounding, vector
from tests.host_kernels.build import Variant
from tests.host_kernels.cases import Shape, orders, seeds
from tests.host_kernels.harness import FORWARD, HostKernel, HostKernels
from tests.support.strategies import Placement, placements

_STEEPEST: Final = 1.2
"""Upper bound of the derivatives of all activations."""


@contextmanager
def launching(host: HostKernels, variants: Collection[Variant], order: int) -> Iterator[pytest.MonkeyPatch]:
    """Within a `with` block, threads of the runtime's launches run in the given order.

    A test case for which no kernel variant is built is skipped.
    """

    def get(entry: Entry, macros: Macros, device: int) -> HostKernel:
        # on the CPU the number of blocks that a multiprocessor holds makes no difference
        alike = tuple((name, "1" if name == "BLOCKS" else value) for name, value in macros)
        assume(Variant(entry.source, alike) in variants)
        return host.get(entry, alike)

    with pytest.MonkeyPatch.context() as patch, host.in_order(order):
        patch.setattr(kernels, "get_kernel", get)
        yield patch


class Memory:
    """A stream's tickets (counters of finished blocks), and a workspace of exactly the size that is needed."""

    stream = 0

    def __init__(self, size: int = 0) -> None:
        self._tickets = vector(np.zeros(MAX_TICKETS), DType.FLOAT32)
        self.tickets, self.workspace = self._tickets.address, self.scratch(size)

    def scratch(self, size: int) -> int:
        """Allocates the workspace."""
        self._workspace = vector(np.full(size // 4, np.nan), DType.FLOAT32)
        return self._workspace.address if size else 0

    def check(self) -> None:
        """Fails if anything around the workspace was written, or if a ticket is not zero again."""
        self._tickets.assert_unchanged()
        self._workspace.values()


def spec_of(matrix: Guarded) -> Spec:
    """Returns the matrix's description as a product's plan takes it."""
    return Spec(matrix.layout, min(ALIGNMENT, matrix.address & -matrix.address))


OPERANDS: Final = ("a", "b", "c", "d", "aux")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test case: a matrix product with its epilogue.

    Attributes:
        c: where C is: absent, in D's memory ("in place"), or in memory of its own.
        places: placements of the operands, in the order of `OPERANDS`.
    """

    alpha: float = 1.0
    beta: float = 1.0
    c: str = "nowhere"
    places: tuple[Placement, ...] = (FLAT,) * len(OPERANDS)
    order: int = FORWARD
    seed: int = 0


CASE: Final[dict[str, Any]] = {
    "alpha": st.sampled_from((1.0, 1.0, -0.75)),
    "beta": st.sampled_from((1.0, 1.0, 0.0, 0.5)),
    "c": st.sampled_from(("nowhere", "in place", "apart")),
    "places": st.tuples(*(placements for _ in OPERANDS)),
    "order": orders,
    "seed": seeds,
}
"""Hypothesis strategies that draw the fields of a test case, by name."""


class Product:
    """The operands of a case in guarded memory, and their expected results.

    Args:
        shape: M, N, K.
        place: the placement of an operand, of its name, shape and placement in the case.
    """

    def __init__(
        self,
        case: Case,
        dtype: DType,
        shape: tuple[int, int, int],
        epilogue: Epilogue,
        place: Callable[[str, Shape, Placement], Placement],
    ) -> None:
        self.case, self.dtype, self.epilogue, self._shape = case, dtype, epilogue, shape
        (m, n, k), generator = shape, np.random.default_rng(case.seed)
        shapes = zip(OPERANDS, ((m, k), (k, n), (m, n), (m, n), (m, n)), case.places, strict=True)
        self.operands = {
            name: Guarded(numbers(generator, each, dtype), place(name, each, at)) for name, each, at in shapes
        }
        if case.c == "in place":
            self.operands["c"] = self.operands["d"]
        self._has_mask = epilogue.activation == "relu" and epilogue.is_derivative
        if self._has_mask:
            self.operands["aux"] = mask(self.operands["aux"].array > 0, case.places[-1].gap)
        self.vector = vector(numbers(generator, (m if epilogue is Epilogue.BGRADA else n,), dtype), dtype)
        self._expect()

    def _expect(self) -> None:
        a, b, c, _, aux = (self.operands[name].array.astype(np.float64) for name in OPERANDS)
        bias = self.vector.array[0].astype(np.float64) if self.epilogue.has_bias else 0.0
        beta = 0.0 if self.case.c == "nowhere" else self.case.beta
        z = self.case.alpha * (a @ b) + beta * c + bias
        size = abs(self.case.alpha) * (np.abs(a) @ np.abs(b)) + np.abs(beta * c) + np.abs(bias)
        # error bound: each term is rounded, and each addition's error is at most half a unit in the last place of the
        # sum of magnitudes
        error = (a.shape[1] + 4) * EPS32 * size
        self._z, self._z_limit = z, rounding(self.dtype, z) + error
        activation = Activation(self.epilogue.activation)
        # The terms that the bias gradient sums up, and the bounds of their errors.
        expected, terms, errors = z, a.T, np.zeros(a.T.shape)
        if self.epilogue.is_derivative:
            bits = unpack_mask(self.operands["aux"].array, z.shape[1]) if self._has_mask else None
            slopes = derivative(aux, activation) if bits is None else bits.astype(np.float64)
            approximation = 16 * EPS32 * (1.0 + np.abs(aux)) if bits is None else 0.0
            expected, error = z * slopes, error * np.abs(slopes) + size * approximation
            terms, errors = expected, error
        elif activation.name != "none":
            expected, error = activate(z, activation), _STEEPEST * error + 16 * EPS32 * np.abs(z)
        self._expected, self._limit = expected, rounding(self.dtype, expected) + error
        self._sums, magnitudes = terms.sum(axis=0), np.abs(terms).sum(axis=0)
        self._sums_limit = rounding(self.dtype, self._sums) + len(terms) * EPS32 * magnitudes + errors.sum(axis=0)

    @property
    def problem(self) -> MatmulProblem:
        a, b, c, d = (spec_of(self.operands[name]) for name in "abcd")
        has_c, has_aux = self.case.c != "nowhere", self.epilogue.is_derivative or self.epilogue.has_aux_output
        optional = {"c": c if has_c else None, "aux": self._aux_spec() if has_aux else None}
        return MatmulProblem(self.dtype, self.dtype, Compute.FLOAT32, a, b, d, self.epilogue, **optional)

    def _aux_spec(self) -> Spec:
        """Returns the layout of the auxiliary matrix; a mask's strides count bits."""
        aux, (m, n, _) = self.operands["aux"], self._shape
        return Spec(Layout(m, n, Order.ROW, 8 * aux.array.strides[0])) if self._has_mask else spec_of(aux)

    def run(self, own_pass: TileMatmulPass | NarrowPass) -> None:
        """Runs `own_pass`, a kernel of ours that computes the product and was made from `self.problem`."""
        a, b, c, d, aux = (self.operands[name].address for name in OPERANDS)
        memory = Memory(own_pass.scratch_bytes)
        call = Call((a, b, c, self.vector.address, aux, d), 0, (self.case.alpha, self.case.beta))
        own_pass.launch(call, memory)  # type: ignore[arg-type]
        memory.check()

    def check(self) -> None:
        """Compares the results with the expected ones, and fails if anything else was written."""
        assert_close("d", self.operands["d"].values(), self._expected, self._limit)
        if self.epilogue.has_bias_gradient:
            assert_close("sums", self.vector.values()[0], self._sums, self._sums_limit)
        else:
            self.vector.assert_unchanged()
        if self.epilogue.has_aux_output:
            assert_close("aux", self.operands["aux"].values(), self._z, self._z_limit)
        for name, operand in self.operands.items():
            is_written = name == "aux" and self.epilogue.has_aux_output
            if operand is not self.operands["d"] and not is_written:
                operand.assert_unchanged()

    @property
    def results(self) -> bytes:
        """Returns the bytes of all outputs: D, the auxiliary matrix and the vector (bias or its gradient)."""
        written = (self.operands["d"], self.operands["aux"], self.vector)
        return b"".join(each.array.tobytes() for each in written)
