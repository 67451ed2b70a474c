"""Sums on the GPU against the exact sum, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import lt_runtime as lt
from lt_runtime.problem import DType
from tests.support.placed import Placed
from tests.support.strategies import TYPES, Placement, placements, sizes


@settings(max_examples=150, deadline=None)
@given(
    shape=st.one_of(st.tuples(sizes, sizes), st.sampled_from(((700, 4096), (3, 1_000_003)))),
    places=st.tuples(placements, placements, placements),
    over=st.integers(0, 2),
    dtype=st.sampled_from(list(TYPES)),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums(
    gpu: Any, shape: tuple[int, int], places: tuple[Placement, ...], over: int, dtype: DType, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    values = [generator.standard_normal(shape, np.float32).astype(dtype.numpy) for _ in range(2)]
    arrays = [Placed(gpu, each, place) for each, place in zip((*values, values[0]), places, strict=True)]
    lt.add(arrays[0].array, arrays[1].array, out=arrays[over].array)
    expected = sum(each.astype(np.float64) for each in values)
    np.testing.assert_array_equal(arrays[over].values(), np.asarray(expected).astype(dtype.numpy).astype(np.float64))
