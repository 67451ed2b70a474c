"""The kernels of LayerNorm, RMSNorm and their gradients, launched by the runtime, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.kernels import norm as family
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.norm import Norm, NormBackwardPass, NormForwardPass
from lt_runtime.layout import Layout
from lt_runtime.problem import DType
from tests.host_kernels.arrays import FLAT, Guarded, numbers, vector
from tests.host_kernels.cases import FEW, orders, seeds, suit_place, suit_shape
from tests.host_kernels.harness import FORWARD, REVERSE, SHUFFLED, HostKernels
from tests.host_kernels.products import Memory, spec_of
from tests.host_kernels.variants import BF16, F16, F32
from tests.support.norm_checks import check_backward, check_forward
from tests.support.strategies import Placement, placements

Array = NDArray[np.float64]
LAYER, RMS = Norm(F32, F32, has_mean=True), Norm(F32, F32, has_mean=False)
NORMS = (
    *(LAYER, RMS, Norm(BF16, BF16, has_mean=True), Norm(BF16, BF16, has_mean=False)),
    *(Norm(BF16, F32, has_mean=True), Norm(F16, F16, has_mean=False), Norm(F16, F32, has_mean=False)),
)


def name_of(norm: Norm) -> str:
    return f"{norm.dtype.value}-{norm.weight.value}-{'layer' if norm.has_mean else 'rms'}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test case: forward and backward of a norm over the same rows.

    Attributes:
        aligned: whether the kernels for aligned rows are used.
        places: placements of x, the residual, y, the sum, dy, the gradient that is added to dx, and dx.
        over: which operands y, the sum and dx overwrite: none (0), or one of two choices (1 and 2).
        offset: elements before weight, bias and their gradients, unless they are aligned.
        accumulate: whether the gradients of weight and bias are added to their buffers.
        wanted: whether the gradients of x, weight and bias are wanted.
        shift: a number that is added to all elements of x.
    """

    shape: tuple[int, int]
    aligned: bool = True
    places: tuple[Placement, ...] = (FLAT,) * 7
    over: int = 0
    offset: int = 0
    adds: bool = True
    has_bias: bool = True
    accumulate: bool = False
    wanted: tuple[bool, bool, bool] = (True, True, True)
    shift: float = 0.0
    eps: float = 1e-5
    order: int = FORWARD
    seed: int = 0

    def suited(self, dtype: DType) -> Case:
        """Returns the case, changed as little as possible so that the kernels for aligned rows, or others, fit it."""
        shape = suit_shape(self.shape, aligned=self.aligned)
        places = [suit_place(each, shape, dtype, aligned=self.aligned) for each in self.places]
        if not self.aligned:
            places[0], places[4] = (replace(each, offset=each.offset | 1) for each in (places[0], places[4]))
        return replace(self, shape=shape, places=tuple(places), offset=0 if self.aligned else self.offset)


cases = st.builds(
    Case,
    shape=st.tuples(st.integers(1, 40), st.one_of(st.integers(1, 300), st.sampled_from((64, 512, 1000, 2056)))),
    aligned=st.booleans(),
    places=st.tuples(*(placements for _ in range(7))),
    over=st.integers(0, 2),
    offset=st.integers(0, 3),
    adds=st.booleans(),
    has_bias=st.booleans(),
    accumulate=st.booleans(),
    wanted=st.sampled_from(((True, True, True), (True, True, False), (False, True, True), (True, False, False))),
    shift=st.sampled_from((0.0, 0.0, 1000.0)),
    eps=st.sampled_from((1e-5, 1e-2)),
    order=orders,
    seed=seeds,
)


@pytest.fixture(scope="module", autouse=True)
def shared_memory() -> Iterator[list[int]]:
    """Bytes of shared memory that a block may have; tests may change the number."""
    size = [227 << 10]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(family, "device_attributes", lambda *_: tuple(size))
        yield size


