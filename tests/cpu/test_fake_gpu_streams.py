"""Calls on tensors that name no stream run on PyTorch's current one, and leave nothing on any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lt_runtime.problem import DType
from tests.support.fake_gpu import FakeGpu
from tests.support.layer_checks import Layer as CheckedLayer
from tests.support.layer_checks import layer_case
from tests.support.over_fake_gpu import call

_CALLS = 5  # the first call makes plans, the second finds them, the third is captured
_DIMS, _ROWS = [12, 16, 5], 8

Calls = dict[str, Callable[[], Any]]


def _tensor(gpu: FakeGpu, values: NDArray[Any]) -> Any:
    return gpu.torch.Tensor(gpu.cp.asarray(values))


def _layer_calls(gpu: FakeGpu) -> Calls:
    layer, tensor = CheckedLayer(gpu, layer_case(dtype=DType.FLOAT16)), gpu.torch.Tensor
    x, w, bias, dy = (tensor(each) for each in (layer.x.array, layer.w.array, layer.bias, layer.dy.array))
    gpu.streams.synchronize_all()  # CuPy's stream makes the arrays, and the calls below run on PyTorch's stream
    with gpu.torch.cuda.stream(gpu.torch.cuda.ExternalStream(gpu.stream.ptr)):
        _, ctx = gpu.lt.linear_fwd(x, w, bias, activation="gelu")
    return {
        "linear": lambda: gpu.lt.linear(x, w, bias, activation="gelu"),
        "linear_fwd": lambda: gpu.lt.linear_fwd(x, w, bias, activation="gelu"),
        "linear_bwd": lambda: gpu.lt.linear_bwd(dy, ctx),
        "matmul": lambda: gpu.lt.matmul(x, tensor(layer.w.array.T), epilogue="gelu_bias", bias=bias),
        "dropout": lambda: gpu.lt.dropout(x, 0.5, gpu.lt.Philox(1)),
    }


def _other_calls(gpu: FakeGpu) -> Calls:
    generator = np.random.default_rng(0)
    value, gradient, logits = (
        _tensor(gpu, generator.standard_normal((_ROWS, _DIMS[-1])).astype(np.float32)) for _ in range(3)
    )
    x = _tensor(gpu, generator.standard_normal((_ROWS, _DIMS[0])).astype(np.float32))
    labels = _tensor(gpu, generator.integers(0, _DIMS[-1], _ROWS))
    optimizer = gpu.lt.AdamW([gpu.lt.Parameter(value, gradient)], lr=1e-2)
    model = gpu.lt.MLP(_DIMS, seed=3, device=0)
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters(), lr=1e-2))
    gpu.streams.synchronize_all()  # initialises the model on the default stream; calls run on other streams
    return {
        "mse_loss": lambda: gpu.lt.mse_loss(logits, gradient),
        "cross_entropy": lambda: gpu.lt.cross_entropy(logits, labels),
        "AdamW.step": optimizer.step,
        "TrainStep": lambda: step(x, labels),
    }


def _streams_given_work(gpu: FakeGpu, call: Callable[[], Any]) -> set[int]:
    before = {handle: len(log) for handle, log in gpu.streams.log.items()}
    call()
    return {handle for handle, log in gpu.streams.log.items() if len(log) > before.get(handle, 0)}


@pytest.mark.parametrize("calls", [_layer_calls, _other_calls])
def test_tensors_without_a_stream(gpu: FakeGpu, calls: Callable[[FakeGpu], Calls]) -> None:
    with gpu.other_stream:  # CuPy's current stream differs from PyTorch's
        for name, call in calls(gpu).items():
            with gpu.torch.cuda.stream(gpu.torch.cuda.ExternalStream(gpu.stream.ptr)):
                for _ in range(_CALLS):
                    used = _streams_given_work(gpu, call)
            assert used == {gpu.stream.ptr}, name
            gpu.synchronize(gpu.stream.ptr)
            # The first calls, which make plans, must put no work on another stream either.
            assert not gpu.streams.left_undone(), name


def test_new_results_are_of_the_calls_stream_each_time(gpu: FakeGpu) -> None:
    x, w = (gpu.cp.asarray(np.ones((8, 8), np.float32)) for _ in range(2))
    gpu.synchronize_all()
    pool, ordered = gpu.cp.cuda.MemoryPool(), []

    def allocate(size: int) -> Any:
        ordered.append(gpu.cp.cuda.get_current_stream().ptr)
        return pool.malloc(size)

    kept = []
    with gpu.stream, gpu.cp.cuda.using_allocator(allocate):
        for stream, expected in ((gpu.other_stream, gpu.other_stream.ptr), (None, gpu.stream.ptr)):
            for _ in range(4):
                ordered.clear()
                kept.append(gpu.lt.linear(x, w, stream=stream))
                assert set(ordered) == {expected}
    gpu.synchronize_all()
    assert all((gpu.host_of(each) == 8).all() for each in kept)


def test_a_graph_of_freed_memory_races_only_with_later_memory_at_its_address(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph of the package may outlive the test that made it, and a later test may reuse the graph's addresses: the
    checker of races must not take accesses of the old graph for accesses of the later test."""
    buffer = np.empty(1 << 12, np.uint8)
    monkeypatch.setattr(np, "empty", lambda *_: buffer)  # makes every allocation below return the same address
    address = call("cuMemAlloc", 4)
    with gpu.stream:
        gpu.stream.begin_capture()
        call("cuMemsetD8Async", address, 0, 4, gpu.stream.ptr)
        graph = gpu.stream.end_capture()
    for stream in (gpu.stream, gpu.other_stream):
        graph.launch(stream)
        gpu.synchronize_all()
        if stream is gpu.stream:
            call("cuMemFree", address)
        gpu.settle()  # what the fixture `gpu` does at the end of each test
    assert call("cuMemAlloc", 4) == address
    call("cuMemsetD8Async", address, 0, 4, gpu.stream.ptr)
    graph.launch(gpu.other_stream)
    gpu.synchronize_all()
    with pytest.raises(AssertionError, match="nothing orders the two"):
        gpu.settle()
    call("cuMemFree", address)
