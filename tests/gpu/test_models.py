"""Models with options by layer on the GPU, what their contexts keep, and their evaluation."""

from __future__ import annotations

from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt

DIMS, ROWS = [72, 128, 64, 24], 48
MODELS: dict[str, dict[str, Any]] = {
    "mixed": {"activation": ["tanh", "relu", "sigmoid"], "bias": [False, True, False]},
    "last activation": {"activation": "gelu", "output_activation": "silu", "dropout": 0.5},
    "no bias": {"bias": False, "dropout": [0.5, 0.0, 0.25]},
}


def _numbers(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("name", MODELS)
def test_gradients(name: str) -> None:
    x, dy = _numbers(0, ROWS, DIMS[0]), _numbers(1, ROWS, DIMS[-1])
    made = []
    for device in ("cpu", "cuda"):
        model = lt.MLP(DIMS, device=device, seed=3, **MODELS[name])
        outputs, contexts = model.forward(model.device.asarray(x), 5)
        dx = model.backward(model.device.asarray(dy), contexts, need_dx=True)
        assert model.backward(model.device.asarray(dy), contexts) is None
        arrays = [outputs, dx, *(each.grad for each in model.parameters())]
        made.append([model.device.to_host(each) for each in arrays])
    for expected, actual in zip(*made, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graph_and_eager_agree_bitwise(name: str, dtype: str) -> None:
    x, target = (cp.asarray(_numbers(i, ROWS, width)) for i, width in enumerate((DIMS[0], DIMS[-1])))
    states = []
    for graph in (True, False):
        model = lt.MLP(DIMS, dtype=dtype, device="cuda", seed=3, **MODELS[name])
        kind = model.parameters()[0].data.dtype
        step = lt.TrainStep(model, lt.AdamW(model.parameters()), loss="mse", graph=graph)
        losses = [float(step(x.astype(kind), target.astype(kind))) for _ in range(6)]
        states.append((losses, [cp.asnumpy(each.data).tobytes() for each in model.parameters()]))
    assert states[0] == states[1]
    assert losses[-1] < losses[0]
