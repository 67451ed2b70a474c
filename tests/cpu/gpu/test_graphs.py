"""Captures, bound plans, branches of a graph and private streams, on the pretended GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
from cuda.bindings import driver

from tests.support.fake_gpu import FakeGpu
from tests.support.over_fake_gpu import call, own

THREAD_LOCAL = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RUN_BEFORE = "run the operation once on this stream before the capture"


@pytest.fixture
def fresh(gpu: FakeGpu) -> Iterator[Any]:
    """The `StreamMemory` of a new stream; freed at the end."""
    stream = gpu.cp.cuda.Stream().ptr
    yield own("gpu.memory").stream_memory(0, stream)
    gpu.synchronize_all()
    own("gpu.memory").release(0, stream)


def put(memory: Any) -> None:
    """Launches one memset on the stream of `memory`."""
    call("cuMemsetD8Async", memory.scratch(16), 1, 16, memory.stream)


@pytest.mark.parametrize("capture", ["Graph", "captured_nodes"])
def test_a_capture_that_fails_ends(gpu: FakeGpu, capture: str) -> None:
    def fail(stream: int) -> None:
        assert own("gpu.driver").is_capturing(stream)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        getattr(own("gpu.graphs"), capture)(fail, gpu.stream.ptr)
    assert not own("gpu.driver").is_capturing(gpu.stream.ptr)


@pytest.mark.parametrize("capture", ["Graph", "captured_nodes"])
def test_no_garbage_is_collected_during_a_capture(gpu: FakeGpu, capture: str) -> None:
    """Garbage collection may run finalisers that free GPU memory, which a capturing thread must not do."""
    seen = list[bool]()
    getattr(own("gpu.graphs"), capture)(lambda _: seen.append(gc.isenabled()), gpu.stream.ptr)
    assert seen == [False]
    assert gc.isenabled()


@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("is_told", [False, True])
def test_a_capture_that_another_thread_invalidates_is_tried_three_times(
    gpu: FakeGpu, times: int, is_told: bool
) -> None:
    """Another thread synchronises the device during the capture. cuBLASLt may report the driver's error as its own."""
    buffer, ended = gpu.cp.zeros(4, "float32"), list[int]()
    errors, graph_of = own("errors"), own("gpu.graphs").Graph

    def run(stream: int) -> None:
        if len(ended) < times:
            gpu.streams.captures[stream].is_broken = True
            ended.append(stream)
            if is_told:
                raise errors.CublasLtError("cublasLtMatmul", 13, "CUBLAS_STATUS_EXECUTION_FAILED", "")
        call("cuMemsetD32Async", buffer.data.ptr, 0x3F800000, 4, stream)

    if times == 3:
        with pytest.raises(errors.GpuError, match="EXECUTION_FAILED" if is_told else "CAPTURE_INVALIDATED"):
            graph_of(run, gpu.stream.ptr)
    else:
        with graph_of(run, gpu.stream.ptr) as graph:
            graph.launch(gpu.stream.ptr)
        gpu.synchronize(gpu.stream.ptr)
        assert gpu.host_of(buffer).tolist() == [1.0] * 4
    assert not own("gpu.driver").is_capturing(gpu.stream.ptr)


def test_a_call_that_is_forbidden_to_the_capturing_thread_is_not_tried_again(gpu: FakeGpu) -> None:
    calls = list[int]()

    def run(stream: int) -> None:
        calls.append(stream)
        call("cuStreamSynchronize", stream)

    with pytest.raises(own("errors").DriverError, match="CAPTURE_UNSUPPORTED"):
        own("gpu.graphs").Graph(run, gpu.stream.ptr)
    assert len(calls) == 1


