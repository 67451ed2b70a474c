"""`lt.prefetch`, which reads batches ahead in a thread: order, depth, end, and copies to the pretended GPU."""

from __future__ import annotations

import gc
import itertools
import signal
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver
from numpy.typing import NDArray

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, OperandError
from lt_runtime.gpu.driver import call
from lt_runtime.training.prefetch import is_pinned
from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of

Pair = namedtuple("Pair", "x labels")


def batches(count: int, seen: list[int] | None = None) -> Iterator[np.ndarray]:
    for i in range(count):
        if seen is not None:
            seen.append(i)
        yield np.full(3, i, np.float32)


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "lt_runtime prefetch"]


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "nothing happened for ten seconds"
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    assert threads() == []
    yield
    assert threads() == []


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_every_batch_comes_once_and_in_order(depth: int, count: int) -> None:
    fetched = lt.prefetch(batches(count), depth, "cpu")
    assert [int(batch[0]) for batch in fetched] == list(range(count))
    assert list(fetched) == []


def test_on_the_host_an_iterable_may_fill_the_same_arrays_again() -> None:
    x, labels = np.empty((2, 3), np.float32, order="F"), np.empty(4, np.int64)

    def in_place() -> Iterator[dict[str, Any]]:
        for i in range(5):
            x[...], labels[...] = i, -i
            yield {"x": x, "more": Pair(labels, [labels[:1]]), "none": ()}

    fetched = [*lt.prefetch(in_place(), 3, "cpu")]
    assert [float(batch["x"].sum()) for batch in fetched] == [6.0 * i for i in range(5)]
    assert [batch["more"].x.tolist() for batch in fetched] == [[-i] * 4 for i in range(5)]
    assert [batch["more"].labels[0].tolist() for batch in fetched] == [[-i] for i in range(5)]
    assert all([*batch] == ["x", "more", "none"] and batch["none"] == () for batch in fetched)
    assert all(batch["x"].flags.f_contiguous and batch["x"].dtype == np.float32 for batch in fetched)


@pytest.mark.parametrize("depth", [1, 3])
def test_it_reads_as_far_ahead_as_it_may_and_no_further(depth: int) -> None:
    seen: list[int] = []
    with lt.prefetch(batches(20, seen), depth, "cpu") as fetched:
        wait_until(lambda: len(seen) == depth)
        for taken in range(1, 5):
            next(fetched)
            wait_until(lambda: len(seen) == depth + taken)  # noqa: B023
            time.sleep(0.005)
            assert len(seen) == depth + taken


