"""Checkpoints on the pretended GPU: a resumed graph continues bit by bit; a failed write restores the old values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.fake_gpu import FakeGpu
from tests.support.placed import host_of

_DIMS, _ROWS = [8, 16, 3], 16


class _Run:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, lt = gpu, gpu.lt
        self.model = lt.MLP(_DIMS, activation="gelu", dropout=0.3, seed=3, device="cuda")
        scaler = lt.GradScaler(1024.0, growth_interval=3)
        self.optimizer = lt.AdamW(self.model.parameters(), lr=1e-2, scaler=scaler, max_norm=1.0, amsgrad=True)
        self.step = lt.TrainStep(self.model, self.optimizer, batch_size=_ROWS)
        gpu.streams.synchronize_all()

    def train(self, steps: range) -> None:
        for i in steps:
            generator = np.random.default_rng(i)
            x = generator.standard_normal((_ROWS, _DIMS[0])).astype(np.float32)
            labels = generator.integers(0, _DIMS[-1], _ROWS)
            self.step(self.gpu.cp.asarray(x), self.gpu.cp.asarray(labels), stream=self.gpu.stream)
        self.gpu.synchronize(self.gpu.stream.ptr)

    def state(self) -> list[bytes]:
        optimizer = self.optimizer
        arrays: list[Any] = [each.data for each in self.model.parameters()]
        arrays += [moment for moments in optimizer.moments for moment in moments]
        arrays += [optimizer.steps, optimizer.skipped_steps, optimizer.grad_norm]
        arrays += [optimizer.scaler.scale, optimizer.scaler.growth_tracker]
        return [host_of(self.gpu, array).tobytes() for array in arrays]


def test_a_resumed_run_is_the_unbroken_one(gpu: FakeGpu, tmp_path: Path) -> None:
    unbroken, first, second = (_Run(gpu) for _ in range(3))
    unbroken.train(range(8))
    first.train(range(4))
    gpu.lt.save_checkpoint(tmp_path / "run", first.model, first.optimizer)
    second.train(range(90, 93))
    gpu.lt.load_checkpoint(tmp_path / "run", second.model, second.optimizer)
    assert second.state() == first.state()
    second.train(range(4, 8))
    assert second.state() == unbroken.state()


@pytest.mark.parametrize("failing", ["write", "synchronize"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_write_that_fails_changes_nothing(
    gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, error: type[BaseException]
) -> None:
    run, other, path = _Run(gpu), _Run(gpu), tmp_path / "run"
    run.train(range(3))
    gpu.lt.save_checkpoint(path, run.model, run.optimizer)
    other.train(range(3, 5))
    before, calls = other.state(), list[None]()
    kind = type(other.model.device)
    work = getattr(kind, failing)

    def fail(*arguments: Any) -> None:
        calls.append(None)
        if len(calls) == (9 if failing == "write" else 2):
            raise error("in the middle")
        work(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(kind, failing, fail)
        with pytest.raises(error, match="in the middle"):
            gpu.lt.load_checkpoint(path, other.model, other.optimizer)
    assert other.state() == before
    gpu.lt.load_checkpoint(path, other.model, other.optimizer)
    assert other.state() == run.state()