def test_a_synchronisation_of_the_device_waits_for_captures(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    device, errors = own("nn.device"), own("errors")
    model = gpu.lt.MLP([8, 4], device="cuda")
    gpu.synchronize_all()
    call("cuStreamBeginCapture", gpu.stream.ptr, 1)
    naps = list[float]()

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            with pytest.raises(errors.DriverError, match="INVALIDATED"):
                call("cuStreamEndCapture", gpu.stream.ptr)

    monkeypatch.setattr(device.time, "sleep", nap)
    model.device.synchronize()
    assert len(naps) == 3
    monkeypatch.setattr(device, "_PATIENCE_S", -1.0)
    call("cuStreamBeginCapture", gpu.stream.ptr, 1)
    with pytest.raises(errors.CaptureError, match="is being captured"):
        model.device.synchronize()
    with pytest.raises(errors.DriverError, match="INVALIDATED"):
        call("cuStreamEndCapture", gpu.stream.ptr)


def bound(memory: Any) -> Any:
    return own("gpu.memory").BoundPlan(put, 0, memory.stream, lambda memory: memory.scratch(16))


def test_a_bound_plan_is_captured_once_and_launched_at_each_call(gpu: FakeGpu, fresh: Any) -> None:
    plan = bound(fresh)
    assert fresh.stream not in gpu.streams.captures
    for _ in range(2):
        gpu.memory.view(fresh.scratch(16), 16, "the buffer")[...] = 0
        plan()
        gpu.synchronize(fresh.stream)
        # Outside a capture `branch` yields the stream's own memory.
        assert gpu.memory.view(fresh.scratch(16), 16, "the buffer").tolist() == [1] * 16
    assert gpu.streams.log[fresh.stream][-2:] == ["graph"] * 2


def test_a_bound_plan_puts_its_launches_into_a_capture(gpu: FakeGpu, fresh: Any) -> None:
    plan = bound(fresh)
    call("cuStreamBeginCapture", fresh.stream, THREAD_LOCAL)
    plan()
    with pytest.raises(own("errors").CaptureError, match=f"stream {fresh.stream:#x} is being captured"):
        bound(fresh)
    graph = call("cuStreamEndCapture", fresh.stream)
    graphs = own("gpu.graphs")
    assert [graphs.node_type(node) for node in graphs.nodes_of(graph)] == ["MEMSET"]
    call("cuGraphDestroy", graph)


def test_graphs_of_ended_plans_are_freed_when_the_next_is_bound(gpu: FakeGpu, fresh: Any) -> None:
    bound(fresh)  # frees graphs that earlier tests have left
    before = gpu.calls.open()["cuGraphInstantiate"]
    plans = [bound(fresh), bound(fresh)]
    assert gpu.calls.open()["cuGraphInstantiate"] == before + 1
    # The graph is not freed with its plan, because that would invalidate a capture during which the plan is dropped.
    plans.clear()
    assert gpu.calls.open()["cuGraphInstantiate"] == before + 1
    kept = bound(fresh)
    assert gpu.calls.open()["cuGraphInstantiate"] == before
    assert kept is not None


def test_a_branch_runs_beside_its_stream_and_is_joined(gpu: FakeGpu, fresh: Any) -> None:
    branch, edges = own("gpu.memory").branch, list[list[int]]()
    with branch(fresh) as outside:
        assert outside is fresh  # without a capture no branch is created
    fresh.branch.scratch(16)

    def fail_within(branched: Any) -> None:
        with branched as beside:
            put(beside)
            raise ZeroDivisionError

    def run(stream: int) -> None:
        view = fresh.on(stream)
        put(view)
        with branch(view) as beside:
            assert beside.workspace != fresh.workspace
            put(beside)
            put(view)
        with pytest.raises(ZeroDivisionError):
            fail_within(branch(view))
        put(view)
        edges.extend(sorted(node.after) for node in gpu.streams.captures[stream].nodes)

    fresh.scratch(16)
    own("gpu.graphs").Graph(run, gpu.stream.ptr).close()
    assert edges == [[], [0], [0], [1, 2], [1, 2, 3]]


def test_a_stream_waits_for_a_branch_one_block_later(gpu: FakeGpu, fresh: Any) -> None:
    memory, edges = own("gpu.memory"), list[list[int]]()

    def run(stream: int) -> None:
        view = fresh.on(stream)

        def both(**options: Any) -> None:
            with memory.branch(view, **options) as beside:
                put(beside)
                put(view)

        for options in {}, {}, {"reads_scratch": True}, {}:
            with memory.deferred_joins(view):
                both(**options)
        memory.join(view)
        put(view)
        edges.extend(sorted(node.after) for node in gpu.streams.captures[stream].nodes)

    fresh.scratch(16), fresh.branch.scratch(16)
    own("gpu.graphs").Graph(run, gpu.stream.ptr).close()
    # Branches have nodes 0, 2, 4, 6. The stream waits for 0 before 5, and before 7 for 4, which reads scratch memory.
    assert edges == [[], [], [0, 1], [1], [0, 2, 3], [0, 3], [2, 4, 5], [2, 4, 5], [4, 6, 7]]


def test_buffers_grow_apart_and_not_during_a_capture(fresh: Any) -> None:
    scratch, copies = fresh.scratch(2 << 20), fresh.copies(1 << 20)
    assert scratch != copies
    view = fresh.on(0)
    assert (view.scratch(2 << 20), view.copies(1 << 20)) == (scratch, copies)
    errors = own("errors")
    call("cuStreamBeginCapture", fresh.stream, THREAD_LOCAL)
    assert fresh.copies(1 << 10) == copies
    with pytest.raises(errors.CaptureError, match=RUN_BEFORE):
        fresh.copies(2 << 20)
    with pytest.raises(errors.CaptureError, match=RUN_BEFORE), own("gpu.memory").branch(fresh):
        raise AssertionError("the first branch cannot be made during a capture")
    call("cuGraphDestroy", call("cuStreamEndCapture", fresh.stream))
    assert view.copies(2 << 20) == fresh.copies(0) != copies


def test_each_purpose_has_a_stream_that_does_not_wait_for_the_default_stream(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, made = own("gpu.streams"), list[tuple[Any, ...]]()

    def create(*arguments: Any) -> int:
        made.append(arguments)
        return len(made)

    monkeypatch.setattr(streams, "call", create)
    asked = [(0, "this test"), (0, "another test"), (1, "this test")]
    assert [streams.private_stream(*each) for each in (*asked, *asked)] == [1, 2, 3, 1, 2, 3]
    assert made == [("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)] * 3
