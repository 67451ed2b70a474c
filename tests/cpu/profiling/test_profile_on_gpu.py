"""Profiles on a fake GPU: events around layers, also in graphs, and kernels from a fake collector."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from lt_runtime.profiling.cupti.records import Activity
from tests.support import fake_collector
from tests.support.fake_collector import kernel
from tests.support.fake_gpu import FakeGpu

ROWS, DIMS = 16, (32, 16, 8)
LAYERS = [("layer0", "forward"), ("layer1", "forward"), ("layer1", "backward"), ("layer0", "backward")]


@pytest.fixture(autouse=True)
def _small_ceilings(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from lt_runtime.profiling import work

    monkeypatch.setattr(work, "_EXTENT", 16)
    monkeypatch.setattr(work, "_COPIED", 1 << 12)


class Training:
    """A training step of a small model, and a batch."""

    def __init__(self, gpu: FakeGpu, **options: Any) -> None:
        self.gpu = gpu
        self.model = gpu.lt.MLP(DIMS, activation="gelu", dropout=0.1, device="cuda", seed=3)
        self.step = gpu.lt.TrainStep(self.model, gpu.lt.AdamW(self.model.parameters()), batch_size=ROWS, **options)
        generator = np.random.default_rng(5)
        self.x = gpu.cp.asarray(generator.standard_normal((ROWS, DIMS[0])).astype(np.float32))
        self.labels = gpu.cp.asarray((np.arange(ROWS) % DIMS[-1]).astype(np.int32))

    def __call__(self, **options: Any) -> Any:
        return self.step(self.x, self.labels, **options)

    def profiled(self, count: int, *, stream: Any = None, **options: Any) -> Any:
        """Profiles some steps; the trace (CUPTI) is off unless an option asks for it."""
        with self.gpu.lt.profile(**{"traced": 0, **options}) as prof:
            for _ in range(count):
                self(stream=stream)
        self.gpu.synchronize_all()
        return prof

    def values(self) -> list[Any]:
        self.gpu.synchronize_all()
        return [self.gpu.host_of(each.data).copy() for each in self.model.parameters()]


@pytest.fixture
def train(gpu: FakeGpu) -> Iterator[Training]:
    """Makes a step and captures it."""
    made = Training(gpu)
    made()
    yield made
    vars(made).clear()  # frees the step's graphs while the fake GPU is still in place


@pytest.fixture
def costs(gpu: FakeGpu) -> Iterator[dict[str, float]]:
    """The fake GPU's times in microseconds, by kind of work: a kernel of ours or a product of cuBLASLt takes 100."""
    gpu.streams.costs_us |= {"kernel": 100.0, "matmul": 100.0}
    yield gpu.streams.costs_us
    gpu.synchronize_all()
    gpu.streams.costs_us.clear()


def layers_of(prof: Any) -> dict[tuple[str, str], Any]:
    return {(layer.name, layer.phase): layer for layer in prof.layers()}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.usefixtures("costs")
def test_layers_are_timed_by_events(gpu: FakeGpu, *, graph: bool) -> None:
    train = Training(gpu, graph=graph)
    train()
    prof = train.profiled(6, timed=4)
    found = layers_of(prof)
    assert [key for key in found if key[0]] == LAYERS
    assert prof.report.timed_steps == 4
    # Each product is a kernel; dropout, its gradient, GELU's derivative, the loss and the update take one more each. A
    # product sums layer1's bias gradient.
    # In a graph, a second stream runs layer1's weight gradient beyond the end of the layer.
    backward = 200 if graph else 300
    assert [found[key].us for key in LAYERS] == [*map(pytest.approx, (200, 100, backward, 100))]
    assert found["", "loss"].us == pytest.approx(100)
    assert found["", "optimizer"].us == pytest.approx(100)
    assert found["", "input"].us == pytest.approx(100)  # one kernel of ours copies all arrays of the batch
    assert all(layer.calls == 1 for key, layer in found.items() if key in LAYERS)
    assert prof.totals().step_us == pytest.approx(sum(layer.us for layer in prof.layers()))


def test_a_profile_may_begin_before_the_first_call_of_cuda(gpu: FakeGpu) -> None:
    gpu.driver.contexts.clear()
    gpu.driver.profiler_calls.clear()
    try:
        with gpu.lt.profile(timed=2, traced=1) as prof:
            for _ in range(3):
                with gpu.lt.range("step"), gpu.lt.range("work"):
                    gpu.lt.matmul(gpu.cp.ones((4, 8), np.float32), gpu.cp.ones((8, 4), np.float32))
    finally:
        gpu.driver.contexts[:] = [1]
        gpu.synchronize_all()
    assert layers_of(prof)["work", "forward"].us > 0
    assert prof.report.traced_steps == 1
    assert gpu.driver.profiler_calls == ["start", "stop"]


