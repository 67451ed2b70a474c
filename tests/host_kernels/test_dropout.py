"""Philox's known answers, and masks that depend on nothing but seed, layer, step and the element's index."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.gpu.params import Dropout, DropoutParams
from lt_runtime.problem import DType, Philox, keep_scale, keep_threshold
from lt_runtime.reference import dropout_mask
from lt_runtime.reference.philox import philox4x32
from tests.host_kernels.arrays import Guarded, assert_close, numbers, rounding
from tests.host_kernels.build import Variant
from tests.host_kernels.cases import MORE, Drops, Shape, Tiling, drops, launch_shape, orders, seeds, shapes, tilings
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.variants import TYPES, scalar_macros
from tests.strategies import Placement, generators, placements

PROBE = Variant("dropout_probe.cu")
WORD = 0xFFFFFFFF
KNOWN_ANSWERS = [  # Random123, ten rounds
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((WORD, WORD, WORD, WORD), (WORD, WORD), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


class PhiloxProbeParams(ctypes.Structure):
    _fields_ = (("counters", ctypes.c_void_p), ("keys", ctypes.c_void_p), ("words", ctypes.c_void_p))


class DropoutProbeParams(ctypes.Structure):
    _fields_ = (("dropout", Dropout), ("indices", ctypes.c_void_p), ("factors", ctypes.c_void_p))


def words_of(host: HostKernels, counters: NDArray[np.uint32], keys: NDArray[np.uint32]) -> NDArray[np.uint32]:
    words = np.zeros_like(counters)
    params = PhiloxProbeParams(counters.ctypes.data, keys.ctypes.data, words.ctypes.data)
    host.kernel(PROBE, "philox_probe").launch((len(counters), 1), (1, 1), params)
    return words


def test_known_answers(host: HostKernels) -> None:
    counters, keys, expected = (np.array(column, np.uint32) for column in zip(*KNOWN_ANSWERS, strict=True))
    assert np.array_equal(words_of(host, counters, keys), expected)


@MORE
@given(seed=seeds)
def test_words_are_the_reference_s(host: HostKernels, seed: int) -> None:
    generator = np.random.default_rng(seed)
    counters = generator.integers(0, 2**32, (5, 4), np.uint32)
    key = generator.integers(0, 2**32, 2, np.uint32)
    expected = philox4x32(counters, (int(key[0]), int(key[1])))
    assert np.array_equal(words_of(host, counters, np.tile(key, (5, 1))), expected)


@MORE
@given(philox=generators, indices=st.lists(st.integers(0, 2**64 - 16), min_size=1, max_size=8))
def test_factors_from_any_index_on(host: HostKernels, philox: Philox, indices: list[int]) -> None:
    threshold = keep_threshold(0.5)
    starts = np.array(indices, np.uint64)
    factors = np.full((len(indices), 8), np.nan, np.float32)
    block = Dropout(philox.seed, 0, philox.step, philox.layer, threshold, keep_scale(threshold))
    params = DropoutProbeParams(block, starts.ctypes.data, factors.ctypes.data)
    host.kernel(PROBE, "dropout_probe").launch((len(indices), 1), (1, 1), params)
    expected = [[lane_of(philox, index + i) < threshold for i in range(8)] for index in indices]
    assert np.array_equal(factors, np.where(expected, keep_scale(threshold), 0.0))


def lane_of(philox: Philox, index: int) -> int:
    """The 16 bits of the element at a row-major index, by the contract's words."""
    counter = np.array([[index // 8 & WORD, index // 8 >> 32, philox.layer, philox.step]], np.uint64)
    words = philox4x32(counter, (philox.seed & WORD, philox.seed >> 32))[0]
    return int(words[index % 8 // 2]) >> 16 * (index % 2) & 0xFFFF


def run_dropout(
    host: HostKernels,
    x: Guarded,
    out: Guarded,
    case: Drops,
    tiling: Tiling | None,
    order: int,
) -> None:
    state, step = case.state()
    rows, cols = x.array.shape
    params = DropoutParams(x.matrix, out.matrix, rows, cols, state.block())
    grid, block = launch_shape((rows, cols), tiling)
    host.get("dropout", scalar_macros(x.dtype)).launch(grid, block, params, order=order)
    assert step[0] == case.philox.step


@MORE
@pytest.mark.parametrize("dtype", TYPES)
@given(shape=shapes, case=drops, tiling=tilings, order=orders, place=placements)
def test_masks_are_the_reference_s(
    host: HostKernels, dtype: DType, shape: Shape, case: Drops, tiling: Tiling | None, order: int, place: Placement
) -> None:
    ones, out = Guarded(np.ones(shape), place, dtype), Guarded(np.full(shape, 7.0), place, dtype)
    run_dropout(host, ones, out, case, tiling, order)
    scale = np.array(keep_scale(keep_threshold(case.p))).astype(dtype.numpy)
    expected = np.where(dropout_mask(shape, case.p, case.philox), scale, np.zeros_like(scale))
    assert np.array_equal(out.values(), expected.astype(np.float64))
    ones.assert_unchanged()


@MORE
@pytest.mark.parametrize("dtype", TYPES)
@given(data=st.data(), shape=shapes, case=drops, tiling=tilings, seed=seeds, in_place=st.booleans())
def test_values(
    host: HostKernels,
    dtype: DType,
    data: st.DataObject,
    shape: Shape,
    case: Drops,
    tiling: Tiling | None,
    seed: int,
    in_place: bool,
) -> None:
    x: NDArray[Any] = numbers(np.random.default_rng(seed), shape, dtype)
    source = Guarded(x, data.draw(placements))
    out = source if in_place else Guarded(np.zeros(shape), data.draw(placements), dtype)
    run_dropout(host, source, out, case, tiling, data.draw(orders))
    expected = x.astype(np.float64) * case.factors(shape)
    assert_close("y", out.values(), expected, 2 * rounding(dtype, expected))
    if not in_place:
        source.assert_unchanged()
