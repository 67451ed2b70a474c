"""dz = dropout'(dy) · act'(saved) and the bias gradient against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.gpu.kernels import THREADS, tile
from lt_runtime.gpu.params import ColumnSumParams, EpilogueBwdParams, Matrix
from lt_runtime.problem import Activation, DType, Philox, Saved, keep_scale, keep_threshold
from lt_runtime.reference import activate, derivative
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, numbers, rounding, vector
from tests.host_kernels.cases import (
    FEW,
    MORE,
    NO_DROPOUT,
    Drops,
    Pair,
    Shape,
    axes,
    blocks,
    columns_of_blocks,
    drops,
    orders,
    seeds,
    shapes,
)
from tests.host_kernels.harness import REVERSE, HostKernels
from tests.host_kernels.variants import BACKWARD_EPILOGUES, F32, TYPES, Epilogue, scalar_macros
from tests.strategies import Placement, placements

Array = NDArray[np.float64]
SPECIAL = np.array([[np.nan, 0.0, -0.0, 40.0, -40.0, 1e-30, 300.0, -300.0, 1e30, -1e30]], np.float32)


@dataclass(frozen=True)
class BackwardCase:
    shape: Shape
    wanted: str  # "dz", "db" or "both"
    in_place: bool  # dz over dy
    slope: float
    drops: Drops
    block: Pair | None  # None leaves it to the runtime
    rows_per_block: int
    order: int
    dy: Placement
    saved: Placement
    dz: Placement
    seed: int

    @property
    def parts(self) -> int:
        return -(-self.shape[0] // self.rows_per_block)


cases = st.builds(
    BackwardCase,
    shape=shapes,
    wanted=st.sampled_from(("dz", "db", "both", "both")),
    in_place=st.booleans(),
    slope=st.sampled_from((0.01, 0.25, 1.5, -0.5)),
    drops=drops,
    block=st.one_of(st.none(), blocks),
    rows_per_block=axes,
    order=orders,
    dy=placements,
    saved=placements,
    dz=placements,
    seed=seeds,
)


@dataclass(frozen=True)
class Operands:
    dy: Guarded
    saved: Guarded
    dz: Guarded | None
    partial: Guarded | None

    @classmethod
    def of(cls, case: BackwardCase, variant: Epilogue) -> Operands:
        generator = np.random.default_rng(case.seed)
        dy = Guarded(numbers(generator, case.shape, variant.dtype), case.dy)
        z = numbers(generator, case.shape, variant.dtype)
        if variant.saved is Saved.OUTPUT:
            z = activate(z, Activation(variant.activation))
        apart = Guarded(np.zeros(case.shape), case.dz, variant.dtype)
        partial = Guarded(np.full((case.parts, case.shape[1]), np.nan), dtype=F32)
        return cls(
            dy=dy,
            saved=Guarded(z, case.saved, variant.dtype),
            dz=None if case.wanted == "db" else dy if case.in_place else apart,
            partial=None if case.wanted == "dz" else partial,
        )


def launch(host: HostKernels, variant: Epilogue, case: BackwardCase, operands: Operands, order: int) -> None:
    state, step = case.drops.state()
    params = EpilogueBwdParams(
        dy=operands.dy.matrix,
        saved=Matrix() if variant.saved is Saved.NOTHING else operands.saved.matrix,
        dz=operands.dz.matrix if operands.dz else Matrix(),
        partial=operands.partial.address if operands.partial else 0,
        rows=case.shape[0],
        cols=case.shape[1],
        rows_per_block=case.rows_per_block,
        dropout=state.block() if variant.dropout else NO_DROPOUT,
        slope=case.slope,
    )
    block = case.block or tile(*case.shape)
    grid = (columns_of_blocks(case.shape[1], block), case.parts)
    host.get("epilogue_bwd", variant.macros).launch(grid, block, params, order=order)
    assert step[0] == case.drops.philox.step


def expected_slopes(variant: Epilogue, saved: Array, slope: float) -> Array:
    """act' from what was saved."""
    if variant.saved is Saved.NOTHING:
        return np.ones_like(saved)
    if variant.saved is Saved.PREACTIVATION:
        return derivative(saved, Activation(variant.activation, slope))
    from_output = {
        "relu": (saved > 0).astype(np.float64),
        "sigmoid": saved * (1.0 - saved),
        "tanh": 1.0 - saved**2,
    }
    return from_output[variant.activation]


def expected_gradient(variant: Epilogue, case: BackwardCase, dy: Array, saved: Array) -> tuple[Array, Array]:
    """dz before it is rounded, and how far off it may be."""
    dz = dy * expected_slopes(variant, saved, case.slope)
    size = np.abs(dy) * max(1.0, abs(case.slope)) * (1.0 + np.abs(saved))
    if variant.dropout:
        dz = dz * case.drops.factors(case.shape)
        size = size * keep_scale(keep_threshold(case.drops.p))
    return dz, 16 * EPS32 * size


