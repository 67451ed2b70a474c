"""A training step measures the layers that have no measured plan; later steps run by the measured plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cupy as cp
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.environment import RECORD_VARIABLE, TUNE_VARIABLE
from lt_runtime.ops import first_use
from lt_runtime.paths import CACHE_VARIABLE
from lt_runtime.plans import cache
from lt_runtime.store.plan_store import plan_store
from lt_runtime.store.recording import read_recorded

DIMS = (72, 160, 24)
ROWS = 64


@pytest.fixture
def met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which this process records its problems. The process has no plan, and its plan cache is empty."""
    monkeypatch.delenv(TUNE_VARIABLE)
    monkeypatch.setenv(RECORD_VARIABLE, str(tmp_path / "met.jsonl"))
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    _forget(monkeypatch)
    return tmp_path / "met.jsonl"


def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forgets all plans in memory, so that the process finds what a new process would find."""
    monkeypatch.setattr(cache, "_plans", {})
    cache.calls.clear()
    monkeypatch.setattr(first_use, "_seen", set())


def _made(**options: Any) -> tuple[lt.MLP, lt.AdamW, lt.TrainStep]:
    model = lt.MLP(DIMS, activation="gelu", dtype="bfloat16", seed=3, device="cuda")
    optimizer = lt.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, lt.TrainStep(model, optimizer, loss="mse", **options)


def _trained(rows: int = ROWS, **options: Any) -> list[bytes]:
    model, _, step = _made(**options)
    return _train(model, step, rows)


def _train(model: lt.MLP, step: lt.TrainStep, rows: int = ROWS) -> list[bytes]:
    """Makes three training steps; returns the losses, and the parameters after the last step."""
    losses = []
    for i in range(3):
        generator = np.random.default_rng(i)
        batch = [generator.standard_normal((rows, n)).astype(model.dtype.numpy) for n in (DIMS[0], DIMS[-1])]
        losses.append(cp.asnumpy(step(*map(cp.asarray, batch))).tobytes())
    return [*losses, *(cp.asnumpy(each.data).tobytes() for each in model.parameters())]


@pytest.mark.parametrize(("options", "rows"), [({}, ROWS), ({"accumulate": 2}, 2 * ROWS)], ids=str)
def test_a_step_measures_its_layers_and_later_ones_follow(
    met: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], rows: int
) -> None:
    first = _trained(rows, **options)
    problems = read_recorded(met)
    assert problems
    assert all(first_use.is_measured(each, 0) for each in problems)
    known = {**plan_store(0)._document.raw}
    for others in ({}, {"graph": False}, {"tune": False}, {"tune": False, "graph": False}):
        _forget(monkeypatch)
        assert _trained(rows, **options, **others) == first
    assert plan_store(0)._document.raw == known
