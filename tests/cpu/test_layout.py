"""`Layout` compared with the strided NumPy views that it describes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lt_runtime.errors import LayoutError, ShapeError
from lt_runtime.layout import Layout, Order, layout_of, overlaps_itself, packed
from tests.support.numpy_cases import Array

BUFFER = np.arange(4096)
MIDDLE = 2048

axes = st.integers(0, 5)
strides = st.one_of(st.integers(-12, 12), st.sampled_from((1, 2, 5)))


def view(shape: tuple[int, int], steps: tuple[int, int], start: int = MIDDLE) -> Array:
    """Makes a strided view of `BUFFER`, whose elements are their own indices."""
    at: Any = BUFFER[start:]
    return np.lib.stride_tricks.as_strided(at, shape, tuple(8 * step for step in steps))


def elements(layout: Layout, start: int = MIDDLE) -> Array:
    """Returns the elements of `BUFFER` that a layout describes."""
    rows, cols = np.indices(layout.shape)
    return start + rows * layout.strides[0] + cols * layout.strides[1]


def is_matrix(matrix: Array) -> bool:
    """Whether some order and leading dimension describe the same elements as the view; tries all possible ones."""
    rows, cols = matrix.shape
    most = max(12, *(abs(step) // 8 for step in matrix.strides))
    return any(
        (elements(Layout(rows, cols, order, leading)) == matrix).all()
        for order, width in ((Order.ROW, cols), (Order.COLUMN, rows))
        for leading in range(max(width, 1), most + 1)
    )


@settings(max_examples=400, deadline=None)
@given(shape=st.tuples(axes, axes), steps=st.tuples(strides, strides))
@example(shape=(1, 1), steps=(-7, 0))
@example(shape=(1, 5), steps=(0, 1))
@example(shape=(5, 1), steps=(1, -3))
@example(shape=(5, 1), steps=(0, 1))
@example(shape=(5, 1), steps=(3, 9))
@example(shape=(1, 5), steps=(9, 3))
@example(shape=(3, 4), steps=(3, 1))
@example(shape=(3, 4), steps=(1, 3))
@example(shape=(4, 4), steps=(1, 1))
@example(shape=(2, 2), steps=(1, -2))
@example(shape=(0, 3), steps=(5, 5))
def test_layout_of(shape: tuple[int, int], steps: tuple[int, int]) -> None:
    matrix = view(shape, steps)
    if not is_matrix(matrix):
        with pytest.raises(LayoutError, match=r"w of shape .* has strides .*; pass lt\.contiguous\(w\)"):
            layout_of("w", shape, steps)
        return
    layout = layout_of("w", shape, steps)
    assert layout.shape == shape
    assert layout.leading_dimension >= max(1, layout.cols if layout.order is Order.ROW else layout.rows)
    np.testing.assert_array_equal(elements(layout), matrix)
    np.testing.assert_array_equal(elements(layout.transposed), matrix.T)
    assert layout.transposed.transposed == layout
    assert layout.extent == (int(matrix.max() - matrix.min()) + 1 if matrix.size else 0)
    assert layout.size == matrix.size


@settings(max_examples=100, deadline=None)
@given(extent=st.integers(1, 5), step=st.integers(1, 9), odd=st.tuples(strides, strides))
def test_the_stride_of_an_axis_of_size_one_has_no_meaning(extent: int, step: int, odd: tuple[int, int]) -> None:
    first, second = (layout_of("x", (1, extent), (stride, step)) for stride in odd)
    assert first == second
    first, second = (layout_of("x", (extent, 1), (step, stride)) for stride in odd)
    assert first == second


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(axes, min_size=3, max_size=4), data=st.data())
def test_leading_axes_are_rows(shape: list[int], data: st.DataObject) -> None:
    """An array has a layout if and only if NumPy can reshape it to a matrix without a copy and the matrix has one."""
    line, gap = data.draw(st.sampled_from([(1, 0), (1, 3), (1, -1), (2, 0)])), 0
    step, gap = line
    pitches = [step]
    for extent in reversed(shape[1:]):
        pitches.insert(0, pitches[0] * extent + (gap if len(pitches) == 1 else data.draw(st.sampled_from((0, 0, 1)))))
    array = np.lib.stride_tricks.as_strided(BUFFER[MIDDLE:], shape, [8 * each for each in pitches])
    turned = data.draw(st.permutations(range(len(shape))))
    array = array.transpose(turned) if data.draw(st.booleans()) else array
    matrix, steps = array.view(), [each // 8 for each in array.strides]
    try:
        matrix.shape = (-1, array.shape[-1]) if array.size else (0, array.shape[-1])
    except (AttributeError, ValueError):
        matrix = None
    if array.size and (matrix is None or not is_matrix(matrix)):
        with pytest.raises(LayoutError, match=rf"x of shape {re.escape(str(array.shape))} has strides .*contiguous\(x"):
            layout_of("x", array.shape, steps)
        return
    layout = layout_of("x", array.shape, steps)
    assert layout.shape == (math.prod(array.shape[:-1]), array.shape[-1])
    np.testing.assert_array_equal(elements(layout).ravel(), array.ravel())


@pytest.mark.parametrize("shape", [(), (3,)])
def test_matrices_only(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match=r"x has shape .*; accepted are matrices, two axes"):
        layout_of("x", shape, tuple(1 for _ in shape))


@pytest.mark.parametrize(
    ("shape", "strides", "overlaps"),
    [
        ((3, 4), (4, 1), False),
        ((3, 4), (3, 1), True),
        ((3, 4), (0, 1), True),
        ((3, 4), (1, 3), False),
        ((3, 4), (1, 2), True),
        ((1, 4), (0, 1), False),
        ((0, 4), (0, 1), False),
        ((2, 3, 4), (12, 4, 1), False),
        ((2, 3, 4), (11, 4, 1), True),
        ((2, 3, 4), (4, 8, 1), False),
    ],
)
def test_what_overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...], overlaps: bool) -> None:
    assert overlaps_itself(shape, strides) == overlaps
    places = np.zeros(shape, int) + sum(
        np.arange(extent).reshape([-1 if axis == at else 1 for at in range(len(shape))]) * stride
        for axis, (extent, stride) in enumerate(zip(shape, strides, strict=True))
    )
    assert (np.unique(places).size < places.size) == overlaps


def test_complaints_say_what_is_wrong() -> None:
    with pytest.raises(LayoutError, match=r"w of shape \(8, 8\) has strides \(4096, 3\): neither axis is contiguous"):
        layout_of("w", (8, 8), (4096, 3))
    with pytest.raises(LayoutError, match=r"has strides \(0, 1\): its rows overlap"):
        layout_of("w", (8, 8), (0, 1))
    with pytest.raises(LayoutError, match=r"has strides \(-8, 1\): it runs backwards"):
        layout_of("w", (8, 8), (-8, 1))


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0), (1, 1)])
def test_packed(shape: tuple[int, int]) -> None:
    layout = packed(*shape)
    np.testing.assert_array_equal(elements(layout, 0).reshape(-1), np.arange(shape[0] * shape[1]))