def test_an_exception_comes_in_its_place() -> None:
    def failing() -> Iterator[np.ndarray]:
        yield from batches(3)
        raise LookupError("the disk is gone")

    fetched = lt.prefetch(failing(), 4, "cpu")
    assert [int(next(fetched)[0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(LookupError, match="the disk is gone"):
        next(fetched)
    assert threads() == []
    with pytest.raises(StopIteration):
        next(fetched)


@pytest.mark.parametrize("end", ["close", "with", "break", "error", "collected", "cycle"])
def test_no_thread_outlives_its_use(end: str) -> None:
    fetched: Any = lt.prefetch(batches(100), 2, "cpu")
    next(fetched)
    assert len(threads()) == 1
    if end == "close":
        fetched.close()
        fetched.close()
        assert list(fetched) == []
    elif end == "with":
        with fetched:
            next(fetched)
    elif end == "error":
        with pytest.raises(KeyError), fetched:
            raise KeyError("the loop's own")
    elif end == "cycle":
        fetched.itself = fetched
    elif end == "break":
        for _ in lt.prefetch(batches(100), 2, "cpu"):
            break
    del fetched
    gc.collect()
    assert threads() == []


def test_a_slow_iterable_is_left_where_it_is() -> None:
    gate, closed = threading.Event(), threading.Event()

    def slow() -> Iterator[np.ndarray]:
        try:
            yield from batches(1)
            gate.wait(10)
            yield from batches(100)
        finally:
            closed.set()

    fetched = lt.prefetch(slow(), 2, "cpu")
    next(fetched)
    timer = threading.Timer(0.02, gate.set)
    timer.start()
    fetched.close()
    timer.join()
    assert closed.is_set()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([1.0, 2.0], r"the batch\[0\] is a float; accepted are NumPy arrays"),
        ((np.ones(2), {"y": None}), r"the batch\[1\]\['y'\] is a NoneType"),
        (np.array([None]), "the batch holds Python objects"),
        ([np.ma.masked_equal(np.ones(2), 0)], r"the batch\[0\] is a masked array of shape \(2,\)"),
    ],
)
def test_batches_of_something_else(batch: Any, message: str) -> None:
    fetched = lt.prefetch([np.ones(1), batch], device="cpu")
    next(fetched)
    with pytest.raises(OperandError, match=message):
        next(fetched)


def take_in_threads(fetched: Any, count: int = 4, pause: float = 0.0) -> tuple[list[threading.Thread], list[Any]]:
    """Starts threads that take batches until the iterator's end; returns the threads, and the list of their batches."""
    seen: list[Any] = []

    def take() -> None:
        try:
            for batch in fetched:
                seen.append(int(batch[0]))
                time.sleep(pause)
            seen.append(StopIteration)
        except Exception as error:
            seen.append(error)

    takers = [threading.Thread(target=take, daemon=True) for _ in range(count)]
    for taker in takers:
        taker.start()
    return takers, seen


def join(takers: list[threading.Thread]) -> None:
    deadline = time.monotonic() + 10
    for taker in takers:
        taker.join(max(0.0, deadline - time.monotonic()))
    assert not any(taker.is_alive() for taker in takers), "a thread hangs"


def until_all_wait(count: int, gate: threading.Event, error: Exception | None = None) -> Iterator[np.ndarray]:
    """Yields batches; ends only when all taking threads already wait for another batch."""
    yield from batches(count)
    gate.wait(10)
    if error is not None:
        raise error


@pytest.mark.parametrize("count", [0, 1, 3, 200])
def test_threads_share_the_batches_and_all_of_them_end(count: int) -> None:
    gate = threading.Event()
    fetched = lt.prefetch(until_all_wait(count, gate), 3, "cpu")
    takers, seen = take_in_threads(fetched)
    wait_until(lambda: len(seen) == count)
    gate.set()
    join(takers)
    assert seen.count(StopIteration) == 4
    assert sorted(each for each in seen if each is not StopIteration) == list(range(count))
    assert list(fetched) == []


def test_an_exception_reaches_one_thread_and_ends_the_others() -> None:
    gate = threading.Event()
    takers, seen = take_in_threads(lt.prefetch(until_all_wait(5, gate, LookupError("the disk is gone")), 2, "cpu"))
    wait_until(lambda: len(seen) == 5)
    gate.set()
    join(takers)
    assert sorted(each for each in seen if isinstance(each, int)) == list(range(5))
    assert seen.count(StopIteration) == 3
    assert [str(each) for each in seen if isinstance(each, LookupError)] == ["the disk is gone"]


def test_a_batch_that_is_refused_ends_all_threads() -> None:
    takers, seen = take_in_threads(lt.prefetch([np.zeros(1), "text", np.ones(1)], 1, "cpu"))
    join(takers)
    assert sorted(str(type(each).__name__) for each in seen) == ["OperandError", "int", *["type"] * 3]


def test_close_wakes_those_who_wait_before_the_iterable_gives_anything() -> None:
    waits, gate = threading.Event(), threading.Event()

    def slow() -> Iterator[np.ndarray]:
        yield from batches(2)
        waits.set()
        gate.wait(10)
        yield from batches(100)

    fetched = lt.prefetch(slow(), 2, "cpu")
    takers, seen = take_in_threads(fetched)
    wait_until(lambda: len(seen) == 2 and waits.is_set())
    closer = threading.Thread(target=fetched.close, daemon=True)
    closer.start()
    join(takers)
    assert seen.count(StopIteration) == 4
    assert closer.is_alive()
    gate.set()
    join([closer])
    assert list(fetched) == []


def test_a_signal_s_handler_may_close_what_its_thread_waits_for() -> None:
    gate = threading.Event()

    def slow() -> Iterator[np.ndarray]:
        gate.wait(10)
        yield from batches(1)

    def close(*_: object) -> None:
        gate.set()
        fetched.close()

    fetched = lt.prefetch(slow(), 1, "cpu")
    before = signal.signal(signal.SIGALRM, close)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert len(list(fetched)) <= 1
    finally:
        signal.signal(signal.SIGALRM, before)
    assert threads() == []


def test_what_is_refused_at_once() -> None:
    with pytest.raises(ArgumentError, match="depth is 0; it must be positive"):
        lt.prefetch([], 0, "cpu")
    with pytest.raises(ArgumentError, match="device is 'tpu'"):
        lt.prefetch([], device="tpu")
    with pytest.raises(TypeError, match="not iterable"):
        lt.prefetch(3, device="cpu")  # type: ignore[arg-type]


# Copies to the pretended GPU, whose streams run their work as late as the driver allows.

Array = NDArray[np.float32]
_FIRST = itertools.count(1000, 100)
"""Numbers of batches, different in each test, because memory may still hold the batches of an earlier test."""

_PAGEABLE = np.zeros(3, np.float32)
"""Made before any test: the pretended driver treats an address that was page-locked once as page-locked for ever."""


def batch_of(number: int) -> tuple[Array, Array]:
    """Makes a batch of two arrays, of which the second is not contiguous."""
    return np.full((3, 5), number, np.float32), np.full((8, 4), -number, np.float32)[:, ::2]


def pinned(gpu: FakeGpu, values: Array) -> Array:
    memory = np.frombuffer(gpu.cp.cuda.alloc_pinned_memory(values.nbytes), values.dtype, values.size)
    array = memory.reshape(values.shape)
    array[...] = values
    return array


def put_copy(gpu: FakeGpu, array: Any) -> Any:
    """Launches a copy of an array on the user's stream, and returns the copy."""
    copy = gpu.cp.asarray(np.full(array.shape, np.nan, np.float32))
    call("cuMemcpyDtoDAsync", copy.data.ptr, array.data.ptr, array.nbytes, gpu.stream.ptr)
    return copy


def batches_from(gpu: FakeGpu, numbers: range, from_pinned: bool) -> Iterator[tuple[Array, Array]]:
    """Yields batches whose arrays are overwritten before the next batch."""
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
        # The oldest batch is read at the last permitted moment, just before the next one is taken.
        if len(waiting) == depth:
            read.append([put_copy(gpu, array) for array in waiting.pop(0)])
    if all_first:
        gpu.synchronize_all()
    gpu.synchronize(gpu.stream.ptr)
    for number, arrays in enumerate(read, first):
        for array, expected in zip(arrays, batch_of(number), strict=True):
            np.testing.assert_array_equal(host_of(gpu, array), expected)
    assert len(read) == 3 * depth + 1
    gpu.synchronize_all()


@pytest.mark.parametrize("is_open", [True, False])
def test_another_iterator_gets_the_memory_after_the_work_that_reads_it(gpu: FakeGpu, is_open: bool) -> None:
    """Buffers of a finished iterator go through CuPy's pool to an iterator that is open already, or to a new one."""

    def opened(stream: Any) -> Any:
        return gpu.lt.prefetch(map(batch_of, range(2)), 1, 0, stream)

    used = opened(gpu.stream)
    batch = next(used)
    if is_open:
        other = opened(gpu.other_stream)
        put_copy(gpu, batch[0])
    used.close()
    if not is_open:
        put_copy(gpu, batch[0])
    del used, batch
    gc.collect()
    for _ in other if is_open else opened(gpu.stream):
        pass
    gpu.synchronize_all()


def test_buffers_stay_while_a_thread_receives(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    receives, closes, errors, freed = threading.Event(), threading.Event(), list[BaseException](), list[Any]()
    wait, destroy = driver.cuStreamWaitEvent, driver.cuEventDestroy

    def slow(*arguments: Any) -> Any:
        # The fault is planted only in threads that take batches, not in the thread that reads ahead.
        if threading.current_thread() in takers:
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
