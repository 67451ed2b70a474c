"""Compares training in FP8 with training in BF16: `python -m benchmarks fp8-accuracy [--rounds N] [--steps N]`.

Students learn the outputs, or the largest of 1,000 outputs, of a teacher from inputs with heavy tails (Student's t with
three degrees of freedom), and every step has fresh inputs. In two more regressions, one column of the inputs is 2^12
times larger, or the magnitudes of the rows vary by 2^12. In the last task they learn scikit-learn's digits. In a round,
all students have the same initial values and batches. A student's loss is the mean over the last tenth of the steps;
before each, its weights are evaluated in BF16 on the step's batch. Of the digits a fifth is held out, and the accuracy
on it in BF16 after the last step is compared.

The command exits with 1 if a recipe's mean loss is higher than BF16's by more than 0.25 % and by more than two standard
errors; if its mean accuracy is lower by more than 0.005; or if it diverges on planted magnitudes, which is a loss of
more than twice that of both students in BF16 or NaN, without having counted an overflow. The second student in BF16 has
a slightly higher learning rate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import ml_dtypes  # noqa: F401  NumPy knows the name "bfloat16" once this is imported.
import numpy as np

from benchmarks import buffers, report
from benchmarks.suite import matches
from benchmarks.timing import has_gpu

BASE: Final = "bf16"
CONTROL: Final = "bf16, other rate"
"""A student in BF16 with a learning rate that is 0.01 % higher, which shows how chaotic a task's training is."""
_RATE: Final = 1e-3
LIMIT: Final = 0.0025
"""The most by which a recipe's mean loss may be higher than BF16's, as a fraction, if the seeds do not spread more."""
ACCURACY_LIMIT: Final = 0.005
"""The most by which a recipe's mean accuracy on held-out digits may be lower than BF16's."""
DIVERGED: Final = 2.0
"""A loss that is not below this multiple of both BF16 students' has diverged."""


class Task(NamedTuple):
    """A task that the student models learn.

    Attributes:
        dims: widths of teacher and students.
        rows: number of rows of a batch.
        planted: "column" or "rows" for the magnitudes that are made larger, in inputs of a teacher; otherwise "".
    """

    name: str
    dims: tuple[int, ...]
    loss: Any
    rows: int = 1024
    planted: str = ""


_DIMS: Final = (256, 1024, 1024, 256)
DIGITS: Final = Task("digits", (64, 256, 128, 10), "cross_entropy", 64)
TASKS: Final = (
    Task("regression", _DIMS, "mse"),
    Task("1000 classes", (256, 1024, 1024, 1000), "cross_entropy"),
    Task("outlier column", _DIMS, "mse", planted="column"),
    Task("rows of other magnitudes", _DIMS, "mse", planted="rows"),
    DIGITS,
)


def recipes() -> dict[str, Any]:
    """The option `precision` of the students, by name."""
    import lt_runtime as lt

    return {
        BASE: None,
        CONTROL: None,
        "delayed": lt.FP8(),  # not precision="fp8", which would leave small layers in BF16
        "delayed, e4m3 gradients": lt.FP8(gradients="e4m3"),
        "delayed, exact backward": lt.FP8(fast_accumulation="forward"),
        "current": lt.FP8(recipe="current"),
        "rowwise": lt.FP8(recipe="rowwise"),
    }


def inputs(shape: tuple[int, int], seed: int, device: str, planted: str = "") -> tuple[Any, Any]:
    """Draws from Student's t with three degrees of freedom: BF16 numbers as arrays in BF16 and in FP32.

    With `planted`, the first column is multiplied by 2^12, or the rows by powers of two from 1 to 2^12 in turns.
    """
    if device == "cpu":
        drawn: Any = np.random.default_rng(seed).standard_normal((4, *shape), np.float32)
    else:
        drawn = buffers.normal((4, *shape), "float32", seed)
    values = drawn[0] / ((drawn[1:] ** 2).sum(0) / 3) ** 0.5
    if planted == "column":
        values[:, 0] *= 2.0**12
    for power in range(1, 13) if planted == "rows" else ():
        values[power::13] *= 2.0**power
    return _rounded(values)


def _rounded(values: Any) -> tuple[Any, Any]:
    """Rounds FP32 values of NumPy or CuPy to the nearest BF16 numbers; returns these as BF16 and as FP32."""
    bits = (values.view(np.uint32) + np.uint32(0x8000)) & np.uint32(0xFFFF0000)
    return (bits >> np.uint32(16)).astype(np.uint16).view(np.dtype("bfloat16")), bits.view(np.float32)


class Round:
    """One student for each recipe, all with the same initial values.

    Attributes:
        students: by the recipe's name. training: their steps.
        twin: a model in BF16, in which the students' weights are evaluated.
    """

    def __init__(self, task: Task, seed: int, device: str) -> None:
        import lt_runtime as lt

        def made(precision: Any = None) -> Any:
            return lt.MLP(task.dims, "gelu", dtype="bfloat16", seed=seed, device=device, precision=precision)

        self.students, self.twin = {name: made(precision) for name, precision in recipes().items()}, made()
        rates = {CONTROL: 1.0001 * _RATE}
        self.training = {
            name: lt.TrainStep(
                each, lt.AdamW(each.parameters(), lr=rates.get(name, _RATE)), loss=task.loss, batch_size=task.rows
            )
            for name, each in self.students.items()
        }

    @property
    def overflows(self) -> dict[str, int]:
        """The overflows that the students counted, by recipe."""
        return {name: sum(map(_overflows, each.layers)) for name, each in self.students.items()}


