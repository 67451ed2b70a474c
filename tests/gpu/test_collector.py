"""CUPTI's records on a GPU: every kernel of every library, with its ranges, eager and in graphs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.arrays.libraries import cupy_stream
from lt_runtime.errors import CuptiError
from lt_runtime.gpu.graphs import Graph, graphs_with_ranges, node_type
from lt_runtime.profiling.collector import Collector
from lt_runtime.profiling.cupti.records import Activity
from lt_runtime.ranges import range_of
from tests.support.peers import NEEDS_TORCH

Path = tuple[str, ...]


def kernels(collector: Collector) -> list[Activity]:
    return [each for each in collector.activities if each.kind == "kernel"]


def by_range(collector: Collector, kind: str = "kernel", depth: int | None = None) -> Counter[Path]:
    """Counts recorded activities by their ranges' names, of which only the `depth` outermost are used."""
    return Counter(each.range[:depth] for each in collector.activities if each.kind == kind)


def share(collector: Collector, belongs: Callable[[Path], bool]) -> float:
    """The share of all kernels' time that is spent in ranges whose path `belongs` accepts."""
    total = sum(each.end_ns - each.start_ns for each in kernels(collector))
    return sum(each.end_ns - each.start_ns for each in kernels(collector) if belongs(each.range)) / total


@pytest.fixture
def layer() -> Callable[[], None]:
    x, w, bias = (cp.ones(shape, np.float32) for shape in ((256, 512), (384, 512), (384,)))

    def run() -> None:
        lt.linear_fwd(x, w, bias, activation="gelu_erf")

    for _ in range(2):
        run()
    return run


def test_an_eager_layers_kernels(layer: Callable[[], None]) -> None:
    before = time.monotonic_ns()
    with Collector() as collector:
        for _ in range(50):
            with range_of("fc1"):
                layer()
        with range_of("once"):
            layer()
    after = time.monotonic_ns()
    counts = by_range(collector, depth=1)
    in_range = counts.pop(("fc1",))
    assert in_range == 50 * sum(counts.values()) > 0
    assert collector.dropped == 0
    for each in kernels(collector):
        assert before < each.start_ns < each.end_ns < after
        assert each.name
        assert not each.name.startswith("_Z")
        assert (each.device, each.node >= 0) == (0, True)
    assert [each.start_ns for each in collector.activities] == sorted(each.start_ns for each in collector.activities)


def test_a_bound_calls_graph() -> None:
    x, w, out = (cp.ones(shape, np.float32) for shape in ((256, 512), (384, 512), (256, 384)))
    with cp.cuda.Stream(non_blocking=True) as stream:
        bound = lt.bind(lt.linear_fwd, x, w, out=out)
        with Collector() as collector:
            for _ in range(10):
                with range_of("bound"):
                    bound()
        stream.synchronize()
    counts = by_range(collector, depth=1)
    assert set(counts) == {("bound",)}
    assert counts[("bound",)] % 10 == 0


def train_step() -> tuple[Any, Any, Any]:
    model = lt.MLP([256, 512, 512, 128], activation="gelu", dtype="bfloat16", dropout=0.1, seed=0, device="cuda")
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-3), loss="cross_entropy", batch_size=512)
    x = cp.ones((512, 256), model.dtype.numpy)
    labels = cp.arange(512, dtype=np.int32) % 128
    return model, step, (x, labels)


def test_a_replayed_step_captured_before_the_profile() -> None:
    model, step, batch = train_step()
    for _ in range(3):
        step(*batch)
    (graph,) = [each for each in graphs_with_ranges() if any(path[0] == "optimizer" for path in each.ranges.values())]
    nodes = Counter(node_type(node) for node in graph.ranges)
    with Collector() as collector:
        for _ in range(10):
            step(*batch)
    counts = by_range(collector)
    assert sum(counts.values()) >= 10 * nodes["KERNEL"]
    assert all(count % 10 == 0 for count in counts.values())
    assert share(collector, lambda path: path[:1] == ("step",) and len(path) > 1) > 0.99
    layers = {part for path in counts for part in path if "/" in part}
    assert layers >= {f"{way}/{each.name}" for way in ("forward", "backward") for each in model.layers}
    assert any("loss" in path for path in counts)
    assert any("optimizer" in path for path in counts)


