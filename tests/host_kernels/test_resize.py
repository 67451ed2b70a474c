"""Copies of matrices into other sizes, launched by the runtime, hold the same bits, and zeros beyond the source."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lt_runtime.kernels import resize
from lt_runtime.kernels.resize import Resize, ResizePass
from lt_runtime.layout import Layout, Order
from lt_runtime.problem import DType
from tests.host_kernels.arrays import FLAT, Guarded, numbers
from tests.host_kernels.cases import FEW, orders, seeds, shapes
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.variants import BF16, F16, F32, TYPES
from tests.support.strategies import Placement, placements


@dataclass(frozen=True)
class Copy:
    """A test case: a matrix, and the target that it is copied into."""

    source: tuple[int, int]
    target: tuple[int, int]
    places: tuple[Placement, Placement]


copies = st.builds(Copy, shapes, shapes, st.tuples(placements, placements))
PADDING = Copy((3, 13), (3, 16), (Placement(False, 0, 1), FLAT))
TRIMMING = Copy((8, 16), (7, 13), (Placement(True, 0, 0), Placement(True, 2, 1)))
TURNING = Copy((100, 71), (104, 72), (FLAT, Placement(True, 0, 0)))
LARGE = Copy((300, 479), (300, 480), (FLAT, FLAT))
TRIMMING_FLAT = Copy((300, 480), (300, 477), (FLAT, FLAT))
PADDING_FAR = Copy((60, 9), (60, 400), (FLAT, FLAT))
"""At the source's row stride, the last columns of the target's last rows would lie beyond the source's memory."""
TRIMMING_LARGE = Copy((300, 480), (299, 479), (FLAT, Placement(False, 0, 3)))


def _layout(shape: tuple[int, int], place: Placement) -> Layout:
    """Makes a layout from a placement, not from strides, which do not tell the order of a matrix of one row."""
    order = Order.COLUMN if place.column_major else Order.ROW
    return Layout(*shape, order, shape[0 if place.column_major else 1] + place.gap)


class _Operands:
    def __init__(self, copy: Copy, dtype: DType, generator: np.random.Generator) -> None:
        values = numbers(generator, copy.source, dtype)
        values[0, 0] = np.inf
        self.source, self.target = (
            Guarded(each, place)
            for each, place in zip((values, np.ones(copy.target, values.dtype)), copy.places, strict=True)
        )
        self.expected = np.zeros(copy.target, values.dtype)
        rows, cols = map(min, copy.source, copy.target)
        self.expected[:rows, :cols] = values[:rows, :cols]
        self.resize = Resize(*(_layout(*each) for each in zip((copy.source, copy.target), copy.places, strict=True)))


@pytest.mark.parametrize("dtype", TYPES, ids=lambda each: each.value)
@FEW
@example(drawn=[PADDING, TRIMMING, LARGE], blocks=4, order=0, seed=0)
@example(drawn=[TRIMMING], blocks=2048, order=1, seed=1)
@example(drawn=[TRIMMING_FLAT], blocks=4, order=0, seed=1)
@example(drawn=[TRIMMING_LARGE], blocks=2048, order=1, seed=1)
@example(drawn=[PADDING_FAR], blocks=1, order=0, seed=1)
@example(drawn=[TURNING, PADDING], blocks=4, order=0, seed=2)
@given(drawn=st.lists(copies, min_size=1, max_size=3), blocks=st.sampled_from((1, 4, 2048)), order=orders, seed=seeds)
def test_copies(host: HostKernels, dtype: DType, drawn: list[Copy], blocks: int, order: int, seed: int) -> None:
    """The copy is launched with so few blocks that each thread has many rows, or with so many that each has one."""
    generator = np.random.default_rng(seed)
    operands = [_Operands(each, dtype, generator) for each in drawn]
    with pytest.MonkeyPatch.context() as patch, host.in_order(order):
        patch.setattr(resize, "_MOST_BLOCKS", blocks)
        made = ResizePass(dtype, [each.resize for each in operands], 0)
    made.launch([(each.source.address, each.target.address) for each in operands], 0)
    for each in operands:
        each.target.values()  # `values` fails if the copy wrote around the target
        assert each.target.array.tobytes() == each.expected.tobytes()
        each.source.assert_unchanged()


@pytest.mark.parametrize("dtype", [F16, BF16, F32], ids=lambda each: each.value)
def test_nan_stays_nan(dtype: DType) -> None:
    values = np.full((2, 9), np.nan, dtype.numpy)
    source, target = Guarded(values), Guarded(np.ones((2, 16), dtype.numpy))
    ResizePass(dtype, [Resize(source.layout, target.layout)], 0).launch([(source.address, target.address)], 0)
    assert np.isnan(target.values()[:, :9]).all()
    assert not target.values()[:, 9:].any()
