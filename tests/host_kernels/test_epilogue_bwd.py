"""dz = dropout'(dy) · act'(saved) and the bias gradient against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.kernels.blocks import ColumnSum, Matrix
from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.epilogue import EPILOGUE_BWD, EpilogueBwdParams
from lt_runtime.kernels.tiling import OCTET, Access, Tiling, reduction
from lt_runtime.layout import packed
from lt_runtime.problem import Activation, DType, Philox, Saved, keep_scale, keep_threshold
from lt_runtime.reference import activate, derivative
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, mask, numbers, rounding, vector
from tests.host_kernels.cases import (
    FEW,
    NO_DROPOUT,
    Blocks,
    Drops,
    Shape,
    blocks,
    drops,
    orders,
    seeds,
    shapes,
    suit_place,
    suit_places,
    suit_shape,
    tall_blocks,
)
from tests.host_kernels.harness import REVERSE, HostKernels
from tests.host_kernels.variants import BACKWARD_EPILOGUES, F32, Backward
from tests.support.strategies import Placement, placements

Array = NDArray[np.float64]
WAVE = 6  # blocks, of a small GPU
# sixteen columns, which both ways to load take
SPECIAL = np.array(
    [[np.nan, 0.0, -0.0, 40.0, -40.0, 1e-30, -1e-30, 300.0, -300.0, 16.0, -16.0, 1e15, 1e30, -1e30, 3e38, -3e38]],
    np.float32,
)


@dataclass(frozen=True)
class BackwardCase:
    shape: Shape
    sums: bool  # the bias gradient is wanted; always where dz is not
    accumulate: bool  # to what it holds
    sum_offset: int
    in_place: bool  # dz over dy
    slope: float
    drops: Drops
    blocks: Blocks | None  # None leaves them to the runtime
    tall_blocks: Blocks  # instead, where the variant transposes
    order: int
    dy: Placement
    saved: Placement
    dz: Placement
    seed: int

    def suited(self, variant: Backward) -> BackwardCase:
        """The nearest case that the variant takes."""
        aligned, dtype = variant.access is Access.ALIGNED, variant.dtype
        shape = suit_shape(self.shape, aligned=aligned, flat=variant.access is Access.FLAT)
        dy, saved, dz = suit_places(variant.access, shape, *((at, dtype) for at in (self.dy, self.saved, self.dz)))
        if variant.transposes:
            dz = suit_place(self.dz, shape, dtype, aligned=aligned, column_major=True)
        blocks = self.tall_blocks if self.blocks and variant.transposes else self.blocks
        return replace(
            self,
            shape=shape,
            sums=self.sums or variant.dz == 0,
            in_place=self.in_place and variant.dz == 1,
            blocks=blocks if blocks and blocks.suit(variant.access) else None,
            dy=dy,
            saved=saved,
            dz=dz,
        )

    def tiling(self, variant: Backward) -> Tiling:
        if self.blocks:
            return self.blocks.tiling(self.shape)
        return reduction(
            packed(*self.shape), WAVE, transposes=variant.transposes, strips=variant.access is not Access.FLAT
        )


cases = st.builds(
    BackwardCase,
    shape=shapes,
    sums=st.sampled_from((True, True, False)),
    accumulate=st.booleans(),
    sum_offset=st.integers(0, 3),
    in_place=st.booleans(),
    slope=st.sampled_from((0.01, 0.25, 1.5, -0.5)),
    drops=drops,
    blocks=st.one_of(st.none(), blocks),
    tall_blocks=tall_blocks,
    order=orders,
    dy=placements,
    saved=placements,
    dz=placements,
    seed=seeds,
)


@dataclass(frozen=True)
class Operands:
    """Of one launch.

    Attributes:
        kept: for each element, the value that `saved` was made from.
    """

    dy: Guarded
    saved: Guarded
    kept: Array
    dz: Guarded | None
    db: Guarded
    partial: Guarded
    tickets: Guarded

    @classmethod
    def of(cls, case: BackwardCase, variant: Backward) -> Operands:
        generator, dtype = np.random.default_rng(case.seed), variant.dtype
        dy = Guarded(numbers(generator, case.shape, dtype), case.dy)
        saved, kept = saved_of(numbers(generator, case.shape, dtype), variant, case.saved)
        apart = Guarded(np.zeros(case.shape), case.dz, dtype)
        start = numbers(generator, case.shape[1:], dtype)
        (columns, parts), (x, _) = case.tiling(variant)
        is_flat = variant.access is Access.FLAT
        return cls(
            dy=dy,
            saved=saved,
            kept=kept,
            dz=None if variant.dz == 0 else dy if case.in_place else apart,
            db=vector(start if case.accumulate else np.full(case.shape[1], np.nan), dtype, case.sum_offset),
            partial=Guarded(np.full((parts, columns * (x + 2 * is_flat) * OCTET), np.nan), dtype=F32),
            tickets=vector(np.zeros(columns), F32),
        )

    @property
    def written(self) -> list[Guarded]:
        """Operands that hold results."""
        return [self.db] if self.dz is None else [self.db, self.dz]

    def column_sum(self, case: BackwardCase, *, in_parts: bool) -> ColumnSum:
        """Where the bias gradient goes; scratch memory only for sums in parts."""
        if not case.sums:
            return ColumnSum()
        scratch = (self.partial.address, self.tickets.address) if in_parts else (0, 0)
        return ColumnSum(self.db.address, *scratch, int(case.accumulate))


def saved_of(z: NDArray[Any], variant: Backward, place: Placement) -> tuple[Guarded, Array]:
    """What forward saves of a pre-activation, and an element each of what it stands for."""
    if variant.saved is Saved.MASK:
        return mask(z > 0, place.gap), (z > 0).astype(np.float64)
    values = activate(z, Activation(variant.activation)) if variant.saved is Saved.OUTPUT else z
    saved = Guarded(values, place, variant.dtype)
    return saved, saved.array.astype(np.float64)


def launch(host: HostKernels, variant: Backward, case: BackwardCase, operands: Operands, order: int) -> None:
    state, step = case.drops.state()
    tiling = case.tiling(variant)
    params = EpilogueBwdParams(
        dy=operands.dy.matrix,
        saved=Matrix() if variant.saved is Saved.NOTHING else operands.saved.matrix,
        dz=operands.dz.matrix if operands.dz else Matrix(),
        db=operands.column_sum(case, in_parts=tiling.grid[1] > 1 or variant.access is Access.FLAT),
        rows=case.shape[0],
        cols=case.shape[1],
        dropout=state.block() if variant.dropout else NO_DROPOUT,
        slope=case.slope,
    )
    host.get(EPILOGUE_BWD, variant.macros).launch(*tiling, params, order=order)
    assert step[0] == case.drops.philox.step
    operands.partial.values()
    operands.tickets.assert_unchanged()  # zero again


def expected_slopes(variant: Backward, saved: Array, slope: float) -> Array:
    """The activation's derivative at the saved values."""
    if variant.saved is Saved.NOTHING:
        return np.ones_like(saved)
    if variant.saved is Saved.PREACTIVATION:
        return derivative(saved, Activation(variant.activation, slope))
    if variant.saved is Saved.MASK:
        return saved
    from_output = {
        "relu": (saved > 0).astype(np.float64),
        "sigmoid": saved * (1.0 - saved),
        "tanh": 1.0 - saved**2,
    }
    return from_output[variant.activation]


