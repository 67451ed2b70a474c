"""Layouts: the order and leading dimension of a matrix, which follow from its strides.

Every matrix with one unit stride has a layout, and is read in place, without a copy. A matrix is *ragged* if its lines
(rows of a row-major matrix, columns of a column-major one) do not all begin and end at multiples of 16 bytes.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lt_runtime.errors import LayoutError, ShapeError


class Order(enum.Enum):
    """Which elements of a matrix are contiguous in memory: those of a row, or those of a column."""

    ROW = "row"
    COLUMN = "column"


@dataclass(frozen=True, slots=True)
class Layout:
    """How a matrix lies in memory: its shape, order and leading dimension.

    Attributes:
        rows, cols: the logical shape.
        order: the axis that has unit stride.
        leading_dimension: elements from one row (row order) or column (column order) to the next.
    """

    rows: int
    cols: int
    order: Order
    leading_dimension: int

    @property
    def strides(self) -> tuple[int, int]:
        """(row stride, column stride) in elements."""
        return (self.leading_dimension, 1) if self.order is Order.ROW else (1, self.leading_dimension)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, cols)."""
        return self.rows, self.cols

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.rows * self.cols

    @property
    def extent(self) -> int:
        """The number of elements of memory from the first to the last, both included; 0 for an empty matrix."""
        if self.size == 0:
            return 0
        row_stride, col_stride = self.strides
        return (self.rows - 1) * row_stride + (self.cols - 1) * col_stride + 1

    @property
    def transposed(self) -> Layout:
        """The layout of the transpose, which is the same memory."""
        other = Order.COLUMN if self.order is Order.ROW else Order.ROW
        return Layout(self.cols, self.rows, other, self.leading_dimension)


def packed(rows: int, cols: int, *, order: Order = Order.ROW) -> Layout:
    """The layout of a matrix without gaps between its rows (or columns)."""
    return Layout(rows, cols, order, max(cols if order is Order.ROW else rows, 1))


def layout_of(operand: str, shape: Sequence[int], strides: Sequence[int]) -> Layout:
    """The layout of an array as a matrix: all axes but the last are its rows.

    Args:
        operand: the array's name in error messages.
        shape: (..., cols).
        strides: in elements. The stride of an axis of size 1 has no meaning and may be anything.

    Raises:
        ShapeError: the array has less than two axes.
        LayoutError: the distance from row to row varies, neither axis has unit stride, or consecutive rows (columns)
            overlap.
    """
    if len(shape) < 2:
        raise ShapeError(f"{operand} has shape {tuple(shape)}; accepted are matrices, two axes, or more axes of rows")
    rows, cols = math.prod(shape[:-1]), shape[-1]
    if rows == 0 or cols == 0:
        return packed(rows, cols)
    mend = f"pass lt.contiguous({operand}) or a view with one unit stride"
    found = f"{operand} of shape {tuple(shape)} has strides {tuple(strides)}"
    row_stride, col_stride = strides[-2:]
    if len(shape) > 2:
        axes = [(extent, stride) for extent, stride in zip(shape[:-1], strides, strict=False) if extent > 1]
        row_stride = axes[-1][1] if axes else cols
        if any(outer[1] != inner[0] * inner[1] for outer, inner in itertools.pairwise(axes)):
            raise LayoutError(f"{found}: its leading axes are no rows with one stride; {mend}")
    if cols == 1 or col_stride == 1:
        leading = cols if rows == 1 else row_stride
        if leading >= cols:
            return Layout(rows, cols, Order.ROW, leading)
    if rows == 1 or row_stride == 1:
        leading = rows if cols == 1 else col_stride
        if leading >= rows:
            return Layout(rows, cols, Order.COLUMN, leading)
    fault = "it runs backwards" if min(row_stride, col_stride) < 0 else "its rows overlap"
    if 1 not in (row_stride, col_stride):
        fault = "neither axis is contiguous"
    raise LayoutError(f"{found}: {fault}; {mend}")


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements of an array may share memory: an axis has a smaller stride than the extent of the inner axes."""
    reach = 1
    for stride, extent in sorted((s, e) for s, e in zip(strides, shape, strict=True) if e > 1):
        if stride < reach:
            return 0 not in shape
        reach = stride * (extent - 1) + reach
    return False
