"""Dropout on the GPU: the mask is the reference's, bit for bit."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.problem import DType, Philox, keep_threshold
from lt_runtime.reference.philox import philox4x32
from tests.support.placed import Placed
from tests.support.strategies import TYPES, Placement, generators, placements, sizes


@settings(max_examples=150, deadline=None)
@given(
    rows=sizes,
    cols=sizes,
    source=placements,
    target=placements,
    dtype=st.sampled_from(list(TYPES)),
    p=st.sampled_from((0.01, 0.1, 0.3, 0.5, 0.9)),
    rng=generators,
)
def test_mask_is_the_references(
    gpu: Any, rows: int, cols: int, source: Placement, target: Placement, dtype: DType, p: float, rng: Philox
) -> None:
    x = Placed(gpu, np.ones((rows, cols), dtype.numpy), source)
    out = Placed(gpu, np.zeros((rows, cols), dtype.numpy), target)
    lt.dropout(x.array, p, rng, out=out.array)
    expected = reference.dropout_scale((rows, cols), p, rng).astype(dtype.numpy).astype(np.float64)
    np.testing.assert_array_equal(out.values(), expected)


@pytest.mark.parametrize(
    "shape", [(1000,), (1,), (2049,), (4096,), (1_000_003,), (7, 293), (3, 5, 7), (0,), (0, 4), ()]
)
def test_any_shape(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    on_gpu = lt.dropout(cp.asarray(x), 0.4, lt.Philox(9))
    np.testing.assert_array_equal(cp.asnumpy(on_gpu), lt.dropout(np.asarray(x), 0.4, lt.Philox(9)))


@pytest.mark.parametrize("size", [2**31 + 3 * 2048, 2**31 + 7])
def test_more_elements_than_31_bits_count(size: int) -> None:
    if cp.cuda.runtime.memGetInfo()[0] < 3 * size:
        pytest.skip("needs 6 GB of memory on the GPU")
    bits, one, two = cp.full(size, 0x3F80, cp.uint16), 0x3F80, 0x4000  # the numbers 1 and 2 as BF16 bits
    x, rng, p = bits.view(DType.BFLOAT16.numpy), lt.Philox(2**60 + 5, 2, 3), 0.5
    assert (bits[-8:] == one).all()
    lt.dropout(x, p, rng, out=x)
    for start in (0, 2**31 - 4096, 2**31, size // 8 * 8 - 4096):
        actual = cp.asnumpy(bits[start : start + 4096 + 7])
        expected = np.where(_keeps(start, actual.size, p, rng), two, 0)
        np.testing.assert_array_equal(actual, expected)
    del x, bits
    cp.get_default_memory_pool().free_all_blocks()


def _keeps(start: int, count: int, p: float, rng: Philox) -> Any:
    """Computes whether dropout keeps each of `count` elements from index `start` (a multiple of eight) on."""
    blocks = np.arange(start // 8, (start + count + 7) // 8, dtype=np.uint64)
    layer, step = (np.full_like(blocks, number) for number in (rng.layer, rng.step))
    counters = np.stack([blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32), layer, step], axis=1)
    words = philox4x32(counters, (rng.seed & 0xFFFFFFFF, rng.seed >> 32))
    lanes = np.stack([words & 0xFFFF, words >> 16], axis=2).reshape(-1)
    return lanes[:count] < keep_threshold(p)


_COUNT = 30030  # 2 · 3 · 5 · 7 · 11 · 13 elements, so that rows can have lengths with every remainder modulo eight
_RNG = Philox(0x0123456789ABCDEF, 11, 13)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("cols", [7, 66, 143, 1001])
def test_a_layer_s_mask_is_the_same_forward_and_backward(dtype: DType, activation: str, cols: int) -> None:
    expected = reference.dropout_mask((_COUNT,), 0.3, _RNG)
    rows = _COUNT // cols
    x, w, bias = (cp.ones(shape, dtype.numpy) for shape in ((rows, 8), (cols, 8), (cols,)))
    y, context = lt.linear_fwd(x, w, bias, activation=activation, dropout=0.3, rng=_RNG)
    dz = cp.zeros((rows, cols), dtype.numpy)
    lt.linear_bwd(cp.ones((rows, cols), dtype.numpy), context, need_dx=False, need_dw=False, out_dz=dz)
    np.testing.assert_array_equal(cp.asnumpy(y).reshape(-1) != 0, expected)
    np.testing.assert_array_equal(cp.asnumpy(dz).reshape(-1) != 0, expected)
