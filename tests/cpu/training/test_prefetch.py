"""Batches read ahead by a thread: their order, how far, what ends it; a GPU's ring of buffers, with fakes."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
import lt_runtime.training.prefetch as module
from lt_runtime.errors import ArgumentError, OperandError
from lt_runtime.gpu import devices
from lt_runtime.training.staging import replaced

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


def test_on_the_host_batches_are_handed_on_as_they_are() -> None:
    given = [{"x": np.ones(2), "more": (np.zeros(1), [np.arange(3)])} for _ in range(3)]
    assert all(one is other for one, other in zip(lt.prefetch(given, device="cpu"), given, strict=True))


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
    ],
)
def test_batches_of_something_else(batch: Any, message: str) -> None:
    fetched = lt.prefetch([np.ones(1), batch], device="cpu")
    next(fetched)
    with pytest.raises(OperandError, match=message):
        next(fetched)


def test_what_is_refused_at_once() -> None:
    with pytest.raises(ArgumentError, match="depth is 0; it must be positive"):
        lt.prefetch([], 0, "cpu")
    with pytest.raises(ArgumentError, match="device is 'tpu'"):
        lt.prefetch([], device="tpu")
    with pytest.raises(TypeError, match="not iterable"):
        lt.prefetch(3, device="cpu")  # type: ignore[arg-type]


def test_the_parts_of_a_batch_are_found_and_put_back() -> None:
    batch = {"a": Pair(np.zeros(1), np.ones(2)), "b": [np.zeros(3), (np.zeros(4),)], "c": ()}
    sizes = replaced(batch, lambda array: array.size)
    assert [*sizes] == [*batch]
    assert sizes == {"a": Pair(1, 2), "b": [3, (4,)], "c": ()}
    assert isinstance(sizes["a"], Pair)


class FakeSlot:
    """Copies at once; overwriting what has not been released is a failure."""

    def __init__(self, device: int, copies: int) -> None:
        self.ready, self.released = f"ready {id(self)}", f"released {id(self)}"
        self.buffer, self.is_free, self.is_closed = np.zeros(3, np.float32), True, False

    def fill(self, batch: np.ndarray) -> np.ndarray:
        assert self.is_free
        assert not self.is_closed
        self.is_free = False
        self.buffer[...] = batch
        return self.buffer

    def close(self) -> None:
        self.is_closed = True


@pytest.fixture
def slots(monkeypatch: pytest.MonkeyPatch) -> list[FakeSlot]:
    """Those that have been made."""
    made: list[FakeSlot] = []

    def make(device: int, copies: int) -> FakeSlot:
        made.append(FakeSlot(device, copies))
        return made[-1]

    def call(name: str, *arguments: Any) -> None:
        if name == "cuEventRecord":
            (slot,) = (slot for slot in made if slot.released == arguments[0])
            slot.is_free = True

    monkeypatch.setattr(devices, "device_count", lambda: 1)
    monkeypatch.setattr(module, "Slot", make)
    monkeypatch.setattr(module, "call", call)
    monkeypatch.setattr(module, "activated", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(module, "private_stream", lambda *_: 1)
    monkeypatch.setattr(module, "order_after", lambda *_: None)
    return made


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_batch_on_a_gpu_lasts_until_depth_more_were_asked_for(slots: list[FakeSlot], depth: int) -> None:
    def in_place() -> Iterator[np.ndarray]:
        array = np.zeros(3, np.float32)
        for i in range(25):
            array[...] = i
            yield array

    held: list[tuple[int, np.ndarray]] = []
    for i, batch in enumerate(lt.prefetch(in_place(), depth, 0, stream=7)):
        held = [*held, (i, batch)][-depth:]
        time.sleep(0.001)  # the thread overwrites what it may
        assert all((array == number).all() for number, array in held)
    assert len(slots) == 2 * depth
    assert all(slot.is_closed for slot in slots)


def test_slots_are_closed_when_the_loop_breaks_off(slots: list[FakeSlot]) -> None:
    for _ in lt.prefetch(batches(50), 2, 0, stream=7):
        break
    gc.collect()
    assert len(slots) == 4
    assert all(slot.is_closed for slot in slots)
