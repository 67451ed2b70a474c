"""Checkpoints: a resumed run ends with the same bits; what does not fit changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, CheckpointError
from tests.support.training_runs import Run, arrays_of, assert_same, rewrite, run_of, state, train


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("float32", {}),
        ("float32", {"amsgrad": True, "moments": "bfloat16", "max_norm": 0.5}),
        ("float16", {"scaled": True}),
        ("bfloat16", {"skip_nonfinite": True}),
    ],
)
def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path, dtype: str, options: dict[str, Any]) -> None:
    unbroken, first, second = (run_of(dtype, **options) for _ in range(3))
    train(unbroken, range(12))
    train(first, range(5))
    lt.save_checkpoint(tmp_path / "run.safetensors", *first)
    train(second, range(90, 93))  # what it was must not matter
    lt.load_checkpoint(tmp_path / "run.safetensors", *second)
    assert_same(state(second), state(first))
    train(second, range(5, 12))
    assert_same(state(second), state(unbroken))
    assert int(second[1].steps[0]) == 12


def test_arrays_are_written_in_place(tmp_path: Path) -> None:
    run = run_of("bfloat16")
    before = arrays_of(run)
    lt.save_checkpoint(tmp_path / "a", *run)
    lt.load_checkpoint(tmp_path / "a", *run)
    assert all(np.shares_memory(array, before[name]) for name, array in arrays_of(run).items())


def test_anyone_can_read_it(tmp_path: Path) -> None:
    run = run_of("bfloat16")
    lt.save_checkpoint(tmp_path / "a", *run)
    with safe_open(tmp_path / "a", framework="np") as file:
        assert {"layer0.weight", "layer0.weight.master", "layer1.bias.v", "optimizer.steps"} <= set(file.keys())
        assert file.get_slice("layer0.weight").get_dtype() == "BF16"
        assert (file.get_tensor("layer1.weight.master") == run[0].layers[1].weight.master).all()


def other_model(**changes: Any) -> Callable[[], Run]:
    options = {"dims": [6, 12, 3], "activation": "gelu", "dropout": 0.3, "seed": 11, "device": "cpu", **changes}

    def make() -> Run:
        model = lt.MLP(**options)
        return model, lt.AdamW(model.parameters(), lr=1e-2, schedule=lt.schedules.warmup_linear(3, 40))

    return make


def reordered() -> Run:
    model, _ = run_of()
    return model, lt.AdamW(model.parameters()[::-1], lr=1e-2, schedule=lt.schedules.warmup_linear(3, 40))


def frozen() -> Run:
    model, _ = run_of()
    return model, lt.AdamW(model.parameters()[:2], lr=1e-2, schedule=lt.schedules.warmup_linear(3, 40))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (other_model(dims=[6, 13, 3]), r"model.dims = \[6, 12, 3\]; here it is \[6, 13, 3\]"),
        (other_model(dims=[6, 12, 3, 3]), r"model.dims = \[6, 12, 3\]; here"),
        (other_model(activation="relu"), "model.activation.name = 'gelu'; here it is 'relu'"),
        (other_model(dtype="bfloat16"), "model.dtype = 'float32'; here it is 'bfloat16'"),
        (other_model(seed=12), "model.seed = 11; here it is 12"),
        (other_model(dropout=0.0), "model.dropout = 0.3; here it is 0.0"),
        (other_model(compute="tf32"), "model.compute = 'float32'; here it is 'tf32'"),
        (lambda: run_of(lr=2e-2), "optimizer.lr = 0.01; here it is 0.02"),
        (lambda: run_of(betas=(0.9, 0.99)), "optimizer.beta2 = 0.999; here it is 0.99"),
        (lambda: run_of(schedule=None), "optimizer.schedule.decay = 'linear'; here it is 'constant'"),
        (lambda: run_of(amsgrad=True), "optimizer.amsgrad = False; here it is True"),
        (lambda: run_of(max_norm=1.0), "optimizer.max_norm = None; here it is 1.0"),
        (lambda: run_of(moments="bfloat16"), "optimizer.moments = 'float32'; here"),
        (lambda: run_of(scaled=True), "optimizer.skip_nonfinite = False; here it is True"),
        (reordered, "with the order of optimizer.parameters = "),
        (frozen, r"optimizer.parameters.layer1.weight = \[1.0, None\]; here it is None"),
    ],
)
def test_of_another_model_or_optimizer(tmp_path: Path, make: Callable[[], Run], message: str) -> None:
    path = tmp_path / "run.safetensors"
    saved, other = run_of(), make()
    train(saved, range(2))
    lt.save_checkpoint(path, *saved)
    before = state(other)
    with pytest.raises(CheckpointError, match=message) as raised:
        lt.load_checkpoint(path, *other)
    assert str(path) in str(raised.value)
    assert_same(state(other), before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays, _: arrays.pop("layer0.bias.m"), "has no layer0.bias.m"),
        (lambda arrays, _: arrays.update(more=np.ones(2)), "has more, which there is not here"),
        (
            lambda arrays, _: arrays.update({"layer0.bias": np.ones(3, np.float32)}),
            r"layer0.bias is float32 \(3,\); here it is float32 \(12,\)",
        ),
        (
            lambda arrays, _: arrays.update({"layer0.bias": np.ones(12, np.float16)}),
            r"layer0.bias is float16 \(12,\); here it is float32",
        ),
        (lambda _, metadata: metadata.clear(), r"was not written by lt.save_checkpoint"),
        (lambda _, metadata: metadata.update(lt_runtime="[1]"), r"was not written by lt.save_checkpoint"),
        (lambda _, metadata: metadata.update(lt_runtime='{"format": 9}'), "has format 9; this version reads format 1"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, change: Any, message: str) -> None:
    path, run = tmp_path / "run.safetensors", run_of()
    lt.save_checkpoint(path, *run)
    rewrite(path, change)
    before = state(run)
    with pytest.raises(CheckpointError, match=message):
        lt.load_checkpoint(path, *run)
    assert_same(state(run), before)


def test_truncated_files(tmp_path: Path) -> None:
    path, run = tmp_path / "run.safetensors", run_of()
    lt.save_checkpoint(path, *run)
    content, before = path.read_bytes(), state(run)
    for length in (0, 5, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is damaged or no safetensors file"):
            lt.load_checkpoint(path, *run)
    assert_same(state(run), before)


def test_an_optimizer_of_something_else(tmp_path: Path) -> None:
    (model, _), (_, optimizer) = run_of(), run_of()
    for function in (lt.save_checkpoint, lt.load_checkpoint):
        with pytest.raises(ArgumentError, match=r"the optimizer has layer0.weight, which is no parameter of the model"):
            function(tmp_path / "a", model, optimizer)
    assert not [*tmp_path.iterdir()]


def test_what_was_skipped_is_kept(tmp_path: Path) -> None:
    model, optimizer = run_of(scaled=True)
    step = lt.TrainStep(model, optimizer, batch_size=16)
    x, labels = np.ones((16, 6), np.float32), np.zeros(16, np.int32)
    step(x, labels)
    step(x * np.nan, labels)
    assert (optimizer.steps.item(), optimizer.skipped_steps.item()) == (1, 1)
    lt.save_checkpoint(tmp_path / "run", model, optimizer)
    other = run_of(scaled=True)
    lt.load_checkpoint(tmp_path / "run", *other)
    assert (other[1].steps.item(), other[1].skipped_steps.item()) == (1, 1)
