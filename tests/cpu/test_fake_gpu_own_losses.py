"""Training steps on the pretended GPU against steps on NumPy arrays, with built-in and user-defined losses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of

_DIMS, _ROWS, _STEPS = [8, 16, 5], 12, 5
_TYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype("bfloat16")}


def cauchy(outputs: Any, target: Any, gradient: Any, stream: Any) -> Any:
    """A user-defined loss: the mean of log (1 + d²), whose derivative is 2 d / (1 + d²)."""
    error = outputs.astype("float32") - target
    gradient[...] = 2 * error / (1 + error**2) / np.float32(error.size)
    return np.log1p(error**2).mean()


def huber_of(lt: Any) -> Callable[..., Any]:
    def huber(outputs: Any, target: Any, gradient: Any, stream: Any) -> Any:
        return lt.huber_loss(outputs.astype("float32"), target, out_gradient=gradient, stream=stream).loss

    return huber


def made_step(lt: Any, device: str, *, dtype: str = "float32", scaled: bool = False, **options: Any) -> Any:
    dropout = 0.3 if options.get("accumulate") == 3 else 0.0
    model = lt.MLP(_DIMS, dtype=dtype, seed=5, device=device, dropout=dropout)
    scaler, schedule = lt.GradScaler(1024.0) if scaled else None, lt.schedules.warmup_cosine(2, 8)
    optimizer = lt.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, schedule=schedule, scaler=scaler)
    return lt.TrainStep(model, optimizer, **options)


def batch_of(seed: int, dtype: str, *, target: str = "") -> list[NDArray[Any]]:
    """Draws inputs, and targets of the model's type or of another one ("labels" are class labels)."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((_ROWS, _DIMS[0])).astype(_TYPES[dtype])
    if target == "labels":
        return [x, np.where(np.arange(_ROWS) == 2, -100, generator.integers(0, _DIMS[-1], _ROWS))]
    return [x, generator.random((_ROWS, _DIMS[-1])).astype(_TYPES[target or dtype])]


def values_of(gpu: FakeGpu, step: Any) -> list[bytes]:
    gpu.streams.synchronize_all()
    return [host_of(gpu, each.data).tobytes() for each in step.model.parameters()]


