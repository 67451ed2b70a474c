"""How the launches of losses divide their work."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lt_runtime.kernels import cross_entropy
from lt_runtime.kernels.cross_entropy import RowSharing
from lt_runtime.kernels.elementwise_loss import flattened
from lt_runtime.layout import Layout, Order, packed


@given(rows=st.integers(1, 10**6), cols=st.integers(1, 10**6), order=st.sampled_from(Order))
def test_every_row_has_threads(rows: int, cols: int, order: Order) -> None:
    sharing = RowSharing.of(Layout(rows, cols, order, max(rows, cols)))
    threads = sharing.threads
    assert threads == (cross_entropy._BLOCK_ROW_THREADS if sharing.lanes > 32 else cross_entropy._WARP_ROW_THREADS)
    assert sharing.lanes == threads or (sharing.lanes <= 32 and sharing.lanes & (sharing.lanes - 1) == 0)
    assert threads % sharing.lanes == 0 == threads % 32
    assert 1 <= sharing.blocks <= cross_entropy._MAX_BLOCKS
    assert sharing.octets * sharing.lanes >= cols // 8


@pytest.mark.parametrize(("itemsize", "held"), [(2, 25), (4, 14)])
def test_rows_are_held_as_far_as_two_blocks_have_memory(
    itemsize: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50,304 classes on an H200: the whole row of a 16-bit type, half of one in FP32."""
    monkeypatch.setattr(cross_entropy, "device_attributes", lambda *_: (227 << 10, 228 << 10))
    sharing = RowSharing.of(packed(8192, 50304))
    assert sharing.octets == 25
    assert sharing.held_octets(itemsize, 0) == held


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
