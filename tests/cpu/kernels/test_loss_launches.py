"""How the launches of loss kernels divide rows over blocks and threads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.kernels import cross_entropy
from lt_runtime.kernels.cross_entropy import RowGroup, RowSharing
from lt_runtime.kernels.losses import flattened
from lt_runtime.layout import Layout, Order, packed

EXTENTS = st.integers(1, 10**6)


@given(rows=EXTENTS, cols=EXTENTS, order=st.sampled_from(Order), itemsize=st.sampled_from((2, 4)))
def test_every_row_has_threads(rows: int, cols: int, order: Order, itemsize: int) -> None:
    sharing = RowSharing.of(Layout(rows, cols, order, max(rows, cols)), itemsize)
    threads = sharing.row_group.threads
    assert (sharing.lanes > 32) == (sharing.row_group is not RowGroup.WARP)
    is_long = order is Order.ROW and cols * itemsize > 112 << 10
    assert is_long == (sharing.row_group is RowGroup.MULTIPROCESSOR)
    assert sharing.lanes == threads or (sharing.lanes <= 32 and sharing.lanes & (sharing.lanes - 1) == 0)
    assert threads % sharing.lanes == 0 == threads % 32
    assert 1 <= sharing.blocks <= cross_entropy._MAX_BLOCKS
    assert sharing.packets * sharing.lanes >= cols * itemsize // 16


@pytest.mark.parametrize(
    ("classes", "itemsize", "packets", "held", "holds"),
    [(50304, 2, 25, 28, True), (50304, 4, 25, 28, True), (128256, 2, 32, 28, True), (128256, 4, 63, 28, False)],
)
def test_rows_are_held_as_far_as_blocks_have_memory(
    classes: int, itemsize: int, packets: int, held: int, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the cases an H200's shared memory holds two rows of scores, one, the part that registers do not hold, or less.
    A row takes whole batches of packets (vector loads of one thread) in shared memory.
    """
    monkeypatch.setattr(cross_entropy, "device_attributes", lambda *_: (227 << 10, 228 << 10))
    sharing = RowSharing.of(packed(8192, classes), itemsize)
    assert sharing.packets == packets
    assert sharing.held_packets(0) == held
    assert sharing.holds_row(held) == holds


@pytest.mark.parametrize(
    ("classes", "spreads", "kept"), [(151936, False, 2), (50304, False, 1), (50304, True, 0), (1000, False, 0)]
)
def test_batches_stay_in_registers_where_these_have_room(classes: int, spreads: bool, kept: int) -> None:
    assert RowSharing.of(packed(8192, classes), 2, spreads=spreads).kept == kept


@pytest.mark.parametrize("classes", [1000, 50304, 151936])
def test_without_a_gradient_two_blocks_share_a_multiprocessor_and_keep_nothing(classes: int) -> None:
    sharing = RowSharing.of(packed(8192, classes), 2, writes=False)
    assert (sharing.row_group.blocks_per_multiprocessor, sharing.kept) == (2, 0)


@pytest.mark.parametrize(("classes", "lanes"), [(24, 2), (257, 16), (263, 16), (264, 32), (1000, 32)])
def test_a_row_has_a_thread_for_16_columns(classes: int, lanes: int) -> None:
    assert RowSharing.of(packed(8192, classes), 2).lanes == lanes


def test_matrices_without_gaps_are_one_row() -> None:
    whole, gaps = packed(5, 6), Layout(5, 6, Order.ROW, 7)
    column = Layout(6, 5, Order.COLUMN, 6)
    assert flattened([whole, whole]) == [packed(1, 30)] * 2
    assert flattened([column, column]) == [packed(1, 30)] * 2
    assert flattened([whole, gaps]) == [whole, gaps]
    assert flattened([Layout(6, 5, Order.COLUMN, 8), column]) == [Layout(5, 6, Order.ROW, 8), packed(5, 6)]
    assert flattened([packed(6, 5), column]) == [packed(6, 5), column]


def test_rows_with_weights_stay_rows() -> None:
    column, huge = Layout(6, 5, Order.COLUMN, 6), packed(1 << 16, 1 << 16)
    assert flattened([packed(5, 6)] * 2, weighted=True) == [packed(1, 30)] * 2
    assert flattened([column] * 2, weighted=True) == [column] * 2
    assert flattened([huge] * 2, weighted=True) == [huge] * 2
    assert flattened([huge] * 2) == [packed(1, 1 << 32)] * 2