def expected_gradient(variant: Backward, case: BackwardCase, dy: Array, saved: Array) -> tuple[Array, Array]:
    """dz before it is rounded, and how far off it may be."""
    dz = dy * expected_slopes(variant, saved, case.slope)
    size = np.abs(dy) * max(1.0, abs(case.slope)) * (1.0 + np.abs(saved))
    if variant.dropout:
        dz = dz * case.drops.factors(case.shape)
        size = size * keep_scale(keep_threshold(case.drops.p))
    return dz, 16 * EPS32 * size


EXAMPLE = BackwardCase(
    shape=(20, 130),
    sums=True,
    accumulate=True,
    sum_offset=0,
    in_place=False,
    slope=0.25,
    drops=Drops(0.5, Philox(1), step_in_memory=True),
    blocks=Blocks((4, 8), 2),
    tall_blocks=Blocks((4, 8), 2),
    order=0,
    dy=FLAT,
    saved=FLAT,
    dz=FLAT,
    seed=0,
)
"""Blocks of the grid's column wait for each other, and go over several rows."""


@pytest.mark.parametrize("variant", BACKWARD_EPILOGUES, ids=str)
@FEW
@example(drawn=EXAMPLE)
@given(drawn=cases)
def test_backward(host: HostKernels, variant: Backward, drawn: BackwardCase) -> None:
    case = drawn.suited(variant)
    operands = Operands.of(case, variant)
    dy = operands.dy.array.astype(np.float64)
    start = operands.db.array[0].astype(np.float64) if case.accumulate else np.zeros(case.shape[1])
    launch(host, variant, case, operands, case.order)
    expected, tolerance = expected_gradient(variant, case, dy, operands.kept)
    if operands.dz is not None:
        assert_close("dz", operands.dz.values(), expected, rounding(variant.dtype, expected) + tolerance)
    if case.sums:
        total = start + expected.sum(axis=0)
        # each addition may be off by half a unit of a sum that is at most the sum of magnitudes
        additions = (case.shape[0] + 2) * EPS32 * (np.abs(start) + np.abs(expected).sum(axis=0))
        limit = rounding(variant.dtype, total) + tolerance.sum(axis=0) + additions
        assert_close("db", operands.db.values()[0], total, limit)
    else:
        operands.db.assert_unchanged()
    operands.saved.assert_unchanged()
    if operands.dz is not operands.dy:
        operands.dy.assert_unchanged()