def by_part(values: Array, rows_per_block: int) -> Array:
    """Sums over the rows of each block."""
    starts = np.arange(0, len(values), rows_per_block)
    return np.add.reduceat(values, starts, axis=0)


@pytest.mark.parametrize("variant", BACKWARD_EPILOGUES, ids=str)
@FEW
@example(
    case=BackwardCase(
        shape=(20, 130),
        wanted="both",
        in_place=False,
        slope=0.25,
        drops=Drops(0.5, Philox(1), step_in_memory=True),
        block=None,
        rows_per_block=16,
        order=0,
        dy=FLAT,
        saved=FLAT,
        dz=FLAT,
        seed=0,
    )
)
@given(case=cases)
def test_backward(host: HostKernels, variant: Epilogue, case: BackwardCase) -> None:
    operands = Operands.of(case, variant)
    dy, saved = (operand.array.astype(np.float64) for operand in (operands.dy, operands.saved))
    launch(host, variant, case, operands, case.order)
    expected, tolerance = expected_gradient(variant, case, dy, saved)
    if operands.dz is not None:
        assert_close("dz", operands.dz.values(), expected, rounding(variant.dtype, expected) + tolerance)
    if operands.partial is not None:
        # each addition may be off by half a unit of a sum that is at most the sum of magnitudes
        additions = case.rows_per_block * EPS32 * by_part(np.abs(expected), case.rows_per_block)
        limit = by_part(tolerance, case.rows_per_block) + additions
        assert_close("partial", operands.partial.values(), by_part(expected, case.rows_per_block), limit)
    operands.saved.assert_unchanged()
    if operands.dz is not operands.dy:
        operands.dy.assert_unchanged()


@FEW
@given(case=cases)
def test_the_order_of_execution_does_not_reach_the_bits(host: HostKernels, case: BackwardCase) -> None:
    variant = Epilogue(F32, "gelu", dropout=True, saved=Saved.PREACTIVATION)
    runs = []
    for order in (0, REVERSE, 2 + case.order):
        operands = Operands.of(case, variant)
        launch(host, variant, case, operands, order)
        written = [operand for operand in (operands.dz, operands.partial) if operand is not None]
        runs.append(b"".join(operand.array.tobytes() for operand in written))
    assert runs[0] == runs[1] == runs[2]


@pytest.mark.parametrize("variant", [v for v in BACKWARD_EPILOGUES if v.saved is Saved.PREACTIVATION], ids=str)
def test_special_values(host: HostKernels, variant: Epilogue) -> None:
    saved = Guarded(SPECIAL.clip(-3e4, 3e4) if variant.dtype is DType.FLOAT16 else SPECIAL, dtype=variant.dtype)
    dy, dz = (Guarded(np.full(SPECIAL.shape, value), dtype=variant.dtype) for value in (1.0, 0.0))
    cols = SPECIAL.shape[1]
    params = EpilogueBwdParams(dy.matrix, saved.matrix, dz.matrix, 0, 1, cols, 1, NO_DROPOUT, 0.25)
    host.get("epilogue_bwd", variant.macros).launch((1, 1), (2, 1), params)
    expected = derivative(saved.array, Activation(variant.activation, 0.25))
    assert_close("dz", dz.values(), expected, rounding(variant.dtype, expected) + 16 * EPS32)


@pytest.mark.parametrize("dtype", TYPES)
@MORE
@given(
    parts=axes,
    cols=st.one_of(axes, st.sampled_from((255, 256, 257, 600))),
    accumulate=st.booleans(),
    offset=st.integers(0, 3),
    order=orders,
    seed=seeds,
)
def test_column_sums(
    host: HostKernels, dtype: DType, parts: int, cols: int, accumulate: bool, offset: int, order: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    partial = Guarded(numbers(generator, (parts, cols), F32))
    total = vector(numbers(generator, (cols,), dtype) if accumulate else np.full(cols, np.nan), dtype, offset)
    before = total.array[0].astype(np.float64) if accumulate else np.zeros(cols)
    params = ColumnSumParams(partial.address, total.address, cols, parts, int(accumulate))
    grid = (-(-cols // THREADS), 1)
    host.get("column_sum_finish", scalar_macros(dtype)).launch(grid, (THREADS, 1), params, order=order)

    terms = np.vstack([before, partial.array.astype(np.float64)])
    expected, magnitude = terms.sum(axis=0), np.abs(terms).sum(axis=0)
    tolerance = rounding(dtype, expected) + 2 * parts * EPS32 * magnitude
    assert_close("sum", total.values()[0], expected, tolerance)
    partial.assert_unchanged()
