"""`Collector` on a fake GPU: it records all work, each with the ranges to which it belongs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.over_fake_gpu import call, own, within


def usable(gpu: FakeGpu) -> Any:
    """A collector, and a pretended CUPTI that works."""
    gpu.cupti.version, gpu.cupti.name = 130500, b""
    for each in (gpu.cupti.sizes, gpu.cupti.fails, gpu.cupti.enabled):
        each.clear()
    return another()


collector = pytest.fixture(usable, name="collector")


def another() -> Any:
    return own("profiling.collector").Collector()


def paths(collector: Any, *kinds: str) -> list[tuple[str, ...]]:
    kinds = kinds or ("kernel", "memcpy", "memset")
    return [each.range for each in collector.activities if each.kind in kinds]


def fill(gpu: FakeGpu) -> None:
    """Puts one copy on the current stream."""
    gpu.cp.ndarray((8,), np.float32).fill(1.0)


def test_work_belongs_to_the_ranges_that_are_open(gpu: FakeGpu, collector: Any) -> None:
    fill(gpu)
    with pytest.raises(ValueError, match="in the body"), collector:  # noqa: PT012
        fill(gpu)
        with within("forward"):
            fill(gpu)
            with within("fc1"):
                fill(gpu)
            fill(gpu)
            raise ValueError("in the body")
    assert paths(collector) == [(), ("forward",), ("forward", "fc1"), ("forward",)]
    assert not gpu.cupti.pushed
    assert not gpu.cupti.enabled


def test_a_call_and_its_copy_have_times_of_the_hosts_clock(gpu: FakeGpu, collector: Any) -> None:
    before = time.monotonic_ns()
    with collector, within("a"):
        fill(gpu)
    after = time.monotonic_ns()
    call, copy = collector.activities
    for each in (call, copy):
        assert before < each.start_ns <= each.end_ns < after
    assert (call.kind, copy.kind, call.correlation) == ("call", "memcpy", copy.correlation)
    assert (call.name, call.thread, call.range) == ("cuLaunchKernel", threading.get_native_id(), ("a",))


def test_a_layers_kernels_have_demangled_names(gpu: FakeGpu, collector: Any) -> None:
    x, w = gpu.cp.ones((16, 16), np.float32), gpu.cp.ones((16, 16), np.float32)
    gpu.cupti.name = b"_Z4gemmPKfPf"
    with collector, within("fc1"):
        gpu.lt.linear_fwd(x, w)
        gpu.cp.cuda.Device(0).synchronize()
    kernels = [each for each in collector.activities if each.kind == "kernel"]
    assert kernels
    assert {each.name for each in kernels} == {"gemm(float const*, float*)"}
    assert {each.range[0] for each in kernels} == {"fc1"}


def run_in_thread(body: Callable[[], object]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(body).result()


def test_a_thread_has_its_own_ranges_and_without_any_works_for_the_profiling_one(gpu: FakeGpu, collector: Any) -> None:
    def body() -> None:
        fill(gpu)
        with within("theirs"):
            fill(gpu)

    with collector:
        with within("ours"):
            run_in_thread(body)
            fill(gpu)
            run_in_thread(lambda: fill(gpu))
        run_in_thread(lambda: fill(gpu))
    assert paths(collector) == [(), ("theirs",), ("ours",), ("ours",), ()]


def test_ranges_that_outlive_a_profile_do_not_reach_the_next(gpu: FakeGpu, collector: Any) -> None:
    second, may_go_on, is_open, is_done = another(), *(threading.Event() for _ in range(3))

    def body() -> None:
        with within("theirs"):
            is_open.set()
            may_go_on.wait(60)
            fill(gpu)
            is_done.set()

    thread, around = threading.Thread(target=body), within("around")
    with collector:
        thread.start()
        assert is_open.wait(60)
        around.__enter__()
        fill(gpu)
    with second:
        fill(gpu)
        around.__exit__(None, None, None)
        with within("ours"):
            may_go_on.set()
            assert is_done.wait(60)
            fill(gpu)
    thread.join()
    assert paths(collector) == [("around",)]
    assert paths(second) == [(), (), ("ours",)]
    assert not gpu.cupti.pushed


def captured(gpu: FakeGpu, names: list[str]) -> Any:
    """Captures a graph of the package with one copy in each range, and one copy outside all ranges."""
    target = gpu.cp.ndarray((8,), np.float32)

    def run(stream: int) -> None:
        call("cuMemsetD8Async", target.data.ptr, 1, 8, stream)
        for name in names:
            with within("forward"), within(name):
                call("cuMemsetD8Async", target.data.ptr, 2, 8, stream)

    graph = own("gpu.graphs").Graph(run, gpu.stream.ptr)
    graph.keeps = target
    return graph


def test_nodes_of_graphs_captured_before_the_profile(gpu: FakeGpu, collector: Any) -> None:
    with captured(gpu, ["fc1", "fc2"]) as graph, collector:
        with within("step"):
            graph.launch(gpu.other_stream.ptr)
        graph.launch(gpu.other_stream.ptr)
    inner = [(), ("forward", "fc1"), ("forward", "fc2")]
    assert sorted(paths(collector)) == sorted([("step", *path) for path in inner] + inner)
    assert {each.graph for each in collector.activities if each.kind == "memset"} == {graph.executable}


def test_a_graph_without_ranges_keeps_nothing(gpu: FakeGpu, collector: Any) -> None:
    open_before = gpu.calls.open()["cuStreamEndCapture"]
    with captured(gpu, []) as graph, captured(gpu, ["a"]) as other:
        assert (graph.template, graph.ranges) == (0, {})
        assert other.template
        assert list(other.ranges.values()) == [("forward", "a")]
        assert gpu.calls.open()["cuStreamEndCapture"] == open_before + 1
        with collector, within("step"):
            graph.launch(gpu.other_stream.ptr)
    assert paths(collector) == [("step",)]
    assert gpu.calls.open()["cuStreamEndCapture"] == open_before
    assert own("gpu.graphs").graphs_with_ranges() == []


def test_ranges_of_broken_captures_and_of_other_threads_do_not_reach_a_capture(gpu: FakeGpu) -> None:
    target, attempts = gpu.cp.ndarray((8,), np.float32), iter(["broken", "whole"])

    def run(stream: int) -> None:
        attempt, opened = next(attempts), within("elsewhere")
        run_in_thread(lambda: opened.__enter__())
        for name in (attempt, "second"):
            with within(name):
                call("cuMemsetD8Async", target.data.ptr, 1, 8, stream)
        run_in_thread(lambda: opened.__exit__(None, None, None))
        gpu.streams.captures[stream].is_broken = attempt == "broken"

    with own("gpu.graphs").Graph(run, gpu.stream.ptr) as graph:
        assert [*graph.ranges.values()] == [("whole",), ("second",)]


@pytest.mark.parametrize("library", ["cupy", "torch"])
def test_nodes_of_graphs_that_others_capture_meanwhile(gpu: FakeGpu, collector: Any, library: str) -> None:
    torch = gpu.torch.cuda
    entered = gpu.stream if library == "cupy" else torch.stream(torch.ExternalStream(gpu.stream.ptr))
    target = gpu.cp.ndarray((8,), np.float32)

    def put() -> None:
        call("cuMemsetD8Async", target.data.ptr, 1, 8, gpu.stream.ptr)

    with collector:
        with within("warm"), entered:
            gpu.stream.begin_capture()
            put()
            with within("fc1"):
                put()
            put()
            graph = gpu.stream.end_capture()
        with within("replay"):
            graph.launch(gpu.other_stream)
    assert sorted(paths(collector)) == [("replay",), ("replay",), ("replay", "fc1")]


def test_a_training_steps_kernels_have_their_layers(gpu: FakeGpu, collector: Any) -> None:
    lt = gpu.lt
    model = lt.MLP([16, 16, 16], activation="relu", dtype="float32", seed=0)
    step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse", batch_size=16)
    x, y = gpu.cp.ones((16, 16), np.float32), gpu.cp.ones((16, 16), np.float32)
    step(x, y)
    step(x, y)
    with collector:
        step(x, y)
    found = {each.range for each in collector.activities if each.kind == "kernel"}
    assert {path[:2] for path in found} >= {("step", "forward"), ("step", "loss"), ("step", "optimizer")}
    assert {path[0] for path in found} == {"step"}
    layers = {part for path in found for part in path if "/" in part}
    assert layers == {f"{way}/{layer.name}" for way in ("forward", "backward") for layer in model.layers}
    del step


def test_what_finds_no_room_is_counted(gpu: FakeGpu, collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cupti = own("profiling.cupti.library")
    monkeypatch.setattr(cupti, "BUFFER_SIZE", 512)
    monkeypatch.setattr(cupti, "MOST_BUFFERS", 3)
    with collector:
        for _ in range(50):
            fill(gpu)
    kept = len(collector.activities)
    # The record of a call and the record that links it to the other library's id take 64 bytes together.
    assert kept == 3 * (512 // 64)
    assert collector.dropped == 3 * 50 - 2 * kept
    with another() as again:
        fill(gpu)
    assert (len(again.activities), again.dropped) == (2, 0)


def test_many_ranges_take_bounded_memory(gpu: FakeGpu, collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own("profiling.collector"), "MOST_PATHS", 2)
    monkeypatch.setattr(own("profiling.collector"), "MOST_BORDERS", 6)
    with collector, within("a"):
        for name in ("b", "c", "b"):
            with within(name):
                fill(gpu)
        # The six recorded begins and ends are used up by the begin of the last "b". Its end is not recorded, so that
        # the other thread's work counts as within it.
        run_in_thread(lambda: fill(gpu))
    assert paths(collector) == [("a", "b"), ("a",), ("a", "b"), ("a", "b")]


def test_a_second_profile_is_refused_and_the_first_goes_on(gpu: FakeGpu, collector: Any) -> None:
    second = another()
    with collector:
        fill(gpu)
        with pytest.raises(gpu.lt.errors.CuptiError, match="another profiler is attached"):
            second.__enter__()
        with within("a"):
            fill(gpu)
    assert paths(collector) == [(), ("a",)]


@pytest.mark.parametrize(
    ("version", "sizes", "fails", "said"),
    [
        (130600, {}, {}, "version 130600, whose records are not known; known are 13.0, "),
        (120900, {}, {}, "version 120900"),
        (28, {}, {}, "version 28"),
        (130401, {10: 256}, {}, "CUPTI 130401 writes 256 bytes for records of kind 10, where 248 are known"),
        (130001, {}, {"cuptiActivityEnable": 35}, "CUPTI_ERROR_35 .35.: the driver lets only administrators profile"),
        (130001, {}, {"cuptiGetVersion": 999}, "cuptiGetVersion failed with CUPTI_ERROR_999"),
        (130001, {}, {"cuptiGetVersion": 999, "cuptiGetResultString": 999}, "cuptiGetVersion failed with status 999"),
    ],
)
def test_why_it_cannot_be_used(
    gpu: FakeGpu, collector: Any, version: int, sizes: dict[int, int], fails: dict[str, int], said: str
) -> None:
    gpu.cupti.version = version
    gpu.cupti.sizes.update(sizes)
    gpu.cupti.fails.update(fails)
    with pytest.raises(gpu.lt.errors.CuptiError, match=said) as caught:
        collector.__enter__()
    assert "\n" not in str(caught.value)
    assert not gpu.cupti.enabled
    with usable(gpu) as again:
        fill(gpu)
    assert paths(again) == [()]


def test_records_that_could_not_be_timed_are_dropped(gpu: FakeGpu, collector: Any) -> None:
    with collector:
        fill(gpu)
        gpu.cp.cuda.Device(0).synchronize()
        records = gpu.cupti.records
        at = next(i for i, each in enumerate(records) if each[:4] == b"\x01\0\0\0")
        records[at] = records[at][:16] + bytes(8) + records[at][24:]
    assert [each.kind for each in collector.activities] == ["call"]
    assert collector.dropped == 1
