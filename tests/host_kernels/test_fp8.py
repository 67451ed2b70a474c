"""FP8 casts by the kernel against NumPy's, bit for bit."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lt_runtime.fp8 import Prologue
from lt_runtime.kernels import fp8, tiling
from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.kernels.fp8 import CastGatedPass, CastPass, CastRowsPass
from lt_runtime.kernels.gated import GatedPass
from lt_runtime.kernels.tiling import Tiling
from lt_runtime.problem import Activation, ActivationName, Derivative, DType, Philox, Saved, keep_threshold
from lt_runtime.reference import activate, amax_of, cast_fp8, derivative, dropout_scale
from lt_runtime.reference.fp8 import FP8_TYPES, cast_fp8_rows
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, numbers, rounding, vector
from tests.host_kernels.cases import FEW, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.products import Memory, spec_of
from tests.host_kernels.variants import BF16, TYPES
from tests.support.strategies import Placement, placements

_SPECIAL = (np.nan, -np.nan, np.inf, -np.inf, 3e38, -3e38, 448.0, 464.0, 464.1, 57344.0, 61440.0, 1e-40, -0.0)
_WIDTHS = (1, 5, 16, 40, 128, 144, 200, 264)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A test case: a cast of a matrix to FP8.

    Attributes:
        aligned: whether rows begin at multiples of 16 bytes, and rows and columns are multiples of 16.
        wanted: whether to write the result by rows, its transpose, and the largest absolute value.
        short: whether the grid has a single block in y, which processes several tiles one after the other.
    """

    shape: tuple[int, int]
    aligned: bool
    places: tuple[Placement, ...]
    wanted: tuple[bool, bool, bool]
    scale: float
    special: bool
    short: bool
    order: int
    seed: int


cases = st.builds(
    Case,
    shape=st.tuples(st.sampled_from(_WIDTHS), st.sampled_from(_WIDTHS)),
    aligned=st.booleans(),
    places=st.tuples(*(placements for _ in range(3))),
    wanted=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    scale=st.sampled_from((1.0, 0.25, 2.0**9, 0.3)),
    special=st.booleans(),
    short=st.booleans(),
    order=orders,
    seed=seeds,
)


# A case whose grid has a single block in y, which processes two tiles: the second overwrites the first in shared
# memory.
_TWO_TILES = Case(
    shape=(144, 40),
    aligned=True,
    places=(FLAT,) * 3,
    wanted=(True,) * 3,
    scale=1.0,
    special=False,
    short=True,
    order=0,
    seed=0,
)


def _suited(case: Case, place: Placement, width: int, itemsize: int) -> Placement:
    """The case's placement, or if the case is aligned, one whose rows begin at multiples of 16 bytes."""
    if not case.aligned:
        return place
    step = 16 // itemsize
    return Placement(column_major=False, gap=-width % step + step * place.gap, offset=step * place.offset)