def losses(task: Task, seed: int, steps: int, device: str) -> tuple[dict[str, float], dict[str, int]]:
    """Trains a student for each recipe; returns, by recipe, their losses, and the overflows that they counted."""
    import lt_runtime as lt

    made = Round(task, seed, device)
    teacher = lt.MLP(task.dims, "tanh", bias=False, seed=seed + 1000, device=device)
    found: dict[str, list[float]] = {name: [] for name in made.students}
    for number in range(steps):
        x, wide = inputs((task.rows, task.dims[0]), seed * steps + number, device, task.planted)
        outputs = teacher(wide)
        target = outputs.argmax(1) if task.loss == "cross_entropy" else _rounded(outputs)[0]
        for name, student in made.students.items():
            if number >= steps - max(1, steps // 10):
                _copy(student, made.twin)
                found[name].append(lt.evaluate(made.twin, [(x, target)], loss=task.loss).loss)
            made.training[name](x, target)
    return {name: float(np.mean(each)) for name, each in found.items()}, made.overflows


def accuracies(seed: int, steps: int, device: str) -> tuple[dict[str, float], dict[str, int]]:
    """Trains the students of a round on digits; returns their accuracies on the held-out fifth, and their overflows."""
    from lt_runtime.cli.demo import load_digits

    made, digits, generator = Round(DIGITS, seed, device), load_digits(), np.random.default_rng(seed)
    place = made.twin.device.asarray
    images, held_out = (each.astype(np.dtype("bfloat16")) for each in (digits.images, digits.held_out_images))
    for _ in range(steps):
        batch = generator.choice(len(images), DIGITS.rows, replace=False)
        x, labels = place(images[batch]), place(digits.labels[batch])
        for each in made.training.values():
            each(x, labels)
    found = {}
    for name, student in made.students.items():
        _copy(student, made.twin)
        scores = made.twin.device.to_host(made.twin(place(held_out))).astype(np.float32)
        found[name] = float(np.mean(scores.argmax(axis=1) == digits.held_out_labels))
    return found, made.overflows


def _copy(source: Any, to: Any) -> None:
    """Copies the values of a model's BF16 parameters."""
    for old, new in zip(to.parameters(), source.parameters(), strict=True):
        old.data.view(np.uint16)[...] = new.data.view(np.uint16)


def _overflows(layer: Any) -> int:
    state = layer.scales
    # A layer whose sizes are no multiples of 16 is not in FP8, and has no scales.
    is_fp8 = state is not None and state.slots is not None
    return sum(state.overflows.values()) if is_fp8 else 0


def judged(task: Task, runs: Sequence[Mapping[str, float]], overflows: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """For each recipe, how far its loss (as a fraction) or accuracy is from BF16's, and whether that is accepted."""
    made = {}
    for name in runs[0].keys() - {BASE}:
        ratios = np.array([run[name] / run[BASE] for run in runs])
        above = np.array([run[name] - run[BASE] for run in runs]) if task is DIGITS else ratios - 1
        mean, error = float(above.mean()), float(above.std(ddof=1) / len(runs) ** 0.5) if len(runs) > 1 else 0.0
        if task.planted:
            limits = [DIVERGED * max(run[BASE], run.get(CONTROL, 0.0)) for run in runs]
            both = zip(runs, limits, overflows, strict=True)
            met = all(run[name] < limit or counted[name] > 0 for run, limit, counted in both)
        else:
            met = mean >= -ACCURACY_LIMIT if task is DIGITS else mean <= max(LIMIT, 2 * error)
        made[name] = {"above": mean, "standard_error": error, "met": met}
    return made


def main(argv: Sequence[str]) -> None:
    """Trains all students, prints how far their losses and accuracies are above BF16's, and writes the results.

    The results are in DIR/fp8_accuracy.json.

    Raises:
        SystemExit: a recipe is beyond a limit, or `--out` is given without a GPU.
    """
    made = report.command("fp8-accuracy", __doc__)
    made.add_argument("--rounds", type=int, default=8, metavar="N", help="rounds, each with other initial values")
    made.add_argument("--steps", type=int, default=2000, metavar="N", help="steps of training")
    made.add_argument("--only", metavar="PATTERN", help="tasks in whose name this regular expression is found")
    made.add_argument("--out", metavar="DIR", help="the folder for fp8_accuracy.json")
    options, device, rows = made.parse_args(argv), "cuda" if has_gpu() else "cpu", []
    if options.out is not None and device == "cpu":
        made.error("--out needs an NVIDIA GPU, which the file names")
    for task in (each for each in TASKS if matches(options.only, each.name)):
        train = accuracies if task is DIGITS else partial(losses, task)
        found = [train(seed, options.steps, device) for seed in range(options.rounds)]
        runs, overflows = [each for each, _ in found], [each for _, each in found]
        what = "accuracies" if task is DIGITS else "losses"
        for name, each in sorted(judged(task, runs, overflows).items()):
            rows.append({"case": f"{task.name}, {name}", **each, what: [run[name] for run in runs]})
            rows[-1] |= {f"bf16_{what}": [run[BASE] for run in runs], "overflows": [run[name] for run in overflows]}
            told = f"{100 * each['above']:+.3f} % ± {100 * each['standard_error']:.3f} %"
            print(f"{rows[-1]['case']}: {told}{'' if each['met'] else ', BEYOND THE LIMIT'}", flush=True)
    if options.out is not None:
        facts = {"steps": options.steps, "rounds": options.rounds, "limit": LIMIT}
        report.write(Path(options.out) / "fp8_accuracy.json", rows, **facts)
    if beyond := [row["case"] for row in rows if not row["met"]]:
        raise SystemExit(f"training in FP8 is worse than in BF16 beyond the limit: {', '.join(beyond)}")
