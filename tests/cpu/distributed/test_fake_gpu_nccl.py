"""NCCL's stand-in on the pretended GPU: collectives in graphs, buckets of gradients, and the watchdog."""

from __future__ import annotations

import importlib
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from lt_runtime.distributed.buckets import divided
from tests.support.fake_gpu import FakeGpu
from tests.support.fake_nccl import SUM_KERNEL, MirrorWire
from tests.support.placed import host_of

Made = tuple[Any, MirrorWire]
Maker = Callable[..., Made]


@pytest.fixture
def made(gpu: FakeGpu) -> Iterator[Maker]:
    """Makes groups of pretended processes, of which one is this process; closes them after the test."""
    module, groups = importlib.import_module("lt_runtime.distributed.group"), list[Any]()
    earlier = len(gpu.nccl.communicators)

    def make(size: int = 2, rank: int = 0) -> Made:
        wire = MirrorWire(size, rank)
        groups.append(module.Group(wire))
        return groups[-1], wire

    yield make
    for each in groups:
        each.close()
    assert all(each.ended for each in gpu.nccl.communicators[earlier:])


def _arrays(gpu: FakeGpu, *dtypes: str) -> list[Any]:
    values = [np.arange(1, 8).astype(each if each != "bfloat16" else _bfloat16()) for each in dtypes]
    made = [gpu.cp.asarray(each) for each in values]
    gpu.synchronize_all()
    return made


def _bfloat16() -> Any:
    return importlib.import_module("ml_dtypes").bfloat16


@pytest.mark.parametrize(
    ("name", "options", "factor"),
    [("sum", (), 3), ("maximum", (), 1), ("reduce", (1,), 3), ("broadcast", (0,), 1)],
)
def test_collectives_run_on_the_stream(gpu: FakeGpu, made: Maker, name: str, options: Any, factor: int) -> None:
    group, _ = made(3)
    arrays = _arrays(gpu, "float32", "bfloat16", "uint32")
    getattr(group.engine(0), name)(arrays, *options, gpu.stream.ptr)
    gpu.synchronize(gpu.stream.ptr)
    for each in arrays:
        np.testing.assert_array_equal(host_of(gpu, each).astype(np.float64), factor * np.arange(1, 8))
    stream, operations = gpu.nccl.calls[-1]  # a single group call has summed all arrays
    assert (stream, len(operations)) == (gpu.stream.ptr, 3)


def test_a_process_alone_keeps_its_sums_in_the_graph(gpu: FakeGpu, made: Maker) -> None:
    group, _ = made(1)
    engine, arrays = group.engine(0), _arrays(gpu, "float32", "float16")
    engine.sum(arrays, gpu.stream.ptr)
    graphs = importlib.import_module("lt_runtime.gpu.graphs")
    assert graphs.captured_nodes(lambda stream: engine.sum(arrays, stream), gpu.other_stream.ptr) == ["MEMCPY"] * 2
    gpu.synchronize(gpu.stream.ptr)
    for each in arrays:
        np.testing.assert_array_equal(host_of(gpu, each).astype(np.float64), np.arange(1, 8))


def test_two_processes_on_one_gpu_are_refused_before_nccl_is_called(gpu: FakeGpu, made: Maker) -> None:
    group, wire = made(3)
    wire.replies["the GPUs of all processes"] = [b"a", b"b", b"a"]
    communicators = len(gpu.nccl.communicators)
    with pytest.raises(RuntimeError, match=r"ranks 0 and 2 have the same GPU"):
        group.engine(0)
    assert len(gpu.nccl.communicators) == communicators


def _hangs(gpu: FakeGpu, engine: Any) -> None:
    engine.sum(_arrays(gpu, "float32"), gpu.stream.ptr)
    engine.launched(gpu.stream.ptr)  # the pretended stream runs nothing before it is waited for


def _fails(gpu: FakeGpu, engine: Any) -> None:
    gpu.nccl.communicators[-1].async_error = 6


@pytest.mark.parametrize(
    ("happens", "told"), [(_hangs, "step 1 has not ended for 0.05 s"), (_fails, "NCCL reports error 6")]
)
def test_the_watchdog_ends_all_processes(
    gpu: FakeGpu, made: Maker, monkeypatch: pytest.MonkeyPatch, happens: Callable[[FakeGpu, Any], None], told: str
) -> None:
    monkeypatch.setattr("lt_runtime.distributed.nccl.POLL_S", 0.01)
    monkeypatch.setattr(MirrorWire, "limit", 0.05)
    group, wire = made()
    engine = group.engine(0)
    happens(gpu, engine)
    end = time.monotonic() + 10
    while not wire.told and time.monotonic() < end:
        time.sleep(0.01)
    assert told in wire.told
    gpu.synchronize(gpu.stream.ptr)


