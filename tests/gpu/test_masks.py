"""Dropout's masks: their statistics, and that they depend on nothing but seed, layer, step and the element's index."""

from __future__ import annotations

import math

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import reference
from lt_runtime.problem import DType, Philox, keep_scale, keep_threshold
from tests.support.gpu_arrays import Guarded
from tests.support.strategies import TYPES, Placement

PROBABILITIES = (0.01, 0.1, 0.3, 0.5, 0.9)
SIDE = 4096  # 2^24 elements
SIGMAS = 5.0
RNG = Philox(0x0123456789ABCDEF, 11, 13)


def kept(p: float, rng: Philox) -> cp.ndarray:
    """The mask of a large matrix, from the kernel."""
    y = lt.dropout(cp.ones((SIDE, SIDE), cp.float32), p, rng)
    mask = y != 0
    assert bool((y == cp.where(mask, cp.float32(keep_scale(keep_threshold(p))), cp.float32(0))).all())
    return mask


def deviation(count: int, size: int, probability: float) -> float:
    """By how many of its standard deviations a binomial count is off."""
    return abs(count - size * probability) / math.sqrt(size * probability * (1 - probability))


@pytest.mark.large
@pytest.mark.parametrize("p", PROBABILITIES)
def test_the_expectation_of_mask_times_scale_is_one(p: float) -> None:
    mask, threshold = kept(p, RNG), keep_threshold(p)
    probability = threshold / 65536
    assert abs(probability - (1 - p)) <= 2.0**-17
    count = int(cp.count_nonzero(mask))
    assert deviation(count, mask.size, probability) < SIGMAS
    mean = count / mask.size * keep_scale(threshold)
    assert abs(mean - 1) < SIGMAS * math.sqrt((1 - probability) / probability / mask.size)


@pytest.mark.large
@pytest.mark.parametrize("p", PROBABILITIES)
def test_each_lane_each_row_and_each_column_keeps_as_often(p: float) -> None:
    mask, probability = kept(p, RNG), keep_threshold(p) / 65536
    lanes = cp.asnumpy(cp.count_nonzero(mask.reshape(-1, 8), axis=0))
    assert max(deviation(int(count), mask.size // 8, probability) for count in lanes) < SIGMAS
    for axis in (0, 1):  # of 4096 counts the largest may be off by more
        counts = cp.asnumpy(cp.count_nonzero(mask, axis=axis))
        assert max(deviation(int(count), SIDE, probability) for count in counts) < SIGMAS + 1


@pytest.mark.large
@pytest.mark.parametrize("p", PROBABILITIES)
@pytest.mark.parametrize(
    "other",
    [
        Philox(RNG.seed + 1, 11, 13),
        Philox(RNG.seed + 2**32, 11, 13),
        Philox(RNG.seed, 12, 13),
        Philox(RNG.seed, 11, 14),
    ],
    ids=["seed", "high seed", "layer", "step"],
)
def test_another_seed_layer_or_step_is_independent(p: float, other: Philox) -> None:
    probability = keep_threshold(p) / 65536
    both = int(cp.count_nonzero(kept(p, RNG) & kept(p, other)))
    assert deviation(both, SIDE * SIDE, probability**2) < SIGMAS


@pytest.mark.large
@pytest.mark.parametrize("distance", [1, 2, 7, 8, SIDE])
def test_neighbours_are_independent(distance: int) -> None:
    mask = kept(0.5, RNG).reshape(-1)
    both = int(cp.count_nonzero(mask[distance:] & mask[:-distance]))
    assert deviation(both, mask.size - distance, 0.25) < SIGMAS


COUNT = 30030  # 2 · 3 · 5 · 7 · 11 · 13: row lengths with every remainder of eight
COLUMNS = (1, 2, 7, 13, 66, 143, 385, 1001, 2730, 15015, COUNT)
PLACES = (Placement(False, 0, 0), Placement(False, 3, 1), Placement(True, 0, 0), Placement(True, 8, 8))


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("cols", COLUMNS)
def test_a_mask_depends_on_the_row_major_index_alone(dtype: DType, place: Placement, cols: int) -> None:
    expected = reference.dropout_mask((COUNT,), 0.3, RNG)
    shape = (COUNT // cols, cols)
    x, out = Guarded(np.ones(shape, dtype.numpy), place), Guarded(np.zeros(shape, dtype.numpy), place)
    lt.dropout(x.array, 0.3, RNG, out=out.array)
    np.testing.assert_array_equal(out.values().reshape(-1) != 0, expected)


@pytest.mark.parametrize("dtype", list(TYPES))
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("cols", [7, 66, 143, 1001])
def test_a_layer_s_mask_is_the_same_forward_and_backward(dtype: DType, activation: str, cols: int) -> None:
    expected = reference.dropout_mask((COUNT,), 0.3, RNG)
    rows = COUNT // cols
    x, w, bias = (cp.ones(shape, dtype.numpy) for shape in ((rows, 8), (cols, 8), (cols,)))
    y, context = lt.linear_fwd(x, w, bias, activation=activation, dropout=0.3, rng=RNG)
    dz = cp.zeros((rows, cols), dtype.numpy)
    lt.linear_bwd(cp.ones((rows, cols), dtype.numpy), context, need_dx=False, need_dw=False, out_dz=dz)
    np.testing.assert_array_equal(cp.asnumpy(y).reshape(-1) != 0, expected)
    np.testing.assert_array_equal(cp.asnumpy(dz).reshape(-1) != 0, expected)
