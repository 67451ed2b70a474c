"""The kernels for logits of which a chunk of classes is in memory: chunks together are cross-entropy of all logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lt_runtime import reference
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.class_chunk import CHUNK_GRADIENT, LOG_SUMS, ClassChunkPass
from lt_runtime.problem import DType
from tests.host_kernels.arrays import EPSILON, FLAT, Guarded
from tests.host_kernels.cases import FEW, axes, orders, seeds
from tests.host_kernels.harness import HostKernels
from tests.host_kernels.products import Memory
from tests.host_kernels.variants import F32, TYPES
from tests.support.strategies import Placement


def vector_of(values: object, dtype: object = np.float32) -> Guarded:
    return Guarded(np.asarray(values, dtype).reshape(1, -1), FLAT)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@FEW
@example(rows=3, widths=[2500, 8, 1], gap=3, offset=1, wide=True, smoothing=0.1, masked=True, order=1, seed=0)
@given(
    rows=axes,
    widths=st.lists(axes, min_size=1, max_size=3),
    gap=st.sampled_from((0, 1, 8)),
    offset=st.sampled_from((0, 1)),
    wide=st.booleans(),
    smoothing=st.sampled_from((0.0, 0.1, 1.0)),
    masked=st.booleans(),
    order=orders,
    seed=seeds,
)
def test_chunks_are_the_cross_entropy_of_all_classes(
    host: HostKernels, dtype: DType, rows: int, widths: list[int], gap: int, offset: int, wide: bool,
    smoothing: float, masked: bool, order: int, seed: int,
) -> None:  # fmt: skip
    generator = np.random.default_rng(seed)
    classes, firsts = sum(widths), [0, *np.cumsum(widths)[:-1].tolist()]
    logits = (4 * generator.standard_normal((rows, classes))).astype(dtype.numpy)
    labels, weights = generator.integers(classes, size=rows), generator.random(rows, np.float32)
    weights[::4] = 0
    if masked and not smoothing and len(widths) > 1:  # a chunk without a finite logit
        logits[:, : widths[0]] = -math.inf
        labels = np.maximum(labels, widths[0])
    place = Placement(column_major=False, gap=gap, offset=offset)
    chunks = [Guarded(logits[:, start : start + width], place) for start, width in zip(firsts, widths, strict=True)]
    at, row_weights = vector_of(labels, np.int64 if wide else np.int32), vector_of(weights)
    sums, targets = vector_of(np.full(rows, -np.inf)), vector_of(np.zeros(rows))
    memory = Memory()
    for entry, arrays in (
        (LOG_SUMS, (at.address, sums.address, targets.address, 0)),
        (CHUNK_GRADIENT, (at.address, sums.address, 0, row_weights.address)),
    ):
        for chunk, first in zip(chunks, firsts, strict=True):
            with host.in_order(order):
                made = ClassChunkPass(entry, dtype, chunk.layout, wide, classes, smoothing, 0)
            made.launch(Call((chunk.address, *arrays), 0, (first, 0)), memory)  # type: ignore[arg-type]
    memory.check()
    losses = sums.values()[0] - targets.values()[0]
    loss, gradient = reference.cross_entropy(logits, labels, label_smoothing=smoothing, row_weights=weights)
    np.testing.assert_allclose((losses * weights).mean(), loss, rtol=1e-5, atol=1e-5)
    found = np.concatenate([chunk.values() for chunk in chunks], axis=1)
    np.testing.assert_allclose(found, gradient * rows, rtol=2 * EPSILON[dtype] + 1e-5, atol=max(EPSILON[F32], 1e-6))
    assert not found[::4].any()
    for each in (at, row_weights):
        each.assert_unchanged()
