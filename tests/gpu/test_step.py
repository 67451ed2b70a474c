"""Training steps as graphs equal eager steps bit for bit; captures by the caller, and the tally of metrics."""

from __future__ import annotations

import itertools
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import CaptureError
from lt_runtime.training.averages import GpuTally, HostTally, Scores
from tests.support.gpu_memory import memory_taken

ROWS, INPUTS, CLASSES = 96, 40, 10


class _Run:
    """A model, its optimizer and its training step; the batch with the number i is always the same."""

    def __init__(self, dtype: str = "float32", loss: Any = "cross_entropy", seed: int = 3, **options: Any) -> None:
        dropout = options.pop("dropout", 0.2)
        optimizer = options.pop("optimizer", {})
        scaler = lt.GradScaler(1024.0, growth_interval=3) if dtype == "float16" else None
        self.model = lt.MLP([INPUTS, 64, 72, CLASSES], "gelu", dropout=dropout, seed=seed, dtype=dtype, device="cuda")
        schedule = lt.schedules.warmup_cosine(3, 40)
        self.optimizer = lt.AdamW(self.model.parameters(), lr=1e-2, schedule=schedule, scaler=scaler, **optimizer)
        self.step = lt.TrainStep(self.model, self.optimizer, loss=loss, **{"batch_size": ROWS, **options})
        self._loss = loss

    def batch(self, i: int, rows: int = ROWS) -> tuple[Any, Any]:
        generator, kind = np.random.default_rng(i), self.model.dtype.numpy
        x = cp.asarray(generator.standard_normal((rows, INPUTS)).astype(kind))
        if self._loss != "cross_entropy":
            kind = np.dtype(np.float32) if callable(self._loss) else kind
            return x, cp.asarray(generator.random((rows, CLASSES)).astype(kind))
        return x, cp.asarray(generator.integers(0, CLASSES, rows).astype(np.int32))

    def train(self, count: int) -> list[float]:
        return [float(self.step(*self.batch(i))) for i in range(count)]

    def state(self) -> list[bytes]:
        cp.cuda.Device().synchronize()
        arrays = [array for each in self.model.parameters() for array in (each.data, each.master) if array is not None]
        arrays += [*itertools.chain.from_iterable(self.optimizer.moments), self.optimizer.steps]
        return [cp.asnumpy(array).tobytes() for array in arrays]


def cauchy(outputs: Any, target: Any, gradient: Any, stream: int) -> Any:
    """A loss written with CuPy, which allocates the intermediate arrays."""
    error = outputs.astype(cp.float32) - target
    gradient[...] = 2 * error / (1 + error**2) / error.size
    return cp.log1p(error**2).mean()


def huber(outputs: Any, target: Any, gradient: Any, stream: int) -> Any:
    """Makes a user-defined loss function that calls a loss of this package."""
    return lt.huber_loss(outputs.astype(cp.float32), target, out_gradient=gradient, stream=stream).loss


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "huber", "bce_with_logits", cauchy, huber])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_graph_and_eager_agree_bitwise(dtype: str, loss: Any, accumulate: int) -> None:
    runs = [
        _Run(dtype, loss, graph=graph, accumulate=accumulate, optimizer={"max_norm": 1.0}) for graph in (True, False)
    ]
    losses = [run.train(8) for run in runs]
    for run, mine in zip(
        runs, losses, strict=True
    ):  # settings that change after the capture take effect in the graph's next launch
        run.optimizer.lr, run.optimizer.weight_decay, run.model.layers[1].weight.lr_scale = 0.25, 0.5, 0.125
        mine.append(float(run.step(*run.batch(8))))
    assert losses[0] == losses[1]
    assert runs[0].state() == runs[1].state()
    metrics = [run.step.metrics() for run in runs]
    assert metrics[0] == metrics[1]
    assert metrics[0].loss == pytest.approx(np.mean(losses[0]), rel=1e-5)
    assert int(runs[0].optimizer.steps[0]) + int(runs[0].optimizer.skipped_steps[0]) == 9


