"""The kernel of dz = dropout'(dy) · act'(saved) and of the bias gradient, against float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.kernels import epilogue
from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.epilogue import EPILOGUE_BWD, BackwardPass
from lt_runtime.kernels.tiling import Access
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import Activation, Derivative, DType, Philox, Saved, Spec, keep_scale, keep_threshold
from lt_runtime.reference import activate, derivative
from tests.host_kernels.arrays import EPS32, FLAT, Guarded, assert_close, mask, numbers, rounding, vector
from tests.host_kernels.build import Variant
from tests.host_kernels.cases import (
    EXAMPLES_ALONE,
    FEW,
    LAUNCH,
    Blocks,
    Drops,
    Launch,
    suit_place,
    suit_places,
    suit_shape,
    tall_blocks,
)
from tests.host_kernels.harness import FORWARD, REVERSE, SHUFFLED, HostKernels
from tests.host_kernels.products import Memory, launching, spec_of
from tests.host_kernels.variants import BACKWARD_EPILOGUES, Backward
from tests.support.strategies import Placement, placements

Array = NDArray[np.float64]
# special values in sixteen columns, a width that both the aligned and the scattered loads support
SPECIAL = np.array(
    [[np.nan, 0.0, -0.0, 40.0, -40.0, 1e-30, -1e-30, 300.0, -300.0, 16.0, -16.0, 1e15, 1e30, -1e30, 3e38, -3e38]],
    np.float32,
)


@dataclass(frozen=True, kw_only=True)
class BackwardCase(Launch):
    sums: bool = True  # Whether the bias gradient is computed; always true if dz is not written.
    accumulate: bool = True  # Whether the bias gradient is added to the contents of its buffer.
    sum_offset: int = 0
    tall_blocks: Blocks  # Blocks for variants of the kernel that transpose; other variants use `blocks`.
    dy: Placement = FLAT
    saved: Placement = FLAT
    dz: Placement = FLAT

    def suited(self, variant: Backward) -> BackwardCase:
        """Returns the case, changed as little as possible so that a kernel variant supports it."""
        aligned, dtype = variant.access is Access.ALIGNED, variant.dtype
        shape = suit_shape(self.shape, aligned=aligned, flat=variant.access is Access.FLAT)
        in_place = self.in_place and variant.dz == 1
        of_values = variant.saved in (Saved.PREACTIVATION, Saved.OUTPUT)
        apart = [0, *([1] if of_values else []), *([2] if variant.dz and not in_place else [])]
        dy, saved, dz = suit_places(
            variant.access,
            shape,
            *((at, dtype) for at in (self.dy, self.saved, self.dz)),
            odd=apart[self.seed // 2 % len(apart)],
            others_aligned=self.seed % 2 == 1,
        )
        if variant.transposes:
            dy = replace(dy, column_major=False)
            dz = suit_place(dz, shape, dtype, aligned=aligned, column_major=True)
        elif not dy.column_major:
            dz = replace(dz, column_major=False)
        blocks = self.tall_blocks if self.blocks and variant.transposes else self.blocks
        return replace(
            self,
            shape=shape,
            sums=self.sums or variant.dz == 0,
            in_place=in_place,
            blocks=blocks if blocks and blocks.suit(variant.access) else None,
            dy=dy,
            saved=saved,
            dz=dz,
        )


cases = st.builds(
    BackwardCase,
    sums=st.sampled_from((True, True, False)),
    accumulate=st.booleans(),
    sum_offset=st.integers(0, 3),
    tall_blocks=tall_blocks,
    dy=placements,
    saved=placements,
    dz=placements,
    **LAUNCH,
)


@dataclass(frozen=True)
class Operands:
    """The operands of one launch, in guarded memory.

    Attributes:
        kept: for each element, the value from which `saved` was computed.
    """

    dy: Guarded
    saved: Guarded
    kept: Array
    dz: Guarded | None
    db: Guarded

    @classmethod
    def of(cls, case: BackwardCase, variant: Backward) -> Operands:
        generator, dtype = np.random.default_rng(case.seed), variant.dtype
        dy = Guarded(numbers(generator, case.shape, dtype), case.dy)
        saved, kept = saved_of(numbers(generator, case.shape, dtype), variant, case.saved)
        apart = Guarded(np.zeros(case.shape), case.dz, dtype)
        start = numbers(generator, case.shape[1:], dtype)
        return cls(
            dy=dy,
            saved=saved,
            kept=kept,
            dz=None if variant.dz == 0 else dy if case.in_place else apart,
            db=vector(start if case.accumulate else np.full(case.shape[1], np.nan), dtype, case.sum_offset),
        )

    @property
    def written(self) -> list[Guarded]:
        """Allocates the operands that hold results."""
        return [self.db] if self.dz is None else [self.db, self.dz]


def saved_of(z: NDArray[Any], variant: Backward, place: Placement) -> tuple[Guarded, Array]:
    """Computes the tensor that forward saves of a pre-activation, and for each element the value that it represents."""
    if variant.saved is Saved.MASK:
        return mask(z > 0, place.gap), (z > 0).astype(np.float64)
    values = activate(z, Activation(variant.activation)) if variant.saved is Saved.OUTPUT else z
    saved = Guarded(values, place, variant.dtype)
    return saved, saved.array.astype(np.float64)


def launch(host: HostKernels, variant: Backward, case: BackwardCase, operands: Operands, order: int) -> None:
    state, step = case.drops.state()
    activation, saved, dz = Activation(variant.activation, case.slope), operands.saved, operands.dz
    saved_spec = None if variant.saved is Saved.NOTHING else spec_of(saved)
    if variant.saved is Saved.MASK:  # the stride of a ReLU mask is counted in bits, as cuBLASLt does
        saved_spec = Spec(Layout(*case.shape, Order.ROW, 8 * saved.matrix.row_stride))
    slopes = Derivative(activation, variant.saved, saved_spec, 16 if case.sums else None, variant.dropout)
    with launching(host, {Variant(EPILOGUE_BWD.source, variant.macros)}, order) as patch:
        if case.blocks:
            for choice in ("sweep", "reduction"):
                patch.setattr(epilogue, choice, lambda *_, **__: case.blocks.tiling(case.shape))
        specs = spec_of(operands.dy), spec_of(dz) if dz else None
        backward = BackwardPass(variant.dtype, slopes, *specs, 0, accumulate=case.accumulate)
    memory = Memory(backward.partial_bytes)
    addresses = operands.dy.address, saved.address, dz.address if dz else 0, operands.db.address
    of_memory: Any = memory
    backward.launch(*addresses, memory.workspace, state if variant.dropout else None, of_memory)
    assert step[0] == case.drops.philox.step
    memory.check()


def expected_slopes(variant: Backward, saved: Array, slope: float) -> Array:
    """Computes the activation's derivative at the saved values."""
    if variant.saved is Saved.NOTHING:
        return np.ones_like(saved)
    if variant.saved is Saved.PREACTIVATION:
        return derivative(saved, Activation(variant.activation, slope))
    if variant.saved is Saved.MASK:
        return saved
    from_output = {"relu": (saved > 0).astype(np.float64), "sigmoid": saved * (1.0 - saved), "tanh": 1.0 - saved**2}
    return from_output[variant.activation]


