"""Training steps as graphs: the bits of eager steps, whatever the stream; what a graph holds, and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import CaptureError, GpuError
from lt_runtime.gpu.graphs import captured_nodes
from lt_runtime.gpu.streams import private_stream
from lt_runtime.training import captured
from lt_runtime.training.tally import GpuTally, HostTally, Scores
from tests.support.gpu_memory import memory_taken

ROWS, INPUTS, CLASSES = 96, 40, 10


class _Run:
    """A model in training; the i-th batch is always the same."""

    def __init__(self, dtype: str = "float32", loss: Any = "cross_entropy", seed: int = 3, **options: Any) -> None:
        dropout = options.pop("dropout", 0.2)
        optimizer = options.pop("optimizer", {})
        scaler = lt.GradScaler(1024.0, growth_interval=3) if dtype == "float16" else None
        kept = {"dtype": dtype, "master_weights": options.pop("master_weights", True)}
        self.model = lt.MLP([INPUTS, 64, 72, CLASSES], "gelu", dropout=dropout, seed=seed, device="cuda", **kept)
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
    """A loss of this package."""
    return lt.huber_loss(outputs.astype(cp.float32), target, out_gradient=gradient, stream=stream).loss


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("loss", ["cross_entropy", "mse", "huber", "bce_with_logits", cauchy, huber])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_graph_and_eager_agree_bitwise(dtype: str, loss: Any, accumulate: int) -> None:
    runs = [
        _Run(dtype, loss, graph=graph, accumulate=accumulate, optimizer={"max_norm": 1.0}) for graph in (True, False)
    ]
    losses = [run.train(8) for run in runs]
    assert losses[0] == losses[1]
    assert runs[0].state() == runs[1].state()
    metrics = [run.step.metrics() for run in runs]
    assert metrics[0] == metrics[1]
    assert metrics[0].loss == pytest.approx(np.mean(losses[0]), rel=1e-5)
    assert int(runs[0].optimizer.steps[0]) + int(runs[0].optimizer.skipped_steps[0]) == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("loss", "option"),
    [("cross_entropy", "class_weights"), ("bce_with_logits", "pos_weight"), ("mse", ""), ("huber", "")],
)
def test_weights_of_rows_and_outputs(loss: str, option: str, dtype: str) -> None:
    options = {option: np.linspace(0.5, 3, CLASSES).astype(np.float32)} if option else {}
    runs = [_Run(dtype, loss, graph=graph, accumulate=2, loss_options=options) for graph in (True, False)]
    plain = _Run(dtype, loss, accumulate=2)
    losses: list[list[float]] = [[], [], []]
    for i in range(6):
        weights = cp.asarray(np.random.default_rng(i).integers(-1, 4, ROWS).astype(np.float32))
        for run, mine in zip(runs, losses, strict=False):
            mine.append(float(run.step(*run.batch(i), weights)))
        losses[2].append(float(plain.step(*plain.batch(i))))
    assert losses[0] == losses[1]
    assert runs[0].state() == runs[1].state()
    assert losses[0] != losses[2]


def test_own_losses_train() -> None:
    run = _Run("bfloat16", cauchy, dropout=0.0)
    batch = run.batch(0)
    losses = [float(run.step(*batch)) for _ in range(60)]
    assert losses[-1] < 0.3 * losses[0]


@pytest.mark.parametrize("graph", [True, False])
def test_the_gradient_of_an_own_loss_begins_with_zeros(graph: bool) -> None:
    """At each replay too, after which other launches have written into the graph's memory."""

    def first_column(outputs: Any, target: Any, gradient: Any, stream: int) -> Any:
        gradient[:, 0] = outputs[:, 0]
        return cp.zeros((), cp.float32)

    run = _Run(loss=first_column, graph=graph)
    bias = run.step.model.parameters()[-1]
    for _ in range(3):
        run.train(1)
        gradient = cp.asnumpy(bias.grad)
        assert gradient[0] != 0
        np.testing.assert_array_equal(gradient[1:], 0)


def test_an_own_loss_that_waits_is_refused() -> None:
    """A graph cannot wait; nothing is updated, and the stream stays usable."""

    def waits(outputs: Any, target: Any, gradient: Any, stream: int) -> Any:
        gradient[...] = float(outputs.astype(cp.float32).sum())
        return cp.zeros((), cp.float32)

    run = _Run(loss=waits)
    before = run.state()
    with pytest.raises(Exception, match=r"(?i)captur"):
        run.train(1)
    assert run.state() == before
    assert np.isfinite(_Run().train(2)).all()


def test_graph_and_eager_agree_bitwise_without_master_weights() -> None:
    optimizer = {"moments": "bfloat16", "stochastic_rounding": True}
    runs = [_Run("bfloat16", graph=graph, master_weights=False, optimizer=optimizer) for graph in (True, False)]
    losses = [[float(run.step(*run.batch(0))) for _ in range(12)] for run in runs]
    assert losses[0] == losses[1]
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert runs[0].state() == runs[1].state()