def test_work_and_strategies_are_known_in_graphs(train: Training) -> None:
    found = layers_of(train.profiled(3, timed=3))
    assert found[LAYERS[0]].flops == 2 * ROWS * DIMS[0] * DIMS[1]
    assert found[LAYERS[2]].flops == 4 * ROWS * DIMS[1] * DIMS[2]
    assert "keeps preactivation" in found[LAYERS[0]].strategy
    assert found["", "optimizer"].bytes > 0
    assert found[LAYERS[0]].bound in ("compute", "memory")
    assert found[LAYERS[0]].fraction > 0


def test_a_profile_changes_no_result_and_no_graph(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    watched, plain, launched = Training(gpu), Training(gpu), list[Any]()
    watched()
    (buffers,), launch = watched.step._gpu._buffers.values(), watched.step._gpu._launch_graph
    own = buffers.graph
    monkeypatch.setattr(
        watched.step._gpu, "_launch_graph", lambda graph, stream: launched.append(graph) or launch(graph, stream)
    )
    watched.profiled(5, timed=3)
    watched()
    for _ in range(7):
        plain()
    assert buffers.graph is own
    # Copies of the graph alternate, so that the events of one are read while the other runs.
    assert len({*launched[:3], own.executable}) == 4
    assert launched[3:] == [own.executable] * 3
    for one, other in zip(watched.values(), plain.values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_step_that_captures_is_left_out_and_copies_and_events_are_freed(gpu: FakeGpu) -> None:
    train = Training(gpu)
    prof = train.profiled(4, timed=2)
    assert prof.report.timed_steps == 2
    assert "1 steps in which graphs were captured are left out" in prof.report.notes
    assert [key for key in layers_of(prof) if key[0]] == LAYERS
    before = len(gpu.driver._graphs), len(gpu.driver._events)
    train.profiled(4, timed=3)
    assert (len(gpu.driver._graphs), len(gpu.driver._events)) == before


def test_the_stream_of_a_step_is_timed(gpu: FakeGpu) -> None:
    train = Training(gpu)
    train(stream=gpu.stream)
    gpu.synchronize_all()
    prof = train.profiled(2, timed=2, stream=gpu.stream)
    assert layers_of(prof)["", "input"].us > 0
    assert prof.totals().step_us > 5


def test_a_graph_that_cannot_be_copied_runs_as_it_is(train: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    from lt_runtime.errors import GpuError
    from lt_runtime.profiling import marks

    def fail(_: int) -> list[int]:
        raise GpuError("no memory")

    monkeypatch.setattr(marks, "_tail", fail)
    prof = train.profiled(3, timed=2)
    assert any("could not be captured with events in it (no memory)" in note for note in prof.report.notes)
    assert ("", "") in layers_of(prof)


def test_the_cost_of_events_is_subtracted(train: Training, costs: dict[str, float]) -> None:
    found = []
    for costs["event"] in (0.0, 7.0):
        prof = train.profiled(21, timed=19)
        found.append([(layer.label, layer.phase, layer.us, layer.spread_us) for layer in prof.layers()])
        in_graph = {(each.range, each.us) for each in prof._timer.spans if "forward" in each.range and each.device == 0}
        assert len({path for path, _ in in_graph}) == len(in_graph)
    assert found[0] == found[1]


@pytest.mark.usefixtures("costs")
def test_a_copy_is_read_before_its_next_launch(gpu: FakeGpu, train: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    from lt_runtime.profiling import marks

    launched: list[tuple[bool, bool]] = []
    launch = marks.MarkedGraph.launch

    def watched(graph: marks.MarkedGraph, copy: marks.MarkedCopy) -> None:
        launched.append((copy.is_unread, copy.empty > 0))
        launch(graph, copy)

    monkeypatch.setattr(marks.MarkedGraph, "launch", watched)

    def often() -> None:
        for _ in range(20):  # there are more steps than copies of the graph that the profile launches in turn
            train()

    fake_collector.install(monkeypatch, [], why="it is left out")
    prof = gpu.lt.profile(often, steps=2)
    layer = layers_of(prof)[LAYERS[0]]
    assert (layer.us, layer.calls) == (pytest.approx(20 * 200), 20)
    assert prof.report.device.startswith("cuda:0 (NVIDIA H200")
    # The first launch is of the copy with all events; each later launch is of a copy with an eighth of the events.
    assert launched == [(False, not number) for number in range(40)]
    assert prof.report.timed_steps == 2


def test_the_work_of_bound_and_repeated_calls_is_known(gpu: FakeGpu) -> None:
    lt, cp = gpu.lt, gpu.cp
    x, w = (cp.asarray(np.ones(shape, np.float32)) for shape in ((4, 8), (16, 8)))
    y = cp.asarray(np.zeros((4, 16), np.float32))
    bound = lt.bind(lt.matmul, x, w.T, out=y)
    with lt.profile(traced=0) as prof:
        with lt.range("bound"):
            bound()
        for _ in range(5):
            with lt.range("repeated"):
                lt.matmul(x, w.T, out=y)
    gpu.synchronize_all()
    flops = 2 * 4 * 8 * 16
    assert {(layer.name, layer.flops) for layer in prof.layers() if layer.flops} == {
        ("bound", flops), ("repeated", 5 * flops),
    }  # fmt: skip


def test_kernels_of_later_steps_are_traced(gpu: FakeGpu, train: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = ("step", "forward", "forward/layer0"), ("step", "backward", "backward/layer0")
    activities: list[Activity] = []
    for step in range(3):
        at = 1000.0 * step
        activities += [
            kernel("gemm", at, 50, *forward),
            kernel("gemm", at + 60, 70, *backward),
            kernel("reduce", at + 70, 20, *backward),
            kernel("other", at + 200, 10),
            kernel("DtoD", at + 300, 5, "step", "input", kind="memcpy", size=64),
        ]
    module = fake_collector.install(monkeypatch, activities, dropped=2)
    gpu.driver.profiler_calls.clear()
    with gpu.lt.profile(timed=2, traced=3) as prof:
        with gpu.lt.range("epoch"):
            train()
            assert not module.running
            train()
            assert module.running
            train()
            train()
            assert gpu.driver.profiler_calls == ["start"]
            train()
            assert not module.running
        assert prof.is_done
    gpu.synchronize_all()
    assert gpu.driver.profiler_calls == ["start", "stop"]
    assert module.entered == ["epoch"]
    assert {(each.name, each.layer, each.phase) for each in prof.kernels()} == {
        ("gemm", "layer0", "forward"), ("gemm", "layer0", "backward"), ("reduce", "layer0", "backward"),
        ("other", "(unattributed)", ""), ("memcpy DtoD", "", "input"),
    }  # fmt: skip
    backward = layers_of(prof)["layer0", "backward"]
    assert (backward.kernels, backward.kernel_us) == (2, pytest.approx(90))
    assert "CUPTI dropped 2 records" in prof.report.notes
    assert prof.report.traced_steps == 3


@pytest.mark.parametrize(
    ("why", "said"), [("the driver lets only administrators profile", "only administrators"), ("", "import of")]
)
def test_without_cupti_layers_are_timed(train: Training, monkeypatch: pytest.MonkeyPatch, why: str, said: str) -> None:
    if why:
        fake_collector.install(monkeypatch, [], why=why)
    else:
        monkeypatch.setitem(sys.modules, fake_collector.MODULE, None)
    prof = train.profiled(4, timed=2, traced=2)
    assert [key for key in layers_of(prof) if key[0]] == LAYERS
    (note,) = prof.report.notes
    assert note.startswith("no kernel times: ")
    assert said in note
    assert note in str(prof)


def test_a_block_too_short_to_be_traced_says_so(train: Training) -> None:
    (note,) = train.profiled(1, traced=10).report.notes
    assert note.startswith("no kernel times: tracing begins once 10 steps have been timed, and the code had 1")


def test_ceilings_are_measured_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from lt_runtime.profiling import work

    known = work.ceilings(0, ["float32", "tf32"])
    assert {"copy", "float32", "tf32"} <= set(known)
    assert all(value > 0 for value in known.values())
    (path,) = (gpu.directory / "ceilings").iterdir()

    def refuse(*_: object) -> float:
        raise AssertionError("measured again")

    monkeypatch.setattr(work, "measure", refuse)
    assert work.ceilings(0, ["float32"]) == known
    path.write_text("{damaged")
    with pytest.raises(AssertionError, match="measured again"):
        work.ceilings(0, [])
    path.unlink()


def test_a_layer_that_may_be_in_fp8_has_the_work_of_its_operations(gpu: FakeGpu) -> None:
    flops = []
    for precision in (None, "fp8"):
        model = gpu.lt.MLP([32, 16], dtype="bfloat16", device="cuda", precision=precision)
        optimizer = gpu.lt.AdamW(model.parameters())
        step = gpu.lt.TrainStep(model, optimizer, loss="mse", batch_size=ROWS, graph=False, tune=False)
        batch = [gpu.cp.ones((ROWS, cols), model.dtype.numpy) for cols in (32, 16)]
        with gpu.lt.profile(traced=0) as prof:
            step(*batch)
        gpu.synchronize_all()
        flops.append({place: layer.flops for place, layer in layers_of(prof).items()})
    assert flops[0] == flops[1]
    assert flops[0]["layer0", "forward"] == 2 * ROWS * 32 * 16
