"""What a capture leaves behind, on the pretended GPU."""

from __future__ import annotations

import pytest

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
