"""Checkpoints hold the scales of FP8 layers: resumed runs equal uninterrupted ones, and forged scales are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, CheckpointError
from lt_runtime.saving import checkpoint_file
from tests.support.training_runs import content_of

DIMS, ROWS = [32, 64, 48, 10], 32  # the last layer stays in BF16, because its size is no multiple of 16
Array = np.ndarray[Any, Any]


class Training:
    """A model with its optimizer; the batch of a training step depends only on the step's number."""

    def __init__(self, precision: Any = "fp8", *, blocks: bool = False) -> None:
        options: dict[str, Any] = {"dtype": "bfloat16", "seed": 4, "device": "cpu", "precision": precision}
        if blocks:
            first = lt.Linear(32, 64, activation="gelu", **options)
            self.model: Any = lt.Chain(first, lt.Linear(64, 32, weight=first.weight.T, **options))
        else:
            self.model = lt.MLP(DIMS, "gelu", **options)
        self.outputs = 32 if blocks else 10
        self.optimizer = lt.AdamW(self.model.parameters(), lr=1e-2)
        self.step = lt.TrainStep(self.model, self.optimizer, loss="mse", batch_size=ROWS)

    def run(self, numbers: range) -> list[float]:
        return [float(self.step(*self.batch(number))) for number in numbers]

    def batch(self, number: int) -> tuple[Array, Array]:
        generator = np.random.default_rng(number)
        x, target = (generator.standard_normal((ROWS, cols)) for cols in (DIMS[0], self.outputs))
        return (1.5**number * x).astype(ml_dtypes.bfloat16), target.astype(ml_dtypes.bfloat16)

    @property
    def states(self) -> list[dict[str, Array]]:
        layers = [each for each in self.model.blocks() if isinstance(each, lt.Linear)]
        return [each.scales.state_dict() if each.scales else {} for each in layers]

    def save(self, path: Path, by: str) -> None:
        if by == "save":
            lt.save(path, model=self.model, optimizer=self.optimizer)
        else:
            lt.save_checkpoint(path, self.model, self.optimizer)

    def load(self, path: Path, by: str, **options: Any) -> None:
        if by == "save":
            lt.load(path, model=self.model, optimizer=self.optimizer, **options)
        else:
            lt.load_checkpoint(path, self.model, self.optimizer, **options)


def same(found: list[dict[str, Array]], wanted: list[dict[str, Array]]) -> bool:
    return [each.keys() for each in found] == [each.keys() for each in wanted] and all(
        (ours[name] == theirs[name]).all() for ours, theirs in zip(found, wanted, strict=True) for name in ours
    )


BOTH = pytest.mark.parametrize("by", ["save_checkpoint", "save"])


@BOTH
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("runs_before", [0, 2])
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path, by: str, blocks: bool, runs_before: int) -> None:
    unbroken, resumed = Training(blocks=blocks), Training(blocks=blocks)
    unbroken.run(range(4))
    unbroken.save(tmp_path / "run", by)
    resumed.run(range(8, 8 + runs_before))
    resumed.load(tmp_path / "run", by)
    assert same(resumed.states, unbroken.states)
    assert resumed.run(range(4, 8)) == unbroken.run(range(4, 8))
    assert same(resumed.states, unbroken.states)


@BOTH
def test_files_with_and_without_scales_load_into_models_of_both_kinds(tmp_path: Path, by: str) -> None:
    for theirs, ours in (("fp8", None), (None, "fp8")):
        saved, loaded, fresh = Training(theirs), Training(ours), Training(ours)
        saved.run(range(2))
        saved.save(tmp_path / "run", by)
        loaded.load(tmp_path / "run", by)
        fresh.model.load_state_dict(saved.model.state_dict())
        x, _ = loaded.batch(5)
        y, _ = loaded.model.forward(x)
        wanted, _ = fresh.model.forward(x)
        assert (y == wanted).all()
        assert same(loaded.states, fresh.states)


@BOTH
def test_another_recipe_must_be_allowed(tmp_path: Path, by: str) -> None:
    saved = Training()
    saved.run(range(2))
    saved.save(tmp_path / "run", by)
    for recipe, row, takes in (
        (lt.FP8(headroom=4.0), "headroom +2.0 +4.0", True),
        (lt.FP8(history=8), "history +16 +8", False),
        (lt.FP8(gradients="e4m3"), "gradients +'e5m2' +'e4m3'", False),
    ):
        other = Training(recipe)
        with pytest.raises(CheckpointError, match=f"precision.{row}"):
            other.load(tmp_path / "run", by)
        other.load(tmp_path / "run", by, changed=("precision",))
        assert same(other.states, saved.states) == takes
        other.run(range(2, 4))


