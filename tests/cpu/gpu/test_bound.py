"""Plans bound to a stream: what they launch, and when their graphs are freed; CUDA is a list of calls here."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from lt_runtime.errors import CaptureError
from lt_runtime.gpu import bound
from lt_runtime.gpu.bound import BoundPlan

CAPTURED, PRIVATE = 13, 99


class FakeGraph:
    def __init__(self, run: Any, stream: int) -> None:
        self.log: list[Any] = bound._log  # type: ignore[attr-defined]
        self.log.append(("capture", stream))
        self.executable = "graph"
        run(stream)

    def close(self) -> None:
        self.log.append("close")


class FakeMemory:
    def __init__(self, device: int, stream: int) -> None:
        self.stream, self.lock = stream, threading.RLock()

    def on(self, stream: int) -> Any:
        return SimpleNamespace(stream=stream, of=self.stream)


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    @contextlib.contextmanager
    def relaxed() -> Any:
        calls.append("relaxed")
        yield
        calls.append("as before")

    monkeypatch.setattr(bound, "_log", calls, raising=False)
    for name, fake in {
        "Graph": FakeGraph,
        "_ended": [],
        "activated": lambda _: contextlib.nullcontext(),
        "is_captured": lambda stream: stream == CAPTURED,
        "is_capturing": lambda stream: stream == CAPTURED,
        "function": lambda name: lambda executable, stream: calls.append(("launch", stream)),
        "private_stream": lambda *_: PRIVATE,
        "relaxed_captures": relaxed,
        "stream_memory": FakeMemory,
    }.items():
        monkeypatch.setattr(bound, name, fake)
    return calls


def bind(log: list[Any], stream: int = 5) -> BoundPlan:
    return BoundPlan(
        lambda memory: log.append(("run", memory.stream, getattr(memory, "of", None))),
        0,
        stream,
        lambda memory: log.append(("reserve", memory.stream)),
    )


def test_what_is_bound_is_captured_once_and_launched_at_each_call(log: list[Any]) -> None:
    plan = bind(log)
    captured = [("reserve", 5), ("capture", PRIVATE), ("run", PRIVATE, 5)]  # with the memory of the stream itself
    assert log == ["relaxed", *captured, "as before"]
    log.clear()
    plan()
    plan()
    assert log == [("launch", 5)] * 2


def test_a_capture_gets_the_launches(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plan = bind(log)
    log.clear()
    for name in ("is_captured", "is_capturing"):
        monkeypatch.setattr(bound, name, lambda stream: stream == 5)
    plan()
    assert log == [("run", 5, None)]
    with pytest.raises(CaptureError, match="stream 0x5 is being captured"):
        bind(log)
    assert log == [("run", 5, None)]


def test_graphs_are_freed_when_the_next_is_made(log: list[Any]) -> None:
    plans = [bind(log), bind(log)]
    plans.clear()  # perhaps in a capture
    assert "close" not in log
    log.clear()
    kept = bind(log)
    assert log[:3] == ["relaxed", "close", "close"]
    log.clear()
    assert bind(log) is not kept
    assert "close" not in log
