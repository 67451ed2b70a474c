"""`lt.dropout` on NumPy arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime import reference
from tests.host_kernels.arrays import Guarded
from tests.support.numpy_cases import DTYPES, PLACES, numbers

RNG = lt.Philox(2**50 + 1, 2, 3)


@settings(max_examples=40, deadline=None)
@given(shape=st.lists(st.integers(0, 6), max_size=3).map(tuple), p=st.sampled_from((0.1, 0.5, 0.9)))
def test_any_shape(shape: tuple[int, ...], p: float) -> None:
    x = numbers(1, shape, "float32")
    y = lt.dropout(np.asarray(x), p, RNG)
    scale = np.float32(65536 / round((1 - p) * 65536))
    expected = np.where(reference.dropout_mask(shape, p, RNG), x * scale, 0)
    assert y.shape == shape
    np.testing.assert_array_equal(y, expected)


def test_the_mask_does_not_depend_on_type_layout_or_buffer() -> None:
    mask = reference.dropout_mask((6, 11), 0.4, RNG)
    for dtype in DTYPES:
        for place in PLACES.values():
            x = Guarded(np.ones((6, 11), DTYPES[dtype]), place)
            out = Guarded(np.zeros((6, 11), DTYPES[dtype]), place)
            assert lt.dropout(x.array, 0.4, RNG, out=out.array) is out.array
            assert ((out.array != 0) == mask).all()
            assert len(np.unique(out.array)) == 2
            out.values()
            x.values()


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place(dtype: str) -> None:
    x = numbers(2, (50,), dtype)
    expected = lt.dropout(x.copy(), 0.3, RNG)
    assert lt.dropout(x, 0.3, RNG, out=x) is x
    assert (x == expected).all()


def test_without_dropout_it_copies() -> None:
    x = numbers(3, (4, 5), "bfloat16")
    y = lt.dropout(x, 0.0)
    assert y is not x
    assert not np.shares_memory(x, y)
    assert (y == x).all()


def test_backward_is_the_same_call() -> None:
    x, dy = np.ones((9, 9), np.float32), np.full((9, 9), 2.0, np.float32)
    assert (lt.dropout(dy, 0.5, RNG) == 2 * lt.dropout(x, 0.5, RNG)).all()


def test_the_step_may_advance_in_place() -> None:
    step = np.zeros(1, np.uint32)
    x, rng = np.ones(200, np.float32), lt.Philox(1, 2, step)
    results = []
    for i in range(3):
        results.append(lt.dropout(x, 0.5, rng))
        assert (results[-1] == lt.dropout(x, 0.5, lt.Philox(1, 2, i))).all()
        step += 1
    assert (results[0] != results[1]).any()
    assert (results[1] != results[2]).any()


def test_nan_and_infinity_pass_where_kept() -> None:
    x = np.full(64, np.inf, np.float16)
    mask = reference.dropout_mask((64,), 0.5, RNG)
    assert np.isinf(lt.dropout(x, 0.5, RNG)[mask]).all()
    assert np.isinf(lt.dropout(np.full(64, 60000, np.float16), 0.5, RNG)[mask]).all()


def test_out_may_be_another_view_of_x() -> None:
    x, copy = np.ones((4, 8), np.float32), np.ones((4, 8), np.float32)
    lt.dropout(x, 0.5, lt.Philox(3), out=x[:])
    np.testing.assert_array_equal(x, lt.dropout(copy, 0.5, lt.Philox(3)))
