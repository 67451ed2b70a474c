"""Overlap of operands, compared with an intersection of the sets of all their bytes' addresses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lt_runtime.arrays.checks import check_no_overlap
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import OverlapError
from lt_runtime.layout import Layout, Order

START = 1 << 46  # an address as high as GPU memory's, which the host cannot read


@st.composite
def layouts(draw: st.DrawFn, order: Order | None = None, leading: int | None = None) -> Layout:
    order = order or draw(st.sampled_from(Order))
    leading = leading or draw(st.integers(1, 9))
    lines, width = draw(st.integers(0, 5)), draw(st.integers(0, leading))
    return Layout(lines, width, order, leading) if order is Order.ROW else Layout(width, lines, order, leading)


def operand(name: str, address: int, shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> Operand:
    return Operand(name, address, shape, strides, f"V{itemsize}", itemsize, 0, None, None)  # type: ignore[arg-type]


def matrix(layout: Layout, distance: int, itemsize: int = 8) -> Operand:
    """A matrix that begins `distance` bytes from `START`."""
    return operand("a matrix", START + distance, layout.shape, layout.strides, itemsize)


def addresses(of: Operand) -> set[int]:
    """The addresses of all bytes of a matrix."""
    first = [
        of.address + of.itemsize * sum(i * stride for i, stride in zip(index, of.strides, strict=True))
        for index in np.ndindex(of.shape)
    ]
    return {address + byte for address in first for byte in range(of.itemsize)}


def overlap(first: Operand, second: Operand) -> bool:
    """Whether `check_no_overlap` finds an overlap. The answer must not depend on which of the two is the output."""
    answers = set()
    for out, other in ((first, second), (second, first)):
        try:
            check_no_overlap(out, other)
        except OverlapError:
            answers.add(True)
        else:
            answers.add(False)
    (answer,) = answers
    return answer


@settings(max_examples=400, deadline=None)
@given(first=layouts(), second=layouts(), distance=st.integers(-60, 60))
def test_exact_for_elements_of_one_size(first: Layout, second: Layout, distance: int) -> None:
    one, other = matrix(first, 0), matrix(second, 8 * distance)
    assert overlap(one, other) == bool(addresses(one) & addresses(other))


@settings(max_examples=400, deadline=None)
@given(
    pair=st.tuples(st.sampled_from(Order), st.integers(1, 9)).flatmap(
        lambda both: st.tuples(layouts(*both), layouts(*both))
    ),
    distance=st.integers(-60, 60),
)
def test_exact_for_one_leading_dimension(pair: tuple[Layout, Layout], distance: int) -> None:
    one, other = matrix(pair[0], 0), matrix(pair[1], 8 * distance)
    assert overlap(one, other) == bool(addresses(one) & addresses(other))


@settings(max_examples=200, deadline=None)
@given(first=layouts(), second=layouts(), distance=st.integers(-300, 300), sizes=st.sampled_from([(2, 8), (8, 2)]))
def test_two_element_sizes_never_miss(first: Layout, second: Layout, distance: int, sizes: tuple[int, int]) -> None:
    one, other = matrix(first, 0, sizes[0]), matrix(second, distance, sizes[1])
    found = overlap(one, other)
    if addresses(one) & addresses(other):
        assert found
    if not (first.size and second.size):
        assert not found


def test_large_matrices_of_two_pitches_and_batches() -> None:
    wide, narrow = Layout(1 << 20, 4, Order.ROW, 8192), Layout(1 << 20, 1, Order.COLUMN, 1 << 20)
    assert overlap(matrix(wide, 0, 2), matrix(narrow, 0, 2))
    assert not overlap(matrix(wide, 0, 2), matrix(Layout(1, 8188, Order.ROW, 8188), 8, 2))
    left, right = (operand("a batch", START + at, (64, 512, 4), (1 << 16, 128, 1), 4) for at in (0, 16))
    assert not overlap(left, right)
    assert overlap(left, operand("a batch", START + 12, (64, 512, 4), (1 << 16, 128, 1), 4))


@pytest.mark.parametrize("itemsize", [4, 8])
@pytest.mark.parametrize("order", Order)
def test_orders_and_types_that_differ(order: Order, itemsize: int) -> None:
    rows, other = Layout(2, 2, Order.ROW, 4), Layout(2, 2, order, 4)
    assert not overlap(matrix(rows, 0, 4), matrix(other, 24, itemsize))
    assert overlap(matrix(rows, 0, 4), matrix(other, 20, itemsize))
