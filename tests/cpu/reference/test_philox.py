"""Philox4x32-10 and the mask drawn from it, against published answers and a second implementation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime.errors import ArgumentError
from lt_runtime.problem import Philox, keep_scale, keep_threshold
from lt_runtime.reference import dropout_mask, dropout_scale, philox4x32

WORD = st.integers(0, 2**32 - 1)
PROBABILITIES = (0.01, 0.1, 0.3, 0.5, 0.9)

KNOWN_ANSWERS = [
    # known answers from Random123's file kat_vectors: counter, key, output
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def scalar_philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers: ten rounds of R = hi(M·c) ^ c ^ k, L = lo(M·c), with the halves exchanged."""
    (a, b, c, d), (k, j) = counter, key
    for _ in range(10):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32) ^ b ^ k, right % 2**32, (left >> 32) ^ d ^ j, left % 2**32
        k, j = (k + 0x9E3779B9) % 2**32, (j + 0xBB67AE85) % 2**32
    return [a, b, c, d]


def scalar_keeps(index: int, p: float, philox: Philox) -> bool:
    """Whether dropout keeps the element with the given row-major index."""
    block, lane = divmod(index, 8)
    words = scalar_philox(
        [block % 2**32, block // 2**32, philox.layer, philox.step], [philox.seed % 2**32, philox.seed // 2**32]
    )
    bits = b"".join(word.to_bytes(4, "little") for word in words)
    return int.from_bytes(bits[2 * lane : 2 * lane + 2], "little") < max(1, round((1 - p) * 65536))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]) -> None:
    assert philox4x32(np.array([counter], np.uint64), key).tolist() == [list(expected)]
    assert scalar_philox(list(counter), list(key)) == list(expected)


@settings(max_examples=60, deadline=None)
@given(counters=st.lists(st.tuples(WORD, WORD, WORD, WORD), min_size=1, max_size=8), key=st.tuples(WORD, WORD))
def test_counters_of_128_bits(counters: list[tuple[int, int, int, int]], key: tuple[int, int]) -> None:
    result = philox4x32(np.array(counters, np.uint64), key)
    assert result.dtype == np.uint32
    assert result.tolist() == [scalar_philox(list(counter), list(key)) for counter in counters]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 7), max_size=3).map(tuple),
    p=st.just(0.0) | st.floats(2.0**-17 * 1.001, 1, exclude_max=True),
    philox=st.builds(Philox, st.integers(0, 2**64 - 1), WORD, WORD),
)
def test_mask_is_the_contracts(shape: tuple[int, ...], p: float, philox: Philox) -> None:
    mask = dropout_mask(shape, p, philox)
    assert mask.shape == shape
    expected = [scalar_keeps(i, p, philox) for i in range(math.prod(shape))]
    assert mask.reshape(-1).tolist() == expected


@pytest.mark.parametrize("p", PROBABILITIES)
def test_expectation_is_one(p: float) -> None:
    size = 1 << 20
    kept = round((1 - p) * 65536) / 65536
    factors = dropout_scale((size,), p, Philox(11, 3, 2)).reshape(-1, 8)
    assert set(np.unique(factors)) == {0.0, float(np.float32(1 / kept))}
    deviation = math.sqrt((1 - kept) / kept)  # the standard deviation of a single element's dropout factor
    assert abs(factors.mean() - 1) < 5 * deviation / math.sqrt(size)
    assert (abs(factors.mean(axis=0) - 1) < 5 * deviation / math.sqrt(size / 8)).all(), "a lane is biased"


@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize("other", [Philox(2**32, 2, 3), Philox(1, 3, 3), Philox(1, 2, 4), Philox(1, 2, 3)])
def test_masks_of_other_seeds_layers_and_steps_are_unrelated(p: float, other: Philox) -> None:
    size = 1 << 16
    first, second = (dropout_mask((size,), p, philox) for philox in (Philox(1, 2, 3), other))
    agreement = float((first == second).mean())
    if (other.seed, other.layer, other.step) == (1, 2, 3):
        assert agreement == 1
        return
    kept = round((1 - p) * 65536) / 65536
    chance = kept**2 + (1 - kept) ** 2
    assert abs(agreement - chance) < 5 * math.sqrt(chance * (1 - chance) / size)


@pytest.mark.parametrize(
    ("p", "threshold"), [(0.0, 65536), (2.0**-16, 65535), (0.1, 58982), (0.5, 32768), (1 - 2.0**-16, 1), (1 - 1e-9, 1)]
)
def test_threshold_and_scale(p: float, threshold: int) -> None:
    assert keep_threshold(p) == threshold
    assert keep_scale(threshold) == np.float32(65536 / threshold)


@pytest.mark.parametrize("p", [5e-324, 1e-6, 2.0**-17])
def test_probabilities_that_would_be_rounded_to_0(p: float) -> None:
    message = rf"dropout( probability)? is {p}, which is rounded to 0, .* accepted are 0 and all above 2\^-17"
    with pytest.raises(ArgumentError, match=message):
        lt.dropout(np.ones(8, np.float32), p, Philox(1))
    with pytest.raises(ArgumentError, match=message):
        lt.MLP([2, 3], dropout=p, device="cpu")
    assert keep_threshold(float(np.nextafter(2.0**-17, 1) * (1 + 1e-10))) == 65535