def run(gpu: FakeGpu, step: Any, batches: list[list[NDArray[Any]]]) -> list[float]:
    """Returns the losses of steps over batches in fresh arrays."""
    losses = []
    for batch in batches:
        made = step(*map(gpu.cp.asarray, batch), stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        losses.append(float(host_of(gpu, made)))
    return losses


def check(gpu: FakeGpu, batches: list[list[NDArray[Any]]], tolerance: float, make: Callable[..., Any]) -> None:
    """Checks that steps give the same bits as a graph and eagerly, and are close to steps on the host."""
    with gpu.others_package() as host_lt:
        host = make(host_lt, "cpu", True)
        expected, metrics = [float(host(*batch)) for batch in batches], host.metrics()
    graph, eager = make(gpu.lt, "cuda", True), make(gpu.lt, "cuda", False)
    gpu.streams.synchronize_all()
    losses = run(gpu, graph, batches)
    assert losses == run(gpu, eager, batches)
    assert values_of(gpu, graph) == values_of(gpu, eager)
    np.testing.assert_allclose(losses, expected, rtol=tolerance)
    found = graph.metrics(stream=gpu.stream)
    assert found[:2] == pytest.approx(metrics[:2], rel=tolerance)
    assert found.accuracy == metrics.accuracy
    for mine, other in zip(graph.model.parameters(), host.model.parameters(), strict=True):
        actual = host_of(gpu, mine.data).astype(np.float64)
        np.testing.assert_allclose(actual, other.data.astype(np.float64), atol=tolerance, err_msg=mine.name)


_SETTINGS = (("float32", False, 3), ("float32", True, 1), ("float16", True, 2), ("bfloat16", False, 1))


@pytest.mark.parametrize(("dtype", "scaled", "accumulate"), _SETTINGS)
@pytest.mark.parametrize("loss", ["cauchy", "huber"])
def test_own_losses(gpu: FakeGpu, loss: str, dtype: str, scaled: bool, accumulate: int) -> None:
    def make(lt: Any, device: str, graph: bool) -> Any:
        function = cauchy if loss == "cauchy" else huber_of(lt)
        options = {"dtype": dtype, "scaled": scaled, "accumulate": accumulate, "graph": graph}
        return made_step(lt, device, loss=function, **options)

    batches = [batch_of(seed, dtype, target="float32") for seed in range(_STEPS)]
    check(gpu, batches, 2e-5 if dtype == "float32" else 3e-2, make)


_LOSSES: list[tuple[str, dict[str, Any]]] = [
    ("cross_entropy", {"label_smoothing": 0.1}),
    ("cross_entropy", {"class_weights": 5}),
    ("cross_entropy", {"label_smoothing": 0.1, "class_weights": 5}),
    ("huber", {"delta": 0.25}),
    ("bce_with_logits", {}),
    ("bce_with_logits", {"pos_weight": 5}),
    ("mse", {}),
]


@pytest.mark.parametrize(
    ("loss", "option", "weighted", "dtype", "scaled", "accumulate"),
    [
        (*loss, weighted, *_SETTINGS[setting])
        for (i, loss), weighted in itertools.product(enumerate(_LOSSES), (False, True))
        for setting in ((i + weighted) % 2, 2 + (i + weighted) % 2)  # each case runs in FP32 and in a 16-bit type
    ],
    ids=str,
)
def test_losses_with_a_name(
    gpu: FakeGpu, loss: str, option: dict[str, Any], weighted: bool, dtype: str, scaled: bool, accumulate: int
) -> None:
    def make(lt: Any, device: str, graph: bool) -> Any:
        arrays = {name: np.linspace(0.5, 2, value).astype(np.float32) for name, value in option.items() if value == 5}
        options = {"dtype": dtype, "scaled": scaled, "accumulate": accumulate, "graph": graph}
        return made_step(lt, device, loss=loss, loss_options={**option, **arrays}, **options)

    batches = [batch_of(seed, dtype, target="labels" if loss == "cross_entropy" else "") for seed in range(_STEPS)]
    if weighted:
        for seed, batch in enumerate(batches):
            batch.append(np.random.default_rng(seed).integers(0, 3, _ROWS).astype(np.float32))
    check(gpu, batches, 2e-5 if dtype == "float32" else 3e-2, make)


@pytest.mark.parametrize("graph", [True, False])
def test_the_gradient_of_an_own_loss_begins_with_zeros(gpu: FakeGpu, graph: bool) -> None:
    """The results are right at each replay, although other launches write into the graph's memory between replays."""

    def first_column(outputs: Any, target: Any, gradient: Any, stream: Any) -> Any:
        gradient[:, :1] = outputs[:, :1]
        return gpu.cp.asarray(np.float32(0))

    step = made_step(gpu.lt, "cuda", loss=first_column, graph=graph)
    bias = step.model.parameters()[-1]
    for seed in range(3):
        run(gpu, step, [batch_of(seed, "float32")])
        gradient = host_of(gpu, bias.grad)
        assert gradient[0] != 0
        np.testing.assert_array_equal(gradient[1:], 0)


def test_steps_with_and_without_weights_take_turns(gpu: FakeGpu) -> None:
    """Batches with and without row weights have a graph each; weights do not affect batches that have none."""
    with gpu.others_package() as host_lt:
        host = made_step(host_lt, "cpu", loss="mse")
    step = made_step(gpu.lt, "cuda", loss="mse")
    gpu.streams.synchronize_all()
    for seed in range(3 * _STEPS):
        batch = batch_of(seed, "float32")
        if seed % 3:
            batch.append(np.full(_ROWS, seed % 3, np.float32))
        (loss,) = run(gpu, step, [batch])
        assert loss == pytest.approx(float(host(*batch)), rel=1e-5)
    assert len(step._gpu._buffers) == 2


def test_targets_of_own_losses_have_a_graph_for_each_kind(gpu: FakeGpu) -> None:
    def loss(outputs: Any, target: Any, gradient: Any, stream: Any) -> Any:
        kinds.append((target.dtype, target.shape, stream))
        gradient[...] = outputs
        return (outputs * outputs).sum()

    kinds: list[Any] = []
    step = made_step(gpu.lt, "cuda", loss=loss, accumulate=2)
    gpu.streams.synchronize_all()
    x, _ = batch_of(0, "float32")
    targets = [np.zeros(_ROWS, np.int64), np.zeros((_ROWS, 2), bool), np.zeros((_ROWS, 2, 3), np.float16)]
    for target in targets * 2:
        run(gpu, step, [[x, target]])
    assert [each[:2] for each in kinds[::6]] == [(each.dtype, (_ROWS // 2, *each.shape[1:])) for each in targets]
    assert len(kinds) == 3 * 6, "a function runs three times for each micro-batch of a kind of batch, then no more"
    assert all(isinstance(stream, int) and stream for *_, stream in kinds)
    assert step.metrics(stream=gpu.stream).accuracy is None


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda cp: None, "OperandError", "the loss that the function returned is None; it must be an FP32"),
        (lambda cp: 0.5, "OperandError", "the loss that the function returned is 0.5; it must be"),
        (lambda cp: np.float32(0.5), "DeviceError", "that the function returned is a NumPy array, the model is"),
        (lambda cp: np.zeros((), np.float32), "DeviceError", "returned is a NumPy array"),
        (lambda cp: cp.zeros((), np.float16), "DTypeError", "function returned is float16; it must be float"),
        (lambda cp: cp.zeros((2,), np.float32), "ShapeError", r"returned has shape \(2,\); .* \(\) and \(1,\)"),
    ],
)
def test_what_a_loss_must_not_return(gpu: FakeGpu, returned: Any, error: str, message: str, graph: bool) -> None:
    step = made_step(gpu.lt, "cuda", loss=lambda *_: returned(gpu.cp), graph=graph)
    before = values_of(gpu, step)
    batch = list(map(gpu.cp.asarray, batch_of(0, "float32")))
    for _ in range(2):
        with pytest.raises(getattr(gpu.lt.errors, error), match=message):
            step(*batch, stream=gpu.stream)
    assert values_of(gpu, step) == before
    assert int(host_of(gpu, step.optimizer.steps)[0]) == 0


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_loss_that_raises(gpu: FakeGpu, at: int) -> None:
    """If the user's loss raises in a rehearsal or in the capture, nothing is updated, and the next step works."""
    calls: list[int] = []

    def loss(outputs: Any, target: Any, gradient: Any, stream: Any) -> Any:
        calls.append(1)
        if len(calls) == at:
            raise ZeroDivisionError("of the caller's")
        return cauchy(outputs, target, gradient, stream)

    step, other = made_step(gpu.lt, "cuda", loss=loss), made_step(gpu.lt, "cuda", loss=cauchy)
    before, batch = values_of(gpu, step), batch_of(0, "float32")
    with pytest.raises(ZeroDivisionError, match="of the caller's"):
        run(gpu, step, [batch])
    assert values_of(gpu, step) == before
    assert run(gpu, step, [batch] * 2) == run(gpu, other, [batch] * 2)
    assert values_of(gpu, step) == values_of(gpu, other)


def test_weights_among_the_options_may_be_changed_where_they_lie(gpu: FakeGpu) -> None:
    """NumPy weights are copied once; weights on the device are read at each step."""
    own, host = gpu.cp.asarray(np.ones(5, np.float32)), np.ones(5, np.float32)
    options = [{"pos_weight": each} for each in (own, host, None)]
    steps = [made_step(gpu.lt, "cuda", loss="bce_with_logits", loss_options=each) for each in options]
    gpu.streams.synchronize_all()
    batches = [batch_of(seed, "float32") for seed in range(2)]
    losses = [run(gpu, step, batches[:1]) for step in steps]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-6)
    host_of(gpu, own)[...] = host[...] = 3.0
    losses = [run(gpu, step, batches[1:]) for step in steps]
    assert losses[0][0] > losses[1][0] + 0.1
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)


def test_weights_on_another_device_are_refused(gpu: FakeGpu) -> None:
    weights = gpu.cp.asarray(np.ones(5, np.float32))
    with pytest.raises(gpu.lt.errors.DeviceError, match=r"but pos_weight not; .*cupy.asnumpy"):
        made_step(gpu.lt, "cpu", loss="bce_with_logits", loss_options={"pos_weight": weights})
