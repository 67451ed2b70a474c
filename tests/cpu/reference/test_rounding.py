"""Stochastic rounding to BF16 and its random bits."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from lt_runtime.reference import RoundedTensor, philox4x32, round_stochastically, rounding_lanes

SEED = 0x0123456789ABCDEF


def lane_of(element: int, tensor: int, step: int, part: RoundedTensor) -> int:
    """Computes one element's random bits as the docstring of `rounding_lanes` describes them."""
    tile, within = divmod(element, 256)
    half, rest = divmod(within, 128)
    thread, i = divmod(rest, 4)
    call = 32 * tile + thread
    counter = np.array([[call & 0xFFFFFFFF, call >> 32, (1 << 31) + tensor, step]], np.uint64)
    words = philox4x32(counter, (SEED & 0xFFFFFFFF, SEED >> 32))[0]
    place = 4 * half + i
    lane = {RoundedTensor.PARAMETER: place, RoundedTensor.M: place ^ 1, RoundedTensor.V: (place + 2) % 8}[part]
    return int(words[lane // 2]) >> (16 * (lane % 2)) & 0xFFFF


@pytest.mark.parametrize("part", RoundedTensor)
@pytest.mark.parametrize("first", [0, 256, 1 << 31, (1 << 35) + 512])
def test_lanes_are_those_of_the_contract(part: RoundedTensor, first: int) -> None:
    lanes = rounding_lanes(700, SEED, 5, 9, part, first)
    assert lanes.dtype == np.uint16
    for element in (0, 1, 3, 4, 127, 128, 131, 132, 255, 256, 511, 699):
        assert int(lanes[element]) == lane_of(first + element, 5, 9, part)


def test_everything_draws_its_own() -> None:
    drawn = [
        rounding_lanes(256, seed, tensor, step, part).tobytes()
        for seed in (0, 1, 1 << 32)
        for tensor in (0, 1)
        for step in (1, 2)
        for part in RoundedTensor
    ]
    assert len(set(drawn)) == len(drawn)


def test_an_element_s_numbers_are_independent() -> None:
    drawn = [rounding_lanes(1 << 16, SEED, 3, 4, part).astype(np.float64) for part in RoundedTensor]
    correlations = np.corrcoef(drawn)[np.triu_indices(len(drawn), 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(1 << 16)


def test_is_right_on_average() -> None:
    values = np.full(1 << 16, 1.0 + 0.3 * 2.0**-7, np.float32)
    rounded = round_stochastically(values, np.arange(1 << 16, dtype=np.uint16)).astype(np.float64)
    assert set(rounded) == {1.0, 1.0 + 2.0**-7}
    assert rounded.mean() == pytest.approx(float(values[0]), abs=2.0**-7 / 65536)
    assert (round_stochastically(-values, np.arange(1 << 16, dtype=np.uint16)).astype(np.float64) == -rounded).all()


def test_what_bfloat16_has_stays() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    exact = bits.view(ml_dtypes.bfloat16).astype(np.float32)
    for lane in (0, 1, 0xFFFF):
        kept = round_stochastically(exact, np.full(exact.shape, lane, np.uint16))
        np.testing.assert_array_equal(kept.astype(np.float32), exact)


def test_nan_stays_nan_and_overflow_is_infinite() -> None:
    all_ones = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert np.isnan(round_stochastically(all_ones, np.full(3, 0xFFFF, np.uint16)).astype(np.float32)).all()
    assert np.isnan(round_stochastically(all_ones, np.zeros(3, np.uint16)).astype(np.float32)).all()
    largest = np.array([np.finfo(np.float32).max], np.float32)
    assert round_stochastically(largest, np.array([0xFFFF], np.uint16)).astype(np.float32)[0] == np.inf
    assert np.isfinite(round_stochastically(largest, np.array([0], np.uint16)).astype(np.float32)[0])