def test_a_graph_of_known_ranges_node_by_node() -> None:
    stream = cp.cuda.Stream(non_blocking=True)
    arrays = [cp.zeros(1000 + i, np.float32) for i in range(8)]

    def run(handle: int) -> None:
        with cupy_stream(0, handle):
            for i, array in enumerate(arrays):
                with range_of(f"r{i}"):
                    cp.add(array, 1, out=array)
                    array.data.memset_async(0, 4 * (i + 1))

    run(stream.ptr)
    stream.synchronize()
    with Graph(run, stream.ptr) as graph, Collector() as collector:
        for name in ("first", "second"):
            with range_of(name):
                graph.launch(stream.ptr)
    expected = Counter({(name, f"r{i}"): 1 for name in ("first", "second") for i in range(8)})
    assert by_range(collector) == expected
    sizes = {(each.range[-1], each.size) for each in collector.activities if each.kind == "memset"}
    assert sizes == {(f"r{i}", 4 * (i + 1)) for i in range(8)}


def test_copies_allocations_and_waits() -> None:
    host = np.zeros(1 << 20, np.uint8)
    with Collector() as collector:
        with range_of("allocate"):
            memory = cp.cuda.Memory(1 << 20)
        pointer = cp.cuda.MemoryPointer(memory, 0)
        with range_of("copy"):
            cp.cuda.runtime.memcpy(pointer.ptr, host.ctypes.data, 4096, cp.cuda.runtime.memcpyHostToDevice)
        with range_of("wait"):
            cp.cuda.get_current_stream().synchronize()
        with range_of("memset"):
            pointer.memset(0, 512)
    (allocated,) = [each for each in collector.activities if each.kind == "allocation" and each.range == ("allocate",)]
    assert (allocated.name, allocated.size) == ("allocate device", 1 << 20)
    (copied,) = [each for each in collector.activities if each.kind == "memcpy"]
    assert (copied.name, copied.size, copied.range) == ("HtoD", 4096, ("copy",))
    assert ("wait",) in by_range(collector, "synchronization")
    (filled,) = [each for each in collector.activities if each.kind == "memset"]
    assert (filled.size, filled.range) == (512, ("memset",))
    names = {each.name.partition("_")[0] for each in collector.activities if each.kind == "call"}
    assert {"cudaMalloc", "cudaStreamSynchronize"} <= names


@NEEDS_TORCH
def test_pytorch_forward_and_backward() -> None:
    import torch

    layers = [torch.nn.Linear(512, 512, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    x = torch.randn(1024, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        with range_of("fc1"):
            hidden = torch.nn.functional.gelu(layers[0](x))
        with range_of("fc2"):
            y = layers[1](hidden)
        with range_of("backward"):
            y.float().sum().backward()

    for _ in range(3):
        step()
    with Collector() as collector:
        for _ in range(10):
            step()
        torch.cuda.synchronize()
    assert set(by_range(collector)) == {("fc1",), ("fc2",), ("backward",)}
    assert all(count % 10 == 0 for count in by_range(collector).values())


@NEEDS_TORCH
def test_a_graph_that_pytorch_captures_meanwhile() -> None:
    import torch

    x, y = (torch.ones(1 << 16, device="cuda") for _ in range(2))
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.mul_(2), y.add_(1)
    torch.cuda.synchronize()
    with Collector() as collector:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            with range_of("mul"):
                x.mul_(2)
            with range_of("add"):
                y.add_(1)
                y.add_(1)
            x.mul_(3)
        with range_of("replay"):
            graph.replay()
    counts = by_range(collector)
    counts.pop((), None)  # PyTorch launches kernels of its own when it begins a capture
    assert counts == {("replay", "mul"): 1, ("replay", "add"): 2, ("replay",): 1}


def test_one_profiler_at_a_time(layer: Callable[[], None]) -> None:
    with Collector() as first:
        with pytest.raises(CuptiError, match="another profiler is attached"):
            Collector().__enter__()
        with range_of("a"):
            layer()
    assert set(by_range(first, depth=1)) == {("a",)}
    for i in range(3):
        with Collector() as again, range_of(f"again{i}"):
            layer()
        assert set(by_range(again, depth=1)) == {(f"again{i}",)}
