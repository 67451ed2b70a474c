"""Training on the GPU has the losses of training with the NumPy reference."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.cli import demo


def _curve(device: str, dtype: str, dropout: float, steps: int) -> np.ndarray:  # type: ignore[type-arg]
    digits = demo.load_digits()
    model = lt.MLP([64, 128, 64, 10], activation="gelu", dtype=dtype, dropout=dropout, seed=4, device=device)
    step = lt.TrainStep(model, lt.AdamW(model.parameters(), lr=3e-3), batch_size=64)
    losses = []
    for i in range(steps):
        batch = slice(64 * (i % 20), 64 * (i % 20) + 64)
        x = model.device.asarray(digits.images[batch].astype(model.dtype.numpy))
        losses.append(float(step(x, model.device.asarray(digits.labels[batch]))))
    return np.array(losses)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_loss_curve_agrees_with_the_reference_in_fp32(dropout: float) -> None:
    on_gpu, on_host = (_curve(device, "float32", dropout, 50) for device in ("cuda", "cpu"))
    np.testing.assert_allclose(on_gpu, on_host, atol=1e-3, rtol=0)
    assert on_gpu[-5:].mean() < 0.5 * on_gpu[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_demo_learns(dtype: str) -> None:
    profiled = lt.profile()
    options = argparse.Namespace(device="cuda", dtype=dtype, epochs=40, dropout=0.1, seed=0)
    result = demo.train(options, None, profiled)
    assert result.accuracy >= 0.96
    assert result.device.startswith("cuda:0")
    assert {layer.name for layer in result.layers if layer.name} == {"layer0", "layer1", "layer2"}
