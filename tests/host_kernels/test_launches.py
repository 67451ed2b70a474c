"""The runtime's own launches of passes over a matrix, with the kernels on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.gpu.compiler import Macros
from lt_runtime.gpu.devices import DeviceInfo
from lt_runtime.gpu.memory import MAX_TICKETS
from lt_runtime.kernels import kernel as kernels
from lt_runtime.kernels import tiling
from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.epilogue import BackwardPass, ForwardPass, Sums
from lt_runtime.kernels.kernel import Entry
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.plans.strategies import unchanged
from lt_runtime.problem import ALIGNMENT, Activation, Compute, Derivative, ForwardProblem, Saved, Spec
from lt_runtime.reference import activate, derivative
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, mask, numbers, rounding, vector
from tests.host_kernels.cases import FEW, MORE, Drops, Shape, drops, seeds, shapes, suit_place, suit_shape
from tests.host_kernels.harness import HostKernel, HostKernels
from tests.host_kernels.variants import BF16, F32
from tests.support.strategies import Placement, placements

Array = NDArray[np.float64]
GELU, RELU = Activation("gelu"), Activation("relu")
UNUSED = Spec(packed(1, 1))
SMALL_GPU = DeviceInfo(0, "", 90, multiprocessors=3, memory=0)
"""So small that a few rows are several parts."""


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu(host: HostKernels) -> Iterator[None]:
    def get(entry: Entry, macros: Macros, device: int) -> HostKernel:
        # the CPU's kernels are the same whatever a multiprocessor shall hold
        return host.get(entry, tuple((name, "1" if name == "BLOCKS" else value) for name, value in macros), device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "get_kernel", get)
        patch.setattr(tiling, "device_info", lambda _: SMALL_GPU)
        yield


def spec_of(matrix: Guarded) -> Spec:
    """The matrix as the runtime's problems record it."""
    return Spec(matrix.layout, min(ALIGNMENT, matrix.address & -matrix.address))


@dataclass(frozen=True)
class PassCase:
    """A pass, forward or backward.

    Attributes:
        vector: whether there is a bias, or its gradient is wanted.
        matrix: whether the product lies apart from y, or dz is wanted.
        flag: backward, whether db is added to what it holds.
        places: y and z, and nothing; dy, z and dz.
        aligned: whether each of them has lines on 16 bytes; if any has, rows are whole octets.
    """

    shape: Shape
    vector: bool
    matrix: bool
    flag: bool
    drops: Drops | None
    places: tuple[Placement, Placement, Placement]
    aligned: tuple[bool, bool, bool]
    seed: int

    def suited(self) -> PassCase:
        """The nearest case that is aligned as it says."""
        shape = suit_shape(self.shape, aligned=any(self.aligned))
        orders = (
            None,
            None,
            self.places[2].column_major,
        )  # dz in any order, so that aligned operands meet a transposed one
        y, z, dz = (
            suit_place(place, shape, F32, aligned=aligned, column_major=order)
            for place, aligned, order in zip(self.places, self.aligned, orders, strict=True)
        )
        return replace(self, shape=shape, places=(y, z, dz))

    def factors(self) -> Array:
        return np.ones(self.shape) if self.drops is None else self.drops.factors(self.shape)

    def state(self) -> tuple[DropoutState | None, object]:
        """What a launch needs of dropout, and what must be kept until then."""
        return (None, None) if self.drops is None else self.drops.state()


cases = st.builds(
    PassCase,
    # the longer ones are several parts to the backward pass, the wide ones have more columns of blocks than a wave
    shape=st.one_of(
        shapes,
        st.tuples(st.sampled_from((64, 100, 333, 521, 700)), st.sampled_from((1, 10, 33))),
        st.tuples(st.integers(1, 9), st.sampled_from((1600, 2000))),
    ),
    vector=st.booleans(),
    matrix=st.booleans(),
    flag=st.booleans(),
    drops=st.one_of(st.none(), drops),
    places=st.tuples(placements, placements, placements),
    aligned=st.one_of(
        st.tuples(st.just(True), st.just(True), st.booleans()),
        st.tuples(st.booleans(), st.booleans(), st.booleans()),
    ),
    seed=seeds,
)


