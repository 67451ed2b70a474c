"""What a capture leaves behind, on the pretended GPU."""

from __future__ import annotations

import gc

import pytest

from lt_runtime.errors import CublasLtError, DriverError, GpuError
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.graphs import Graph, captured_nodes
from lt_runtime.gpu.streams import is_capturing
from tests.support.fake_gpu import FakeGpu


@pytest.mark.parametrize("capture", [Graph, captured_nodes])
def test_a_capture_that_fails_ends(gpu: FakeGpu, capture: type[Graph]) -> None:
    def fail(stream: int) -> None:
        assert is_capturing(stream)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        capture(fail, gpu.stream.ptr)
    assert not is_capturing(gpu.stream.ptr)


@pytest.mark.parametrize("capture", [Graph, captured_nodes])
def test_nothing_is_collected_during_a_capture(gpu: FakeGpu, capture: type[Graph]) -> None:
    """What is collected may free memory, which the capturing thread may not do."""
    seen = list[bool]()
    capture(lambda _: seen.append(gc.isenabled()), gpu.stream.ptr)
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_capture_that_others_end_is_made_anew(gpu: FakeGpu, times: int, is_told: bool) -> None:
    buffer, ended = gpu.cp.zeros(4, "float32"), list[int]()

    def run(stream: int) -> None:
        if len(ended) < times:  # as when another thread waits for the whole device
            gpu.streams.captures[stream].is_broken = True
            ended.append(stream)
            if is_told:  # by cuBLASLt, of the launch that the driver has refused it
                raise CublasLtError("cublasLtMatmul", 13, "CUBLAS_STATUS_EXECUTION_FAILED", "")
        call("cuMemsetD32Async", buffer.data.ptr, 0x3F800000, 4, stream)

    if times == 3:
        with pytest.raises(GpuError, match="EXECUTION_FAILED" if is_told else "CAPTURE_INVALIDATED"):
            Graph(run, gpu.stream.ptr)
    else:
        with Graph(run, gpu.stream.ptr) as graph:
            graph.launch(gpu.stream.ptr)
        gpu.synchronize(gpu.stream.ptr)
        assert gpu.host_of(buffer).tolist() == [1.0] * 4
    assert not is_capturing(gpu.stream.ptr)


def test_what_the_capturing_thread_may_not_do_is_not_tried_again(gpu: FakeGpu) -> None:
    calls = list[int]()

    def run(stream: int) -> None:
        calls.append(stream)
        call("cuStreamSynchronize", stream)

    with pytest.raises(DriverError, match="CAPTURE_UNSUPPORTED"):
        Graph(run, gpu.stream.ptr)
    assert len(calls) == 1


def test_a_device_that_is_captured_from_is_waited_for(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from lt_runtime.training import device  # the GPU's own copy of the package

    model = gpu.lt.MLP([8, 4], device="cuda")
    gpu.synchronize_all()
    call("cuStreamBeginCapture", gpu.stream.ptr, 1)
    naps = list[float]()

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            with pytest.raises(DriverError, match="INVALIDATED"):
                call("cuStreamEndCapture", gpu.stream.ptr)

    monkeypatch.setattr(device.time, "sleep", nap)
    model.device.synchronize()
    assert len(naps) == 3
    monkeypatch.setattr(device, "_PATIENCE_S", -1.0)
    call("cuStreamBeginCapture", gpu.stream.ptr, 1)
    with pytest.raises(device.CaptureError, match="is being captured"):
        model.device.synchronize()
    with pytest.raises(DriverError, match="INVALIDATED"):
        call("cuStreamEndCapture", gpu.stream.ptr)
