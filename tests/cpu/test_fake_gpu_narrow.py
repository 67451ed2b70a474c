"""Narrow MLPs on the pretended GPU: which run forward or backward in one kernel, with the results of single layers."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.fake_gpu import FakeGpu
from tests.support.over_fake_gpu import call
from tests.support.placed import host_of

FORWARD, BACKWARD, GRADIENTS, COPY = "mlp_fwd", "mlp_bwd", "mlp_gradients", "copy_rows"
DIMS = (20, 32, 24, 5)
ROWS = 40
BF16 = ml_dtypes.bfloat16


def _model(gpu: FakeGpu, dims: Sequence[int] = DIMS, **options: Any) -> Any:
    return gpu.lt.MLP(dims, **{"dtype": "bfloat16", "seed": 3, "device": "cuda", **options})


def _inputs(gpu: FakeGpu, rows: int = ROWS, columns: int = DIMS[0], seed: int = 0, dtype: Any = BF16) -> Any:
    return gpu.cp.asarray(np.random.default_rng(seed).standard_normal((rows, columns)).astype(dtype))


def _names(gpu: FakeGpu, *others: str) -> set[str]:
    """Returns the names of the MLP kernels, and of `others`, launched since the last call; waits for the kernels."""
    gpu.streams.synchronize_all()
    found = {FORWARD, BACKWARD, GRADIENTS, *others} & {*gpu.kernels.launched}
    gpu.kernels.launched.clear()
    return found


def _by_layers(gpu: FakeGpu, model: Any, x: Any) -> NDArray[np.float64]:
    outputs, _ = model.forward(x, 0)
    gpu.synchronize(0)
    return host_of(gpu, outputs).astype(np.float64)


def _values(gpu: FakeGpu, array: Any) -> NDArray[np.float64]:
    gpu.synchronize(0)
    return host_of(gpu, array).astype(np.float64)


@pytest.fixture(autouse=True)
def _nothing_launched(gpu: FakeGpu) -> None:
    gpu.streams.synchronize_all()
    gpu.kernels.launched.clear()


@pytest.mark.parametrize(("activation", "dtype"), [("relu", "bfloat16"), ("gelu", "float16")])
def test_inference(gpu: FakeGpu, activation: str, dtype: str) -> None:
    model = _model(gpu, activation=activation, dtype=dtype)
    x = _inputs(gpu, dtype=model.dtype.numpy)
    for _ in range(5):  # the fourth call replays a graph
        outputs = model(x)
        assert outputs.shape == (ROWS, DIMS[-1])
        made = _values(gpu, outputs)
        np.testing.assert_allclose(made, _by_layers(gpu, model, x), atol=1e-2)
    assert _names(gpu) == {FORWARD}


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"output_activation": "relu"},
        {"activation": ["relu", "tanh", "none"]},
        {"dims": (20, 5)},
        {"dims": (20, 136, 5)},
        {"dims": (136, 32, 5)},
        {"dims": [16] * 18},
    ],
    ids=str,
)
def test_other_models_run_layer_by_layer(gpu: FakeGpu, options: dict[str, Any]) -> None:
    dims = options.get("dims", DIMS)
    model = _model(gpu, **options)
    x = _inputs(gpu, columns=dims[0], dtype=model.dtype.numpy)
    assert model(x).shape == (ROWS, dims[-1])
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse")
    step(x, _inputs(gpu, columns=dims[-1], dtype=model.dtype.numpy))
    assert _names(gpu) == set()


def test_inputs_of_any_layout(gpu: FakeGpu) -> None:
    model, x = _model(gpu), _inputs(gpu)
    wide = _inputs(gpu, columns=50)[:, 3 : 3 + DIMS[0]]
    turned = _inputs(gpu, rows=DIMS[0], columns=ROWS).T
    for each in (x, wide, turned):
        np.testing.assert_allclose(_values(gpu, model(each)), _by_layers(gpu, model, each), atol=1e-2)
    assert _names(gpu) == {FORWARD}


def test_inference_has_no_dropout_and_training_has_it(gpu: FakeGpu) -> None:
    model, x = _model(gpu, dropout=0.5), _inputs(gpu)
    model(x)
    assert _names(gpu) == {FORWARD}
    gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()))(x, gpu.cp.asarray(np.zeros(ROWS, np.int32)))
    assert _names(gpu) == set()


def _gradients(gpu: FakeGpu, model: Any) -> list[NDArray[np.float64]]:
    return [_values(gpu, each.grad) for each in model.parameters()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"activation": "gelu", "dtype": "float16"},
        {"bias": [False, True, False]},
        {"loss": "cross_entropy"},
        {"loss": "huber"},
        {"loss": "bce_with_logits"},
        {"loss": "mse", "row_weights": True},
        {"accumulate": 2},
        {"dims": (128, 128, 128, 128, 4), "graph": False},  # the gradients of such wide layers need two launches
    ],
    ids=str,
)
def test_a_step_makes_the_layers_gradients(gpu: FakeGpu, options: dict[str, Any]) -> None:
    of_step = {name: options[name] for name in ("accumulate", "graph") if name in options}
    loss, dims = options.get("loss", "mse"), options.get("dims", DIMS)
    of_model = {name: value for name, value in options.items() if name not in ("loss", "row_weights", *of_step)}
    model = _model(gpu, **of_model)
    x = _inputs(gpu, columns=dims[0], dtype=model.dtype.numpy)
    labels, targets = np.arange(ROWS) % dims[-1], _inputs(gpu, columns=dims[-1], seed=1, dtype=model.dtype.numpy)
    weights = gpu.cp.asarray(np.linspace(0, 2, ROWS, dtype=np.float32)) if "row_weights" in options else None
    target = gpu.cp.asarray(labels) if loss == "cross_entropy" else targets
    outputs, contexts = model.forward(x)
    function = getattr(gpu.lt, {"mse": "mse_loss", "huber": "huber_loss"}.get(loss, loss))
    exact_loss, gradient = function(outputs, target, row_weights=weights)
    model.backward(gradient, contexts)
    expected = _gradients(gpu, model)
    assert _names(gpu) == set()
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters(), lr=0.0), loss=loss, **of_step)
    found = step(x, target, row_weights=weights)
    for made, exact in zip(_gradients(gpu, model), expected, strict=True):
        assert np.linalg.norm(made - exact) <= 2e-2 * np.linalg.norm(exact)
    assert _values(gpu, found) == pytest.approx(_values(gpu, exact_loss), rel=1e-2)
    in_one = loss != "cross_entropy" and weights is None
    if dims != DIMS:
        gpu.streams.synchronize_all()
        assert [gpu.kernels.launched.count(each) for each in (FORWARD, BACKWARD, GRADIENTS)] == [0, 2, 1]
    assert _names(gpu) == ({BACKWARD, GRADIENTS} if in_one else {FORWARD, BACKWARD, GRADIENTS})


def test_a_loss_in_the_backward_pass_is_scaled(gpu: FakeGpu) -> None:
    """With a loss scale on the device, the gradients are those without a loss scale, times the scale."""
    made = []
    for scaler in (None, gpu.lt.GradScaler(init_scale=1024.0)):
        model = _model(gpu, dtype="float16")
        optimizer = gpu.lt.AdamW(model.parameters(), lr=0.0, scaler=scaler)
        step = gpu.lt.TrainStep(model, optimizer, loss="mse")
        step(_inputs(gpu, dtype=np.float16), _inputs(gpu, columns=DIMS[-1], seed=1, dtype=np.float16))
        made.append(_gradients(gpu, model))
    assert _names(gpu) == {BACKWARD, GRADIENTS}
    for plain, scaled in zip(*made, strict=True):
        assert np.linalg.norm(scaled / 1024 - plain) <= 1e-2 * np.linalg.norm(plain)


def test_a_graph_changes_no_bit(gpu: FakeGpu) -> None:
    trained = []
    for graph in (True, False):
        model = _model(gpu)
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters(), lr=1e-2), loss="mse", graph=graph)
        for seed in range(4):
            step(_inputs(gpu, seed=seed), _inputs(gpu, columns=DIMS[-1], seed=9))
        trained.append([_values(gpu, each.data) for each in model.parameters()])
    for one, other in zip(*trained, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("columns", "begin", "width", "copies"),
    [(16, 0, 16, 0), (16, 8, 24, 0), (16, 4, 24, 1), (16, 8, 25, 1), (20, 0, 20, 0), (20, 3, 25, 0)],
)
def test_a_graph_reads_batches_in_place(
    gpu: FakeGpu, accumulate: int, columns: int, begin: int, width: int, copies: int
) -> None:
    """Only rows of whole vectors of 16 bytes that are not aligned are copied; the results are equal bit by bit."""
    trained, rows = [], 39
    for graph in (False, True):
        model = _model(gpu, (columns, 16, 5))
        options = {"loss": "mse", "graph": graph, "accumulate": accumulate}
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters(), lr=1e-2), **options)
        for seed in (0, 1, 1):
            x = _inputs(gpu, rows, width, seed)[:, begin : begin + columns]
            target = _inputs(gpu, rows, 8, seed)[:, 1:6]
            step(x, target)
        assert _names(gpu, COPY) == {BACKWARD, GRADIENTS} | ({COPY} if copies or not graph else set())
        trained.append([_values(gpu, each.data) for each in model.parameters()])
    assert all(np.array_equal(*pair) for pair in zip(*trained, strict=True))


def test_a_repeated_call_does_not_keep_the_factor_of_earlier_calls(gpu: FakeGpu) -> None:
    """A call that repeats becomes the launch of a graph, which holds the factor and the address of the table."""
    names = "kernels.losses", "kernels.mlp", "ops._mlp", "ops.call"
    losses, mlp, operations, calls = (importlib.import_module(f"lt_runtime.{name}") for name in names)
    model, x, target = _model(gpu), _inputs(gpu), _inputs(gpu, columns=DIMS[-1])
    values, gradients = (model.narrow._arrays(kind) for kind in ("data", "grad"))
    arrays = x, target, *values, *gradients, None, gpu.cp.zeros((), np.float32)
    options, found = (model.layers[0].activation, False, losses.ElementwiseLoss("mse")), []
    for factor in (1.0, 1.0, 1.0, 1.0, 0.5):
        calls.perform(operations.MLP_GRADIENTS, arrays, options, mlp.LossArguments(factor, 0, 0), gpu.stream)
        gpu.streams.synchronize_all()
        found.append(_values(gpu, model.parameters()[0].grad))
    np.testing.assert_array_equal(found[-1], 0.5 * found[0])


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("waits", [True, False])
def test_a_batch_may_be_overwritten_after_the_step(gpu: FakeGpu, waits: bool, number: int) -> None:
    model, batch = _model(gpu), (_inputs(gpu), _inputs(gpu, columns=DIMS[-1]))
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse")
    gpu.streams.synchronize_all()
    for _ in range(2):
        step(*batch, stream=gpu.stream)
    event = call("cuEventCreate", 0)
    if waits:
        call("cuEventRecord", event, gpu.stream.ptr)
        call("cuStreamWaitEvent", gpu.other_stream.ptr, event, 0)
    call("cuMemsetD8Async", batch[number].data.ptr, 0, batch[number].nbytes, gpu.other_stream.ptr)
    gpu.streams.synchronize_all()
    assert [race.partition(" ")[0] for race in gpu.streams.races.take()] == ([] if waits else [BACKWARD])


def test_prefetched_batches_are_overwritten_after_the_steps_that_read_them(gpu: FakeGpu) -> None:
    """The checker of races fails the test if a slot of `prefetch` gets its next batch before a step has read it."""
    generator, trained = np.random.default_rng(7), []
    batches = [[generator.standard_normal((ROWS, size)).astype(BF16) for size in (DIMS[0], DIMS[-1])] for _ in range(6)]
    for graph in (True, False):
        model = _model(gpu)
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters(), lr=1e-2), loss="mse", graph=graph)
        gpu.streams.synchronize_all()
        for x, target in gpu.lt.prefetch(batches, 1, 0, gpu.stream):
            step(x, target, stream=gpu.stream)
        gpu.streams.synchronize_all()
        trained.append([_values(gpu, each.data) for each in model.parameters()])
    assert all(np.array_equal(*pair) for pair in zip(*trained, strict=True))


def test_the_plan_cache_decides(gpu: FakeGpu) -> None:
    rows = 41
    model, x, target = _model(gpu), _inputs(gpu, rows), _inputs(gpu, rows, DIMS[-1])
    model(x)
    assert _names(gpu) == {FORWARD}
    _remember(gpu, model, rows, backward=False, no_split_k=False)
    model(x)
    assert _names(gpu) == set()
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse", graph=False)
    step(x, target)
    assert _names(gpu) == {BACKWARD, GRADIENTS}
    _remember(gpu, model, rows, backward=True, loss=True, no_split_k=False)
    step(x, target)
    assert _names(gpu) == set()


def _remember(gpu: FakeGpu, model: Any, rows: int, *, backward: bool, no_split_k: object, loss: bool = False) -> None:
    """Stores a decision for a model in the plan cache, as the tuner would."""
    names = ("problem", "store.keys", "store.entries", "store.plan_store", "plans.cache")
    problem, keys, entries, plan_store, cache = (importlib.import_module(f"lt_runtime.{each}") for each in names)
    assert problem is gpu.lt.problem, "of the package that is on the pretended GPU"
    biases = (True,) * (len(model.dims) - 1)
    asked = problem.MLPProblem(model.dtype, rows, model.dims, biases, problem.Activation("relu"), backward, loss)
    entry = entries.LayerEntry({"fused_mlp": no_split_k}, 1.0)
    plan_store.plan_store(0).put({keys.problem_key(asked): entry})
    cache.forget([asked], 0)


def test_what_is_none_of_its_strategies_is_not_followed(gpu: FakeGpu) -> None:
    rows = 42
    model = _model(gpu)
    _remember(gpu, model, rows, backward=False, no_split_k="no")
    model(_inputs(gpu, rows))
    assert _names(gpu) == {FORWARD}


@pytest.mark.parametrize(("slow", "rows"), [("matmul", 17), ("kernel", 18)])
def test_tuning(hurried: FakeGpu, monkeypatch: pytest.MonkeyPatch, slow: str, rows: int) -> None:
    """The faster of one fused kernel and single layers is used, stored in the plan cache and shown by `lt.explain`."""
    gpu, dims = hurried, (16, 16, 16)
    monkeypatch.setattr(gpu.streams, "costs_us", {"kernel": 1e3, "matmul": 1e3} | {slow: 2e4})
    report = gpu.lt.tune(dims, rows, dtype="bfloat16", progress=False)
    is_fused = slow == "matmul"
    chosen, other = ("fused kernels", "layer by layer")[:: 1 if is_fused else -1]
    assert report[-1].strategy == chosen
    explained = gpu.lt.explain(dims, rows, dtype="bfloat16")[-1]
    assert (explained.strategy, [words for words, _ in explained.alternatives]) == (chosen, [other])
    assert f"training {rows}x16-16-16 bfloat16 relu" in str(explained)
    again = gpu.lt.tune(dims, rows, dtype="bfloat16", progress=False)
    assert (again[-1].strategy, again[-1].measured) == (chosen, 0)
    gpu.kernels.launched.clear()
    model = _model(gpu, dims)
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse")
    step(_inputs(gpu, rows, 16), _inputs(gpu, rows, 16))
    assert _names(gpu) == ({BACKWARD, GRADIENTS} if is_fused else set())


def test_a_forward_pass_counts_where_a_step_runs_one(hurried: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an elementwise loss a step runs two fused kernels and no forward pass, otherwise three; layers are five."""
    gpu, dims, rows = hurried, (16, 16, 16), 20
    monkeypatch.setattr(gpu.streams, "costs_us", {"kernel": 2e3, "matmul": 1e3})
    gpu.lt.tune(dims, rows, dtype="bfloat16", progress=False)
    strategies = [each.strategy for each in gpu.lt.explain(dims, rows, dtype="bfloat16")[-2:]]
    assert strategies == ["fused kernels", "layer by layer"]
    x, labels = _inputs(gpu, rows, 16), gpu.cp.asarray(np.arange(rows, dtype=np.int32) % 16)
    for loss, target, names in (("mse", x, {BACKWARD, GRADIENTS}), ("cross_entropy", labels, set())):
        model = _model(gpu, dims)
        step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss=loss)
        gpu.kernels.launched.clear()
        step(x, target)
        assert _names(gpu) == names, loss


