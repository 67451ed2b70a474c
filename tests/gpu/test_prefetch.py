"""Batches copied to the GPU ahead of their use: values, reuse of buffers behind a slow reader, page-locked sources."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import cupy as cp
import cupyx
import ml_dtypes
import numpy as np
import pytest

import lt_runtime as lt

ROWS, COLS = 512, 768


def _in_one_array(count: int, array: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields every batch in the same arrays, whose contents it overwrites."""
    labels = np.empty(ROWS, np.int32)
    for i in range(count):
        array[...], labels[...] = i, -i
        yield array, labels


def _array(kind: str) -> np.ndarray:
    if kind == "pinned":
        return cupyx.empty_pinned((ROWS, COLS), np.float32)
    if kind == "strided":
        return np.empty((ROWS, 2 * COLS), np.float32)[:, ::2]
    return np.empty((ROWS, COLS), ml_dtypes.bfloat16 if kind == "bfloat16" else np.float32)


@pytest.mark.parametrize("kind", ["pageable", "pinned", "strided", "bfloat16"])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_slow_reader_sees_every_batch_as_it_was(depth: int, kind: str) -> None:
    stream, busy = cp.cuda.Stream(non_blocking=True), cp.random.standard_normal((2048, 2048), dtype=cp.float32)
    cp.cuda.get_current_stream().synchronize()
    sums = []
    with stream:
        for x, labels in lt.prefetch(_in_one_array(30, _array(kind)), depth, "cuda", stream):
            busy = busy @ busy * 1e-3  # the GPU reads the batch long after the host has launched the reading kernel
            assert isinstance(x, cp.ndarray)
            sums.append((x.astype(cp.float32).min(), x.astype(cp.float32).max(), labels.max()))
    stream.synchronize()
    assert [tuple(map(float, found)) for found in sums] == [(i, i, -i) for i in range(30)]


def test_breaking_off_frees_everything() -> None:
    pool = cp.get_default_memory_pool()
    for depth in (1, 2, 4):
        for i, _ in enumerate(lt.prefetch(_in_one_array(50, _array("pageable")), depth, "cuda")):
            if i == 3:
                break
    assert not [thread for thread in threading.enumerate() if thread.name == "lt_runtime prefetch"]
    used = pool.used_bytes()
    for _ in range(20):
        for _ in lt.prefetch(_in_one_array(50, _array("pageable")), 2, "cuda"):
            break
    assert pool.used_bytes() <= used


def test_out_of_memory_comes_to_the_caller() -> None:
    def huge() -> Iterator[np.ndarray]:
        yield np.zeros(3, np.float32)
        yield np.broadcast_to(np.float32(0), (1 << 42,))

    fetched = lt.prefetch(huge(), 1, "cuda")
    assert float(next(fetched).sum()) == 0
    with pytest.raises(Exception, match=r"(?i)memory"):
        next(fetched)
