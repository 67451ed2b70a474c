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
from lt_runtime.gpu.compiler import runtime_headers
from lt_runtime.paths import kernel_sources
from lt_runtime.problem import DType, Philox, keep_threshold
from lt_runtime.reference.philox import philox4x32
from tests.support.gpu_arrays import Guarded, to_host
from tests.support.strategies import TYPES, Placement, generators, placements, sizes

KNOWN_ANSWERS = [
    # Random123, Philox4x32-10: counter, key, output
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]

_PROBE = r"""
#include "philox.cuh"
extern "C" __global__ void probe(const unsigned* in, unsigned* out) {
  const lt::Words r = lt::philox4x32(lt::Words{{in[0], in[1], in[2], in[3]}}, in[4], in[5]);
  for (int i = 0; i < 4; ++i) out[i] = r.w[i];
}
"""


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    kernel = cp.RawKernel(_PROBE, "probe", options=("-std=c++17", f"-I{kernel_sources()}", f"-I{runtime_headers()}"))
    out = cp.zeros(4, cp.uint32)
    kernel((1,), (1,), (cp.asarray(np.array([*counter, *key], np.uint32)), out))
    assert tuple(int(word) for word in out) == expected


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
    rows: int, cols: int, source: Placement, target: Placement, dtype: DType, p: float, rng: Philox
) -> None:
    x = Guarded(np.ones((rows, cols), dtype.numpy), source)
    out = Guarded(np.zeros((rows, cols), dtype.numpy), target)
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


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", [(64, 96), (333, 77), (5, 2048), (1, 9)])
@pytest.mark.parametrize("place", [(0, 1), (1, 1), (8, 0), (1, 0)], ids=str)
def test_gaps_and_offsets_do_not_reach_the_mask(dtype: DType, shape: tuple[int, int], place: tuple[int, int]) -> None:
    gap, offset = place
    x = (np.random.default_rng(1).standard_normal(shape) + 3.0).astype(dtype.numpy)
    padded = Guarded(x, Placement(column_major=False, gap=gap, offset=offset))
    flat = lt.dropout(cp.asarray(x), 0.3, lt.Philox(5, 6, 7))
    apart = lt.dropout(padded.array, 0.3, lt.Philox(5, 6, 7))
    np.testing.assert_array_equal(to_host(apart), to_host(flat))
    lt.dropout(padded.array, 0.3, lt.Philox(5, 6, 7), out=padded.array)
    np.testing.assert_array_equal(padded.values(), to_host(flat))


@pytest.mark.parametrize("size", [2**31 + 3 * 2048, 2**31 + 7])
def test_more_elements_than_31_bits_count(size: int) -> None:
    if cp.cuda.runtime.memGetInfo()[0] < 3 * size:
        pytest.skip("needs 6 GB of memory on the GPU")
    bits, one, two = cp.full(size, 0x3F80, cp.uint16), 0x3F80, 0x4000  # of BF16
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
    """Which of the elements from row-major index `start` on, a multiple of eight, are kept."""
    blocks = np.arange(start // 8, (start + count + 7) // 8, dtype=np.uint64)
    layer, step = (np.full_like(blocks, number) for number in (rng.layer, rng.step))
    counters = np.stack([blocks & np.uint64(0xFFFFFFFF), blocks >> np.uint64(32), layer, step], axis=1)
    words = philox4x32(counters, (rng.seed & 0xFFFFFFFF, rng.seed >> 32))
    lanes = np.stack([words & 0xFFFF, words >> 16], axis=2).reshape(-1)
    return lanes[:count] < keep_threshold(p)


def test_in_place_and_without_dropout() -> None:
    x = cp.arange(10, dtype=cp.float32)
    copy = lt.dropout(x, 0.0)
    assert copy is not x
    assert (copy == x).all()
    expected = lt.dropout(x, 0.5, lt.Philox(1))
    assert lt.dropout(x, 0.5, lt.Philox(1), out=x) is x
    assert (x == expected).all()


def test_step_lives_on_the_device() -> None:
    x, step = cp.ones((64, 64), cp.float32), cp.asarray([3], dtype=cp.uint32)
    rng = lt.Philox(1, 2, step)
    assert (lt.dropout(x, 0.5, rng) == lt.dropout(x, 0.5, lt.Philox(1, 2, 3))).all()
    step += 1
    assert (lt.dropout(x, 0.5, rng) == lt.dropout(x, 0.5, lt.Philox(1, 2, 4))).all()


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("shape", [(64, 96), (33, 77)])
def test_linear_uses_the_same_mask_forward_and_backward(dtype: DType, shape: tuple[int, int]) -> None:
    m, n = shape
    rng = lt.Philox(123456789012345, 3, 99)
    x, w = cp.ones((m, 8), dtype.numpy), cp.ones((n, 8), dtype.numpy)
    y, ctx = lt.linear_fwd(x, w, activation="none", dropout=0.25, rng=rng)
    dz: Any = cp.zeros((m, n), dtype.numpy)
    lt.linear_bwd(cp.ones((m, n), dtype.numpy), ctx, out_dz=dz)
    mask = reference.dropout_mask(shape, 0.25, rng)
    np.testing.assert_array_equal(cp.asnumpy(y) != 0, mask)
    np.testing.assert_array_equal(cp.asnumpy(dz) != 0, mask)
