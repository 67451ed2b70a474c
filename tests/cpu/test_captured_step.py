"""Graphs of a training step, kept by size of batch: everything but CUDA itself, which is a list of calls here."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from lt_runtime.errors import CaptureError, GpuError
from lt_runtime.training import captured
from lt_runtime.training.captured import MAX_GRAPHS, GpuStep, Turn

PRIVATE = 99


class FullError(Exception):
    """Stands in for CuPy's error."""


class Body:
    """Notes what it is run with."""

    def __init__(self, log: list[Any]) -> None:
        self.log, self.error = log, None

    def run(self, parts: Any, tally: Any, stream: int, *, updates: bool = True) -> None:
        self.log.append(("run", stream, tally, updates))
        if self.error is not None:
            raise self.error


class FakeBatches:
    def __init__(self, x: Any, target: Any, parts: int, stream: int) -> None:
        self.parts, self.graph = parts, None

    def copies(self, x: Any, target: Any) -> Any:
        copied = SimpleNamespace(put=lambda address, stream: captured.call("fill", x.shape[0], stream))
        return [copied], []

    def fill(self, x: Any, target: Any, stream: int) -> None:
        captured.call("fill", x.shape[0], stream)


class FakeGraph:
    def __init__(self, log: list[Any], run: Callable[[int], None], stream: int) -> None:
        self.log = log
        log.append(("capture", stream))
        run(stream)

    def launch(self, stream: int) -> None:
        self.log.append(("launch", stream))

    def close(self) -> None:
        self.log.append(("close",))


class Pool:
    freed = 0

    def __init__(self, allocator: Any = None) -> None:
        pass

    def free_all_blocks(self) -> None:
        Pool.freed += 1


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    calls: list[Any] = []
    tallies = iter(["tally", "spare"] * 9)
    memory = SimpleNamespace(OutOfMemoryError=FullError)
    cuda = SimpleNamespace(MemoryPool=Pool, using_allocator=lambda _: contextlib.nullcontext(), memory=memory)
    for name, fake in {
        "activated": lambda _: contextlib.nullcontext(),
        "call": lambda *arguments: calls.append(arguments) or "event",
        "cupy": lambda: SimpleNamespace(cuda=cuda),
        "GpuTally": lambda *_: next(tallies),
        "Batches": FakeBatches,
        "Graph": lambda run, stream: FakeGraph(calls, run, stream),
        "is_captured": lambda stream: stream == 13,
        "order_after": lambda stream, producer: calls.append(("order", stream, producer)),
        "private_stream": lambda *_: PRIVATE,
        "stream_handle": lambda *_: 0,
    }.items():
        monkeypatch.setattr(captured, name, fake)
    captured._turn.cache_clear()
    Pool.freed = 0
    yield calls
    gc.collect()  # steps end while CUDA is faked
    captured._turn.cache_clear()


def operands(rows: int, labels: str = "int32") -> tuple[Any, Any]:
    return SimpleNamespace(shape=(rows, 3), address=256), SimpleNamespace(dtype=labels, address=512)


def events(log: list[Any], *names: str) -> list[Any]:
    return [entry for entry in log if entry[0] in names]


def test_the_first_batch_is_rehearsed_captured_and_launched(log: list[Any]) -> None:
    step = GpuStep(Body(log), 0, 1, graph=True)
    log.clear()
    step.run(*operands(8), 5)
    assert [entry for entry in log if not entry[0].startswith("cuEvent")] == [
        ("order", PRIVATE, 5),
        ("run", PRIVATE, "spare", False),  # for the plans
        ("run", PRIVATE, "spare", False),  # for the memory
        ("capture", PRIVATE),
        ("run", PRIVATE, "tally", True),
        ("order", 5, PRIVATE),
        ("fill", 8, 5),
        ("launch", 5),
    ]
    log.clear()
    step.run(*operands(8), 5)
    assert log == [("fill", 8, 5), ("launch", 5), ("cuEventRecord", "event", 5)]


