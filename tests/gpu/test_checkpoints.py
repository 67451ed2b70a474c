"""A run on the GPU that is resumed from a checkpoint ends with the bits of an unbroken one, in graphs and eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.saving import checkpoints

BATCH = 64


class _Run:
    def __init__(self, dtype: str, *, graph: bool) -> None:
        self.model = lt.MLP([40, 96, 10], activation="gelu", dtype=dtype, dropout=0.2, seed=3, device="cuda")
        scaler = lt.GradScaler(1024.0, growth_interval=3) if dtype == "float16" else None
        self.optimizer = lt.AdamW(self.model.parameters(), lr=1e-2, scaler=scaler, max_norm=1.0)
        self.step = lt.TrainStep(self.model, self.optimizer, batch_size=BATCH, graph=graph)

    def train(self, steps: range) -> None:
        for i in steps:
            generator = np.random.default_rng(i)
            x = self.model.device.asarray(generator.standard_normal((BATCH, 40)).astype(self.model.dtype.numpy))
            self.step(x, cp.asarray(generator.integers(0, 10, BATCH)))

    def state(self) -> dict[str, bytes]:
        cp.cuda.Device().synchronize()
        arrays: dict[str, Any] = checkpoints._arrays(self.model, self.optimizer)
        return {name: cp.asnumpy(array).tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path, dtype: str, graph: bool) -> None:
    unbroken, first, second = (_Run(dtype, graph=graph) for _ in range(3))
    unbroken.train(range(12))
    first.train(range(5))
    lt.save_checkpoint(tmp_path / "run", first.model, first.optimizer)
    second.train(range(90, 93))  # its graph is captured; its own values must not matter
    lt.load_checkpoint(tmp_path / "run", second.model, second.optimizer)
    assert second.state() == first.state()
    second.train(range(5, 12))
    assert second.state() == unbroken.state()


def test_a_checkpoint_goes_from_the_gpu_to_the_host(tmp_path: Path) -> None:
    run = _Run("bfloat16", graph=True)
    run.train(range(3))
    lt.save_checkpoint(tmp_path / "run", run.model, run.optimizer)
    model = lt.MLP([40, 96, 10], activation="gelu", dtype="bfloat16", dropout=0.2, seed=3, device="cpu")
    optimizer = lt.AdamW(model.parameters(), lr=1e-2, max_norm=1.0)
    lt.load_checkpoint(tmp_path / "run", model, optimizer)
    assert {n: a.tobytes() for n, a in checkpoints._arrays(model, optimizer).items()} == run.state()
