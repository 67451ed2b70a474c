"""What a capture leaves behind, on the pretended GPU."""

from __future__ import annotations

import pytest

from lt_runtime.errors import DriverError
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


@pytest.mark.parametrize("times", [1, 2, 3])
def test_a_capture_that_others_end_is_made_anew(gpu: FakeGpu, times: int) -> None:
    buffer, ended = gpu.cp.zeros(4, "float32"), list[int]()

    def run(stream: int) -> None:
        if len(ended) < times:  # as when another thread waits for the whole device
            gpu.streams.captures[stream].is_broken = True
            ended.append(stream)
        call("cuMemsetD32Async", buffer.data.ptr, 0x3F800000, 4, stream)

    if times == 3:
        with pytest.raises(DriverError, match="CAPTURE_INVALIDATED"):
            Graph(run, gpu.stream.ptr)
    else:
        with Graph(run, gpu.stream.ptr) as graph:
            graph.launch(gpu.stream.ptr)
        gpu.synchronize(gpu.stream.ptr)
        assert gpu.host_of(buffer).tolist() == [1.0] * 4
    assert not is_capturing(gpu.stream.ptr)
