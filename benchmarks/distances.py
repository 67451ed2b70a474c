"""Measures the distance of losses from a float64 run: `python -m benchmarks distances [--out DIR]`.

Small models of the suite `models` train in FP32, by this package and by PyTorch, and by PyTorch in float64, all from
the same initial values and on the same batches. A distance is |loss - loss in float64|, as the mean over the last steps
of several runs. The models train on a GPU if there is one, otherwise by NumPy and by PyTorch on the CPU. The command
exits with 1 if our distance is more than 1.5 times that of PyTorch's FP32 run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks import report
from benchmarks.models import TAKEN, ModelCase, case
from benchmarks.peers import peer
from benchmarks.steps import LEARNING_RATE, WEIGHT_DECAY
from benchmarks.timing import has_gpu

STEPS: Final = 200
LAST: Final = 20
SEEDS: Final = 4
LIMIT: Final = 1.5
CASES: Final = (
    case("feed_forward", 128, 32, 88, layers=2, tokens=16, kind="fp32"),
    case("towers", 128, 24, 64, 4, kind="fp32"),
    case("autoencoder", 128, 64, 8, kind="fp32"),
    case("mixture", 256, 16, 32, 4, kind="fp32"),
    # No ReLU: a rounding could switch a ReLU unit off.
    replace(case("dqn", 128, 8, 32, 2, kind="fp32"), activation="tanh"),
)


def batches(case: ModelCase, seed: int, steps: int) -> Iterator[tuple[Any, Any]]:
    """Random FP32 inputs, and a fixed function of them as targets, as NumPy arrays."""
    rng, (inputs, outputs) = np.random.default_rng(seed), case.dims
    mix = rng.normal(0, inputs**-0.5, (inputs, outputs)).astype(np.float32)
    for _ in range(steps):
        x = rng.standard_normal((*case.batch_shape, inputs), np.float32)
        target = np.tanh(x @ mix)
        if case.loss == TAKEN:
            taken = rng.integers(0, outputs, len(x))
            target = np.c_[np.eye(outputs)[taken], target[np.arange(len(x)), taken]].astype(np.float32)
        yield x, target


def losses(case: ModelCase, seed: int, steps: int, device: str) -> dict[str, list[float]]:
    """The losses of the steps of one run, by contender: "lt", "torch" in FP32 and "float64"."""
    import lt_runtime as lt

    model, given = case.model(device, seed), [*batches(case, seed, steps)]
    to_host, place = model.device.to_host, model.device.asarray
    values = [to_host(each.data).copy() for each in model.parameters()]
    optimizer = lt.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    ema = None if case.decay is None else lt.EMA(model, case.decay)
    step = lt.TrainStep(model, optimizer, loss=case.objective, ema=ema, tune=False)
    made = {"lt": [float(step(place(x), place(target))) for x, target in given]}
    for name, dtype in (("torch", "float32"), ("float64", "float64")):
        made[name] = peer("torch_networks", "train", case, values, given, device, dtype)()
    return made


def distances(runs: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """The mean distances of "lt" and "torch" from "float64" over the last steps of all runs, and their ratio."""
    last = {name: np.array([run[name][-LAST:] for run in runs]) for name in runs[0]}
    made = {name: float(np.abs(last[name] - last["float64"]).mean()) for name in ("lt", "torch")}
    return made | {"ratio": made["lt"] / made["torch"], "loss": float(last["float64"].mean())}


def main(argv: Sequence[str]) -> None:
    """Trains all models, prints the distances, and writes them to DIR/distances.json if `--out` is given.

    Raises:
        SystemExit: a distance is beyond the limit, or `--out` is given without a GPU.
    """
    made = report.command("distances", __doc__)
    made.add_argument("--out", metavar="DIR", help="the folder for distances.json")
    out, device, rows = made.parse_args(argv).out, "cuda" if has_gpu() else "cpu", []
    if out is not None and device == "cpu":
        made.error("--out needs an NVIDIA GPU, which the file names")
    for each in CASES:
        found = distances([losses(each, seed, STEPS, device) for seed in range(SEEDS)])
        rows.append({"case": each.name, **found})
        print(f"{each.name}: lt {found['lt']:.2e}, PyTorch {found['torch']:.2e}, ratio {found['ratio']:.2f}")
    if out is not None:
        facts = {"steps": STEPS, "last": LAST, "seeds": SEEDS, "limit": LIMIT, "device": device}
        report.write(Path(out) / "distances.json", rows, **facts)
    if beyond := [row["case"] for row in rows if row["ratio"] > LIMIT]:
        raise SystemExit(f"more than {LIMIT} times as far from float64 as PyTorch: {', '.join(beyond)}")