@pytest.mark.parametrize("variant", [v for v in BACKWARD_EPILOGUES if v.activation == "gelu"], ids=str)
@FEW
@example(drawn=EXAMPLE)
@given(drawn=cases)
def test_the_order_of_execution_does_not_reach_the_bits(
    host: HostKernels, variant: Backward, drawn: BackwardCase
) -> None:
    case = drawn.suited(variant)
    runs = []
    for order in (0, REVERSE, 2 + case.order):
        operands = Operands.of(case, variant)
        launch(host, variant, case, operands, order)
        runs.append(b"".join(operand.array.tobytes() for operand in operands.written))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("variant", [v for v in BACKWARD_EPILOGUES if v.saved is Saved.PREACTIVATION and v.dz], ids=str)
def test_special_values(host: HostKernels, variant: Backward) -> None:
    saved = Guarded(SPECIAL.clip(-3e4, 3e4) if variant.dtype is DType.FLOAT16 else SPECIAL, dtype=variant.dtype)
    place = Placement(variant.transposes, 7 if variant.transposes else 0, 0)  # columns on 16 bytes
    dy = Guarded(np.ones(SPECIAL.shape), dtype=variant.dtype)
    dz = Guarded(np.zeros(SPECIAL.shape), place, dtype=variant.dtype)
    cols = SPECIAL.shape[1]
    keeps_all = DropoutState(65536, Philox()).block()
    params = EpilogueBwdParams(dy.matrix, saved.matrix, dz.matrix, ColumnSum(), 1, cols, keeps_all, 0.25)
    host.get(EPILOGUE_BWD, variant.macros).launch((1, 1), (2, 8), params)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = derivative(saved.array, Activation(variant.activation, 0.25))
    assert_close("dz", dz.values(), expected, rounding(variant.dtype, expected) + 16 * EPS32)


RELU_FROM_VALUES = [
    each for each in BACKWARD_EPILOGUES if each.activation == "relu" and each.dz and each.saved is not Saved.MASK
]


@pytest.mark.parametrize("variant", RELU_FROM_VALUES, ids=str)
def test_relu_hands_on_the_gradient_of_nan(host: HostKernels, variant: Backward) -> None:
    values = np.array([[np.nan, -np.nan, 1.0, -1.0, 0.0, -0.0, np.inf, 7.0]], np.float32)
    place = Placement(variant.transposes, 7 if variant.transposes else 0, 0)  # columns on 16 bytes
    saved, dy = (Guarded(each, dtype=variant.dtype) for each in (values, np.full(values.shape, 3.0)))
    dz = Guarded(np.zeros(values.shape), place, dtype=variant.dtype)
    keeps_all = DropoutState(65536, Philox()).block()
    params = EpilogueBwdParams(dy.matrix, saved.matrix, dz.matrix, ColumnSum(), *values.shape, keeps_all, 0.0)
    host.get(EPILOGUE_BWD, variant.macros).launch((1, 1), (2, 8), params)
    assert dz.values().tolist() == [[3.0, 3.0, 3.0, 0.0, 0.0, 0.0, 3.0, 3.0]]


@pytest.mark.parametrize("variant", [v for v in BACKWARD_EPILOGUES if v.saved is Saved.MASK and v.dz], ids=str)
@pytest.mark.parametrize("positive", [False, True])
def test_a_mask_leaves_no_nan_out(host: HostKernels, variant: Backward, positive: bool) -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 1.0, -1.0, 0.0, -0.0, 7.0]], np.float32)
    place = Placement(variant.transposes, 7 if variant.transposes else 0, 0)  # columns on 16 bytes
    dy, dz = Guarded(values, FLAT, variant.dtype), Guarded(np.zeros(values.shape), place, variant.dtype)
    saved = mask(np.full(values.shape, positive), 0)
    params = EpilogueBwdParams(dy.matrix, saved.matrix, dz.matrix, ColumnSum(), *values.shape, NO_DROPOUT, 0.0)
    host.get(EPILOGUE_BWD, variant.macros).launch((1, 1), (2, 8), params)
    with np.errstate(invalid="ignore"):
        assert_close("dz", dz.values(), values * float(positive), 0.0)
