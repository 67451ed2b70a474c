"""Batches of training steps on the pretended GPU: which are accepted, how they are copied, which graphs are kept."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of

_ROWS, _WIDTH = 12, 5
_TYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype("bfloat16")}


class _Run:
    """A training step whose model returns its inputs, and whose loss stores its arguments.

    Attributes:
        calls: the number of calls of the loss.
        outputs, targets: outputs and targets of each micro-batch, on the host, until the step runs as a graph.
    """

    def __init__(self, gpu: FakeGpu, dtype: str = "float32", **options: Any) -> None:
        self._gpu, self.calls = gpu, 0
        self.outputs: list[Any] = []
        self.targets: list[Any] = []
        self.model = gpu.lt.MLP([_WIDTH, _WIDTH], dtype=dtype, bias=False, device="cuda")
        self.model.layers[0].weight.assign(np.eye(_WIDTH))
        optimizer = gpu.lt.AdamW(self.model.parameters(), lr=0.0)
        self._graph = options.get("graph", True)
        self.step = gpu.lt.TrainStep(self.model, optimizer, **{"loss": self._loss, "tune": False, **options})
        gpu.streams.synchronize_all()

    def _loss(self, outputs: Any, target: Any, gradient: Any, stream: int) -> Any:
        self.calls += 1
        if not self._graph:
            self.outputs.append(outputs.get())
            self.targets.append(target.get())
        return self._gpu.cp.asarray(np.float32(0))

    def __call__(self, *batch: Any) -> None:
        self.step(*batch, stream=self._gpu.stream)
        self._gpu.synchronize_all()


def _sliced(gpu: FakeGpu, values: Any) -> Any:
    """Copies values to the GPU, with gaps after each row."""
    wide = np.full((values.shape[0], values.shape[1] + 3), 99, values.dtype)
    wide[:, 1:-2] = values
    return gpu.cp.asarray(wide)[:, 1:-2]


@pytest.mark.parametrize("parts", [1, 3, 12])
@pytest.mark.parametrize("dtype", _TYPES)
def test_a_batch_is_copied_row_by_row(gpu: FakeGpu, dtype: str, parts: int) -> None:
    run = _Run(gpu, dtype, accumulate=parts, graph=False)
    x = np.arange(_ROWS * _WIDTH).reshape(_ROWS, _WIDTH).astype(_TYPES[dtype])
    on_gpu, column = gpu.cp.asarray(x), np.arange(_ROWS)
    targets = [column.astype(kind) for kind in ("float64", "float16", "bfloat16", "int8", "uint64", "bool")]
    targets += [column.reshape(-1, 1), np.arange(6.0 * _ROWS).reshape(_ROWS, 2, 3)]
    pairs = [(on_gpu, each, gpu.cp.asarray(each)) for each in targets]
    pairs.append((_sliced(gpu, x), x, _sliced(gpu, x)))
    for given, target, on_device in pairs:
        run.outputs, run.targets = [], []
        run(given, on_device)
        assert [each.shape for each in run.outputs] == [(_ROWS // parts, _WIDTH)] * parts
        np.testing.assert_array_equal(np.concatenate(run.outputs), x)
        copied = np.concatenate(run.targets)
        assert (copied.dtype, copied.tobytes()) == (target.dtype, target.tobytes())


def _case(name: str, make: Any, error: str, message: str, loss: str = "mse") -> Any:
    return pytest.param(name, make, error, message, loss, id=f"{loss} {name} {error}")


@pytest.mark.parametrize(
    ("name", "make", "error", "message", "loss"),
    [
        _case("x", lambda x, cp: x, "DeviceError", r"x is a NumPy .* on cuda:0 \(.*; cupy.asarray\(x\)"),
        _case("x", lambda x, cp: [[1.0]], "OperandError", r"x is a list .*; numpy.asarray\(x\) makes one"),
        _case("x", lambda x, cp: cp.asarray(x[:7]), "ShapeError", r"shape \(7, 5\); .* for \(12, 5\); lt.TrainStep"),
        _case("x", lambda x, cp: cp.asarray(x[:, :4]), "ShapeError", r"x has shape \(12, 4\); .* for \(12, 5\)$"),
        _case("x", lambda x, cp: cp.asarray(x.astype("f2")), "DTypeError", r"x is float16; .* x.astype\('float32'\)"),
        _case("x", lambda x, cp: cp.asarray(x.T).T, "LayoutError", r"strides \(1, 12\); its rows must be contiguous"),
        _case("target", lambda x, cp: x, "DeviceError", "target is a NumPy array, the model is on cuda:0"),
        _case("target", lambda x, cp: cp.asarray(x.astype("f2")), "DTypeError", "target is float16; the model takes"),
        _case("target", lambda x, cp: cp.asarray(x.T).T, "LayoutError", "target has strides"),
        _case("target", lambda x, cp: cp.asarray(x[:, :4]), "ShapeError", r"shape \(12, 4\); it must be \(12, 5\)"),
        _case("weights", lambda x, cp: cp.asarray(x[:, :1]), "ShapeError", r"row_weights has shape \(12, 1\); it"),
        _case("weights", lambda x, cp: cp.asarray(x[:, 0].astype("f2")), "DTypeError", "row_weights is float16; it"),
        _case("weights", lambda x, cp: cp.asarray(x)[:, 0], "LayoutError", r"row_weights has strides \(5,\)"),
        _case("weights", lambda x, cp: x[:, 0], "DeviceError", r"row_weights is a NumPy .*\(row_weights\)"),
        _case("target", lambda x, cp: cp.asarray(x[:, 0]), "DTypeError", "labels has type float32", "cross_entropy"),
        _case("target", lambda x, cp: cp.asarray(np.zeros(5, int)), "ShapeError", r"shape \(5,\)", "cross_entropy"),
        _case("target", lambda x, cp: cp.asarray(np.zeros(24, int))[::2], "LayoutError", "strides", "cross_entropy"),
        _case("target", lambda x, cp: cp.asarray(x[:5]), "ShapeError", "target .* must have 12 rows, as x has", "own"),
        _case("target", lambda x, cp: cp.asarray(x)[:, 0], "LayoutError", "it must be row-major without gaps", "own"),
        _case("target", lambda x, cp: cp.asarray(x.T).T, "LayoutError", "its rows must be contiguous", "own"),
        _case("target", lambda x, cp: cp.asarray(x.astype("c8")), "DTypeError", "target is complex64; accepted", "own"),
        _case("weights", lambda x, cp: cp.asarray(x[:, 0]), "ArgumentError", "row_weights are for losses with", "own"),
    ],
)  # fmt: skip
def test_batches_that_do_not_fit(gpu: FakeGpu, name: str, make: Any, error: str, message: str, loss: str) -> None:
    """Batches are refused before the first step and after it; nothing is updated, and a fitting batch is accepted
    afterwards.
    """
    run = _Run(gpu, **({} if loss == "own" else {"loss": loss}), batch_size=_ROWS)
    x = np.ones((_ROWS, _WIDTH), np.float32)
    right = {"x": gpu.cp.asarray(x), "target": gpu.cp.asarray(np.zeros(_ROWS, int) if loss == "cross_entropy" else x)}
    for steps in (1, 2):
        with pytest.raises(getattr(gpu.lt.errors, error), match=message):
            run(*{**right, name: make(x, gpu.cp)}.values())
        run(*right.values())
        assert int(host_of(gpu, run.step.optimizer.steps)[0]) == steps


@pytest.mark.parametrize("width", [8, 160])
@pytest.mark.parametrize("call", ["__call__", "forward"])
def test_inputs_of_a_model_that_do_not_fit(gpu: FakeGpu, width: int, call: str) -> None:
    """Checks a model that runs in one kernel, and a model with a kernel for each layer."""
    model, errors = gpu.lt.MLP([width, width, 8], dtype="bfloat16", device="cuda"), gpu.lt.errors
    x = np.ones((4, width), np.float32)
    for given, error, message in (
        (x, errors.DeviceError, r"^x is a NumPy array, the model is on cuda:0 .*; cupy.asarray\(x\) copies it there"),
        (gpu.cp.asarray(x), errors.DTypeError, r"^x is float32; the model takes bfloat16: x.astype\('bfloat16'\)$"),
        (gpu.torch.Tensor(gpu.cp.asarray(x)), errors.DTypeError, r"takes bfloat16: x.to\(torch.bfloat16\)$"),
        (gpu.cp.asarray(x[:, 1:]), errors.ShapeError, rf"^x has shape \(4, {width - 1}\); .* \((\.\.\.|M), {width}\)$"),
    ):
        with pytest.raises(error, match=message):
            getattr(model, call)(given, stream=gpu.stream)
    gpu.synchronize_all()


def test_one_row_and_one_column_lie_in_any_order(gpu: FakeGpu) -> None:
    for rows, width in ((1, _WIDTH), (4, 1)):
        model = gpu.lt.MLP([width, 2], device="cuda")
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse", tune=False)
        x = gpu.cp.asarray(np.ones((width, rows), np.float32)).T
        step(x, gpu.cp.asarray(np.zeros((rows, 2), np.float32)))
    gpu.synchronize_all()


def _batch(gpu: FakeGpu, rows: int, kind: str = "int32") -> tuple[Any, Any]:
    return gpu.cp.asarray(np.ones((rows, _WIDTH), np.float32)), gpu.cp.asarray(np.zeros(rows, kind))


def test_each_size_and_type_has_a_graph_and_the_oldest_goes(gpu: FakeGpu) -> None:
    """A user's loss runs three times when a graph is made, and not at all in a replay."""
    run = _Run(gpu)
    for rows in range(1, 9):
        run(*_batch(gpu, rows))
    made = 24
    assert run.calls == made
    for rows, kind, is_new in ((1, "int32", False), (3, "int64", True), (1, "int32", False), (2, "int32", True)):
        run(*_batch(gpu, rows, kind))
        made += 3 * is_new
        assert run.calls == made, (rows, kind)


