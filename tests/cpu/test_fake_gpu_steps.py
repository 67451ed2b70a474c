"""Replays of training steps on the pretended GPU: on any stream, with batches of any layout, with few Python calls."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of

_DIMS, _ROWS, _STEPS = [12, 16, 5], 8, 6


def _step(gpu: FakeGpu, **options: Any) -> Any:
    model = gpu.lt.MLP(_DIMS, seed=3, dropout=0.3, device=0)
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters(), lr=1e-2), **options)
    gpu.streams.synchronize_all()  # initialises the model on the default stream; calls run on other streams
    return step


def _batch(gpu: FakeGpu, seed: int, rows: int = _ROWS) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    x = gpu.cp.asarray(generator.standard_normal((rows, _DIMS[0])).astype(np.float32))
    labels = gpu.cp.asarray(generator.integers(0, _DIMS[-1], rows).astype(np.int32))
    gpu.streams.synchronize_all()
    return x, labels


def _values(gpu: FakeGpu, *steps: Any) -> list[list[bytes]]:
    gpu.streams.synchronize_all()
    return [[host_of(gpu, each.data).tobytes() for each in step.model.parameters()] for step in steps]


@pytest.mark.parametrize("graph", [True, False])
def test_streams_may_change_between_steps(gpu: FakeGpu, graph: bool) -> None:
    step, other = _step(gpu), _step(gpu, graph=graph)
    batches = [_batch(gpu, seed) for seed in range(_STEPS)]
    for batch, stream in zip(batches, [gpu.stream, gpu.other_stream, None] * 2, strict=True):
        step(*batch, stream=stream)  # The host does not wait between steps.
    gpu.synchronize()  # The last step runs on the default stream, the steps of `other` on another one.
    for batch in batches:
        other(*batch, stream=gpu.stream)
    assert len(set(map(tuple, _values(gpu, step, other)))) == 1


def test_a_graph_is_made_behind_the_steps_on_another_stream(gpu: FakeGpu) -> None:
    step, batches = _step(gpu), [_batch(gpu, 0), _batch(gpu, 1, _ROWS // 2)]
    for batch, stream in zip(batches, (gpu.stream, gpu.other_stream), strict=True):
        step(*batch, stream=stream)
    gpu.synchronize_all()  # the gradients are shared: a race of the two streams fails the test


def test_metrics_begin_anew_when_they_are_read(gpu: FakeGpu) -> None:
    step = _step(gpu)
    for steps in (2, 0, 1):
        for seed in range(steps):
            step(*_batch(gpu, seed), stream=gpu.stream)
        assert step.metrics(stream=gpu.stream).steps == steps
    step(*_batch(gpu, 0), stream=gpu.stream)
    step.metrics(stream=gpu.stream)
    step(*_batch(gpu, 0), stream=gpu.other_stream)  # the step must order this stream after the other one by itself
    assert step.metrics(stream=gpu.other_stream).steps == 1


def test_two_steps_take_turns_with_their_memory(gpu: FakeGpu) -> None:
    together, alone = ([_step(gpu), _step(gpu)] for _ in range(2))
    for i in range(_STEPS):
        for step, stream in zip(together, (gpu.stream, gpu.other_stream), strict=True):
            step(*_batch(gpu, i), stream=stream)
    for step in alone:
        for i in range(_STEPS):
            step(*_batch(gpu, i), stream=gpu.stream)
    assert _values(gpu, *together) == _values(gpu, *alone)


def test_a_step_on_another_stream_after_an_event_that_could_not_be_recorded(gpu: FakeGpu) -> None:
    step, batch = _step(gpu), _batch(gpu, 0)
    step(*batch, stream=gpu.stream)
    gpu.calls.begin()
    step(*batch, stream=gpu.stream)
    gpu.calls.begin(gpu.calls.names.index("cuEventRecord"))
    step(*batch, stream=gpu.stream)
    step(*batch, stream=gpu.other_stream)
    assert gpu.calls.failed == "cuEventRecord"
    gpu.synchronize_all()  # a race of the two streams fails the test


@pytest.mark.parametrize("kind", ["MLP", "AdamW", "EMA", "TrainStep"])
def test_objects_that_are_made_on_one_stream_are_used_on_another(gpu: FakeGpu, kind: str) -> None:
    model = gpu.lt.MLP(_DIMS, seed=3, device=0)
    optimizer, batch = gpu.lt.AdamW(model.parameters()), _batch(gpu, 0)
    with gpu.other_stream:
        if kind == "MLP":
            gpu.lt.MLP(_DIMS, device=0)(batch[0], stream=gpu.stream)
        elif kind == "AdamW":
            gpu.lt.AdamW(model.parameters()).step(stream=gpu.stream)
        elif kind == "EMA":
            gpu.lt.EMA(model).update(stream=gpu.stream)
        else:
            gpu.lt.TrainStep(model, optimizer)(*batch, stream=gpu.stream)
    gpu.synchronize(gpu.other_stream.ptr)  # writes the tables of addresses without which the kernels would crash
    gpu.synchronize_all()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, pickle.dumps])
def test_copies_and_pickles_of_graphs_launches_and_threads_are_refused_by_name(
    gpu: FakeGpu, duplicate: Callable[[Any], object]
) -> None:
    model = gpu.lt.MLP(_DIMS, seed=3, device=0)
    optimizer, ema, (x, labels) = gpu.lt.AdamW(model.parameters()), gpu.lt.EMA(model), _batch(gpu, 0)
    step = gpu.lt.TrainStep(model, optimizer, ema=ema)
    step(x, labels, stream=gpu.stream)
    bound = gpu.lt.bind(gpu.lt.add, x, x, out=x, stream=gpu.stream)
    message = "{}.* can be neither copied nor pickled, because .*; (save|call)"
    with gpu.lt.prefetch([np.ones(1)], device=0) as batches:
        refusals = {"AdamW": optimizer, "EMA": ema, "TrainStep": step, "BoundPlan": bound, "Prefetcher": batches}
        for name, each in refusals.items():
            with pytest.raises(gpu.lt.errors.KindError, match=message.format(name)):
                duplicate(each)
    duplicate(model)
    gpu.streams.synchronize_all()


def test_averages_are_copied_after_the_steps(gpu: FakeGpu) -> None:
    model, copy = (gpu.lt.MLP(_DIMS, seed=seed, device=0) for seed in (3, 4))
    ema = gpu.lt.EMA(model)
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters(), lr=1e-2), ema=ema)
    step(*_batch(gpu, 0), stream=gpu.stream)
    ema.copy_to(copy)
    gpu.synchronize_all()
    for average, parameter in zip(ema.averages.values(), copy.parameters(), strict=True):
        assert (host_of(gpu, average) == host_of(gpu, parameter.data)).all()


def test_batches_as_they_lie(gpu: FakeGpu) -> None:
    packed, gaps = _step(gpu, accumulate=2), _step(gpu, accumulate=2)
    for i in range(4):
        x, labels = _batch(gpu, i)
        wide = gpu.cp.asarray(np.full((_ROWS, _DIMS[0] + 3), np.nan, np.float32))
        wide[:, 1 : 1 + _DIMS[0]] = x
        gpu.streams.synchronize_all()
        losses = [packed(x, labels, stream=gpu.stream), gaps(wide[:, 1 : 1 + _DIMS[0]], labels, stream=gpu.stream)]
        gpu.streams.synchronize_all()
        assert len({float(host_of(gpu, loss)) for loss in losses}) == 1
    assert len(set(map(tuple, _values(gpu, packed, gaps)))) == 1


def test_other_rows_may_begin_at_the_same_address(gpu: FakeGpu) -> None:
    step, other = _step(gpu), _step(gpu)
    wide, labels = gpu.cp.asarray(np.arange(_ROWS * 2 * _DIMS[0], dtype=np.float32) / 100), _batch(gpu, 0)[1]
    packed, gaps = wide[: _ROWS * _DIMS[0]].reshape(_ROWS, _DIMS[0]), wide.reshape(_ROWS, 2 * _DIMS[0])[:, : _DIMS[0]]
    copied = gpu.cp.asarray(gaps.get())
    for x in (packed, gaps, packed, gaps):
        step(x, labels, stream=gpu.stream)
    for x in (packed, copied, packed, copied):
        other(x, labels, stream=gpu.stream)
    assert len(set(map(tuple, _values(gpu, step, other)))) == 1


def test_batches_of_many_sizes(gpu: FakeGpu) -> None:
    graphs, eager = _step(gpu), _step(gpu, graph=False)
    for i, rows in enumerate([*range(1, 11), 3, 1, 1, 2]):
        for step in (graphs, eager):
            step(*_batch(gpu, i, rows), stream=gpu.stream)
    assert len(set(map(tuple, _values(gpu, graphs, eager)))) == 1


@pytest.mark.parametrize("current", [True, False])
def test_a_replay_takes_a_short_way(gpu: FakeGpu, current: bool) -> None:
    step, home, entered = _step(gpu), str(Path(gpu.lt.__file__).parent), []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(home):
            entered.append((frame.f_code.co_filename.removeprefix(home), frame.f_code.co_name))

    batches, ways = [_batch(gpu, seed) for seed in range(2)], []
    with gpu.stream:
        stream = None if current else gpu.stream.ptr
        step(*batches[0], stream=stream)
        # A replay with another batch than the step before, and one with the same batch, may enter functions of at most
        # this many modules, and this many functions.
        for batch, modules, functions in ((batches[1], 6, 14), (batches[1], 5, 11)):
            entered.clear()
            sys.setprofile(note)
            try:
                step(*batch, stream=stream)
            finally:
                sys.setprofile(None)
            ways.append(([*entered], modules, functions))
    gpu.streams.synchronize_all()
    for way, modules, functions in ways:
        assert len({file for file, _ in way}) <= modules, way
        assert len(way) <= functions, way


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("deed", ["waits for the device", "waits for the stream", "reads a value", "allocates"])
def test_a_block_that_cannot_be_captured_is_named(gpu: FakeGpu, deed: str, phase: str) -> None:
    lt, driver = gpu.lt, sys.modules["lt_runtime.gpu.driver"]
    deeds = {
        "waits for the device": lambda x, stream: gpu.cp.cuda.Device().synchronize(),
        "waits for the stream": lambda x, stream: driver.call("cuStreamSynchronize", stream),
        "reads a value": lambda x, stream: float(x.sum()),
        "allocates": lambda x, stream: driver.check("cuMemAlloc", 900 * driver.is_capturing(stream)),
    }
    forbidden = [deeds[deed]]

    class Mine(lt.Block):  # type: ignore[misc]
        def forward(self, x: Any, run: Any) -> Any:
            return self._pass(x, run, "forward")

        def backward(self, dy: Any, run: Any) -> Any:
            return self._pass(dy, run, "backward")

        def _pass(self, x: Any, run: Any, name: str) -> Any:
            with run.array_module(x):
                for act in forbidden if name == phase else ():
                    act(x, run.stream)
            return x

    def made() -> Any:
        mine = lt.Residual(lt.Chain(lt.Linear(_DIMS[0], _DIMS[0], seed=1, device=0), Mine()))
        model = lt.Chain(mine, lt.Linear(_DIMS[0], _DIMS[-1], seed=2, device=0))
        return lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2))

    step, other = made(), made()
    before = _values(gpu, step)
    named = r"^0.inner.1 \(Mine\) failed during the capture of a step: .*; a block must neither wait for the GPU"
    with pytest.raises(lt.errors.CaptureError, match=named):
        step(*_batch(gpu, 0), stream=gpu.stream)
    assert _values(gpu, step) == before
    forbidden.clear()
    for seed in range(2):
        for each in (step, other):
            each(*_batch(gpu, seed), stream=gpu.stream)
    assert _values(gpu, step) == _values(gpu, other) != before