def run_forward(case: PassCase, product: Guarded, y: Guarded, kept: Guarded | None, bias: Guarded) -> None:
    problem = ForwardProblem(
        y.dtype,
        Compute.FLOAT32,
        GELU,
        x=UNUSED,
        w=UNUSED,
        y=spec_of(y),
        bias=16 if case.vector else None,
        dropout=case.drops is not None,
    )
    state, _kept = case.state()
    address = bias.address if case.vector else 0
    forward = ForwardPass(
        problem,
        0,
        product=spec_of(product),
        product_dtype=product.dtype,
        kept=spec_of(kept) if kept else None,
        adds_bias=case.vector,
    )
    forward.run(product.address, address, y.address, kept.address if kept else 0, state, 0)


@MORE
@given(drawn=cases)
def test_forward_pass(drawn: PassCase) -> None:
    case = drawn.suited()
    generator = np.random.default_rng(case.seed)
    product = numbers(generator, case.shape, F32)
    y, z, _ = (Guarded(product, place) for place in case.places)
    bias = vector(numbers(generator, case.shape[1:], F32), F32)
    source = z if case.matrix else y
    run_forward(case, source, y, z if case.matrix and case.vector else None, bias)

    added = bias.array.astype(np.float64) if case.vector else np.zeros((1, case.shape[1]))
    sums, factors = product.astype(np.float64) + added, case.factors()
    size = 1.0 + np.abs(product) + np.abs(added)
    assert_close("y", y.values(), activate(sums, GELU) * factors, 10 * EPS32 * size * np.maximum(factors, 1.0))
    assert_close("z", z.values(), sums if case.matrix else product, EPS32 * size)
    bias.assert_unchanged()


@FEW
@given(drawn=cases)
def test_forward_pass_over_an_fp32_product(drawn: PassCase) -> None:
    case = drawn.suited()
    generator = np.random.default_rng(case.seed)
    product = Guarded(numbers(generator, case.shape, F32), case.places[2])
    y, kept = (Guarded(np.zeros(case.shape), place, BF16) for place in case.places[:2])
    bias = vector(numbers(generator, case.shape[1:], BF16), BF16)
    run_forward(case, product, y, kept if case.matrix else None, bias)

    added = bias.array.astype(np.float32) if case.vector else np.zeros((1, case.shape[1]), np.float32)
    sums, factors = product.array + added, case.factors()
    expected = activate(sums.astype(np.float64), GELU) * factors
    size = 1.0 + np.abs(sums)
    assert_close("y", y.values(), expected, rounding(BF16, expected) + 10 * EPS32 * size * np.maximum(factors, 1.0))
    if case.matrix:
        assert np.array_equal(kept.values(), sums.astype(BF16.numpy).astype(np.float64)), "rounded once"
    product.assert_unchanged()


def mask_spec(shape: Shape, bits: Guarded) -> Spec:
    """A mask's rows, counted in bits as cuBLASLt does."""
    return Spec(Layout(*shape, Order.ROW, 8 * bits.matrix.row_stride))


@dataclass(frozen=True)
class Saving:
    """What the backward pass takes the derivative from.

    Attributes:
        slopes: the derivative, (rows, columns).
        error: of a slope, in units of FP32's rounding, for a gradient of 1.
    """

    derivative: Derivative
    operand: Guarded
    slopes: Array
    error: Array


def saving(case: PassCase, saved: Saved, z: NDArray[np.float32]) -> Saving:
    """GELU's pre-activation, ReLU's mask, or nothing at all."""
    if saved is Saved.PREACTIVATION:
        operand = Guarded(z, case.places[1])
        derived = Derivative(GELU, saved, spec_of(operand), dropout=case.drops is not None)
        return Saving(derived, operand, derivative(z, GELU), 18 * (1.0 + np.abs(z)))
    operand = mask(z > 0, case.places[1].gap)
    if saved is Saved.MASK:
        derived = Derivative(RELU, saved, mask_spec(case.shape, operand))
        return Saving(derived, operand, (z > 0).astype(np.float64), np.zeros(case.shape))
    return Saving(unchanged(None), operand, np.ones(case.shape), np.zeros(case.shape))