def expected_gradient(variant: Backward, case: BackwardCase, dy: Array, saved: Array) -> tuple[Array, Array]:
    """Computes dz before rounding, and the bound of its error."""
    dz = dy * expected_slopes(variant, saved, case.slope)
    size = np.abs(dy) * max(1.0, abs(case.slope)) * (1.0 + np.abs(saved))
    if variant.dropout:
        dz = dz * case.drops.factors(case.shape)
        size = size * keep_scale(keep_threshold(case.drops.p))
    return dz, 16 * EPS32 * size


EXAMPLE = BackwardCase(
    shape=(20, 130),
    drops=Drops(0.5, Philox(1), step_in_memory=True),
    blocks=Blocks((4, 8), 2),
    tall_blocks=Blocks((4, 8), 2),
)
"""A test case in which several blocks share a column's sum, and each block has several rows."""
TALL = replace(EXAMPLE, shape=(700, 40), blocks=None)
"""A test case in which the runtime chooses the blocks: a thread has several rows, and blocks share a column's sum."""


@pytest.mark.parametrize("variant", BACKWARD_EPILOGUES, ids=str)
@FEW
@example(drawn=EXAMPLE)
@example(drawn=TALL)
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
        # each addition's error is at most half a unit in the last place of the sum of magnitudes
        additions = (case.shape[0] + 2) * EPS32 * (np.abs(start) + np.abs(expected).sum(axis=0))
        limit = rounding(variant.dtype, total) + tolerance.sum(axis=0) + additions
        assert_close("db", operands.db.values()[0], total, limit)
    else:
        operands.db.assert_unchanged()
    operands.saved.assert_unchanged()
    if operands.dz is not operands.dy:
        operands.dy.assert_unchanged()