def test_inference_is_measured_where_that_is_asked_for(hurried: FakeGpu) -> None:
    gpu, rows = hurried, 19
    model, x = _model(gpu, (16, 16, 4)), _inputs(gpu, rows, 16)
    model(x)  # an untuned first call must not keep the MLP from being measured later
    with gpu.lt.tuning():
        outputs = model(x)
    entries = importlib.import_module("lt_runtime.store.plan_store").plan_store(0)._document.raw
    (entry,) = (each for key, each in entries.items() if "MLPProblem" in key and f'"rows": {rows},' in key)
    assert set(entry["strategy"]) == {"fused_mlp"}
    np.testing.assert_allclose(_values(gpu, outputs), _by_layers(gpu, model, x), atol=1e-2)


@pytest.mark.parametrize(("precision", "rows"), [(None, 48), ("fp8", 64)])
def test_nothing_is_measured_while_the_stream_is_captured(
    hurried: FakeGpu, monkeypatch: pytest.MonkeyPatch, precision: str | None, rows: int
) -> None:
    """In a capture the untuned choice is taken; the next call measures, and finds layer by layer to be faster."""
    gpu = hurried
    model, x = _model(gpu, (16, 16, 16), precision=precision), _inputs(gpu, rows, 16)
    model(_inputs(gpu, 16, 16), stream=gpu.stream)  # allocates the stream's memory
    monkeypatch.setenv("LT_RUNTIME_TUNE", "first-use")
    monkeypatch.setattr(gpu.streams, "costs_us", {"kernel": 2e4, "matmul": 1e3})
    _names(gpu)
    gpu.stream.begin_capture()
    model(x, stream=gpu.stream)
    gpu.stream.end_capture().launch(gpu.stream)
    assert _names(gpu, "expect") == {FORWARD}
    model(x, stream=gpu.stream)
    assert "expect" in _names(gpu, "expect")
    model(x, stream=gpu.stream)
    assert _names(gpu) == set()


def test_an_untuned_chain_is_explained_by_the_priors(gpu: FakeGpu) -> None:
    explained = gpu.lt.explain([16, 16, 4], 43, dtype="bfloat16")
    assert explained[-1].strategy == "fused kernels (by the priors)"
    assert "one kernel" not in str(gpu.lt.explain([16, 16, 4], 43, dtype="float32"))
