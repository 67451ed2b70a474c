"""Our kernel that applies cuBLASLt's epilogues to a stored product, launched by the runtime, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.matmul_epilogue import MatmulPass
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem, Spec
from lt_runtime.reference import activate, derivative
from tests.host_kernels.arrays import EPS32, Guarded, assert_close, numbers, rounding, vector
from tests.host_kernels.cases import FEW, Shape, axes, seeds, shapes
from tests.host_kernels.variants import MATMUL_EPILOGUES, MatmulEpilogue
from tests.support.strategies import Placement, placements

Array = NDArray[np.float64]
PITCH = 16  # the distance of a ReLU mask's rows is a multiple of this many bytes


class Batch:
    """Matrices stacked along the axis that is not contiguous, so that one guarded matrix holds them all."""

    def __init__(self, values: NDArray[np.generic], placement: Placement, dtype: DType) -> None:
        self.count, rows, cols = values.shape
        self._column_major = placement.column_major
        stacked = np.concatenate(list(values), axis=int(placement.column_major))
        self.guarded = Guarded(stacked, placement, dtype)
        lines, width = (cols, rows) if placement.column_major else (rows, cols)
        pitch = width + placement.gap
        order = Order.COLUMN if placement.column_major else Order.ROW
        self.spec = Spec(Layout(rows, cols, order, pitch), batch_stride=lines * pitch)

    @property
    def address(self) -> int:
        return self.guarded.address

    def values(self) -> Array:
        return np.stack(np.split(self.guarded.values(), self.count, axis=int(self._column_major)))


class BitMask:
    """ReLU's bit masks of a batch of matrices: a row of bytes for each line of a matrix, padded with bytes of 0xFF."""

    def __init__(self, positive: NDArray[np.bool_], order: Order) -> None:
        self._by_line = positive if order is Order.ROW else positive.swapaxes(1, 2)
        batch, lines, bits = self._by_line.shape
        pitch = -(-bits // 8 // PITCH) * PITCH + PITCH
        self.bytes = np.full((batch, lines, pitch), 0xFF, np.uint8)
        rows, cols = positive.shape[1:]
        self.spec = Spec(Layout(rows, cols, order, 8 * pitch), batch_stride=8 * lines * pitch)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

    def expected(self) -> NDArray[np.uint8]:
        bits = np.packbits(self._by_line, axis=-1, bitorder="little")
        filled = np.full_like(self.bytes, 0xFF)
        filled[..., : bits.shape[-1]] = bits
        return filled


@dataclass(frozen=True)
class MatmulCase:
    batch: int
    shape: Shape
    k: int
    keep: bool
    bias: bool
    beta: float  # β of a C whose order differs from D's; 0 without C
    beta_in_memory: bool
    d: Placement
    c: Placement  # How C is placed if the product is not stored in D.
    product: Placement  # How the product is placed if it is not stored in D.
    operand: Placement
    aux_gap: int
    seed: int


cases = st.builds(
    MatmulCase,
    batch=st.sampled_from((1, 1, 3)),
    shape=shapes,
    k=axes,
    keep=st.booleans(),
    bias=st.booleans(),
    beta=st.sampled_from((0.0, 0.0, 1.0, -0.75)),
    beta_in_memory=st.booleans(),
    d=placements,
    c=placements,
    product=placements,
    operand=placements,
    aux_gap=st.sampled_from((0, 8)),
    seed=seeds,
)


class Product:
    """A product that is already stored, with all operands that an epilogue may need."""

    def __init__(self, case: MatmulCase, variant: MatmulEpilogue) -> None:
        self.case, self.variant = case, variant
        self.generator = np.random.default_rng(case.seed)
        shape = (case.batch, *case.shape)
        self.d = self.batch(shape, variant.dtype, case.d)
        # the matrix that holds the product: D itself, or another one
        self.source = self.batch(shape, DType.FLOAT32, case.product) if variant.once else self.d
        # if the product is stored in D, the kernel adds C only if C's order differs from D's
        across = replace(case.d, column_major=not case.d.column_major)
        self.c = self.batch(shape, variant.dtype, case.c if variant.once else across)
        self.before = self.source.values() + case.beta * self.c.values()
        self.size = 1.0 + np.abs(self.source.values()) + np.abs(self.c.values())
        self.aux_place = Placement(case.d.column_major, case.aux_gap, 0)

    def batch(self, shape: tuple[int, ...], dtype: DType, place: Placement) -> Batch:
        return Batch(numbers(self.generator, shape, dtype), place, dtype)

    def vector(self, count: int) -> Guarded:
        return vector(numbers(self.generator, (count,), self.variant.dtype), self.variant.dtype)

    def run(self, epilogue: Epilogue, of: Guarded | None, aux: Batch | BitMask | None, *operands: Batch) -> None:
        """Runs our epilogue kernel on the stored product.

        `of` is the bias or the bias gradient. `operands` are A and B, if the kernel reads them.
        """
        (m, n), k, in_memory = self.case.shape, self.case.k, self.case.beta_in_memory
        a, b = operands or (None, None)
        specs = a.spec if a else Spec(packed(m, k)), b.spec if b else Spec(packed(k, n)), self.d.spec
        types, c = (self.variant.operand, self.variant.dtype, Compute.FLOAT32), self.c.spec if self.case.beta else None
        options = {"batch": self.case.batch, "aux": aux.spec if aux else None, "device_scalars": in_memory}
        problem = MatmulProblem(*types, *specs, epilogue, c=c, **options)
        beta = np.array([self.case.beta], np.float32)
        addresses = tuple(each.address if each else 0 for each in (a, b, self.c, of, aux, self.d))
        call = Call(addresses, 0, (1.0, beta.ctypes.data if in_memory else self.case.beta))
        product = self.source.spec if self.variant.once else None
        MatmulPass(problem, 0, product).launch(call, self.source.address, 0)
        self.c.guarded.assert_unchanged()
        if self.variant.once:
            self.source.guarded.assert_unchanged()

    def in_fp32(self, bias: Array) -> NDArray[np.float32]:
        """Computes the product + β·C + bias, added in the kernel's order."""
        product, c = (matrix.values().astype(np.float32) for matrix in (self.source, self.c))
        sums = product + np.float32(self.case.beta) * c if self.case.beta else product
        return sums + bias.astype(np.float32)


@pytest.mark.parametrize("variant", MATMUL_EPILOGUES, ids=str)
@FEW
@given(case=cases)
def test_epilogues(variant: MatmulEpilogue, case: MatmulCase) -> None:
    if variant.activation == "none":
        plain = replace(case, beta=0.0)
        if not variant.once:
            check_operand_sum(Product(plain, variant), Epilogue.BGRADA if case.keep else Epilogue.BGRADB)
        check_forward(Product(case, variant), Epilogue.BIAS if case.bias else Epilogue.NONE)
        return
    name = f"{variant.activation}{'_aux' if case.keep else ''}{'_bias' if case.bias else ''}"
    check_forward(Product(case, variant), Epilogue(name))
    check_backward(Product(case, variant), Epilogue(f"d{variant.activation}{'_bgrad' if case.bias else ''}"))


def check_forward(product: Product, epilogue: Epilogue) -> None:
    variant = product.variant
    bias = product.vector(product.case.shape[1])
    added = bias.array[0].astype(np.float64) if epilogue.has_bias else np.zeros(product.case.shape[1])
    z = product.before + added
    size = product.size + np.abs(added)
    mask = BitMask(product.in_fp32(added) > 0, product.d.spec.layout.order)
    kept = Batch(np.zeros(z.shape), product.aux_place, variant.dtype)
    is_mask = variant.activation == "relu"
    keeps = epilogue.has_aux_output
    product.run(epilogue, bias if epilogue.has_bias else None, (mask if is_mask else kept) if keeps else None)
    expected = activate(z, Activation(variant.activation))
    assert_close("d", product.d.values(), expected, rounding(variant.dtype, expected) + 8 * EPS32 * size)
    once = product.in_fp32(added).astype(variant.dtype.numpy).astype(np.float64) if variant.once else None
    if once is not None and variant.activation == "none":
        assert np.array_equal(product.d.values(), once), "rounded once"
    if keeps and is_mask:
        assert np.array_equal(mask.bytes, mask.expected())
    elif keeps:
        assert_close("aux", kept.values(), z, rounding(variant.dtype, z) + 2 * EPS32 * size)
        assert once is None or np.array_equal(kept.values(), once), "rounded once"
    bias.assert_unchanged()


def check_backward(product: Product, epilogue: Epilogue) -> None:
    variant = product.variant
    z = product.batch(product.before.shape, variant.dtype, product.aux_place)
    values = z.values()
    mask = BitMask(values > 0.0, product.d.spec.layout.order)
    mask.bytes[:] = mask.expected()  # the mask's bytes as cuBLASLt would write them
    gradient = product.vector(product.case.batch * product.case.shape[1])
    of = gradient if epilogue.has_bias_gradient else None
    product.run(epilogue, of, mask if variant.activation == "relu" else z)
    expected = product.before * derivative(values, Activation(variant.activation))
    limit = 16 * EPS32 * product.size * (1.0 + np.abs(values))
    assert_close("d", product.d.values(), expected, rounding(variant.dtype, expected) + limit)
    check_sums(gradient, expected, limit, written=epilogue.has_bias_gradient)
    z.guarded.assert_unchanged()
    assert np.array_equal(mask.bytes, mask.expected())


@pytest.mark.parametrize("variant", [each for each in MATMUL_EPILOGUES if each.activation == "relu"], ids=str)
def test_the_mask_of_nan_is_set(variant: MatmulEpilogue) -> None:
    place = Placement(column_major=False, gap=0, offset=0)
    values = np.array([[[np.nan, 1.0, -1.0, 0.0, -0.0, np.inf, -np.inf, 2.0]]])
    d = Batch(values, place, variant.dtype)
    product = Batch(values, place, DType.FLOAT32)
    bits = BitMask(~(values <= 0), Order.ROW)
    types, specs = (variant.operand, variant.dtype, Compute.FLOAT32), (Spec(packed(1, 4)), Spec(packed(4, 8)), d.spec)
    problem = MatmulProblem(*types, *specs, Epilogue.RELU_AUX, aux=bits.spec)
    own_pass = MatmulPass(problem, 0, product.spec if variant.once else None)
    call = Call((0, 0, 0, 0, bits.address, d.address), 0)
    own_pass.launch(call, product.address if variant.once else d.address, 0)
    assert np.array_equal(bits.bytes, bits.expected())
    assert np.array_equal(d.values(), np.where(values <= 0, 0.0, values), equal_nan=True)


def check_operand_sum(product: Product, epilogue: Epilogue) -> None:
    case, variant = product.case, product.variant
    (m, n), k = case.shape, case.k
    a = product.batch((case.batch, m, k), variant.operand, case.operand)
    b = product.batch((case.batch, k, n), variant.operand, case.operand)
    of_a = epilogue is Epilogue.BGRADA
    sums = product.vector(case.batch * (m if of_a else n))
    product.run(epilogue, sums, None, a, b)
    terms = a.values().swapaxes(1, 2) if of_a else b.values()
    check_sums(sums, terms, np.zeros(terms.shape), written=True)
    for operand in (a, b, product.d):
        operand.guarded.assert_unchanged()


def check_sums(sums: Guarded, terms: Array, limit: Array, *, written: bool) -> None:
    """Checks a bias gradient: the sums over rows of a batch of terms, each of which may be off by `limit`."""
    if not written:
        sums.assert_unchanged()
        return
    expected = terms.sum(axis=1)
    tolerance = rounding(sums.dtype, expected) + limit.sum(axis=1)
    tolerance = tolerance + terms.shape[1] * EPS32 * np.abs(terms).sum(axis=1)
    assert_close("sums", sums.values().reshape(expected.shape), expected, tolerance)
