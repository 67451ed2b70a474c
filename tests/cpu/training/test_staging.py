"""Copies of batches to the pretended GPU, whose streams run their work as late as the driver allows."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from numpy.typing import NDArray

from lt_runtime.gpu.driver import call
from lt_runtime.training.prefetch import is_pinned
from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of

Array = NDArray[np.float32]
_FIRST = itertools.count(1000, 100)
"""Numbers of batches, different in each test, because memory may still hold the batches of an earlier test."""

_PAGEABLE = np.zeros(3, np.float32)
"""Made before any test, because the pretended driver takes memory at freed page-locked addresses for page-locked."""


def batch_of(number: int) -> tuple[Array, Array]:
    """Two arrays; the second is not contiguous."""
    return np.full((3, 5), number, np.float32), np.full((8, 4), -number, np.float32)[:, ::2]


def pinned(gpu: FakeGpu, values: Array) -> Array:
    memory = np.frombuffer(gpu.cp.cuda.alloc_pinned_memory(values.nbytes), values.dtype, values.size)
    array = memory.reshape(values.shape)
    array[...] = values
    return array


def put_copy(gpu: FakeGpu, array: Any) -> Any:
    """Puts a copy of an array on the user's stream, and returns the array that it writes."""
    copy = gpu.cp.asarray(np.full(array.shape, np.nan, np.float32))
    call("cuMemcpyDtoDAsync", copy.data.ptr, array.data.ptr, array.nbytes, gpu.stream.ptr)
    return copy


def batches_from(gpu: FakeGpu, numbers: range, from_pinned: bool) -> Iterator[tuple[Array, Array]]:
    """Batches whose arrays are overwritten before the next batch."""
    for number in numbers:
        batch = batch_of(number)
        batch = (pinned(gpu, batch[0]), batch[1]) if from_pinned else batch
        assert is_pinned(batch[0]) or not from_pinned
        assert not is_pinned(_PAGEABLE), "only pinned arrays are copied without a copy on the host before"
        yield batch
        for array in batch:
            array[...] = 100.0


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("from_pinned", [False, True])
@pytest.mark.parametrize("all_first", [False, True])
def test_batches_stay_until_as_many_more_were_asked_for(
    gpu: FakeGpu, depth: int, from_pinned: bool, all_first: bool
) -> None:
    waiting, read = [], []
    first = next(_FIRST)
    numbers = range(first, first + 4 * depth)
    for batch in gpu.lt.prefetch(batches_from(gpu, numbers, from_pinned), depth, 0, gpu.stream):
        waiting.append(batch)
        if len(waiting) == depth:  # the last moment at which the user may read the batch
            read.append([put_copy(gpu, array) for array in waiting.pop(0)])
    if all_first:
        gpu.synchronize_all()
    gpu.synchronize(gpu.stream.ptr)
    for number, arrays in enumerate(read, first):
        for array, expected in zip(arrays, batch_of(number), strict=True):
            np.testing.assert_array_equal(host_of(gpu, array), expected)
    assert len(read) == 3 * depth + 1
    gpu.synchronize_all()


def test_buffers_stay_while_a_thread_receives(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    receives, closes, errors, freed = threading.Event(), threading.Event(), list[BaseException](), list[Any]()
    wait, destroy = driver.cuStreamWaitEvent, driver.cuEventDestroy

    def slow(*arguments: Any) -> Any:
        if threading.current_thread() in takers:  # and not the thread that reads ahead
            receives.set()
            closes.wait(0.2)
            assert not freed
        return wait(*arguments)

    def take() -> None:
        try:
            for _ in fetched:
                pass
        except BaseException as error:
            errors.append(error)

    takers = [threading.Thread(target=take, daemon=True) for _ in range(4)]
    fetched = gpu.lt.prefetch(batches_from(gpu, range(60), from_pinned=False), 2, 0, gpu.stream)
    monkeypatch.setattr(driver, "cuStreamWaitEvent", slow)
    monkeypatch.setattr(driver, "cuEventDestroy", lambda event: freed.append(event) or destroy(event))
    for taker in takers:
        taker.start()
    receives.wait(10)
    fetched.close()
    closes.set()
    for taker in takers:
        taker.join(10)
    assert not any(taker.is_alive() for taker in takers)
    assert errors == []
    assert freed
    gpu.synchronize_all()
