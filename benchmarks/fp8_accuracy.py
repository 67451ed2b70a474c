"""Compares losses of training in FP8 and in BF16: `python -m benchmarks fp8-accuracy [--rounds N] [--steps N]`.

Students learn the outputs, or the largest of 1,000 outputs, of a teacher from inputs with heavy tails (Student's t with
three degrees of freedom), and every step has fresh inputs. In a round, all students have the same initial values and
batches. A student's loss is the mean over the last tenth of the steps; before each, its weights are evaluated in BF16
on the step's batch. The command exits with 1 if a recipe's mean loss is higher than BF16's by more than 0.25 % and by
more than two standard errors.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import ml_dtypes  # noqa: F401  NumPy knows the name "bfloat16" once this is imported.
import numpy as np

from benchmarks import buffers, report
from benchmarks.suite import matches
from benchmarks.timing import has_gpu

BASE: Final = "bf16"
LEARNING_RATE: Final = 1e-3
LIMIT: Final = 0.0025
"""The most by which a recipe's mean loss may be higher than BF16's, as a fraction, if the seeds do not spread more."""


class Task(NamedTuple):
    """What the students learn: the widths of teacher and students, the loss, and the rows of a batch."""

    name: str
    dims: tuple[int, ...]
    loss: Any
    rows: int = 1024


TASKS: Final = (
    Task("regression", (256, 1024, 1024, 256), "mse"),
    Task("1000 classes", (256, 1024, 1024, 1000), "cross_entropy"),
)


def recipes() -> dict[str, Any]:
    """The option `precision` of the students, by name."""
    import lt_runtime as lt

    return {
        BASE: None,
        "delayed": lt.FP8(),  # not "fp8", which leaves small layers in their own type
        "delayed, e4m3 gradients": lt.FP8(gradients="e4m3"),
        "delayed, fast accumulation": lt.FP8(fast_accumulation="always"),
        "current": lt.FP8(recipe="current"),
    }


def inputs(shape: tuple[int, int], seed: int, device: str) -> tuple[Any, Any]:
    """Draws from Student's t with three degrees of freedom: BF16 numbers as arrays in BF16 and in FP32."""
    if device == "cpu":
        drawn: Any = np.random.default_rng(seed).standard_normal((4, *shape), np.float32)
    else:
        drawn = buffers.normal((4, *shape), "float32", seed)
    return _rounded(drawn[0] / ((drawn[1:] ** 2).sum(0) / 3) ** 0.5)


def _rounded(values: Any) -> tuple[Any, Any]:
    """FP32 values of NumPy or CuPy, rounded to the nearest BF16 number, in BF16 and in FP32."""
    bits = (values.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return (bits >> np.uint32(16)).astype(np.uint16).view(np.dtype("bfloat16")), bits.view(np.float32)


def losses(task: Task, seed: int, steps: int, device: str) -> tuple[dict[str, float], dict[str, int]]:
    """Trains the students of a round; returns, by recipe, their losses, and the overflows that they counted."""
    import lt_runtime as lt

    def made(precision: Any = None) -> Any:
        return lt.MLP(task.dims, "gelu", dtype="bfloat16", seed=seed, device=device, precision=precision)

    teacher = lt.MLP(task.dims, "tanh", bias=False, seed=seed + 1000, device=device)
    students, twin = {name: made(precision) for name, precision in recipes().items()}, made()
    training = {
        name: lt.TrainStep(each, lt.AdamW(each.parameters(), lr=LEARNING_RATE), loss=task.loss, batch_size=task.rows)
        for name, each in students.items()
    }
    found: dict[str, list[float]] = {name: [] for name in students}
    for number in range(steps):
        x, wide = inputs((task.rows, task.dims[0]), seed * steps + number, device)
        outputs = teacher(wide)
        target = outputs.argmax(1) if task.loss == "cross_entropy" else _rounded(outputs)[0]
        for name, student in students.items():
            if number >= steps - max(1, steps // 10):
                _copy(student, twin)
                found[name].append(lt.evaluate(twin, [(x, target)], loss=task.loss).loss)
            training[name](x, target)
    means = {name: float(np.mean(each)) for name, each in found.items()}
    return means, {name: sum(map(_overflows, student.layers)) for name, student in students.items()}


def _copy(source: Any, to: Any) -> None:
    """Copies the values of a model's BF16 parameters."""
    for old, new in zip(to.parameters(), source.parameters(), strict=True):
        old.data.view(np.uint16)[...] = new.data.view(np.uint16)


def _overflows(layer: Any) -> int:
    state = layer.scales
    is_fp8 = state is not None and state.slots is not None  # a layer whose sizes FP8 does not take has no scales
    return sum(state.overflows.values()) if is_fp8 else 0


def judged(runs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, Any]]:
    """By recipe, how far its loss is above BF16's as a fraction: mean, standard error, and whether that is accepted."""
    made = {}
    for name in runs[0].keys() - {BASE}:
        above = np.array([run[name] / run[BASE] - 1 for run in runs])
        mean, error = float(above.mean()), float(above.std(ddof=1) / len(runs) ** 0.5) if len(runs) > 1 else 0.0
        made[name] = {"above": mean, "standard_error": error, "met": mean <= max(LIMIT, 2 * error)}
    return made


def main(argv: Sequence[str]) -> None:
    """Trains all students, prints how far their losses are above BF16's, and writes DIR/fp8_accuracy.json.

    Raises:
        SystemExit: a recipe's loss is beyond the limit, or `--out` is given without a GPU.
    """
    made = argparse.ArgumentParser(prog="python -m benchmarks fp8-accuracy", description=__doc__)
    made.add_argument("--rounds", type=int, default=8, metavar="N", help="rounds, each with other initial values")
    made.add_argument("--steps", type=int, default=2000, metavar="N", help="steps of training")
    made.add_argument("--only", metavar="PATTERN", help="tasks in whose name this regular expression is found")
    made.add_argument("--out", metavar="DIR", help="the folder for fp8_accuracy.json")
    options, device, rows = made.parse_args(argv), "cuda" if has_gpu() else "cpu", []
    if options.out is not None and device == "cpu":
        made.error("--out needs an NVIDIA GPU, which the file names")
    for task in (each for each in TASKS if matches(options.only, each.name)):
        found = [losses(task, seed, options.steps, device) for seed in range(options.rounds)]
        runs, overflows = [each for each, _ in found], [each for _, each in found]
        for name, each in sorted(judged(runs).items()):
            rows.append({"case": f"{task.name}, {name}", **each, "losses": [run[name] for run in runs]})
            rows[-1] |= {"bf16_losses": [run[BASE] for run in runs], "overflows": [run[name] for run in overflows]}
            told = f"{100 * each['above']:+.3f} % ± {100 * each['standard_error']:.3f} %"
            print(f"{rows[-1]['case']}: {told}{'' if each['met'] else ', BEYOND THE LIMIT'}", flush=True)
    if options.out is not None:
        facts = {"steps": options.steps, "rounds": options.rounds, "limit": LIMIT}
        report.write(Path(options.out) / "fp8_accuracy.json", rows, **facts)
    if beyond := [row["case"] for row in rows if not row["met"]]:
        raise SystemExit(f"the loss is higher than BF16's beyond the limit: {', '.join(beyond)}")
