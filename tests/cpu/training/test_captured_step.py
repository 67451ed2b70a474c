"""Training steps as graphs, kept by size of batch, on a pretended GPU: CUDA is a list of calls."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.arrays import libraries as signatures
from lt_runtime.arrays.arena import host_zeros
from lt_runtime.errors import CaptureError, DriverError, GpuError, OperandError, ShapeError
from lt_runtime.gpu import driver, streams
from lt_runtime.kernels import resize
from lt_runtime.training import captured, inputs
from lt_runtime.training.captured import MAX_GRAPHS
from lt_runtime.training.device import ComputeDevice
from lt_runtime.training.tally import Totals
from tests.support.fake_device import DeviceArray, operand_of

PRIVATE, CAPTURED, INPUTS, CLASSES = 99, 13, 3, 2
RECORD = ("cuEventRecord", 77)


@pytest.fixture(autouse=True)
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy's current stream is not asked for: other tests may have imported it, and there is no GPU."""
    monkeypatch.delitem(sys.modules, "cupy", raising=False)


class FullError(Exception):
    """Stands in for CuPy's error."""


class Gpu:
    """Notes what reaches CUDA, and copies.

    Attributes:
        body_error: what the step's operations raise, if anything.
        statuses: what a driver's function returns instead of success.
    """

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.body_error: Exception | None = None
        self.statuses: dict[str, int] = {}
        self.device, self.freed = 0, 0

    def call(self, name: str, *arguments: Any) -> Any:
        self.log.append((name, *arguments))
        return 77 if name == "cuEventCreate" else None

    def function(self, name: str) -> Callable[..., int]:
        def put(*arguments: Any) -> int:
            if name == "cuCtxGetDevice":
                arguments[0].value = self.device
            elif name == "cuStreamIsCapturing":
                ctypes.c_int.from_address(arguments[1]).value = arguments[0] == CAPTURED
            elif name == "cuMemcpyHtoDAsync_v2":
                self.log.append(("table", arguments[3]))
            else:
                self.log.append((name, *arguments))
            return self.statuses.get(name, 0)

        return put

    def run(self, parts: Any, tally: Any, stream: int, *, updates: bool = True) -> None:
        self.log.append(("run", stream, tally.name, updates))
        if self.body_error is not None:
            raise self.body_error

    def read(self, stream: int) -> Totals:
        self.log.append(("read", stream))
        return Totals(4, 2.0, 8, 6)

    def graph(self, run: Callable[[int], None], stream: int) -> Any:
        self.log.append(("capture", stream))
        run(stream)
        graph = SimpleNamespace(executable=len(self.named("capture")))
        graph.close = lambda: self.log.append(("close", graph.executable))
        return graph

    def free_all_blocks(self) -> None:
        self.freed += 1

    def copies(self, *_: Any) -> Any:
        """Stands in for `RowsCopy`."""
        return SimpleNamespace(
            run=lambda places, stream: self.log.append(("copy", stream)),
            run_by_table=lambda table, stream: self.log.append(("copy by table", stream)),
        )

    def named(self, *names: str) -> list[Any]:
        return [entry for entry in self.log if entry[0] in names]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    made = Gpu()
    tallies = (SimpleNamespace(name=name, mean=np.float32(0.5), read=made.read) for name in ["tally", "spare"] * 9)
    pool = SimpleNamespace(free_all_blocks=made.free_all_blocks)
    cuda = SimpleNamespace(
        MemoryPool=lambda *_: pool,
        using_allocator=lambda _: contextlib.nullcontext(),
        memory=SimpleNamespace(OutOfMemoryError=FullError),
    )
    zeros = SimpleNamespace(zeros=lambda *arguments: np.zeros(*arguments).view(DeviceArray))
    for name, fake in {
        "GpuTally": lambda *_: next(tallies),
        "Graph": made.graph,
        "RowsCopy": made.copies,
        "library_of": lambda _: SimpleNamespace(current_stream=lambda _: 6),
        "activated": lambda _: contextlib.nullcontext(),
        "call": made.call,
        "cupy": lambda: SimpleNamespace(cuda=cuda),
        "cupy_stream": lambda *_: contextlib.nullcontext(zeros),
        "function": made.function,
        "order_after": lambda stream, producer: made.log.append(("order", stream, producer)),
        "private_stream": lambda *_: PRIVATE,
    }.items():
        monkeypatch.setattr(captured, name, fake)
    monkeypatch.setattr(driver, "function", made.function)
    monkeypatch.setattr(resize, "function", made.function)
    monkeypatch.setattr(driver.driver, "cuGetErrorString", lambda _: (0, b"it was told to"))
    monkeypatch.setattr(inputs, "read", operand_of)
    monkeypatch.setattr(streams, "_check_place", lambda *_: None)
    monkeypatch.setitem(signatures.current_streams, DeviceArray, lambda _: 6)
    look = attrgetter("ctypes.data"), lambda array: (0, array.shape, array.strides, array.dtype)
    monkeypatch.setitem(signatures._looks, DeviceArray, look)
    captured._turn.cache_clear()
    yield made
    made.body_error = None  # its traceback holds a step
    gc.collect()  # steps end while CUDA is pretended
    captured._turn.cache_clear()