@pytest.mark.parametrize("to", FP8_TYPES)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
@FEW
@given(case=cases)
@example(case=_TWO_TILES)
@example(case=replace(_TWO_TILES, aligned=False))
def test_casts(host: HostKernels, dtype: DType, to: str, case: Case) -> None:
    rows, cols = (-(-each // 16) * 16 if case.aligned else each for each in case.shape)
    generator = np.random.default_rng(case.seed)
    values = numbers(generator, (rows, cols), dtype)
    if case.special:
        with np.errstate(over="ignore"):
            values.flat[: len(_SPECIAL)] = np.array(_SPECIAL).astype(values.dtype)[: values.size]
    x = Guarded(values, _suited(case, case.places[0], cols, dtype.itemsize))
    out, transposed = (
        Guarded(np.zeros(shape, FP8_TYPES[to]), _suited(case, place, shape[1], 1))
        for shape, place in zip(((rows, cols), (cols, rows)), case.places[1:], strict=True)
    )
    specs = [spec_of(each) if wanted else None for each, wanted in zip((out, transposed), case.wanted, strict=False)]
    before = np.float32([0.5])
    scale, amax = np.float32([case.scale]), before.copy()
    with pytest.MonkeyPatch.context() as patch, host.in_order(case.order):
        patch.setattr(fp8, "check_fp8", lambda _: None)
        if case.short:
            patch.setattr(fp8, "square_tiles", lambda layout, **_: Tiling((-(-layout.cols // 128), 1), (16, 16)))
        made = CastPass(dtype, to, spec_of(x), *specs, 0)
    memory = Memory()
    addresses = x.address, scale.ctypes.data, out.address, transposed.address, amax.ctypes.data * case.wanted[2]
    made.launch(Call(addresses, 0), memory)  # type: ignore[arg-type]
    with np.errstate(over="ignore", invalid="ignore"):
        expected = cast_fp8(x.array, case.scale, to)
    for found, wanted, exact in zip((out, transposed), case.wanted, (expected, expected.T), strict=False):
        found.values()
        if wanted:
            np.testing.assert_array_equal(found.array.copy().view(np.uint8), exact.copy().view(np.uint8))
        else:
            found.assert_unchanged()
    largest = amax_of(np.array([0.5, amax_of(x.array)])) if case.wanted[2] else np.float32(0.5)
    np.testing.assert_array_equal(amax[0], largest)
    x.assert_unchanged()


@pytest.mark.parametrize("to", FP8_TYPES)
@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
@FEW
@given(case=cases)
@example(case=_TWO_TILES)
@example(case=replace(_TWO_TILES, aligned=False, special=True))
def test_casts_with_a_scale_for_each_row(host: HostKernels, dtype: DType, to: str, case: Case) -> None:
    """Rows and columns are of magnitudes that differ by 2^12, or by 2^124 outside of FP16, or are zeros."""
    shape = _, cols = tuple(-(-each // 16) * 16 if case.aligned else each for each in case.shape)
    generator = np.random.default_rng(case.seed)
    range_of = 6 if dtype is DType.FLOAT16 else 62
    sizes = [generator.choice([0.0, 2.0**-range_of, 1.0, 2.0**6, 2.0**range_of], each) for each in shape]
    with np.errstate(over="ignore"):
        values = (numbers(generator, shape, DType.FLOAT32) * np.outer(*sizes)).astype(dtype.numpy)
        if case.special:
            values.flat[: len(_SPECIAL)] = np.array(_SPECIAL).astype(values.dtype)[: values.size]
    x = Guarded(values, _suited(case, case.places[0], cols, dtype.itemsize))
    made = [
        Guarded(np.zeros(each, FP8_TYPES[to]), _suited(case, place, each[1], 1))
        for each, place in zip((shape, shape[::-1]), case.places[1:], strict=True)
    ]
    scales = [vector(np.full(each, np.nan), DType.FLOAT32) for each in shape]
    specs = [spec_of(each) if wanted else None for each, wanted in zip(made, case.wanted, strict=False)]
    with pytest.MonkeyPatch.context() as patch, host.in_order(case.order):
        patch.setattr(fp8, "check_fp8", lambda _: None)
        patch.setattr(fp8, "driver_call", _fill)
        if case.short:
            patch.setattr(fp8, "square_tiles", lambda layout, **_: Tiling((-(-layout.cols // 128), 1), (16, 16)))
        made_pass = CastRowsPass(dtype, to, spec_of(x), *specs, 0)
        addresses = [each.address * case.wanted[i % 2] for i, each in enumerate((*made, *scales))]
        memory = Memory()
        made_pass.launch(Call((x.address, *addresses), 0), memory)  # type: ignore[arg-type]
    for source, found, inverse, wanted in zip((x.array, x.array.T), made, scales, case.wanted, strict=False):
        if not wanted:
            found.assert_unchanged()
            inverse.assert_unchanged()
            continue
        expected, factors = cast_fp8_rows(source, to)
        found.values()
        np.testing.assert_array_equal(found.array.copy().view(np.uint8), expected.view(np.uint8))
        np.testing.assert_array_equal(inverse.values()[0], factors)
    x.assert_unchanged()


def _fill(_: str, address: int, value: int, count: int, __: int) -> None:
    """The driver's memset of 32-bit words in host memory."""
    (ctypes.c_uint32 * count).from_address(address)[:] = [value] * count


@dataclass(frozen=True)
class Function:
    """An elementwise function before the cast: dropout of an activation, or backward of its derivative."""

    dtype: DType
    activation: ActivationName
    to: str
    dropout: bool
    backward: bool
    gated: bool = False

    def __str__(self) -> str:
        way = "gated" if self.gated else "backward" if self.backward else "forward"
        options = way, "dropout" if self.dropout else "whole"
        return "-".join([self.dtype.value, self.activation, self.to, *options])


FUNCTIONS = (
    Function(BF16, "gelu", "float8_e4m3fn", dropout=False, backward=False),
    Function(BF16, "sigmoid", "float8_e4m3fn", dropout=True, backward=False),
    Function(BF16, "gelu_erf", "float8_e4m3fn", dropout=False, backward=False, gated=True),
    Function(BF16, "silu", "float8_e4m3fn", dropout=True, backward=False, gated=True),
    Function(BF16, "none", "float8_e5m2", dropout=False, backward=True),
    Function(BF16, "gelu", "float8_e5m2", dropout=False, backward=True),
    Function(BF16, "silu", "float8_e4m3fn", dropout=True, backward=True),
)
_P = 0.25


@pytest.mark.parametrize("function", FUNCTIONS, ids=str)
@FEW
@given(case=cases, accumulate=st.booleans(), blocks=st.sampled_from((1, 2, 64)))
@example(case=_TWO_TILES, accumulate=True, blocks=1)
@example(case=_TWO_TILES, accumulate=True, blocks=2)
def test_functions(host: HostKernels, function: Function, case: Case, accumulate: bool, blocks: int) -> None:
    """A result must lie between the casts of the exact number minus and plus the error of FP32 arithmetic."""
    case, dtype, philox = replace(case, aligned=True), function.dtype, Philox(case.seed, 3, 5)
    rows, cols = shape = -(-case.shape[0] // 16) * 16, -(-case.shape[1] // 16) * 16
    generator, activation = np.random.default_rng(case.seed), Activation(function.activation)
    read = cols * (1 + function.gated)  # with a gate, x is the left half of a matrix
    x, saved = (
        Guarded(numbers(generator, (rows, width), dtype), _suited(case, place, width, 2))
        for place, width in zip(case.places, (read, cols), strict=False)
    )
    out, transposed = (
        Guarded(np.zeros(each, FP8_TYPES[function.to]), _suited(case, case.places[2], each[1], 1))
        for each in (shape, shape[::-1])
    )
    specs = [spec_of(each) if wanted else None for each, wanted in zip((out, transposed), case.wanted, strict=False)]
    scale, amax, db = np.float32([case.scale]), np.zeros(1, np.float32), vector(np.full(cols, 0.5), dtype)
    fp8_addresses = scale.ctypes.data, out.address, transposed.address, amax.ctypes.data
    dropout = DropoutState(keep_threshold(_P), philox) if function.dropout else None
    with pytest.MonkeyPatch.context() as patch, host.in_order(case.order):
        patch.setattr(fp8, "check_fp8", lambda _: None)
        patch.setattr(tiling, "_MOST_PARTS", blocks)
        if function.backward:
            reads = Saved.NOTHING if function.activation == "none" else Saved.PREACTIVATION
            of_saved = None if function.activation == "none" else spec_of(saved)
            derived = Derivative(activation, reads, of_saved, 256, function.dropout)
            back = CastPass(dtype, function.to, spec_of(x), *specs, 0, derived, accumulate=accumulate)
            memory = Memory(back.partial_bytes)
            pointers = x.address, *fp8_addresses, saved.address, db.address, memory.workspace
            back.launch(Call(pointers, 0, dropouts=(dropout, None)), memory)  # type: ignore[arg-type]
        else:
            of_x = spec_of(x)
            of_x = replace(of_x, layout=replace(of_x.layout, cols=cols))
            prologue = Prologue(activation, _P * function.dropout, function.gated)
            made = CastPass(dtype, function.to, of_x, *specs, 0, prologue)
            memory = Memory()
            made.launch(Call((x.address, *fp8_addresses), 0, dropouts=(dropout, None)), memory)  # type: ignore[arg-type]
    memory.check()
    values = x.array.astype(np.float64)
    if function.gated:
        gate, value = np.split(values, 2, axis=1)
        exact, error = activate(gate, activation) * value, (1 + np.abs(gate)) * np.abs(value)
    elif function.backward:
        exact, error = values * derivative(saved.array.astype(np.float64), activation), np.abs(values)
    else:
        exact, error = activate(values, activation), 1 + np.abs(values)
    factors = dropout_scale(shape, _P, philox) if function.dropout else np.float64(1)
    exact, error = exact * factors, 32 * EPS32 * error * factors
    casts = [cast_fp8(np.float32(each), case.scale, function.to) for each in (exact - error, exact, exact + error)]
    low, _, high = (each.astype(np.float64) for each in casts)
    for found, wanted, turned in ((out, case.wanted[0], False), (transposed, case.wanted[1], True)):
        values = found.values().T if turned else found.values()
        if wanted:
            assert ((low <= values) & (values <= high)).all()
        else:
            found.assert_unchanged()
    assert abs(float(amax[0]) - np.abs(exact).max()) <= error.max()
    if function.backward:
        sums = exact.sum(0) + 0.5 * accumulate
        bound = rounding(dtype, sums) + error.sum(0) + rows * EPS32 * np.abs(exact).sum(0)
        assert_close("db", db.values()[0], sums, bound)


@pytest.mark.parametrize("to", FP8_TYPES)
@pytest.mark.parametrize(("activation", "drops"), [("none", False), ("silu", True), ("gelu_erf", False)])
@FEW
@given(case=cases)
@example(case=_TWO_TILES)
def test_gradients_of_a_gate(host: HostKernels, activation: ActivationName, drops: bool, to: str, case: Case) -> None:
    """The gradients of gate and value are NumPy's casts of the gradients that gated_bwd writes, bit for bit."""
    shape = rows, cols = -(-case.shape[0] // 16) * 16, -(-case.shape[1] // 16) * 16
    wide, generator = (rows, 2 * cols), np.random.default_rng(case.seed)
    dy, h, dh = (Guarded(numbers(generator, each, BF16), FLAT) for each in (shape, wide, wide))
    out, transposed = (Guarded(np.zeros(each, FP8_TYPES[to])) for each in (wide, wide[::-1]))
    scales, amax = np.float32([case.scale, 2 * case.scale]), np.float32([0.5, 0.25])
    words = [each.ctypes.data + 4 * i for i in range(2) for each in (scales, amax)]
    dropout = DropoutState(keep_threshold(_P), Philox(case.seed, 3, 5)) if drops else None
    with pytest.MonkeyPatch.context() as patch, host.in_order(case.order):
        patch.setattr(fp8, "check_fp8", lambda _: None)
        if case.short:
            patch.setattr(fp8, "square_tiles", lambda layout, **_: Tiling((-(-layout.cols // 128), 1), (16, 16)))
        specs = [spec_of(each) for each in (h, dy, dh)]
        plain = GatedPass(BF16, Activation(activation), drops, specs, False, 0)
        cast = CastGatedPass(to, Activation(activation), drops, spec_of(dy), 0)
        for made, results in ((plain, (dh.address,)), (cast, (out.address, transposed.address, *words))):
            memory = Memory()
            addresses = dy.address, h.address, *results
            made.launch(Call(addresses, 0, dropouts=(dropout, None)), memory)  # type: ignore[arg-type]
    halves = np.split(dh.values().astype(BF16.numpy), 2, axis=1)
    expected = np.concatenate([cast_fp8(each, scale, to) for each, scale in zip(halves, scales, strict=True)], axis=1)
    np.testing.assert_array_equal(out.values(), expected.astype(np.float64))
    np.testing.assert_array_equal(transposed.values(), expected.T.astype(np.float64))
    np.testing.assert_array_equal(amax, [max(0.5, amax_of(halves[0])), max(0.25, amax_of(halves[1]))])
    h.assert_unchanged()
    dy.assert_unchanged()
