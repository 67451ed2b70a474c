"""Training steps on the pretended GPU against the same steps by the reference on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of

_DIMS, _ROWS, _STEPS = [24, 40, 32, 5], 16, 5


def _trained(lt: Any, device: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """A model and its training step."""
    made = {name: options[name] for name in ("dtype", "dropout", "activation") if name in options}
    model = lt.MLP(_DIMS, seed=3, device=device, **made)
    schedule = lt.schedules.warmup_cosine(2, 8)
    optimizer = lt.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, schedule=schedule)
    asked = {name: options[name] for name in ("loss", "graph", "accumulate") if name in options}
    return model, lt.TrainStep(model, optimizer, batch_size=_ROWS, **asked)


def _batch(seed: int, loss: str, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((_ROWS, _DIMS[0])).astype(dtype)
    if loss == "mse":
        return x, generator.standard_normal((_ROWS, _DIMS[-1])).astype(dtype)
    labels = generator.integers(0, _DIMS[-1], _ROWS)
    labels[2] = -100
    return x, labels


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="cross entropy"),
        pytest.param({"dropout": 0.5, "activation": "gelu"}, id="dropout"),
        pytest.param({"loss": "mse"}, id="mse"),
        pytest.param({"accumulate": 2, "dropout": 0.5, "activation": "gelu"}, id="accumulate"),
        pytest.param({"graph": False}, id="one by one"),
        pytest.param({"dtype": "bfloat16"}, id="bfloat16"),
    ],
)
def test_training(gpu: FakeGpu, options: dict[str, Any]) -> None:
    loss = options.get("loss", "cross_entropy")
    with gpu.others_package() as host_lt:
        expected_model, expected_step = _trained(host_lt, "cpu", {**options, "graph": True})
        dtype = expected_model.parameters()[0].data.dtype
        batches = [_batch(seed % 3, loss, dtype) for seed in range(_STEPS)]
        expected_losses = [float(expected_step(*batch)) for batch in batches]
        expected_metrics = expected_step.metrics()
    model, step = _trained(gpu.lt, "cuda", options)
    gpu.streams.synchronize_all()  # the model was initialised on the default stream
    tolerance = 3e-2 if options.get("dtype") else 2e-5
    for (x, target), expected in zip(batches, expected_losses, strict=True):
        made = step(gpu.cp.asarray(x), gpu.cp.asarray(target), stream=gpu.stream)
        gpu.synchronize(gpu.stream.ptr)
        np.testing.assert_allclose(host_of(gpu, made), expected, rtol=tolerance)
    for parameter, other in zip(model.parameters(), expected_model.parameters(), strict=True):
        actual = host_of(gpu, parameter.data).astype(np.float64)
        np.testing.assert_allclose(actual, other.data.astype(np.float64), atol=tolerance, err_msg=parameter.name)
    metrics = step.metrics(stream=gpu.stream)
    assert metrics.steps == _STEPS
    assert metrics.loss == pytest.approx(expected_metrics.loss, rel=tolerance)
    assert metrics.accuracy == pytest.approx(expected_metrics.accuracy)