@pytest.mark.parametrize("variant", [v for v in BACKWARD_EPILOGUES if v.activation == "gelu"], ids=str)
@EXAMPLES_ALONE
@example(drawn=EXAMPLE)
@example(drawn=TALL)
@given(drawn=cases)
def test_the_order_of_execution_does_not_reach_the_bits(
    host: HostKernels, variant: Backward, drawn: BackwardCase
) -> None:
    case = drawn.suited(variant)

    def bits(order: int) -> bytes:
        operands = Operands.of(case, variant)
        launch(host, variant, case, operands, order)
        return b"".join(operand.array.tobytes() for operand in operands.written)

    assert bits(FORWARD) == bits(REVERSE) == bits(SHUFFLED)


def launch_on_row(
    host: HostKernels, variant: Backward, dy: NDArray[Any], saved: Guarded, *, slope: float = 0.0
) -> Guarded:
    """Computes dz of a single row, with a dropout that keeps every element if the variant has dropout."""
    place = Placement(variant.transposes, 7 if variant.transposes else 0, 0)  # columns begin at multiples of 16 bytes
    source, dz = Guarded(dy, dtype=variant.dtype), Guarded(np.zeros(dy.shape), place, variant.dtype)
    keeps_all = DropoutState(65536, Philox()).block()
    matrices = source.matrix, saved.matrix, dz.matrix
    params = EPILOGUE_BWD.params(*matrices, (), *dy.shape, keeps_all, slope)
    host.get(EPILOGUE_BWD, variant.macros).launch((1, 1), (2, 8), params)
    return dz


@pytest.mark.parametrize("variant", [v for v in BACKWARD_EPILOGUES if v.saved is Saved.PREACTIVATION and v.dz], ids=str)
def test_special_values(host: HostKernels, variant: Backward) -> None:
    saved = Guarded(SPECIAL.clip(-3e4, 3e4) if variant.dtype is DType.FLOAT16 else SPECIAL, dtype=variant.dtype)
    dz = launch_on_row(host, variant, np.ones(SPECIAL.shape), saved, slope=0.25)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = derivative(saved.array, Activation(variant.activation, 0.25))
    assert_close("dz", dz.values(), expected, rounding(variant.dtype, expected) + 16 * EPS32)


RELU = [each for each in BACKWARD_EPILOGUES if each.activation == "relu" and each.dz]


@pytest.mark.parametrize("variant", [each for each in RELU if each.saved is not Saved.MASK], ids=str)
def test_relu_hands_on_the_gradient_of_nan(host: HostKernels, variant: Backward) -> None:
    values = np.array([[np.nan, -np.nan, 1.0, -1.0, 0.0, -0.0, np.inf, 7.0]], np.float32)
    dz = launch_on_row(host, variant, np.full(values.shape, 3.0), Guarded(values, dtype=variant.dtype))
    assert dz.values().tolist() == [[3.0, 3.0, 3.0, 0.0, 0.0, 0.0, 3.0, 3.0]]


@pytest.mark.parametrize("variant", [each for each in RELU if each.saved is Saved.MASK], ids=str)
@pytest.mark.parametrize("positive", [False, True])
def test_a_mask_leaves_no_nan_out(host: HostKernels, variant: Backward, positive: bool) -> None:
    values = np.array([[np.nan, np.inf, -np.inf, 1.0, -1.0, 0.0, -0.0, 7.0]], np.float32)
    dz = launch_on_row(host, variant, values, mask(np.full(values.shape, positive), 0))
    with np.errstate(invalid="ignore"):
        assert_close("dz", dz.values(), values * float(positive), 0.0)