def run_backward(case: PassCase, saved: Saving, dy: Guarded, dz: Guarded | None, db: Guarded) -> None:
    sums = Sums(case.flag) if case.vector else None
    backward = BackwardPass(F32, saved.derivative, spec_of(dy), spec_of(dz) if dz else None, 0, sums=sums)
    partial = Guarded(np.full((1, max(backward.partial_bytes // 4, 1)), np.nan), FLAT, F32)
    tickets = vector(np.zeros(MAX_TICKETS), F32)
    state, _kept = case.state()
    addresses = (dy.address, saved.operand.address, dz.address if dz else 0, db.address)
    backward.run(*addresses, partial.address, tickets.address, dropout=state, stream=0)
    partial.values()
    tickets.assert_unchanged()  # zero again


def check_backward(case: PassCase, kind: Saved, *, in_place: bool = False) -> None:
    """Runs a pass of the given kind and compares what it makes; what it is not to make stays as it was."""
    generator = np.random.default_rng(case.seed)
    dy = Guarded(numbers(generator, case.shape, F32), case.places[0])
    gradient, saved = dy.array.astype(np.float64), saving(case, kind, numbers(generator, case.shape, F32))
    dz, db = Guarded(np.zeros(case.shape), case.places[2], F32), vector(numbers(generator, case.shape[1:], F32), F32)
    start = db.array[0].astype(np.float64) if case.flag else np.zeros(case.shape[1])
    target = (dy if in_place else dz) if case.matrix else None
    run_backward(case, saved, dy, target, db)

    factors = case.factors()
    expected = gradient * saved.slopes * factors
    limit = EPS32 * np.abs(gradient) * np.maximum(factors, 1.0) * saved.error
    if target is not None:
        assert_close("dz", target.values(), expected, limit)
    if case.vector:
        additions = (case.shape[0] + 2) * EPS32 * (np.abs(expected).sum(axis=0) + np.abs(start))
        assert_close("db", db.values()[0], start + expected.sum(axis=0), limit.sum(axis=0) + additions)
    for operand, is_result in ((dy, dy is target), (dz, dz is target), (db, case.vector), (saved.operand, False)):
        if not is_result:
            operand.assert_unchanged()


TALL = PassCase(
    shape=(700, 40),
    vector=True,
    matrix=True,
    flag=True,
    drops=None,
    places=(FLAT, FLAT, Placement(column_major=True, gap=1, offset=1)),
    aligned=(True, True, False),
    seed=0,
)
"""Blocks go over several rows, and share the sum."""


@MORE
@example(drawn=TALL)
@given(drawn=cases)
def test_backward_pass(drawn: PassCase) -> None:
    check_backward(drawn.suited(), Saved.PREACTIVATION)


@MORE
@example(drawn=TALL)
@given(drawn=cases)
def test_backward_pass_with_a_mask(drawn: PassCase) -> None:
    check_backward(replace(drawn.suited(), drops=None), Saved.MASK)


@MORE
@example(drawn=TALL, kind=Saved.PREACTIVATION)
@example(drawn=TALL, kind=Saved.MASK)
@given(drawn=cases, kind=st.sampled_from((Saved.PREACTIVATION, Saved.MASK)))
def test_backward_pass_in_place(drawn: PassCase, kind: Saved) -> None:
    case = drawn.suited()
    check_backward(replace(case, matrix=True, drops=None if kind is Saved.MASK else case.drops), kind, in_place=True)


@FEW
@example(drawn=TALL)
@given(drawn=cases)
def test_a_pass_that_only_sums(drawn: PassCase) -> None:
    check_backward(replace(drawn.suited(), vector=True, matrix=False, drops=None), Saved.NOTHING)
