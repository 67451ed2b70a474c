"""Branches of a graph: forked and joined by events while the stream is captured, and no branch at all otherwise."""

from __future__ import annotations

import itertools

import pytest

from lt_runtime.errors import CaptureError
from lt_runtime.gpu import memory
from lt_runtime.gpu.memory import StreamMemory, branch

STREAM, BESIDE = 0x10, 0x20


class Driver:
    """Streams without a driver: who waits for whom, and which are captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.captured: set[int] = set()
        self.waits: list[tuple[int, int]] = []
        addresses = itertools.count(1 << 20, 1 << 20)
        monkeypatch.setattr(memory, "call", lambda name, *_: next(addresses) if name == "cuMemAlloc" else None)
        monkeypatch.setattr(memory, "workspace_size", lambda _: 1 << 10)
        monkeypatch.setattr(memory, "private_stream", lambda *_: BESIDE)
        monkeypatch.setattr(memory, "order_after", lambda stream, producer: self.waits.append((stream, producer)))
        monkeypatch.setattr(memory, "is_capturing", self.captured.__contains__)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_outside_of_a_capture_there_is_no_branch(driver: Driver) -> None:
    own = StreamMemory(0, STREAM)
    with branch(own) as other:
        assert other is own
    assert driver.waits == [(STREAM, BESIDE)]  # for its memory to be zeroed


def test_a_branch_waits_for_its_stream_and_is_waited_for(driver: Driver) -> None:
    own = StreamMemory(0, STREAM)
    with branch(own):
        pass  # makes its memory, as no capture could
    driver.waits.clear()
    driver.captured.add(STREAM)
    with branch(own) as other:
        assert other.stream == BESIDE
        assert other.workspace != own.workspace
        assert driver.waits == [(BESIDE, STREAM)]
    assert driver.waits == [(BESIDE, STREAM), (STREAM, BESIDE)]
    with branch(own) as again:
        assert again is other


def test_a_branch_is_joined_whatever_happens(driver: Driver) -> None:
    own = StreamMemory(0, STREAM)
    assert own.branch.stream == BESIDE
    driver.captured.add(STREAM)
    with pytest.raises(ZeroDivisionError), branch(own):
        raise ZeroDivisionError
    assert driver.waits[-1] == (STREAM, BESIDE)


def test_buffers_grow_apart_and_not_during_a_capture(driver: Driver) -> None:
    own = StreamMemory(0, STREAM)
    scratch, copies = own.scratch(2 << 20), own.copies(1 << 20)
    assert scratch != copies
    view = own.on(BESIDE)
    assert (view.scratch(2 << 20), view.copies(1 << 20)) == (scratch, copies)
    driver.captured.add(STREAM)
    assert own.copies(1 << 10) == copies
    with pytest.raises(CaptureError, match="run the operation once on this stream before the capture"):
        own.copies(2 << 20)
    driver.captured.clear()
    assert view.copies(2 << 20) == own.copies(0) != copies


def test_a_first_branch_in_a_capture_says_what_to_do(driver: Driver) -> None:
    own = StreamMemory(0, STREAM)
    driver.captured.add(STREAM)
    with pytest.raises(CaptureError, match="run the operation once on this stream before the capture"), branch(own):
        raise AssertionError("no work without memory for it")
    assert driver.waits == []