class Rows:
    """The operands of both passes in guarded memory."""

    def __init__(self, norm: Norm, case: Case) -> None:
        self.norm, self.case, generator = norm, case, np.random.default_rng(case.seed)
        (_, cols), places = case.shape, iter(case.places)

        def matrix(shift: float = 0.0) -> Guarded:
            values = numbers(generator, case.shape, norm.dtype).astype(np.float32) + np.float32(shift)
            return Guarded(values, next(places), norm.dtype)

        self.x, self.add, self.y, self.total = matrix(case.shift), matrix(), matrix(), matrix()
        self.dy, self.add_dx, self.dx = matrix(), matrix(), matrix()
        # The result y overwrites x or the residual, the sum the other of the two; dx overwrites dy or the added
        # gradient.
        if case.over:
            first = case.over == 1 or not case.adds
            self.y, self.total = (self.x, self.add) if first else (self.add, self.x)
            self.dx = self.dy if first else self.add_dx
        self.weight, self.bias, self.dweight, self.dbias = (
            vector(numbers(generator, (cols,), norm.weight), norm.weight, case.offset) for _ in range(4)
        )

    @property
    def has_bias(self) -> bool:
        return self.norm.has_mean and self.case.has_bias

    @property
    def alignment(self) -> int:
        return min(spec_of(each).alignment for each in (self.weight, self.bias))

    def forward(self) -> tuple[Array, Array, Array, Array]:
        """Runs the forward pass; returns y, the sum, the means and the reciprocal deviations."""
        case, (rows, _) = self.case, self.case.shape
        mean, rstd = (vector(np.full(rows, np.nan), F32) for _ in range(2))
        added = [spec_of(each) if case.adds else None for each in (self.add, self.total)]
        matrices = spec_of(self.x), *added, spec_of(self.y)
        launched = NormForwardPass(self.norm, matrices, self.alignment, case.eps, 0)
        bias, add = self.bias.address if self.has_bias else 0, self.add.address if case.adds else 0
        results = self.y.address, self.total.address if case.adds else 0, mean.address, rstd.address
        self._launch(launched, (self.x.address, self.weight.address, bias, add, *results))
        return self.y.values(), self.total.values(), mean.values()[0], rstd.values()[0]

    def backward(self, mean: NDArray[Any], rstd: NDArray[Any]) -> None:
        """Runs the backward pass with the given means and reciprocal deviations."""
        case, (wants_dx, wants_dweight, wants_dbias) = self.case, self.wanted
        adds, statistics = case.adds and wants_dx, [vector(each, F32) for each in (mean, rstd)]
        results = spec_of(self.add_dx) if adds else None, spec_of(self.dx) if wants_dx else None
        matrices, sums = (spec_of(self.dy), spec_of(self.x), *results), wants_dweight or wants_dbias
        launched = NormBackwardPass(self.norm, matrices, self.alignment, sums, case.accumulate, 0)
        operands = [self.dy, self.x, self.weight, *statistics]
        given = ((self.add_dx, adds), (self.dx, wants_dx), (self.dweight, wants_dweight), (self.dbias, wants_dbias))
        addresses = [each.address for each in operands] + [each.address if is_given else 0 for each, is_given in given]
        self._launch(launched, tuple(addresses))

    @property
    def wanted(self) -> tuple[bool, bool, bool]:
        *others, dbias = self.case.wanted
        return (*others, dbias and self.norm.has_mean)  # type: ignore[return-value]

    def _launch(self, launched: Any, addresses: tuple[int, ...]) -> None:
        memory: Any = Memory()
        launched.launch(Call(addresses, 0), memory)
        memory.check()


def check(rows: Rows) -> None:
    """Runs forward, then backward, each on the present operands, and compares all results with the reference."""
    norm, case, weight = rows.norm, rows.case, rows.weight.array[0]
    x, add = (each.array.astype(np.float64) for each in (rows.x, rows.add))
    total = (x + add).astype(np.float32).astype(norm.dtype.numpy) if case.adds else rows.x.array.copy()
    y, written, mean, rstd = rows.forward()
    if case.adds:
        np.testing.assert_array_equal(written, total.astype(np.float64))
    statistics = mean if norm.has_mean else None, rstd
    check_forward(total, weight, rows.bias.array[0] if rows.has_bias else None, case.eps, (y, *statistics))
    # Backward has operands of its own, because y may lie over x.
    rows = Rows(norm, case)
    dy, x, add, *starts = (each.array.copy() for each in (rows.dy, rows.x, rows.add_dx, rows.dweight, rows.dbias))
    exact_mean = x.astype(np.float64).mean(axis=1)
    variances = ((x - exact_mean[:, None] if norm.has_mean else x.astype(np.float64)) ** 2).mean(axis=1)
    mean, rstd = exact_mean.astype(np.float32), (1.0 / np.sqrt(variances + case.eps)).astype(np.float32)
    rows.backward(mean, rstd)
    made = [rows.dx.values(), *(each.values()[0] for each in (rows.dweight, rows.dbias))]
    begun = [each[0].astype(np.float64) if case.accumulate else 0.0 for each in starts]
    results = [each if wanted else None for each, wanted in zip(made, rows.wanted, strict=True)]
    statistics = mean if norm.has_mean else None, rstd
    check_backward((dy, x, weight), statistics, add if case.adds else None, begun, results)
    unwritten = [rows.weight, rows.bias, rows.x, *(() if case.over else (rows.dy, rows.add_dx))]
    unwritten += [each for each, wanted in zip((rows.dweight, rows.dbias), rows.wanted[1:], strict=True) if not wanted]
    for each in unwritten:
        each.assert_unchanged()


