"""Trains a classifier of handwritten digits, on a GPU or with the NumPy reference."""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from lt_runtime import ranges, schedules
from lt_runtime.errors import ArgumentError, MissingLibraryError
from lt_runtime.ops.adamw import AdamW
from lt_runtime.profiling import LayerTime, RangeTimer
from lt_runtime.training import MLP, TrainStep
from lt_runtime.training.device import ComputeDevice

_HIDDEN: Final = (256, 128)
_CLASSES: Final = 10
_BATCH: Final = 64
_LEARNING_RATE: Final = 3e-3
_WEIGHT_DECAY: Final = 0.01
_SPLIT_SEED: Final = 1797  # the held-out fifth is the same whatever the training seed


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line asked for."""

    device: str = "auto"
    dtype: str = "float32"
    epochs: int = 40
    dropout: float = 0.1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What `--json` writes.

    Attributes:
        device: such as "cpu" or "cuda:0 (NVIDIA H200)".
        accuracy: on the held-out fifth, 0 to 1.
        samples_per_second: in training, without the first epoch (compilation) and the last (layers are timed then).
        loss: of every step.
        layers: where the time of a step went.
    """

    device: str
    dtype: str
    accuracy: float
    samples_per_second: float
    loss: list[float]
    layers: list[LayerTime]


@dataclass(frozen=True, slots=True)
class Digits:
    """Images (n, 64) in [0, 1] and labels (n,), to train on and held out."""

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    held_out_images: np.ndarray[Any, Any]
    held_out_labels: np.ndarray[Any, Any]


def load_digits() -> Digits:
    """scikit-learn's 1,797 scanned digits of 8×8 pixels, a fixed fifth of them held out.

    Raises:
        MissingLibraryError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits as load
    except ImportError as error:
        raise MissingLibraryError("the demo needs scikit-learn: pip install 'lt_runtime[demo]'") from error
    images, labels = load(return_X_y=True)
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(labels))
    images, labels = (images[order] / 16.0).astype(np.float32), labels[order].astype(np.int32)
    held_out = len(labels) // 5
    return Digits(images[held_out:], labels[held_out:], images[:held_out], labels[:held_out])


def train(settings: Settings, on_step: Callable[[], None] = lambda: None) -> Result:
    """Trains and evaluates; `on_step` is called after every step."""
    digits = load_digits()
    step = _make_step(settings, digits)
    device = step.model.device
    with device.current():
        losses, seconds, timer = _train_epochs(settings, digits, step, on_step)
        accuracy = _accuracy(step.model, digits)
    speed = _samples_per_second(seconds, _batches(digits) * _BATCH)
    return Result(device.description, settings.dtype, accuracy, speed, losses, timer.layers())


def _batches(digits: Digits) -> int:
    """Batches an epoch; the few samples that do not fill one are left out, others each time."""
    return len(digits.labels) // _BATCH


def _make_step(settings: Settings, digits: Digits) -> TrainStep:
    model = MLP(
        (digits.images.shape[1], *_HIDDEN, _CLASSES),
        dtype=settings.dtype,
        dropout=settings.dropout,
        seed=settings.seed,
        device=settings.device,
    )
    epoch = _batches(digits)
    total = settings.epochs * epoch
    schedule = schedules.warmup_cosine(min(epoch, total - 1), total)
    optimizer = AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, schedule=schedule)
    return TrainStep(model, optimizer, batch_size=_BATCH)


def _train_epochs(
    settings: Settings, digits: Digits, step: TrainStep, on_step: Callable[[], None]
) -> tuple[list[float], list[float], RangeTimer]:
    """Losses by step, seconds by epoch, and the last epoch's ranges."""
    device, batches = step.model.device, _batches(digits)
    images = device.asarray(digits.images.astype(step.model.dtype.numpy))
    labels = device.asarray(digits.labels)
    generator = np.random.default_rng(settings.seed)
    timer = RangeTimer(device.ordinal)
    losses: list[float] = []
    seconds: list[float] = []
    timed = TrainStep(step.model, step.optimizer, batch_size=_BATCH, graph=False)  # a range for each layer
    for epoch in range(settings.epochs):
        last = epoch == settings.epochs - 1
        order = generator.permutation(len(digits.labels))[: batches * _BATCH].reshape(batches, _BATCH)
        start = time.perf_counter()
        with ranges.listening(timer) if last else contextlib.nullcontext():
            losses += _epoch(timed if last else step, images, labels, device.asarray(order), on_step)
        seconds.append(time.perf_counter() - start)
    return losses, seconds, timer


def _epoch(step: TrainStep, images: Any, labels: Any, order: Any, on_step: Callable[[], None]) -> list[float]:
    """One pass; the losses are read once at its end, so that no step waits for them."""
    losses = []
    for batch in order:
        losses.append(step(images[batch], labels[batch]).copy())
        on_step()
    device = step.model.device
    return [float(loss) for loss in device.to_host(device.namespace.stack(losses))]


def _samples_per_second(seconds: list[float], samples: int) -> float:
    typical = seconds[1:-1] or seconds
    return samples * len(typical) / sum(typical)


def _accuracy(model: MLP, digits: Digits) -> float:
    images = model.device.asarray(digits.held_out_images.astype(model.dtype.numpy))
    scores = model.device.to_host(model(images)).astype(np.float32)
    return float(np.mean(scores.argmax(axis=1) == digits.held_out_labels))


def run(arguments: argparse.Namespace) -> int:
    """The command: a progress bar, then the results; returns the exit status."""
    settings = Settings(arguments.device, arguments.dtype, arguments.epochs, arguments.dropout, arguments.seed)
    console, json_file = Console(), arguments.json
    if json_file is not None and not json_file.parent.is_dir():
        raise ArgumentError(f"--json is {json_file}, but {json_file.parent} is no directory")
    device = ComputeDevice.parse(settings.device)
    if device.ordinal is None:
        console.print("No GPU in use: this runs the NumPy reference (see `python -m lt_runtime doctor`).")
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        steps = settings.epochs * _batches(load_digits())
        task = progress.add_task("training", total=steps)
        result = train(settings, lambda: progress.advance(task))
    _print(console, result)
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(result), indent=2) + "\n")
    return 0


def _print(console: Console, result: Result) -> None:
    table = Table(title="Where a step's time went")
    table.add_column("layer")
    for heading in ("forward µs", "backward µs", "share"):
        table.add_column(heading, justify="right")
    whole = sum(layer.total_us for layer in result.layers)
    for layer in result.layers:
        backward = f"{layer.backward_us:.1f}" if layer.backward_us else ""
        table.add_row(layer.name, f"{layer.forward_us:.1f}", backward, f"{layer.total_us / whole:.0%}")
    console.print(table)
    console.print(f"accuracy: {result.accuracy:.2%} of the held-out digits ({result.dtype})")
    console.print(f"{result.samples_per_second:,.0f} samples per second on {result.device}")