def test_eager_steps_may_follow_graphs() -> None:
    mixed, graphs = _Run(), _Run()
    eager = lt.TrainStep(mixed.model, mixed.optimizer, batch_size=ROWS, graph=False)
    for i in range(6):
        (eager if i % 2 else mixed.step)(*mixed.batch(i))
    graphs.train(6)
    assert mixed.state() == graphs.state()


def test_masks_differ_from_step_to_step() -> None:
    run = _Run(dropout=0.5)
    frozen = lt.AdamW(run.model.parameters(), lr=0.0, weight_decay=0.0)
    step, batch = lt.TrainStep(run.model, frozen, batch_size=ROWS), run.batch(0)
    assert len({float(step(*batch)) for _ in range(5)}) == 5


def test_the_memory_of_a_step() -> None:
    rows, width, hidden = 512, 768, 3072
    model = lt.MLP([width, hidden] * 2 + [width], "gelu", dtype="bfloat16", master_weights=False, device="cuda")
    optimizer = lt.AdamW(model.parameters(), moments="bfloat16", stochastic_rounding=True)
    step = lt.TrainStep(model, optimizer, loss="mse", batch_size=rows, tune=False)
    batch = cp.asarray(np.zeros((rows, width), model.dtype.numpy))
    step(batch, batch)
    kept = 2 * (2 * hidden + width)  # the arrays before and after each activation
    gradients = width + hidden  # the gradient of the outputs, written over them, and the gradient below the last layer
    assert step._gpu._pool.total_bytes() == 2 * rows * (kept + gradients) + 512  # the loss has a block of 512 bytes


def test_a_graph_holds_kernels_alone() -> None:
    run = _Run("bfloat16", optimizer={"max_norm": 1.0})
    run.train(1)
    gpu = run.step._gpu
    (batches,) = gpu._buffers.values()
    with captured._memory_from(gpu._pool):
        nodes = captured_nodes(
            lambda stream: gpu._body.run(batches.parts, gpu.tally, stream), private_stream(0, "training")
        )
    print(f"a step of 3 layers with max_norm: {len(nodes)} nodes")
    assert set(nodes) <= {"KERNEL", "MEMSET"}  # memsets of tile counters, which some products need
    assert len(nodes) < 30


def test_two_steps_take_turns_with_their_memory() -> None:
    runs, alone = [_Run(seed=seed) for seed in (1, 2)], [_Run(seed=seed) for seed in (1, 2)]
    streams = [cp.cuda.Stream(non_blocking=True) for _ in runs]
    for i in range(12):
        batches = [run.batch(i) for run in runs]
        cp.cuda.get_current_stream().synchronize()
        for run, stream, batch in zip(runs, streams, batches, strict=True):
            run.step(*batch, stream=stream)
    for run, other in zip(runs, alone, strict=True):
        other.train(12)
        assert run.state() == other.state()


def test_batches_of_any_size() -> None:
    runs = [_Run(batch_size=None, graph=graph) for graph in (True, False)]
    sizes = [*range(8, 8 * (captured.MAX_GRAPHS + 3), 8), 96, 8, 16, 96]
    for i, rows in enumerate(sizes):
        losses = [float(run.step(*run.batch(i, rows))) for run in runs]
        assert losses[0] == losses[1]
    assert runs[0].state() == runs[1].state()
    assert len(runs[0].step._gpu._buffers) == captured.MAX_GRAPHS


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
    assert metrics.steps == 10_000
    assert np.isfinite(metrics.loss)
    assert all(bool(cp.isfinite(parameter.data.astype(cp.float32)).all()) for parameter in run.model.parameters())


@pytest.mark.parametrize("at", [0, 1, 3])
def test_out_of_memory(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    run, expected = _Run(), _Run()
    allocate, left = captured._device_memory, [at]

    def fail(size: int) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise GpuError(f"{size} bytes of GPU memory could not be allocated")
        return allocate(size)

    run.step._gpu._pool = cp.cuda.MemoryPool(fail)
    before = run.state()
    with pytest.raises(GpuError, match="could not be allocated"):
        run.step(*run.batch(0))
    assert run.state() == before
    left[0] = 1 << 30
    assert run.train(4) == expected.train(4)
    assert run.state() == expected.state()


def test_a_failure_while_capturing(monkeypatch: pytest.MonkeyPatch) -> None:
    run, expected = _Run(), _Run()
    calls: list[Any] = []

    def fail(_: lt.AdamW, *, stream: Any = None) -> None:
        calls.append(stream)
        raise GpuError("the optimizer's launch failed")

    before = run.state()
    with monkeypatch.context() as patch:
        patch.setattr(lt.AdamW, "step", fail)
        with pytest.raises(GpuError, match="launch failed"):
            run.step(*run.batch(0))
    assert run.state() == before
    assert len(calls) == 1  # the error comes in the capture, not in a rehearsal
    assert run.train(3) == expected.train(3)


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