def test_the_watchdog_lets_steps_end(gpu: FakeGpu, made: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lt_runtime.distributed.nccl.POLL_S", 0.01)
    monkeypatch.setattr(MirrorWire, "limit", 0.05)
    group, wire = made()
    _hangs(gpu, group.engine(0))
    gpu.synchronize(gpu.stream.ptr)
    time.sleep(0.2)
    assert not wire.told


class _Net:
    """A model of three layers, and buckets for its gradients."""

    def __init__(self, gpu: FakeGpu, group: Any, model: Any = None) -> None:
        lt = gpu.lt
        self.gpu, self.group = gpu, group
        self.model = model or lt.Chain(
            lt.Linear(12, 16, activation="relu", device=0), lt.LayerNorm(16, device=0), lt.Linear(16, 8, device=0)
        )
        buckets = importlib.import_module("lt_runtime.distributed.buckets")
        self.buckets = buckets.Buckets(group, self.model.parameters(), 0)
        self.x = gpu.cp.asarray(np.random.default_rng(0).standard_normal((8, 12)).astype(np.float32))
        gpu.synchronize_all()

    def backward(self, stream: int, *, sums: bool = True) -> None:
        run = self.gpu.lt.Pass(inputs=(self.x,), stream=stream)
        if sums:
            self.buckets.begin(stream)
            run.on_written = self.buckets.written
        y = self.model.forward(self.x, run)
        self.model.backward(y, run)
        run.finish()
        if sums:
            self.buckets.finish()

    def gradients(self) -> list[Any]:
        self.gpu.synchronize_all()
        return [host_of(self.gpu, each.grad).copy() for each in self.model.parameters()]


def _numbers(net: _Net, calls: list[Any]) -> list[list[int]]:
    """For each call, the numbers of the parameters whose gradients it sums."""
    addresses = [each.grad.data.ptr for each in net.model.parameters()]
    return [[addresses.index(each.source) for each in operations] for _, operations in calls]


def test_gradients_are_summed_in_the_order_in_which_they_are_completed(
    gpu: FakeGpu, made: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lt_runtime.distributed.buckets._BYTES", 100)
    net = _Net(gpu, made()[0])
    net.backward(gpu.stream.ptr, sums=False)
    alone, first = net.gradients(), len(gpu.nccl.calls)
    for _ in range(2):  # the first backward pass sums the gradients at its end, the second one while it goes on
        net.backward(gpu.stream.ptr)
        for mine, summed in zip(alone, net.gradients(), strict=True):
            np.testing.assert_array_equal(2 * mine, summed)
    assert _numbers(net, gpu.nccl.calls[first:]) == 2 * [[4, 5], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([7.75, 8], [15.75]),
        ([16, 16], [16, 16]),
        ([4.5, 4.5, 4.5, 4.5], [9, 9]),
        ([31.75, 32], [31.75, 32]),
        ([117, 0.25, 117, 0.25], [117.25, 117.25]),  # a large weight and the bias that is complete with it
        ([10, *[3] * 30], [28, 36, 36]),
    ],
)
def test_buckets_are_about_equal_and_not_small(sizes: list[float], expected: list[float]) -> None:
    """The sizes are in MiB."""
    made = divided([int(each * 2**20) for each in sizes])
    assert [*itertools.chain(*made)] == [*range(len(sizes))]
    assert [sum(sizes[index] for index in each) for each in made] == expected


def test_a_bucket_runs_beside_the_backward_pass_that_goes_on(
    gpu: FakeGpu, made: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lt_runtime.distributed.buckets._BYTES", 100)
    net = _Net(gpu, made()[0])
    captured = _captured(net)
    kinds = [node.arguments is not None and node.arguments[0] == SUM_KERNEL for node in captured.nodes]
    sums = [index for index, is_sum in enumerate(kinds) if is_sum]
    works = [index for index, is_sum in enumerate(kinds) if not is_sum]
    for index in sums[:2]:  # the first layer's backward runs beside the sums of the other two layers' gradients
        beside = [each for each in works if each > index and not captured.nodes[each].before >> index & 1]
        # Some work of the backward pass does not wait for this sum, but for a memset that lets the sum start first.
        assert captured.nodes[beside[0]].kind.name == "CU_GRAPH_NODE_TYPE_MEMSET"
        assert all(captured.nodes[each].before >> beside[0] & 1 for each in beside[1:])
    last = captured.nodes[captured.joined]
    assert all(last.before >> index & 1 for index in sums)  # work after the pass waits for all sums


def _captured(net: _Net) -> Any:
    """The capture of a pass, with a memset after it whose index is `joined`."""
    graphs, driver = importlib.import_module("lt_runtime.gpu.graphs"), importlib.import_module("cuda.bindings.driver")
    gpu, kept = net.gpu, list[Any]()

    def run(stream: int) -> None:
        net.backward(stream)
        driver.cuMemsetD32Async(net.model.parameters()[0].grad.data.ptr, 0, 1, stream)
        kept.append(gpu.streams.captures[stream])

    net.backward(gpu.other_stream.ptr)
    graphs.captured_nodes(run, gpu.other_stream.ptr)
    gpu.synchronize_all()
    kept[0].joined = len(kept[0].nodes) - 1
    return kept[0]
