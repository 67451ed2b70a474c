"""Weights of a PyTorch `nn.Sequential` are loaded, trained further, and returned under their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import lt_runtime as lt

NAMES = {f"layer{i}.{part}": f"{2 * i}.{part}" for i in range(2) for part in ("weight", "bias")}


def main(xp: Any, device: str, dtype: str, state: Mapping[str, Any], x: Any, lr: float = 0.0) -> tuple[Any, Any]:
    """Returns the outputs for some inputs, and the weights after ten updates.

    Args:
        state: state_dict of nn.Sequential(nn.Linear(...), nn.GELU(), nn.Linear(...)).
    """
    outputs, inputs = state["0.weight"].shape
    model = lt.MLP([inputs, outputs, len(state["2.bias"])], "gelu_erf", dtype=dtype, device=device, seed=9)
    optimizer = lt.AdamW(model.parameters(), lr=lr)
    model.load_state_dict(state, names=NAMES)
    y = model(x)
    step = lt.TrainStep(model, optimizer, loss="mse", batch_size=len(x))
    for _ in range(10):
        step(x, xp.zeros_like(y))
    return y, model.state_dict(names=NAMES)


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """Copies a NumPy or CuPy array into a NumPy array."""
    return np.asarray(array.get() if hasattr(array, "get") else array)
