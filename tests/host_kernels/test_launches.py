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
from lt_runtime.gpu.memory import ALIGNMENT, MAX_TICKETS
from lt_runtime.layout import packed
from lt_runtime.planning import launches, tiling
from lt_runtime.planning.launches import BackwardPass, DropoutState, ForwardPass
from lt_runtime.problem import Activation, BackwardProblem, Compute, ForwardProblem, Saved, Spec
from lt_runtime.reference import activate, derivative
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, numbers, vector
from tests.host_kernels.cases import MORE, Drops, Shape, drops, seeds, shapes, suit_place, suit_shape
from tests.host_kernels.harness import HostKernel, HostKernels
from tests.host_kernels.variants import F32
from tests.strategies import Placement, placements

Array = NDArray[np.float64]
GELU = Activation("gelu")
UNUSED = Spec(packed(1, 1))
SMALL_GPU = DeviceInfo(0, "", 90, multiprocessors=3, memory=0)
"""So small that a few rows are several parts."""


@pytest.fixture(scope="module", autouse=True)
def _on_the_cpu(host: HostKernels) -> Iterator[None]:
    def get(entry: str, macros: Macros, device: int) -> HostKernel:
        # the CPU's kernels are the same whatever a multiprocessor shall hold
        return host.get(entry, tuple((name, "1" if name == "BLOCKS" else value) for name, value in macros), device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launches, "get_kernel", get)
        patch.setattr(tiling, "device_info", lambda _: SMALL_GPU)
        yield


def spec_of(matrix: Guarded) -> Spec:
    """The matrix as the runtime's problems record it."""
    return Spec(matrix.layout, min(ALIGNMENT, matrix.address & -matrix.address))


@dataclass(frozen=True)
class PassCase:
    """A pass with GELU, forward or backward.

    Attributes:
        vector: whether there is a bias, or its gradient is wanted.
        matrix: whether the pre-activation is kept, or dz is wanted.
        flag: forward, whether the product is in y although the pre-activation is kept; backward, whether db is added
            to what it holds.
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


def run_forward(case: PassCase, source: Guarded, y: Guarded, z: Guarded, bias: Guarded) -> None:
    problem = ForwardProblem(
        F32,
        Compute.FLOAT32,
        GELU,
        x=UNUSED,
        w=UNUSED,
        y=spec_of(y),
        bias=16 if case.vector else None,
        preactivation=spec_of(z) if case.matrix else None,
        dropout=case.drops is not None,
    )
    state, _kept = case.state()
    address = bias.address if case.vector else 0
    forward = ForwardPass(problem, 0, in_place=source is y, adds_bias=case.vector)
    forward.run(source.address, address, y.address, dropout=state, stream=0)


@MORE
@given(drawn=cases)
def test_forward_pass(drawn: PassCase) -> None:
    case = drawn.suited()
    generator = np.random.default_rng(case.seed)
    in_place = case.flag or not case.matrix
    product = numbers(generator, case.shape, F32)
    y, z, _ = (Guarded(product, place) for place in case.places)
    bias = vector(numbers(generator, case.shape[1:], F32), F32)
    run_forward(case, y if in_place else z, y, z, bias)

    added = bias.array.astype(np.float64) if case.vector else np.zeros((1, case.shape[1]))
    sums, factors = product.astype(np.float64) + added, case.factors()
    size = 1.0 + np.abs(product) + np.abs(added)
    assert_close("y", y.values(), activate(sums, GELU) * factors, 10 * EPS32 * size * np.maximum(factors, 1.0))
    assert_close("z", z.values(), product if in_place else sums, EPS32 * size)
    bias.assert_unchanged()


def run_backward(case: PassCase, dy: Guarded, saved: Guarded, dz: Guarded, db: Guarded) -> None:
    problem = BackwardProblem(
        F32,
        Compute.FLOAT32,
        GELU,
        x=UNUSED,
        w=UNUSED,
        dy=spec_of(dy),
        saved=Saved.PREACTIVATION,
        saved_spec=spec_of(saved),
        dx=None,
        dw=None,
        db=case.vector,
        dropout=case.drops is not None,
        accumulate=case.flag,
    )
    backward = BackwardPass(problem, spec_of(dz) if case.matrix else None, 0)
    partial = Guarded(np.full((1, max(backward.partial_bytes // 4, 1)), np.nan), FLAT, F32)
    tickets = vector(np.zeros(MAX_TICKETS), F32)
    state, _kept = case.state()
    backward.run(
        dy.address, saved.address, dz.address, db.address, partial.address, tickets.address, dropout=state, stream=0
    )
    partial.values()
    tickets.assert_unchanged()  # zero again


@MORE
@example(
    drawn=PassCase(
        shape=(700, 40),
        vector=True,
        matrix=True,
        flag=True,
        drops=None,
        places=(FLAT, FLAT, Placement(column_major=True, gap=1, offset=1)),
        aligned=(True, True, False),
        seed=0,
    )
)
@given(drawn=cases)
def test_backward_pass(drawn: PassCase) -> None:
    case = drawn.suited()
    generator = np.random.default_rng(case.seed)
    dy, saved = (Guarded(numbers(generator, case.shape, F32), place) for place in case.places[:2])
    dz, db = Guarded(np.zeros(case.shape), case.places[2], F32), vector(numbers(generator, case.shape[1:], F32), F32)
    start = db.array[0].astype(np.float64) if case.flag else np.zeros(case.shape[1])
    run_backward(case, dy, saved, dz, db)

    factors = case.factors()
    expected = dy.array.astype(np.float64) * derivative(saved.array, GELU) * factors
    limit = 18 * EPS32 * np.abs(dy.array) * np.maximum(factors, 1.0) * (1.0 + np.abs(saved.array))
    if case.matrix:
        assert_close("dz", dz.values(), expected, limit)
    else:
        dz.assert_unchanged()
    if case.vector:
        additions = (case.shape[0] + 2) * EPS32 * (np.abs(expected).sum(axis=0) + np.abs(start))
        assert_close("db", db.values()[0], start + expected.sum(axis=0), limit.sum(axis=0) + additions)
    else:
        db.assert_unchanged()