def step_of(gpu: Gpu, **options: Any) -> lt.TrainStep:
    """A step that notes what its operations would be; its making is not noted."""
    model = lt.MLP([INPUTS, CLASSES], device="cpu")
    optimizer = lt.AdamW(model.parameters())
    model.device = ComputeDevice(0)
    step = lt.TrainStep(model, optimizer, **options)
    step._body.run = gpu.run  # type: ignore[method-assign]
    gpu.log.clear()
    return step


def batch(rows: int, labels: str = "int32") -> tuple[Any, Any]:
    x = host_zeros(rows * INPUTS, np.dtype(np.float32)).reshape(rows, INPUTS)  # aligned as a GPU's arrays are
    return x.view(DeviceArray), host_zeros(rows, np.dtype(labels)).view(DeviceArray)


def test_the_first_batch_is_rehearsed_captured_and_launched(gpu: Gpu) -> None:
    step = step_of(gpu)
    step(*batch(8), stream=5)
    assert gpu.log == [
        ("order", PRIVATE, 5),
        ("run", PRIVATE, "spare", False),  # for the plans
        ("run", PRIVATE, "spare", False),  # for the memory
        ("order", 5, PRIVATE),
        ("capture", PRIVATE),
        ("copy by table", PRIVATE),
        ("run", PRIVATE, "tally", True),
        (*RECORD, 5),  # of the rehearsals
        ("table", 5),
        ("cuGraphLaunch", 1, 5),
        (*RECORD, 5),
    ]


def test_the_table_is_written_where_a_batch_lies_elsewhere(gpu: Gpu) -> None:
    step, launch = step_of(gpu), [("cuGraphLaunch", 1, 5), (*RECORD, 5)]
    first, second = batch(8), batch(8)
    for given, expected in (
        (first, None), (first, []), (second, [("table", 5)]), (second, []), ((first[0], second[1]), [("table", 5)]),
    ):  # fmt: skip
        gpu.log.clear()
        step(*given, stream=5)
        assert expected is None or gpu.log == [*expected, *launch]


def test_a_table_whose_write_failed_is_written_again(gpu: Gpu) -> None:
    step, (first, second) = step_of(gpu), (batch(8), batch(8))
    step(*first, stream=5)
    gpu.statuses["cuMemcpyHtoDAsync_v2"] = 719
    with pytest.raises(DriverError):
        step(*second, stream=5)
    gpu.statuses.clear()
    gpu.log.clear()
    step(*first, stream=5)
    assert gpu.named("table") == [("table", 5)]


def test_without_graphs_everything_is_on_the_callers_stream(gpu: Gpu) -> None:
    step = step_of(gpu, graph=False, accumulate=2)
    for _ in range(2):
        step(*batch(8), stream=CAPTURED)
    assert gpu.log == [("copy", CAPTURED), ("run", CAPTURED, "tally", True)] * 2


def test_each_size_and_type_has_a_graph_and_the_oldest_goes(gpu: Gpu) -> None:
    step = step_of(gpu)
    for rows in range(1, MAX_GRAPHS + 1):
        step(*batch(rows), stream=5)
    step(*batch(1), stream=5)
    assert len(gpu.named("capture")) == MAX_GRAPHS
    assert gpu.named("close") == []
    step(*batch(3, "int64"), stream=5)  # the batch of two rows has not been used for the longest time
    assert gpu.named("close") == [("close", 2)]
    assert gpu.log[gpu.log.index(("close", 2)) - 1] == ("cuEventSynchronize", 77)
    step(*batch(1), stream=5)
    assert gpu.log[-2] == ("cuGraphLaunch", 1, 5)
    assert len(gpu.named("capture")) == MAX_GRAPHS + 1
    step(*batch(2), stream=5)
    assert len(gpu.named("capture")) == MAX_GRAPHS + 2


def test_graphs_are_freed_with_the_step(gpu: Gpu) -> None:
    step = step_of(gpu)
    for rows in (1, 2):
        step(*batch(rows), stream=5)
    del step
    gc.collect()
    assert gpu.named("close") == [("close", 1), ("close", 2)]


def test_a_graph_that_was_freed_is_not_launched(gpu: Gpu) -> None:
    step = step_of(gpu)
    step(*batch(8), stream=5)
    assert step._gpu is not None
    captured._close(0, step._gpu._batches, 1)  # as by another thread, between the look-up and the launch
    gpu.log.clear()
    step(*batch(8), stream=5)
    assert gpu.named("capture", "cuGraphLaunch") == [("capture", PRIVATE), ("cuGraphLaunch", 1, 5)]