def test_a_loaded_model_has_the_precision_and_scales_of_the_file(tmp_path: Path) -> None:
    for blocks in (False, True):
        saved = Training(lt.FP8(history=4), blocks=blocks)
        saved.run(range(3))
        lt.save_model(tmp_path / "model", saved.model)
        own, chosen = lt.FP8(history=4), lt.FP8(fallback=True)
        cases: list[tuple[Any, lt.FP8 | None]] = [("file", own), ("fp8", chosen), (None, None)]
        for precision, recipe in cases:
            loaded = lt.load_model(tmp_path / "model", "cpu", precision=precision)
            layers = [each for each in loaded.blocks() if isinstance(each, lt.Linear)]
            assert {each.precision for each in layers} == {recipe}
            found = [each.scales.state_dict() if each.scales else {} for each in layers]
            assert same(found, saved.states) == (precision == "file")
        before = Training(lt.FP8(history=4), blocks=blocks)
        lt.load_checkpoint(tmp_path / "model", before.model)
        assert same(before.states, saved.states)
    with pytest.raises(ArgumentError, match="precision is 'fp4'"):
        lt.load_model(tmp_path / "model", "cpu", precision="fp4")  # type: ignore[arg-type]


def put(part: str, place: tuple[int, ...], value: float) -> Callable[[dict[str, Array]], None]:
    def change(arrays: dict[str, Array]) -> None:
        arrays[f"layer1.scales.{part}"][place] = value

    return change


def replaced(**parts: Any) -> Callable[[dict[str, Array]], None]:
    def change(arrays: dict[str, Array]) -> None:
        for part, array in parts.items():
            arrays[f"layer1.scales.{part}"] = array

    return change


def without(arrays: dict[str, Array]) -> None:
    del arrays["layer1.scales.history"]


def elsewhere(arrays: dict[str, Array]) -> None:
    for part in ("slots", "history", "calibrated"):
        arrays[f"layer7.scales.{part}"] = arrays[f"layer0.scales.{part}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without, "has layer1.scales.calibrated, but not all of slots, history, calibrated beside it"),
        (replaced(slots=np.ones((3, 9), np.float32)), r"layer1.scales.slots is float32 \(3, 9\), which no scales are"),
        (replaced(history=np.ones((3, 0), np.float32)), r"layer1.scales.history is float32 \(3, 0\), which no"),
        (replaced(calibrated=np.ones(3, np.int32)), r"layer1.scales.calibrated is int32 \(3,\), which no scales are"),
        (elsewhere, "has layer7.scales.slots, which there is not here"),
        (put("slots", (0, 1), 3.0), r"layer1.scales.slots has the scales \[3.0, "),
        (put("slots", (1, 1), 2.0**127), "slots has the scales"),
        (put("slots", (1, 1), math.nan), "slots has the scales"),
        (put("slots", (2, 0), 3.0), "slots has the scales"),
        (put("slots", (0, 2), -1.0), "slots has magnitudes that no FP8 type has"),
        (put("slots", (0, 3), 449.0), "slots has magnitudes that no FP8 type has"),
        (put("slots", (0, 4), -1.0), "slots has the counts"),
        (put("history", (0, 0), math.inf), "history has magnitudes that are negative, infinite or NaN"),
        (put("history", (0, 0), -1.0), "history has magnitudes that are negative, infinite or NaN"),
        (put("calibrated", (1,), 2), r"calibrated is \[1, 2, 1\]; accepted are 0 and 1"),
    ],
)
def test_scales_that_training_cannot_reach(tmp_path: Path, change: Any, message: str) -> None:
    saved, other = Training(), Training()
    saved.run(range(2))
    saved.save(tmp_path / "run", "save_checkpoint")
    arrays, metadata = content_of(tmp_path / "run")
    change(arrays)
    checkpoint_file.write(tmp_path / "run", arrays, metadata["lt_runtime"])
    with pytest.raises(CheckpointError, match=message):
        other.load(tmp_path / "run", "save_checkpoint")
    assert other.states == [{}] * 3
    assert (other.model.layers[0].weight.data == Training().model.layers[0].weight.data).all()
    with pytest.raises(CheckpointError, match=message):
        lt.load_model(tmp_path / "run", "cpu")
