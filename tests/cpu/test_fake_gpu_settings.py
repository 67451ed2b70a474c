"""Changes of an optimizer's settings on the pretended GPU, also while earlier steps still wait on the stream."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from tests.support.fake_gpu import FakeGpu
from tests.support.fake_streams import Status
from tests.support.over_fake_gpu import own
from tests.support.placed import host_of

_DIMS, _ROWS = [12, 16, 5], 8


def _step(gpu: FakeGpu, lt: Any = None, device: object = 0, **options: Any) -> Any:
    """Makes a training step with an EMA."""
    lt = lt or gpu.lt
    model = lt.MLP(_DIMS, seed=3, dropout=0.3, device=device, dtype=options.pop("dtype", "float32"))
    schedule = lt.schedules.warmup_linear(2, 9)
    made = {name: options.pop(name) for name in ("max_norm", "moments") if name in options}
    optimizer = lt.AdamW(model.parameters(), lr=1e-2, schedule=schedule, **made)
    step = lt.TrainStep(model, optimizer, ema=lt.EMA(model, 0.75), **options)
    gpu.streams.synchronize_all()  # the model is initialised on the default stream, while steps run on other streams
    return step


def _batch(seed: int, dtype: Any = np.float32) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((_ROWS, _DIMS[0])).astype(dtype)
    return x, generator.integers(0, _DIMS[-1], _ROWS).astype(np.int32)


def _values(gpu: FakeGpu, step: Any) -> list[bytes]:
    """Returns the bytes of every array that a step changes; waits for all streams."""
    gpu.streams.synchronize_all()
    arrays = [each.data for each in step.model.parameters()] + [*step.ema.averages.values()]
    arrays += [moment for moments in step.optimizer.moments for moment in moments]
    return [host_of(gpu, each).tobytes() for each in arrays]


def _schedule(step: Any, kind: str) -> None:
    step.optimizer.schedule = None if kind == "none" else type(step.optimizer.schedule)(kind, 1, 12, 0.25)


CHANGES: dict[int, Callable[[Any], None]] = {
    1: lambda step: setattr(step.optimizer, "lr", 0.5),
    2: lambda step: setattr(step.optimizer, "weight_decay", 0.25),
    3: lambda step: _schedule(step, "cosine"),
    4: lambda step: setattr(step.model.layers[0].weight, "lr_scale", 0.125),
    5: lambda step: setattr(step.model.layers[1].bias, "weight_decay", 0.5),
    6: lambda step: _schedule(step, "none"),
    7: lambda step: setattr(step.optimizer, "lr", 0),
}


@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2}, {"max_norm": 1.0, "moments": "bfloat16"}, {"dtype": "bfloat16"}], ids=str
)
def test_settings_changed_in_the_middle_of_a_captured_run(gpu: FakeGpu, options: dict[str, Any]) -> None:
    graph, eager, unchanged = (_step(gpu, **options, graph=graph) for graph in (True, False, True))
    dtype = host_of(gpu, graph.model.layers[0].weight.data).dtype
    before: list[list[bytes]] = []
    for i in range(9):
        x, labels = map(gpu.cp.asarray, _batch(i, dtype))
        for step in (graph, eager):
            if i in CHANGES:
                CHANGES[i](step)
            step(x, labels, stream=gpu.stream)
        unchanged(x, labels, stream=gpu.stream)
        assert _values(gpu, graph) == _values(gpu, eager), i
        assert (_values(gpu, graph) == _values(gpu, unchanged)) == (i == 0)
        before.append(_values(gpu, graph))
    assert before[-1][0] == before[-2][0] == before[-3][0]  # with a learning rate of 0 the update keeps all parameters


def _rules_step(gpu: FakeGpu, lt: Any, device: object, **options: Any) -> Any:
    """Makes a training step whose optimizer has three rules and a table as its schedule."""
    model = lt.MLP(_DIMS, seed=3, device=device)
    (first, second), rules = model.layers, lt.rules
    groups = [
        ([first.weight], rules.Lion(0.02)),
        ([second.weight, second.bias], rules.SGD(0.25, 0.5, nesterov=True)),
        ([first.bias], rules.AdamW(0.01)),
    ]
    optimizer = lt.Optimizer(groups, lt.schedules.table([0.5, 1.0, 0.25]), max_norm=1.0, scaler=lt.GradScaler(4.0))
    step = lt.TrainStep(model, optimizer, **options)
    gpu.streams.synchronize_all()
    return step


def test_three_rules_and_a_table_in_a_graph(gpu: FakeGpu) -> None:
    def change(i: int, step: Any, lt: Any) -> None:
        if i == 2:
            step.optimizer.schedule = lt.schedules.from_function(lambda number: number / 8, 5)
        if i == 5:
            rules = step.optimizer.rules
            step.optimizer.rules = [replace(rule, lr=rule.lr / 2, weight_decay=0.5) for rule in rules]
        if i == 6:
            step.optimizer.schedule = None

    graph, eager = (_rules_step(gpu, gpu.lt, 0, graph=graph) for graph in (True, False))
    with gpu.others_package() as host_lt:
        expected = _rules_step(gpu, host_lt, "cpu")
        for i in range(8):
            change(i, expected, host_lt)
            expected(*_batch(i))
    for i in range(8):
        x, labels = map(gpu.cp.asarray, _batch(i))
        for step in (graph, eager):
            change(i, step, gpu.lt)
            step(x, labels, stream=(gpu.other_stream, gpu.stream)[i % 2])
        gpu.streams.synchronize_all()
        for one, other in zip(graph.model.parameters(), eager.model.parameters(), strict=True):
            assert host_of(gpu, one.data).tobytes() == host_of(gpu, other.data).tobytes(), i
    assert host_of(gpu, graph.optimizer.steps).tolist() == [8]
    for one, other in zip(graph.model.parameters(), expected.model.parameters(), strict=True):
        np.testing.assert_allclose(host_of(gpu, one.data), other.data, atol=2e-5)
    assert expected.optimizer.rates == (0.01, 0.125, 0.005)
    assert repr(graph).endswith("Optimizer, loss=cross_entropy, batch_size=None, accumulate=1)")
    state = eager.optimizer.state_dict()
    graph.optimizer.load_state_dict(state)
    again = graph.optimizer.state_dict()
    assert all(again[name].tobytes() == array.tobytes() for name, array in state.items())


def test_a_new_table_is_refused_in_a_capture(gpu: FakeGpu) -> None:
    arrays = [gpu.cp.asarray(np.ones(40, np.float32)) for _ in range(2)]
    optimizer = gpu.lt.Optimizer([([gpu.lt.Parameter(*arrays)], gpu.lt.rules.SGD())])
    gpu.streams.synchronize_all()
    optimizer.schedule = gpu.lt.schedules.table([0.5])
    with gpu.stream:
        gpu.stream.begin_capture()
        with pytest.raises(gpu.lt.errors.CaptureError, match="changed before the capture; call its apply_settings"):
            optimizer.step()
        with pytest.raises(gpu.lt.errors.CaptureError, match="cannot be read or written by the host"):
            optimizer.state_dict()
        gpu.stream.end_capture()


def test_a_rehearsal_for_a_second_batch_size_updates_nothing(gpu: FakeGpu) -> None:
    graph, eager = (_step(gpu, graph=graph) for graph in (True, False))
    for rows in (_ROWS, _ROWS - 3):
        batch = [gpu.cp.asarray(each[:rows]) for each in _batch(0)]
        for step in (graph, eager):
            step(*batch, stream=gpu.stream)
        assert _values(gpu, graph) == _values(gpu, eager)


def test_the_host_goes_the_same_way(gpu: FakeGpu) -> None:
    with gpu.others_package() as host_lt:
        expected = _step(gpu, host_lt, "cpu")
        for i in range(8):
            CHANGES.get(i, id)(expected)
            expected(*_batch(i))
    step = _step(gpu)
    for i in range(8):
        CHANGES.get(i, id)(step)
        step(*map(gpu.cp.asarray, _batch(i)), stream=gpu.stream)
    gpu.streams.synchronize_all()
    for one, other in zip(step.model.parameters(), expected.model.parameters(), strict=True):
        np.testing.assert_allclose(host_of(gpu, one.data), other.data, atol=2e-5)
    for name, average in step.ema.averages.items():
        np.testing.assert_allclose(host_of(gpu, average), expected.ema.averages[name], atol=2e-5)


def test_steps_under_way_keep_the_settings_that_they_were_put_on_the_stream_with(gpu: FakeGpu) -> None:
    together, waiting = _step(gpu), _step(gpu)
    batches = [tuple(map(gpu.cp.asarray, _batch(i))) for i in range(6)]
    gpu.streams.synchronize_all()
    for step in (together, waiting):
        for i, batch in enumerate(batches):
            step.optimizer.lr = 0.5**i
            step(*batch, stream=(gpu.other_stream, gpu.stream)[i % 2])
            if step is waiting:
                gpu.streams.synchronize_all()
            step.optimizer.lr = 3.0  # no step runs with this learning rate: it changes before the next step
    assert _values(gpu, together) == _values(gpu, waiting)


def test_a_graph_of_ones_own_follows_what_is_applied(gpu: FakeGpu) -> None:
    parameters = [
        [gpu.lt.Parameter(gpu.cp.asarray(np.ones(40, np.float32)), gpu.cp.asarray(np.ones(40, np.float32)))]
        for _ in range(2)
    ]
    captured, eager = (gpu.lt.AdamW(each, lr=0.1) for each in parameters)
    gpu.streams.synchronize_all()
    captured.lr = 0.2
    with gpu.stream:
        gpu.stream.begin_capture()
        with pytest.raises(gpu.lt.errors.CaptureError, match="changed before the capture; call its apply_settings"):
            captured.step()
        gpu.stream.end_capture()
        captured.apply_settings()
        gpu.stream.begin_capture()
        captured.step()
        graph = gpu.stream.end_capture()
        for rate in (0.2, 0.4, 0.1):
            captured.lr = eager.lr = rate
            captured.apply_settings()
            graph.launch(gpu.stream)
            eager.step()
    gpu.streams.synchronize_all()
    one, other = (host_of(gpu, each.data) for (each,) in parameters)
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("graph", [True, False])
def test_a_memset_that_fails_is_made_at_the_next_step(
    gpu: FakeGpu, graph: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, other = _step(gpu, graph=graph), _step(gpu, graph=graph)
    batches = [tuple(map(gpu.cp.asarray, _batch(i))) for i in range(4)]
    for each in (step, other):
        each(*batches[0], stream=gpu.stream)
        each.optimizer.lr, each.model.layers[0].bias.lr_scale = 0.5, 0.25
    before, sound = _values(gpu, step), driver.cuMemsetD32Async
    answers = iter([sound, lambda *_: (Status.CUDA_ERROR_UNKNOWN,)])
    monkeypatch.setattr(driver, "cuMemsetD32Async", lambda *arguments: next(answers)(*arguments))
    # Makes the second of two memsets fail.
    with pytest.raises(gpu.lt.errors.DriverError, match="cuMemsetD32Async"):
        step(*batches[1], stream=gpu.stream)
    assert [*answers] == []
    monkeypatch.setattr(driver, "cuMemsetD32Async", sound)
    assert _values(gpu, step) == before
    for batch in batches[1:]:
        for each in (step, other):
            each(*batch, stream=gpu.stream)
    assert _values(gpu, step) == _values(gpu, other)


def _interrupt(_: Any) -> None:
    raise KeyboardInterrupt


def _fail(_: Any) -> None:
    own("gpu.driver").check("cuLaunchKernelEx", Status.CUDA_ERROR_UNKNOWN)


@pytest.mark.parametrize("stop", [_fail, _interrupt])
def test_a_failed_update_does_not_skip_the_next_one(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, stop: Any) -> None:
    model = gpu.lt.MLP(_DIMS, device="cuda")
    optimizer, gradient = gpu.lt.AdamW(model.parameters(), skip_nonfinite=True), model.parameters()[0].grad
    optimizer.step(stream=gpu.stream)
    gpu.synchronize_all()
    gradient.fill(np.inf)
    gpu.synchronize_all()
    launches = own("gpu.driver").Launch
    sound = launches.__call__
    answers = iter([sound, stop])
    monkeypatch.setattr(launches, "__call__", lambda launch: next(answers)(launch))
    with pytest.raises((gpu.lt.errors.DriverError, KeyboardInterrupt)):
        optimizer.step(stream=gpu.stream)
    monkeypatch.setattr(launches, "__call__", sound)
    gpu.synchronize_all()
    gradient.fill(0.0)
    gpu.synchronize_all()
    optimizer.step(stream=gpu.stream)
    gpu.synchronize_all()
    assert host_of(gpu, optimizer.steps).tolist() == [2]


@pytest.mark.parametrize("part", ["data", "grad"])
def test_a_replaced_array_is_refused_before_anything_is_launched(gpu: FakeGpu, part: str) -> None:
    step = _step(gpu, max_norm=1.0)
    weight = step.model.layers[0].weight
    setattr(weight, part, gpu.cp.asarray(np.zeros((16, 12), np.float32)))
    given = {stream: [*kinds] for stream, kinds in gpu.streams.log.items()}
    for run in (
        lambda: step(*map(gpu.cp.asarray, _batch(0)), stream=gpu.stream),
        lambda: step.optimizer.step(stream=gpu.stream),
        lambda: step.ema.update(stream=gpu.stream),
    ):
        with pytest.raises(gpu.lt.errors.OperandError, match=r"an array of layer0.weight was replaced"):
            run()
    assert gpu.streams.log == given


def test_averages_of_an_array_with_gaps_are_refused(gpu: FakeGpu) -> None:
    model = gpu.lt.MLP(_DIMS, device="cuda")
    model.layers[0].weight.data = gpu.cp.asarray(np.zeros((16, 24), np.float32))[:, ::2]
    with pytest.raises(gpu.lt.errors.LtError, match="it must be row-major without gaps"):
        gpu.lt.EMA(model)
