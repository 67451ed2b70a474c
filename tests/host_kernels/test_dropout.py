"""The kernels' Philox against published answers; masks depend only on seed, layer, step and the element's index."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.epilogue import DROPOUT
from lt_runtime.kernels.kernel import Dropout
from lt_runtime.kernels.tiling import sweep
from lt_runtime.layout import packed
from lt_runtime.problem import Philox, keep_scale, keep_threshold
from lt_runtime.reference import dropout_mask
from lt_runtime.reference.philox import philox4x32
from tests.host_kernels.arrays import Guarded, assert_close, numbers, rounding
from tests.host_kernels.build import Variant
from tests.host_kernels.cases import FEW, LAUNCH, Launch, seeds, suit_place, suit_shape
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.variants import DROPPING, Dropping
from tests.support.strategies import Placement, generators, placements

PROBE = Variant("dropout_probe.cu")
WORD = 0xFFFFFFFF
KNOWN_ANSWERS = [  # known answers of Random123, for ten rounds
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


@FEW
@given(seed=seeds)
def test_words_are_the_reference_s(host: HostKernels, seed: int) -> None:
    generator = np.random.default_rng(seed)
    counters = generator.integers(0, 2**32, (5, 4), np.uint32)
    key = generator.integers(0, 2**32, 2, np.uint32)
    expected = philox4x32(counters, (int(key[0]), int(key[1])))
    assert np.array_equal(words_of(host, counters, np.tile(key, (5, 1))), expected)


@pytest.mark.parametrize(("entry", "multiple"), [("dropout_probe", 1), ("whole_dropout_probe", 8)])
@FEW
@given(philox=generators, indices=st.lists(st.integers(0, 2**64 - 16), min_size=1, max_size=8))
def test_factors_from_any_index_on(
    host: HostKernels, entry: str, multiple: int, philox: Philox, indices: list[int]
) -> None:
    threshold = keep_threshold(0.5)
    indices = [index // multiple * multiple for index in indices]
    starts = np.array(indices, np.uint64)
    factors = np.full((len(indices), 8), np.nan, np.float32)
    params = DropoutProbeParams(DropoutState(threshold, philox).block(), starts.ctypes.data, factors.ctypes.data)
    host.kernel(PROBE, entry).launch((len(indices), 1), (1, 1), params)
    expected = [[lane_of(philox, index + i) < threshold for i in range(8)] for index in indices]
    assert np.array_equal(factors, np.where(expected, keep_scale(threshold), 0.0))


def lane_of(philox: Philox, index: int) -> int:
    """Draws the 16 bits of the element at a row-major index as the docstring of reference/philox.py defines them."""
    counter = np.array([[index // 8 & WORD, index // 8 >> 32, philox.layer, philox.step]], np.uint64)
    words = philox4x32(counter, (philox.seed & WORD, philox.seed >> 32))[0]
    return int(words[index % 8 // 2]) >> 16 * (index % 2) & 0xFFFF


@dataclass(frozen=True, kw_only=True)
class DropoutCase(Launch):
    x: Placement
    out: Placement


def run_dropout(host: HostKernels, variant: Dropping, x: Guarded, out: Guarded, case: DropoutCase) -> None:
    state, step = case.drops.state()
    rows, cols = x.array.shape
    params = DROPOUT.params(x.matrix, out.matrix, rows, cols, state.block())
    tiling = case.blocks.tiling((rows, cols)) if case.blocks else sweep(packed(rows, cols), None)
    host.get(DROPOUT, variant.macros).launch(*tiling, params, order=case.order)
    assert step[0] == case.drops.philox.step


@pytest.mark.parametrize("variant", DROPPING, ids=str)
@FEW
@given(case=st.builds(DropoutCase, x=placements, out=placements, **LAUNCH))
def test_masks_are_the_reference_s(host: HostKernels, variant: Dropping, case: DropoutCase) -> None:
    shape = suit_shape(case.shape, aligned=variant.aligned)
    x: NDArray[Any] = numbers(np.random.default_rng(case.seed), shape, variant.dtype)
    at, apart = (suit_place(place, shape, variant.dtype, aligned=variant.aligned) for place in (case.x, case.out))
    source = Guarded(x, at)
    out = source if case.in_place else Guarded(np.zeros(shape), apart, variant.dtype)
    run_dropout(host, variant, source, out, case)
    expected = x.astype(np.float64) * case.drops.factors(shape)
    assert_close("y", out.values(), expected, 2 * rounding(variant.dtype, expected))
    kept = dropout_mask(shape, case.drops.p, case.drops.philox) & (x != 0)
    assert np.array_equal(out.values() != 0, kept)
    if not case.in_place:
        source.assert_unchanged()
