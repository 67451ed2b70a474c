"""Copies of batches to the pretended GPU, whose streams run their work as late as the driver allows."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lt_runtime.gpu.driver import call
from lt_runtime.training.prefetch import _GpuLane
from lt_runtime.training.staging import Slot, is_pinned
from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of

Array = NDArray[np.float32]
_FIRST = itertools.count(1000, 100)
"""Numbers of batches, different in each test, because memory may still hold the batches of an earlier test."""


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


@pytest.mark.parametrize("from_pinned", [False, True])
def test_a_slot_keeps_each_batch_until_it_is_released(gpu: FakeGpu, from_pinned: bool) -> None:
    copies = gpu.other_stream.ptr
    slot, read = Slot(0, copies), []
    for number in range(1, 4):
        batch = batch_of(number)
        batch = (pinned(gpu, batch[0]), batch[1]) if from_pinned else batch
        assert is_pinned(batch[0]) == from_pinned, "only pinned arrays are copied without a copy on the host before"
        on_gpu = slot.fill(batch)
        for array in batch:
            array[...] = 100.0  # the caller may change its arrays now
        call("cuStreamWaitEvent", gpu.stream.ptr, slot.ready, 0)
        read.append([put_copy(gpu, array) for array in on_gpu])
        call("cuEventRecord", slot.released, gpu.stream.ptr)
    gpu.synchronize(copies)
    gpu.synchronize(gpu.stream.ptr)
    for number, arrays in enumerate(read, 1):
        for array, expected in zip(arrays, batch_of(number), strict=True):
            np.testing.assert_array_equal(host_of(gpu, array), expected)
    slot.close()


@pytest.mark.parametrize("held", [1, 2, 3])
@pytest.mark.parametrize("copies_first", [False, True])
def test_batches_stay_until_as_many_more_were_asked_for(gpu: FakeGpu, held: int, copies_first: bool) -> None:
    lane = _GpuLane(0, 2 * held, held, gpu.stream)
    waiting, read = [], []
    first = next(_FIRST)
    for number in range(first, first + 4 * held):
        lane.ask()
        waiting.append(lane.receive(lane.send(batch_of(number))))
        if len(waiting) == held:  # the last moment at which its user may read it
            read.append([put_copy(gpu, array) for array in waiting.pop(0)])
    if copies_first:
        gpu.synchronize(lane._copies)
    gpu.synchronize(gpu.stream.ptr)
    for number, arrays in enumerate(read, first):
        for array, expected in zip(arrays, batch_of(number), strict=True):
            np.testing.assert_array_equal(host_of(gpu, array), expected)
    lane.close()
    gpu.streams.synchronize_all()