def test_buffers_are_freed_with_their_graph(gpu: FakeGpu) -> None:
    run, largest = _Run(gpu), 1000
    for rows in (largest, *range(1, 8)):
        run(*_batch(gpu, rows))
    gc.collect()
    before = gpu.memory_used()
    run(*_batch(gpu, 8))
    gc.collect()
    assert gpu.memory_used() < before - largest * _WIDTH * 4


def test_a_graph_that_another_thread_has_dropped_is_made_again(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is dropped after a step has looked it up and before the step launches it."""
    run = _Run(gpu)
    run(*_batch(gpu, 3))
    steps = run.step._gpu
    launch = steps._launch

    def late(*arguments: Any) -> bool:
        monkeypatch.undo()
        for rows in range(4, 12):
            run(*_batch(gpu, rows))
        taken: bool = launch(*arguments)
        return taken

    monkeypatch.setattr(steps, "_launch", late)
    run(*_batch(gpu, 3))
    assert run.calls == 3 * 10


def test_graphs_are_freed_with_the_step(gpu: FakeGpu) -> None:
    _Run(gpu)(*_batch(gpu, 3))  # the first step allocates the memory of the streams
    gc.collect()
    before = gpu.memory_used()
    run = _Run(gpu)
    for rows in (3, 4):
        run(*_batch(gpu, rows))
    assert gpu.memory_used() > before
    del run
    gc.collect()
    assert gpu.memory_used() == before


def test_a_step_within_a_capture_is_refused(gpu: FakeGpu) -> None:
    run, batch = _Run(gpu), _batch(gpu, 3)
    for _ in range(2):
        with gpu.stream:
            gpu.stream.begin_capture()
            with pytest.raises(gpu.lt.errors.CaptureError, match="a step to be captured needs graph=False"):
                run.step(*batch)
            gpu.stream.end_capture()
        run(*batch)


def test_without_memory_for_a_size_the_others_go_on(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _Run(gpu)
    run(*_batch(gpu, 3))
    batch, used = _batch(gpu, 64), gpu.memory_used()

    def full(*_: Any) -> int:
        raise gpu.cp.cuda.memory.OutOfMemoryError("all is used")

    with monkeypatch.context() as patch:
        patch.setattr(gpu.memory, "allocate", full)
        with pytest.raises(gpu.lt.errors.GpuError, match="no memory for batches of 64 rows: all is used"):
            run(*batch)
    gc.collect()
    assert gpu.memory_used() == used
    run(*_batch(gpu, 3))
    run(*batch)
