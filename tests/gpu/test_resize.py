"""Copies of matrices into other sizes and orders hold the same bits, and zeros in added rows and columns."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest

from lt_runtime.kernels.resize import TABLE_BYTES, Resize, ResizePass, RowBuffers, RowsCopy, write_table
from lt_runtime.layout import Layout, layout_of
from lt_runtime.problem import DType
from tests.support.placed import Placed
from tests.support.strategies import TYPES, Placement

PLACES = {"rows": Placement(False, 0, 0), "columns": Placement(True, 0, 0), "rows off 16 bytes": Placement(False, 3, 1)}
SIZES = [((255, 479), (255, 480)), ((300, 512), (297, 509)), ((7, 1001), (8, 1008)), ((1, 5), (3, 2))]


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("source", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("target", PLACES.values(), ids=PLACES)
def test_several_in_one_launch(gpu: Any, dtype: DType, source: Placement, target: Placement) -> None:
    generator = np.random.default_rng(1)
    for sizes in (SIZES[:1], SIZES[1:]):
        values = [generator.standard_normal(size, np.float32).astype(dtype.numpy) for size, _ in sizes]
        given = [Placed(gpu, each, source) for each in values]
        made = [Placed(gpu, np.ones(size, dtype.numpy), target) for _, size in sizes]
        pairs = [(one.array, other.array) for one, other in zip(given, made, strict=True)]
        resizes = [Resize(*(_layout(each) for each in pair)) for pair in pairs]
        stream = cp.cuda.get_current_stream().ptr
        ResizePass(dtype, resizes, 0).launch([(one.data.ptr, other.data.ptr) for one, other in pairs], stream)
        for each, copy in zip(values, made, strict=True):
            expected = np.zeros(copy.array.shape, np.float64)
            rows, cols = map(min, each.shape, expected.shape)
            expected[:rows, :cols] = each[:rows, :cols]
            np.testing.assert_array_equal(copy.values(), expected)


def _layout(array: cp.ndarray) -> Layout:
    return layout_of("copy", array.shape, [stride // array.itemsize for stride in array.strides])


@pytest.mark.parametrize("gap", [0, 3], ids=["packed", "with gaps"])
def test_rows_are_copied_from_where_a_table_says(gap: int) -> None:
    rows, cols = 37, 20
    wide = cp.random.default_rng(6).standard_normal((2, rows, cols + gap), dtype=cp.float32)
    x, labels = wide[:, :, :cols], cp.arange(2 * rows, dtype=cp.int64).reshape(2, rows)
    buffers = cp.zeros((rows, cols), cp.float32), cp.zeros(rows, cp.int64)
    copies = RowsCopy([RowBuffers(each.data.ptr, rows, each.nbytes // rows, 0) for each in buffers], 1, 0)
    table, stream = cp.zeros(TABLE_BYTES, cp.uint8), cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    for i in range(2):
        write_table(table.data.ptr, [(x[i].data.ptr, x.strides[1]), (labels[i].data.ptr, 8)], stream.ptr)
        copies.launch((), stream.ptr, table.data.ptr)
        stream.synchronize()
        assert (buffers[0] == x[i]).all()
        assert (buffers[1] == labels[i]).all()