def test_an_own_loss_that_waits_is_refused() -> None:
    """A loss that waits for the host cannot be captured: nothing is updated, and the stream stays usable."""

    def waits(outputs: Any, target: Any, gradient: Any, stream: int) -> Any:
        gradient[...] = float(outputs.astype(cp.float32).sum())
        return cp.zeros((), cp.float32)

    run = _Run(loss=waits)
    before = run.state()
    with pytest.raises(Exception, match=r"(?i)captur"):
        run.train(1)
    assert run.state() == before
    assert np.isfinite(_Run().train(2)).all()


def test_eager_steps_may_follow_graphs() -> None:
    mixed, graphs = _Run(), _Run()
    eager = lt.TrainStep(mixed.model, mixed.optimizer, batch_size=ROWS, graph=False)
    for i in range(6):
        (eager if i % 2 else mixed.step)(*mixed.batch(i))
    graphs.train(6)
    assert mixed.state() == graphs.state()


def test_training_from_prefetched_batches() -> None:
    run, expected = _Run("bfloat16"), _Run("bfloat16")
    host = [tuple(map(cp.asnumpy, run.batch(i))) for i in range(20)]
    for x, labels in lt.prefetch(host, 2, run.model.device):
        run.step(x, labels)
    expected.train(20)
    assert run.state() == expected.state()


def test_many_replays_take_no_memory() -> None:
    run = _Run("bfloat16")
    batch = run.batch(0)
    run.step(*batch)
    run.step.metrics()
    used = cp.get_default_memory_pool().used_bytes()

    def train() -> None:
        for _ in range(2_500):
            run.step(*batch)

    assert memory_taken(train) <= 2 << 20
    assert cp.get_default_memory_pool().used_bytes() <= used
    metrics = run.step.metrics()
    assert metrics.steps >= 10_000
    assert np.isfinite(metrics.loss)
    assert all(bool(cp.isfinite(parameter.data.astype(cp.float32)).all()) for parameter in run.model.parameters())


def test_captures_by_the_caller() -> None:
    graphs, eager, new = _Run(), _Run(graph=False), _Run(graph=False, batch_size=None)
    stream = cp.cuda.Stream(non_blocking=True)
    batch = eager.batch(0)
    cp.cuda.Device().synchronize()
    with stream:
        eager.step(*batch)
        unplanned = new.batch(0, 23)
        stream.synchronize()
        stream.begin_capture()
        with pytest.raises(CaptureError, match="a step to be captured needs graph=False"):
            graphs.step(*batch)
        with pytest.raises(CaptureError, match="before the capture"):
            new.step(*unplanned)
        eager.step(*batch)
        graph = stream.end_capture()
        before = eager.state()
        graph.launch(stream)
        stream.synchronize()
    assert eager.state() != before
    assert int(eager.optimizer.steps[0]) == 2
    new.step(*unplanned)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_tally_is_the_hosts(dtype: str) -> None:
    generator = np.random.default_rng(0)
    logits = generator.integers(-3, 4, (3000, 70)).astype(lt.MLP([1, 1], dtype=dtype, device="cpu").dtype.numpy)
    labels = np.where(generator.random(3000) < 0.5, logits.argmax(axis=1), generator.integers(0, 70, 3000))
    labels[::7] = -100
    gpu, host = GpuTally(0, cp.cuda.get_current_stream().ptr), HostTally()
    for i in range(5):
        loss = np.float32(0.1 * i)
        gpu.add(
            cp.asarray(loss), Scores(cp.asarray(logits), cp.asarray(labels), -100), 0.5, first=i % 2 == 0, stream=None
        )
        host.add(loss, Scores(logits, labels, -100), 0.5, first=i % 2 == 0, stream=None)
        assert float(gpu.mean) == float(host.mean)
    found, expected = gpu.read(None), host.read(None)
    assert (found.steps, found.rows, found.correct) == (expected.steps, expected.rows, expected.correct)
    assert found.loss == pytest.approx(expected.loss, rel=1e-6)
    assert gpu.read(None) == (0, 0.0, 0, 0)
