"""The clock, graphs and captures over a driver that only takes notes."""

from __future__ import annotations

from typing import Any

import pytest
from cuda.bindings import driver

from lt_runtime.errors import CaptureError, DriverError
from lt_runtime.gpu import clock, graphs, streams
from lt_runtime.gpu.clock import Clock

MODE, STATUS = driver.CUstreamCaptureMode, driver.CUstreamCaptureStatus


class Driver:
    """Answers calls; a millisecond passes between any two records of events.

    Attributes:
        calls: names of the calls, in order.
        alive: handles that were made and not destroyed.
        capturing: streams that are being captured.
        implicit: whether the default stream would wait for one of those.
        mode: the thread's.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.alive: set[int] = set()
        self.capturing: set[int] = set()
        self.implicit = False
        self.mode: Any = MODE.CU_STREAM_CAPTURE_MODE_GLOBAL
        self._records: dict[int, int] = {}
        self._handles = iter(range(100, 10**6))
        for module in (clock, graphs, streams):
            monkeypatch.setattr(module, "call", self.call)
        monkeypatch.setattr(graphs, "function", lambda name: lambda *arguments: self.call(name, *arguments))
        monkeypatch.setattr(streams, "is_capturing", lambda stream: self.call("cuStreamIsCapturing", stream))
        monkeypatch.setattr(clock, "private_stream", lambda device, purpose: 7)
        monkeypatch.setattr(streams, "stream_handle", lambda stream, device: 0)

    def call(self, name: str, *arguments: Any) -> Any:
        self.calls.append(name)
        return getattr(self, name)(*arguments)

    def _make(self, *_: Any) -> int:
        handle = next(self._handles)
        self.alive.add(handle)
        return handle

    cuEventCreate = cuGraphInstantiate = cuStreamEndCapture = _make  # noqa: N815

    def _destroy(self, handle: int) -> None:
        self.alive.remove(handle)

    cuEventDestroy = cuGraphDestroy = cuGraphExecDestroy = _destroy  # noqa: N815

    def cuEventRecord(self, event: int, stream: int) -> None:  # noqa: N802
        assert stream == 7
        self._records[event] = len(self._records)

    def cuEventElapsedTime(self, start: int, end: int) -> float:  # noqa: N802
        return float(self._records[end] - self._records[start])

    def cuGraphLaunch(self, graph: int, stream: int) -> int:  # noqa: N802
        assert graph in self.alive
        assert stream == 7
        return 0

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> None:  # noqa: N802
        assert mode == MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

    def cuStreamSynchronize(self, stream: int) -> None:  # noqa: N802
        assert stream == 7

    def cuStreamIsCapturing(self, stream: int) -> bool:  # noqa: N802
        if stream == 0 and self.implicit:
            status = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
            raise DriverError("cuStreamIsCapturing", int(status), status.name, "")
        return stream in self.capturing

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:  # noqa: N802
        self.mode, before = mode, self.mode
        return before


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_one_run_is_timed_by_two_events(gpu: Driver) -> None:
    streams_given: list[int] = []
    assert Clock(0).once(streams_given.append) == 1000.0
    assert streams_given == [7]
    assert not gpu.alive


def test_events_are_freed_when_a_run_raises(gpu: Driver) -> None:
    def run(_: int) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        Clock(0).once(run)
    assert not gpu.alive


def test_graphs_are_replayed_behind_an_untimed_one(gpu: Driver) -> None:
    timer = Clock(0)
    with timer.capture(lambda _: None) as first, timer.capture(lambda _: None) as second:
        gpu.calls.clear()
        assert timer.replay([first, second]) == [1000.0, 1000.0]
        queued = [name for name in gpu.calls if name in ("cuEventRecord", "cuGraphLaunch", "cuStreamSynchronize")]
        one = ["cuEventRecord", "cuGraphLaunch", "cuEventRecord"]
        assert queued == ["cuGraphLaunch", *one, *one, "cuStreamSynchronize"]
        assert len(gpu.alive) == 2
    assert not gpu.alive


def test_each_graph_may_be_replayed_behind_itself(gpu: Driver) -> None:
    timer = Clock(0)
    with timer.capture(lambda _: None) as first, timer.capture(lambda _: None) as second:
        gpu.calls.clear()
        assert timer.replay([first, second], behind_itself=True) == [1000.0, 1000.0]
        one = ["cuGraphLaunch", "cuEventRecord", "cuGraphLaunch", "cuEventRecord"]
        assert [name for name in gpu.calls if name in one] == [*one, *one]


def test_no_call_of_this_thread_is_forbidden_beside_captures(gpu: Driver) -> None:
    with streams.beside_captures(0):
        assert gpu.mode == MODE.CU_STREAM_CAPTURE_MODE_RELAXED
        with streams.beside_captures(0):
            pass
        assert gpu.mode == MODE.CU_STREAM_CAPTURE_MODE_RELAXED
    assert gpu.mode == MODE.CU_STREAM_CAPTURE_MODE_GLOBAL


@pytest.mark.parametrize(("capturing", "implicit", "current"), [({9}, False, 9), (set(), True, 0), (set(), True, 9)])
def test_captures_that_would_be_disturbed(
    capturing: set[int], implicit: bool, current: int, gpu: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "stream_handle", lambda stream, device: current)
    gpu.capturing, gpu.implicit = capturing, implicit
    with pytest.raises(CaptureError, match="is being captured"), streams.beside_captures(0):
        pass
    assert gpu.mode == MODE.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_another_failure_of_the_driver_is_its_own(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: int) -> None:
        raise DriverError("cuStreamIsCapturing", 400, "CUDA_ERROR_INVALID_HANDLE", "")

    monkeypatch.setattr(gpu, "cuStreamIsCapturing", fails)
    with pytest.raises(DriverError, match="CUDA_ERROR_INVALID_HANDLE"), streams.beside_captures(0):
        pass


def test_the_default_stream_is_not_asked_for_a_capture(gpu: Driver) -> None:
    gpu.capturing, gpu.implicit = {9}, True
    assert [streams.is_captured(stream) for stream in (0, 5, 9)] == [False, False, True]
