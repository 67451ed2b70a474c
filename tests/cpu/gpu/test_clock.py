"""The clock, and measuring while other threads capture, on the pretended GPU, where each memset takes 1 µs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import driver

from tests.support.fake_gpu import FakeGpu
from tests.support.over_fake_gpu import call, own

MODE = driver.CUstreamCaptureMode


@pytest.fixture
def buffer(gpu: FakeGpu) -> Any:
    return gpu.cp.zeros(16, "uint8")


@pytest.fixture
def clock(gpu: FakeGpu, buffer: Any) -> Iterator[Any]:
    """A clock; the test fails if an event or graph of the clock is left at the end."""
    made = own("gpu.clock").Clock(0)
    before = gpu.calls.open()
    yield made
    assert gpu.calls.open() == before


def memsets(buffer: Any, count: int) -> Any:
    def run(stream: int) -> None:
        for _ in range(count):
            call("cuMemsetD8Async", buffer.data.ptr, 1, 16, stream)

    return run


def test_one_run_is_timed_by_two_events(clock: Any, buffer: Any) -> None:
    assert clock.once(memsets(buffer, 3)) == pytest.approx(3.0)


def test_events_are_freed_when_a_run_raises(clock: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        clock.once(lambda _: 1 / 0)
    clock.wait()


@pytest.mark.parametrize("behind_itself", [False, True])
def test_graphs_are_timed_behind_an_untimed_launch(gpu: FakeGpu, clock: Any, buffer: Any, behind_itself: bool) -> None:
    with clock.capture(memsets(buffer, 2)) as first, clock.capture(memsets(buffer, 5)) as second:
        gpu.calls.begin()
        assert clock.replay([first, second], behind_itself=behind_itself) == pytest.approx([2.0, 5.0])
        calls = [name for name in gpu.calls.names if name in ("cuEventRecord", "cuGraphLaunch", "cuStreamSynchronize")]
        timed = ["cuEventRecord", "cuGraphLaunch", "cuEventRecord"]
        between = ["cuGraphLaunch"] if behind_itself else []
        assert calls == ["cuGraphLaunch", *timed, *between, *timed, "cuStreamSynchronize"]


def test_a_thread_beside_captures_may_allocate(gpu: FakeGpu) -> None:
    streams = own("gpu.streams")
    call("cuStreamBeginCapture", gpu.other_stream.ptr, MODE.CU_STREAM_CAPTURE_MODE_GLOBAL)
    with streams.beside_captures(0):
        with streams.beside_captures(0):
            pass
        call("cuMemFree", call("cuMemAlloc", 16))
    call("cuGraphDestroy", call("cuStreamEndCapture", gpu.other_stream.ptr))
    assert call("cuThreadExchangeStreamCaptureMode", MODE.CU_STREAM_CAPTURE_MODE_GLOBAL) == (
        MODE.CU_STREAM_CAPTURE_MODE_GLOBAL
    )


def test_captures_that_a_measurement_would_disturb(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The captured stream is CuPy's current stream, or a stream that the default stream waits for."""
    streams, errors = own("gpu.streams"), own("errors")
    with gpu.stream:
        call("cuStreamBeginCapture", gpu.stream.ptr, MODE.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        with pytest.raises(errors.CaptureError, match="is being captured"), streams.beside_captures(0):
            pass
        assert [streams.is_captured(each) for each in (0, gpu.other_stream.ptr, gpu.stream.ptr)] == [False, False, True]
        call("cuGraphDestroy", call("cuStreamEndCapture", gpu.stream.ptr))
    answers = {
        driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT: errors.CaptureError,
        driver.CUresult.CUDA_ERROR_INVALID_HANDLE: errors.DriverError,
    }
    for status, error in answers.items():

        def fail(_: int, status: Any = status) -> bool:
            raise errors.DriverError("cuStreamIsCapturing", int(status), status.name, "")

        monkeypatch.setattr(streams, "is_capturing", fail)
        with pytest.raises(error), streams.beside_captures(0):
            pass
