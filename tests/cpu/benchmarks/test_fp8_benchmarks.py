"""The suite `fp8` on the pretended GPU, its figures, and the comparison of losses in FP8 with those in BF16."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from benchmarks import fp8, fp8_accuracy
from benchmarks.__main__ import main, options_of
from benchmarks.fp8_accuracy import Task
from benchmarks.timing import Timing
from tests.support.fake_gpu import FakeGpu


def test_our_steps_run_and_each_is_timed_in_bursts_and_sustained(
    hurried: FakeGpu, benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, steps, rng = benchmark_module("fp8"), benchmark_module("steps"), np.random.default_rng(0)

    def normal(shape: tuple[int, ...], dtype: str) -> Any:
        return hurried.cp.asarray(rng.standard_normal(shape).astype(dtype))

    def timed(contender: Any, count: int, stream: Any) -> Callable[[], float]:
        def turn() -> float:
            contender.replays(1)
            hurried.synchronize_all()
            return 1e5 / count

        return turn

    monkeypatch.setattr(steps, "normal", normal)
    monkeypatch.setattr(steps, "synchronize", hurried.synchronize_all)
    monkeypatch.setattr(steps.Setup, "restore", lambda setup: None)  # the pretended CuPy copies no memory
    for module in (suite, steps):
        monkeypatch.setattr(module, "graph_turn", timed)
    monkeypatch.setattr(suite, "memory_of", lambda case, stream: 100 if case.precision is None else 90)
    case = suite.case((32, 64, 32), 64)
    row = suite.measure_compared(case, options_of(["fp8", "--ours", "--rounds", "1"]), hurried.cp.cuda.Stream())
    found = row.as_json()
    assert not row.left_out
    assert {*found["us"]} == {*found["sustained_us"]} == {"lt", "lt_bf16", "lt_exact_backward"}
    assert found["us"]["lt"] == pytest.approx(1e5 / case.replays)
    assert found["sustained_us"]["lt"] < found["us"]["lt"], "more steps in a row"
    assert found["memory_ratio"] == 0.9
    assert found["first_loss"]["lt"] == pytest.approx(found["first_loss"]["lt_bf16"], rel=0.2)


def test_the_timed_graph_casts_no_weight(
    gpu: FakeGpu, benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the graph cast the first weight, 2 MiB, it would need more scratch memory than the step, and fail."""
    suite, steps, internals = map(benchmark_module, ("fp8", "steps", "internals"))
    monkeypatch.setattr(steps, "normal", lambda shape, dtype: gpu.cp.ones(shape, np.dtype(dtype)))
    monkeypatch.setattr(steps, "synchronize", gpu.synchronize_all)
    monkeypatch.setattr(steps.Setup, "restore", lambda setup: None)  # the pretended CuPy copies no memory
    case = replace(suite.case((256, 8192, 256), 16), precision=gpu.lt.FP8(fallback=False))
    monkeypatch.setattr(type(case), "tune", False)
    setup = steps.Setup(case, gpu.cp.cuda.Stream())
    with internals.own_training_stream():  # A stream without memory of earlier tests.
        steps.contender(setup).replays(2)
    gpu.synchronize_all()
    assert setup.optimizer.steps.item() == 3