@pytest.mark.parametrize("error", [FullError, GpuError])
def test_a_failure_leaves_nothing_behind(gpu: Gpu, error: type[Exception]) -> None:
    step = step_of(gpu)
    gpu.body_error = error("all is used")
    with pytest.raises(GpuError, match="all is used"):
        step(*batch(8), stream=5)
    assert gpu.named("cuGraphLaunch", "table") == []
    assert ("order", 5, PRIVATE) in gpu.log
    assert gpu.freed == 1
    gpu.body_error = None
    step(*batch(8), stream=5)
    assert len(gpu.named("cuGraphLaunch")) == 1
    gpu.body_error = error("all is used")
    with pytest.raises(GpuError, match="all is used"):
        step(*batch(9), stream=5)
    assert gpu.freed == 1  # the first graph has its memory there
    step(*batch(8), stream=5)


@pytest.mark.parametrize("name", ["cuGraphLaunch", "cuMemcpyHtoDAsync_v2"])
def test_a_failing_launch_is_raised_and_ends_the_turn(gpu: Gpu, name: str) -> None:
    step, first, second = step_of(gpu), batch(8), batch(8)
    step(*first, stream=5)
    gpu.statuses[name] = 719
    with pytest.raises(DriverError, match=name.removesuffix("_v2")):
        step(*second, stream=5)
    assert gpu.log[-1] == (*RECORD, 5)
    gpu.statuses.clear()
    step(*second, stream=5)


def test_a_graph_cannot_be_captured_in_another(gpu: Gpu) -> None:
    step = step_of(gpu)
    message = "stream 0xd is being captured; a step to be captured needs graph=False"
    with pytest.raises(CaptureError, match=message):
        step(*batch(8), stream=CAPTURED)
    assert gpu.log == []
    step(*batch(8), stream=5)
    gpu.log.clear()
    with pytest.raises(CaptureError, match=message):
        step(*batch(8), stream=CAPTURED)
    assert gpu.log == []


def test_streams_wait_for_the_turn_before(gpu: Gpu) -> None:
    steps, given = [step_of(gpu), step_of(gpu)], [batch(8) for _ in range(3)]
    for step in steps:
        step(*given[0], stream=1)
    gpu.log.clear()
    for step, each, stream in zip(steps * 2, given[1:2] * 2 + given[2:] * 2, (1, 1, 2, 1), strict=True):
        step(*each, stream=stream)
    work = [[("table", i), ("cuGraphLaunch", 1, i), (*RECORD, i)] for i in (1, 2)]
    graphs = [[(*entry[:1], 2, entry[2]) if entry[0] == "cuGraphLaunch" else entry for entry in each] for each in work]
    wait = [[("cuStreamWaitEvent", i, 77, 0)] for i in (1, 2)]
    assert gpu.log == [*work[0], *graphs[0], *wait[1], *work[1], *wait[0], *graphs[0]]


def test_batches_are_checked_unless_they_look_like_one_before(gpu: Gpu) -> None:
    step = step_of(gpu, batch_size=8)
    x, labels = batch(8)
    for _ in range(2):
        with pytest.raises(ShapeError, match=r"x has shape \(7, 3\); this step was made for \(8, 3\)"):
            step(*batch(7), stream=5)
        with pytest.raises(OperandError, match="labels has type float32"):
            step(x, labels.astype(np.float32), stream=5)
        with pytest.raises(OperandError, match=r"its rows must be contiguous"):
            step(np.asfortranarray(x).view(DeviceArray), labels, stream=5)
        step(x, labels, stream=5)
    gpu.device = 1  # the thread's current device is another: the long way makes the step's current
    gpu.log.clear()
    step(x, labels, stream=5)
    assert gpu.named("capture", "cuGraphLaunch") == [("cuGraphLaunch", 1, 5)]


@pytest.mark.parametrize("graph", [True, False])
def test_the_current_stream_is_that_of_the_batchs_library(gpu: Gpu, graph: bool) -> None:
    step = step_of(gpu, graph=graph)
    step(*batch(8))
    gpu.log.clear()
    step(*batch(8))
    assert gpu.log[-2 if graph else 0][-1] == 6
    assert step.metrics() == (4, 0.5, 0.75)
    assert step.metrics(stream=3).steps == 4
    assert gpu.log[-2:] == [("read", 6), ("read", 3)]


def test_a_replaced_array_is_refused_in_replays_too(gpu: Gpu) -> None:
    step = step_of(gpu)
    step(*batch(8), stream=5)
    weight = step.model.layers[0].weight
    kept, weight.data = weight.data, weight.data.copy()
    gpu.log.clear()
    with pytest.raises(OperandError, match=r"an array of layer0.weight was replaced"):
        step(*batch(8), stream=5)
    assert gpu.log == []
    weight.data = kept
    step(*batch(8), stream=5)
