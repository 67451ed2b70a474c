"""Copies of rows into buffers, launched by the runtime, hold the rows' bits, and write nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from lt_runtime.kernels.kernel import struct
from lt_runtime.kernels.resize import COPIED, RowBuffers, RowsCopy
from tests.host_kernels.arrays import Guarded
from tests.host_kernels.cases import FEW, axes, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.support.strategies import Placement


@dataclass(frozen=True)
class Batch:
    """A test case: a source array and the buffers that it is copied into.

    Attributes:
        kind: type of the elements.
        cols: elements of a row.
        gap: elements between two rows of the array.
        offset: elements before the first row of the array.
        shift: the distance of two parts of the buffers, in bytes, modulo 256.
    """

    kind: str
    cols: int
    gap: int = 0
    offset: int = 0
    shift: int = 0


batches = st.builds(
    Batch,
    st.sampled_from(["u1", "u2", "f4", "i8"]),
    axes,
    *(st.sampled_from(each) for each in ([0, 0, 1, 8], [0, 0, 1, 3], [0, 0, 1, 4])),
)
LARGE = Batch("f4", 515)
LABELS = Batch("i8", 1)


class _Operands:
    """An array, its buffers with a gap after each part, and their expected contents."""

    def __init__(self, batch: Batch, rows: int, parts: int, generator: np.random.Generator) -> None:
        kind = np.dtype(batch.kind)
        values = generator.integers(0, 256, (parts * rows, batch.cols * kind.itemsize), np.uint8).view(kind)
        self.source = Guarded(values, Placement(False, batch.gap, batch.offset))
        self.stride = -(-rows * batch.cols * kind.itemsize // 256) * 256 + batch.shift
        self.target = Guarded(np.full((parts, self.stride), 7, np.uint8))
        self.expected = np.full((parts, self.stride), 7, np.uint8)
        self.expected[:, : rows * batch.cols * kind.itemsize] = values.view(np.uint8).reshape(parts, -1)
        pitch = self.source.array.strides[0] if parts * rows > 1 else batch.cols * kind.itemsize
        self.place = self.source.address, pitch
        self.buffers = RowBuffers(self.target.address, rows, batch.cols * kind.itemsize, self.stride)


def _table(*operands: _Operands) -> Any:
    return np.frombuffer(bytes((struct("Rows") * COPIED)(*(each.place for each in operands))), np.uint8).copy()


@FEW
@example(drawn=[LARGE, LABELS], rows=40, parts=1, from_table=True, order=0, seed=0)
@example(drawn=[LARGE, LABELS, LABELS], rows=3, parts=4, from_table=False, order=1, seed=1)
@example(drawn=[Batch("u2", 13, 3, 1), Batch("f4", 8, 8), LABELS], rows=5, parts=2, from_table=True, order=0, seed=2)
@example(drawn=[Batch("f4", 8, shift=4)], rows=5, parts=2, from_table=False, order=0, seed=3)
@given(
    drawn=st.lists(batches, min_size=1, max_size=COPIED),
    rows=axes,
    parts=st.integers(1, 4),
    from_table=st.booleans(),
    order=orders,
    seed=seeds,
)
def test_copies(
    host: HostKernels, drawn: list[Batch], rows: int, parts: int, from_table: bool, order: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    operands = [_Operands(each, rows, parts, generator) for each in drawn]
    with host.in_order(order):
        copies = RowsCopy([each.buffers for each in operands], parts, 0)
    if from_table:
        table = _table(*operands)
        copies.launch((), 0, table.ctypes.data)
    else:
        copies.launch([each.place for each in operands], 0)
    for each in operands:
        each.target.values()  # `values` fails if memory around the array was written
        assert each.target.array.tobytes() == each.expected.tobytes()
        each.source.assert_unchanged()


def test_a_table_is_left_for_given_arrays() -> None:
    first, second = (_Operands(LABELS, 4, 1, np.random.default_rng(seed)) for seed in range(2))
    copies = RowsCopy([first.buffers], 1, 0)
    table = _table(second)
    for run, expected in (
        (lambda: copies.launch((), 0, table.ctypes.data), second),
        (lambda: copies.launch([first.place], 0), first),
    ):
        run()
        assert first.target.array.tobytes() == expected.expected.tobytes()