def test_inference_in_bf16_is_not_measured_as_fp8(
    hurried: FakeGpu, benchmark_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    suite, measured = benchmark_module("fp8"), dict[str, Any]()

    def normal(shape: tuple[int, ...], dtype: str) -> Any:
        return hurried.cp.asarray(np.ones(shape, dtype))

    def measure(builders: Any, sets: int, repetitions: int, rounds: int, stream: Any) -> Any:
        made, left_out = suite.built(builders)
        measured.update(made)
        return suite.timing.Measured({name: Timing(1.0, 0.0) for name in made}, left_out)

    monkeypatch.setattr(suite, "normal", normal)
    monkeypatch.setattr(suite.timing, "cache_size", lambda: 1 << 20)
    monkeypatch.setattr(suite.timing, "measure", measure)
    given = options_of(["fp8", "--rounds", "1"])
    row = suite.measure_inference(suite.case((32, 64, 32), 64), given, None)
    assert {*row.timings} == {*measured}
    measured["lt_bf16"].run(0, 0)
    monkeypatch.setattr(suite, "precisions", lambda **_: {"lt": None, "lt_bf16": None})
    assert [*suite.measure_inference(suite.case((32, 64, 32), 64), given, None).left_out] == ["lt"]


def test_the_fastest_of_a_library_counts_and_sustained_times_are_compared() -> None:
    given = {"lt": 2.0, "torch_bf16_graph": 5.0, "torch_bf16_compile": 4.0, "torchao_rowwise": 3.0}
    made = fp8.with_fastest({name: Timing(value, 0.0) for name, value in given.items()})
    us = {name: each.median for name, each in made.items()}
    assert us == {**given, "torch_bf16": 4.0, "torchao": 3.0}
    rows = [
        {"case": "4096-14336-4096", "us": {}, "sustained_us": {**us, "lt_bf16": 3.0}},
        {"case": "4096-14336-4096", "us": {}, "sustained_us": {"lt_exact_backward": 2.0, "torchao": 2.4}},
        {"case": "a", "us": {}, "memory_ratio": 1.05, "master": False},
        {"case": "b", "us": {}, "memory_ratio": 1.05, "master": True},
        {"case": "512-2048-512 batch 1024", "us": {"lt": 1.0, "lt_bf16": 0.9}},
        {"case": "1024-4096-1024 batch 4096", "us": {"lt": 1.0, "lt_bf16": 1.5}},
        {"case": "4096-14336-4096 inference 64", "us": {"lt": 1.0, "lt_bf16": 1.5}},
    ]
    assert [(each.what, each.value, each.met) for each in fp8.findings(rows)] == [
        ("lt_bf16 / lt, sustained, 4096-14336-4096", 1.5, False),
        ("torch_bf16 / lt, sustained, 4096-14336-4096", 2.0, True),
        ("torchao / lt, sustained, 4096-14336-4096", 1.5, True),
        ("torchao / lt_exact_backward, sustained, 4096-14336-4096", 1.2, False),
        ("lt_bf16 / lt, training, worst", 0.9, False),
        ("lt_bf16 / lt, inference, worst", 1.5, True),
        ("memory of lt / lt_bf16, a", 1.05, True),
        ("memory of lt / lt_bf16, b", 1.05, False),
    ]


SMALL = (Task("regression", (32, 64, 32), "mse", 64), Task("classes", (32, 64, 40), "cross_entropy", 64))


@pytest.mark.parametrize("task", SMALL, ids=lambda task: task.name)
def test_students_in_fp8_learn_as_in_bf16(task: Task) -> None:
    few, more = (fp8_accuracy.losses(task, 1, steps, "cpu")[0] for steps in (10, 60))
    assert len({*more.values()}) > 1, "FP8 rounds"
    for name, loss in more.items():
        assert loss < 0.99 * few[name]
        assert loss == pytest.approx(more["bf16"], rel=0.02)


def test_inputs_have_heavy_tails_and_differ_between_steps() -> None:
    drawn, wide = fp8_accuracy.inputs((64, 4096), 3, "cpu")
    assert (drawn.astype(np.float32) == wide).all()
    assert abs((np.abs(wide) > 3.182).mean() - 0.05) < 0.003, "quantile of Student's t with three degrees of freedom"
    again, other = (fp8_accuracy.inputs((64, 4096), seed, "cpu")[1] for seed in (3, 4))
    assert (again == wide).all()
    assert (other != wide).mean() > 0.9


def test_digits_in_fp8_are_recognised_as_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    recipes = {"bf16": None, "delayed": lt.FP8()}
    monkeypatch.setattr(fp8_accuracy, "recipes", lambda: recipes)
    found, _ = fp8_accuracy.accuracies(0, 60, "cpu")
    assert found.keys() == recipes.keys()
    assert min(found.values()) > 0.8


def test_planted_magnitudes_are_of_one_column_or_of_rows() -> None:
    plain, column, rows = (fp8_accuracy.inputs((26, 8), 3, "cpu", each)[1] for each in ("", "column", "rows"))
    assert (column / plain)[5].tolist() == [4096.0] + [1.0] * 7
    assert (rows / plain)[:, 2].tolist() == [2.0**power for power in range(13)] * 2


@pytest.mark.parametrize(
    ("number", "above", "overflows", "met"),
    [
        (0, [0.002, 0.002], [0, 0], True),
        (0, [0.003, 0.003], [9, 9], False),
        (0, [0.020, -0.010], [0, 0], True),  # the mean, 0.005, is within two standard errors, 0.03
        (0, [-0.5, -0.5], [0, 0], True),
        (0, [float("nan"), 0.0], [0, 0], False),
        (2, [0.9, 0.9], [0, 0], True),
        (2, [1.0, 0.0], [0, 1], False),
        (3, [float("nan"), 0.0], [1, 0], True),
        (-1, [-0.002, -0.002], [0, 0], True),
        (-1, [-0.006, -0.006], [0, 0], False),  # lowers the mean accuracy by 0.012; 0.005 is allowed
    ],
)
def test_a_recipe_is_accepted_within_the_limits_of_its_task(
    number: int, above: list[float], overflows: list[int], met: bool
) -> None:
    runs = [{"bf16": 2.0, "delayed": 2.0 * (1 + each)} for each in above]
    found = fp8_accuracy.judged(fp8_accuracy.TASKS[number], runs, [{"delayed": each} for each in overflows])
    assert found["delayed"]["met"] is met
    scale = 2.0 if number == -1 else 1.0
    assert found["delayed"]["above"] == pytest.approx(scale * np.mean(above), nan_ok=True)


def test_planted_magnitudes_may_raise_a_loss_as_much_as_a_learning_rate_does() -> None:
    losses = {"bf16": 1.0, "bf16, other rate": 3.0, "below": 5.9, "beyond": 6.1}
    found = fp8_accuracy.judged(fp8_accuracy.TASKS[2], [losses], [dict.fromkeys(losses, 0)])
    assert {name: each["met"] for name, each in found.items()} == {
        "bf16, other rate": True, "below": True, "beyond": False
    }  # fmt: skip


def test_the_command_writes_no_file_without_a_gpu_and_fails_beyond_the_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def losses(task: Task, seed: int, steps: int, device: str) -> Any:
        return {"bf16": 1.0, "delayed": 1.1 if task.loss == "mse" else 1.0}, {"bf16": 0, "delayed": seed}

    monkeypatch.setattr(fp8_accuracy, "losses", losses)
    with pytest.raises(SystemExit, match=r"beyond the limit: regression, delayed$"):
        main(["fp8-accuracy", "--rounds", "3", "--only", "^(regression|1000 classes)$"])
    main(["fp8-accuracy", "--only", "classes", "--rounds", "3"])
    assert "1000 classes, delayed: +0.000 %" in capsys.readouterr().out
    monkeypatch.setattr(fp8_accuracy, "has_gpu", lambda: True)
    monkeypatch.setattr(fp8_accuracy.report, "machine", dict)
    main(["fp8-accuracy", "--only", "classes", "--rounds", "3", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "fp8_accuracy.json").read_text())["rows"]
    assert (row["losses"], row["overflows"]) == ([1.0] * 3, [0, 1, 2])
    monkeypatch.setattr(fp8_accuracy, "has_gpu", lambda: False)
    with pytest.raises(SystemExit):
        main(["fp8-accuracy", "--out", str(tmp_path)])
    assert "--out needs an NVIDIA GPU" in capsys.readouterr().err