def test_without_graphs_everything_is_on_the_callers_stream(log: list[Any]) -> None:
    step = GpuStep(Body(log), 0, 2, graph=False)
    log.clear()
    for _ in range(2):
        step.run(*operands(8), 13)
    assert log == [("fill", 8, 13), ("run", 13, "tally", True)] * 2


def test_each_size_and_type_has_a_graph_and_the_oldest_goes(log: list[Any]) -> None:
    step = GpuStep(Body(log), 0, 1, graph=True)
    for rows in range(1, MAX_GRAPHS + 1):
        step.run(*operands(rows), 5)
    step.run(*operands(1), 5)
    assert len(events(log, "capture")) == MAX_GRAPHS
    assert events(log, "close") == []
    step.run(*operands(3, "int64"), 5)  # the batch of two rows has not been used for the longest time
    assert len(events(log, "close")) == 1
    at = log.index(("close",))
    assert log[at - 1] == ("cuEventSynchronize", "event")
    step.run(*operands(1), 5)
    assert len(events(log, "capture")) == MAX_GRAPHS + 1
    step.run(*operands(2), 5)
    assert len(events(log, "capture")) == MAX_GRAPHS + 2


def test_graphs_are_freed_with_the_step(log: list[Any]) -> None:
    step = GpuStep(Body(log), 0, 1, graph=True)
    for rows in (1, 2):
        step.run(*operands(rows), 5)
    del step
    assert len(events(log, "close")) == 2


@pytest.mark.parametrize("error", [FullError, GpuError])
def test_a_failure_leaves_nothing_behind(log: list[Any], error: type[Exception]) -> None:
    body = Body(log)
    step = GpuStep(body, 0, 1, graph=True)
    body.error = error("all is used")
    with pytest.raises(GpuError, match="all is used"):
        step.run(*operands(8), 5)
    assert events(log, "launch", "fill") == []
    assert ("order", 5, PRIVATE) in log
    assert Pool.freed == 1
    body.error = None
    step.run(*operands(8), 5)
    assert events(log, "launch") == [("launch", 5)]
    body.error = error("all is used")
    with pytest.raises(GpuError, match="all is used"):
        step.run(*operands(9), 5)
    assert Pool.freed == 1  # the first graph has its memory there
    step.run(*operands(8), 5)


def test_a_batch_that_looks_like_one_before_is_not_looked_at(log: list[Any]) -> None:
    step = GpuStep(Body(log), 0, 1, graph=True)
    assert not step.repeat("8 rows", (256, 512), 5)
    step.run(*operands(8), 5, "8 rows")
    step.run(*operands(9), 5)
    log.clear()
    assert step.repeat("8 rows", (256, 512), 5)
    assert log == [("fill", 8, 5), ("launch", 5), ("cuEventRecord", "event", 5)]
    with pytest.raises(CaptureError, match="stream 0xd is being captured"):
        step.repeat("8 rows", (256, 512), 13)
    for rows in range(10, 10 + MAX_GRAPHS - 2):
        step.run(*operands(rows), 5)
    assert step.repeat("8 rows", (256, 512), 5)
    step.run(*operands(100), 5)  # that of nine rows goes, of eight it was the last
    assert ("close",) in log
    assert not step.repeat("8 rows", (256, 512), 5)
    log.clear()
    step.run(*operands(8), 5)
    assert events(log, "capture") == []


def test_a_graph_cannot_be_captured_in_another(log: list[Any]) -> None:
    step = GpuStep(Body(log), 0, 1, graph=True)
    with pytest.raises(CaptureError, match="stream 0xd is being captured; a step to be captured needs graph=False"):
        step.run(*operands(8), 13)
    assert events(log, "launch", "run") == []


def test_turns_wait_for_each_other_across_streams(log: list[Any]) -> None:
    turn = Turn()
    log.clear()
    for stream in (1, 1, 2, 1):
        with turn.on(stream):
            log.append(("work", stream))
    assert log == [
        *(("work", 1), ("cuEventRecord", "event", 1)) * 2,
        *(("cuStreamWaitEvent", 2, "event", 0), ("work", 2), ("cuEventRecord", "event", 2)),
        *(("cuStreamWaitEvent", 1, "event", 0), ("work", 1), ("cuEventRecord", "event", 1)),
    ]