EXAMPLE = Case(shape=(40, 136))
"""A test case in which a block processes several groups of rows, and adds up their sums for the weight's gradient."""
WARPS = Case(shape=(9, 1000), aligned=False, accumulate=True, shift=1000.0)
"""A test case in which several warps share a row, and the last octet of a row is not whole."""


@pytest.mark.parametrize("norm", NORMS, ids=name_of)
@FEW
@example(drawn=EXAMPLE)
@example(drawn=replace(EXAMPLE, aligned=False, shape=(40, 77)))
@example(drawn=WARPS)
@example(drawn=replace(WARPS, aligned=True, over=1))
@given(drawn=cases)
def test_norms(norm: Norm, drawn: Case) -> None:
    case = drawn.suited(norm.dtype)
    check(Rows(norm, case))


WIDE = [(5, 4104), (4, 8000), (3, 16384), (3, 20000), (4, 33000)]
"""Shapes whose rows need a large block, or do not fit into registers."""


@pytest.mark.parametrize("shape", WIDE)
@pytest.mark.parametrize("norm", [LAYER, Norm(BF16, BF16, has_mean=True), Norm(BF16, F32, has_mean=False)], ids=name_of)
@pytest.mark.parametrize("aligned", [True, False])
def test_wide_rows(norm: Norm, shape: tuple[int, int], aligned: bool) -> None:
    for over in (0, 1):
        case = Case(shape=shape, aligned=aligned, over=over, accumulate=over == 1, shift=100.0).suited(norm.dtype)
        check(Rows(norm, case))


def test_long_rows_without_shared_memory(shared_memory: list[int]) -> None:
    """Without enough shared memory, the sums of a block's rows are kept in global memory, and have the same bits."""
    results = []
    for size in (227 << 10, 1 << 10):
        shared_memory[:] = [size]
        rows = Rows(LAYER, Case(shape=(7, 20000)))
        check(rows)
        rows.backward(np.zeros(7), np.ones(7))
        results.append((rows.dweight.array.tobytes(), rows.dbias.array.tobytes()))
    shared_memory[:] = [227 << 10]
    assert results[0] == results[1]


@pytest.mark.parametrize("norm", [LAYER, RMS, Norm(BF16, BF16, has_mean=True)], ids=name_of)
@pytest.mark.parametrize("shape", [(300, 24), (40, 136), (30, 1000), (7, 4104), (7, 20000)])
def test_the_order_of_execution_does_not_reach_the_bits(host: HostKernels, norm: Norm, shape: tuple[int, int]) -> None:
    def bits(order: int) -> bytes:
        rows = Rows(norm, Case(shape=shape))
        with host.in_order(order):
            _, _, mean, rstd = rows.forward()
            rows.backward(mean if norm.has_mean else np.zeros(len(rstd)), rstd)
        return b"".join(each.array.tobytes() for each in (rows.y, rows.total, rows.dx, rows.dweight, rows.dbias))

    assert bits(FORWARD) == bits(REVERSE) == bits(SHUFFLED)


@pytest.mark.parametrize("norm", [LAYER, RMS, Norm(BF16, BF16, has_mean=True)], ids=name_of)
def test_special_rows(norm: Norm) -> None:
    """A row of equal numbers has variance 0. A NaN or infinity makes its own row NaN, and leaves other rows finite."""
    case = Case(shape=(4, 72), adds=False, has_bias=False)
    rows = Rows(norm, case)
    rows.x.array[0], rows.x.array[1, 3], rows.x.array[2, 71] = 3.1, np.nan, np.inf
    rows.x._before[...] = rows.x._bytes
    y, _, _, rstd = rows.forward()
    if norm.has_mean:
        np.testing.assert_array_equal(y[0], 0.0)
        assert rstd[0] == pytest.approx(case.eps**-0.5)
        assert np.isnan(y[2]).all()
    assert np.isnan(y[1]).all()
    assert np.isfinite(y[3]).all()


def test_no_rows_have_gradients_of_zero() -> None:
    dweight, dbias = vector(np.full(24, 2.0), F32), vector(np.full(24, 3.0), F32)
    empty = Layout(0, 24, spec_of(dweight).layout.order, 24)
    spec: Any = replace(spec_of(dweight), layout=empty)
    for accumulate in (True, False):
        launched = NormBackwardPass(LAYER, (spec, spec, None, spec), 16, True, accumulate, 0)
        memory: Any = Memory()
        launched.launch(Call((0, 0, dweight.address, 0, 0, 0, 0, dweight.address, dbias.address), 0), memory)
        assert (dweight.values() == (2.0 if accumulate else 0.0)).all()
        assert (dbias.values() == (3.0 if accumulate else 0.0)).all()
