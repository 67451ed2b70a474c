"""Models with options by layer on the pretended GPU, against the same models on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.fake_streams import MEMCPY
from tests.support.numpy_cases import numbers
from tests.support.placed import host_of

_DIMS, _ROWS = [24, 40, 32, 8], 16
_MODELS: dict[str, dict[str, Any]] = {
    "mixed": {"activation": ["tanh", "relu", "sigmoid"], "bias": [False, True, False]},
    "last activation": {"activation": "gelu", "output_activation": "tanh", "dropout": 0.5},
    "no bias": {"bias": False, "dropout": [0.5, 0.0, 0.25]},
}


@pytest.mark.parametrize("name", _MODELS)
def test_gradients(gpu: FakeGpu, name: str) -> None:
    x, dy = numbers(0, (_ROWS, _DIMS[0]), "float32"), numbers(1, (_ROWS, _DIMS[-1]), "float32")
    with gpu.others_package() as host_lt:
        expected = host_lt.MLP(_DIMS, device="cpu", seed=3, **_MODELS[name])
        outputs, contexts = expected.forward(x, 5)
        expected_dx = expected.backward(dy, contexts, need_dx=True)
    model = gpu.lt.MLP(_DIMS, device="cuda", seed=3, **_MODELS[name])
    gpu.streams.synchronize_all()  # the model is initialised on the default stream, and called on another stream
    made, contexts = model.forward(gpu.cp.asarray(x), 5, stream=gpu.stream)
    dx = model.backward(gpu.cp.asarray(dy), contexts, need_dx=True, stream=gpu.stream)
    assert model.backward(gpu.cp.asarray(dy), contexts, stream=gpu.stream) is None
    gpu.synchronize(gpu.stream.ptr)
    np.testing.assert_allclose(host_of(gpu, made), outputs, atol=2e-5)
    np.testing.assert_allclose(host_of(gpu, dx), expected_dx, atol=2e-5)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        np.testing.assert_allclose(host_of(gpu, one.grad), other.grad, atol=5e-5, err_msg=one.name)


@pytest.mark.parametrize("name", _MODELS)
@pytest.mark.parametrize("graph", [False, True])
def test_training(gpu: FakeGpu, name: str, graph: bool) -> None:
    x, target = numbers(0, (_ROWS, _DIMS[0]), "float32"), numbers(1, (_ROWS, _DIMS[-1]), "float32")

    def trained(lt: Any, device: str) -> tuple[Any, Any]:
        model = lt.MLP(_DIMS, device=device, seed=3, **_MODELS[name])
        return model, lt.TrainStep(model, lt.AdamW(model.parameters(), lr=1e-2), loss="mse", graph=graph)

    with gpu.others_package() as host_lt:
        expected, its_step = trained(host_lt, "cpu")
        losses = [float(its_step(x, target)) for _ in range(4)]
    model, step = trained(gpu.lt, "cuda")
    gpu.streams.synchronize_all()
    for loss in losses:
        made = step(gpu.cp.asarray(x), gpu.cp.asarray(target), stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        np.testing.assert_allclose(host_of(gpu, made), loss, rtol=2e-5)
    for one, other in zip(model.parameters(), expected.parameters(), strict=True):
        np.testing.assert_allclose(host_of(gpu, one.data), other.data, atol=5e-5, err_msg=one.name)


def test_a_step_that_advances_keeps_its_masks(gpu: FakeGpu) -> None:
    x, dy = (gpu.cp.asarray(numbers(i, (_ROWS, width), "float32")) for i, width in enumerate((_DIMS[0], _DIMS[-1])))
    made = []
    for step in (None, 0):
        model = gpu.lt.MLP(_DIMS, dropout=0.5, device="cuda", seed=3)
        optimizer = gpu.lt.AdamW(model.parameters(), lr=0.0)
        gpu.streams.synchronize_all()
        steps = step if step is not None else optimizer.steps
        _, contexts = model.forward(x, steps, stream=gpu.stream)
        optimizer.step(stream=gpu.stream)
        model.backward(dy, contexts, stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        made.append([host_of(gpu, each.grad).copy() for each in model.parameters()])
        assert host_of(gpu, optimizer.steps).item() == 1
    for one, other in zip(*made, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_captured_step_copies_no_step(gpu: FakeGpu) -> None:
    model = gpu.lt.MLP(_DIMS, dropout=0.5, device="cuda")
    step = gpu.lt.TrainStep(model, gpu.lt.AdamW(model.parameters()), loss="mse")
    gpu.streams.synchronize_all()
    arrays = [gpu.cp.asarray(numbers(i, (_ROWS, width), "float32")) for i, width in enumerate((_DIMS[0], _DIMS[-1]))]
    step(*arrays, stream=gpu.stream)
    gpu.synchronize(gpu.stream.ptr)
    (batches,) = step._gpu._buffers.values()
    nodes = gpu.driver._graphs[batches.graph.executable].nodes
    assert len(nodes) > 5
    assert MEMCPY not in [node.kind for node in nodes]
