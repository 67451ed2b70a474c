"""Small models that train on the host, and comparisons of their whole state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import safetensors.numpy
from safetensors import safe_open

import lt_runtime as lt
from tests.support.numpy_cases import DTYPES, Array

BATCH = 16
Run: TypeAlias = tuple[lt.MLP, lt.AdamW]


def run_of(dtype: str = "float32", *, scaled: bool = False, **options: Any) -> Run:
    model = lt.MLP([6, 12, 3], activation="gelu", dtype=dtype, dropout=0.3, seed=11, device="cpu")
    options = {"lr": 1e-2, "schedule": lt.schedules.warmup_linear(3, 40), **options}
    scaler = lt.GradScaler(1024.0, growth_interval=3) if scaled else None
    return model, lt.AdamW(model.parameters(), scaler=scaler, **options)


def train(run: Run, steps: range) -> None:
    model, optimizer = run
    step = lt.TrainStep(model, optimizer, batch_size=BATCH)
    for i in steps:
        generator = np.random.default_rng(i)
        x = generator.standard_normal((BATCH, 6)).astype(DTYPES[model.dtype.value])
        step(x, generator.integers(0, 3, BATCH).astype(np.int32))


def arrays_of(run: Run) -> dict[str, Array]:
    """Returns all values that training changes: parameters, moments, counters, scale."""
    model, optimizer = run
    found = {f"{each.name}.{part}": getattr(each, part) for each in model.parameters() for part in ("data", "master")}
    for each, moments in zip(optimizer.parameters, optimizer.moments, strict=True):
        found |= {f"{each.name}, moment {i}": moment for i, moment in enumerate(moments)}
    found |= {name: getattr(optimizer, name) for name in ("steps", "skipped_steps", "grad_norm")}
    if optimizer.scaler is not None:
        found |= {"scale": optimizer.scaler.scale, "growth": optimizer.scaler.growth_tracker}
    return {name: array for name, array in found.items() if array is not None}


def state(run: Run) -> dict[str, Array]:
    return {name: array.copy() for name, array in arrays_of(run).items()}


def assert_same(one: dict[str, Array], other: dict[str, Array]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name


def content_of(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """Reads arrays and metadata of a safetensors file."""
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata())  # noqa: SIM118


def rewrite(path: Path, change: Callable[[dict[str, Array], dict[str, str]], object]) -> None:
    """Rewrites a safetensors file after `change` has altered its arrays and metadata."""
    arrays, metadata = content_of(path)
    change(arrays, metadata)
    safetensors.numpy.save_file(arrays, path, metadata)
