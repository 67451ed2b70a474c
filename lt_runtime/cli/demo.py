"""Trains a classifier of handwritten digits, on a GPU or with the NumPy reference."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple

import numpy as np

from lt_runtime import schedules
from lt_runtime.cli.output import print_lines
from lt_runtime.errors import ArgumentError, MissingLibraryError
from lt_runtime.files import replacing
from lt_runtime.gpu.devices import parse_device
from lt_runtime.ops.adamw import AdamW
from lt_runtime.problem import DTypeName
from lt_runtime.profiling import Layer, Profile, profile
from lt_runtime.training import MLP, TrainStep
from lt_runtime.tuner.report import Progress, progress_bar

_HIDDEN: Final = (256, 128)
_CLASSES: Final = 10
_BATCH: Final = 64
_LEARNING_RATE: Final = 3e-3
_WEIGHT_DECAY: Final = 0.01
_SPLIT_SEED: Final = 1797  # the held-out fifth is the same whatever the training seed


@dataclass(frozen=True, slots=True)
class Result:
    """The content of the file that `--json` names.

    Attributes:
        device: such as "cpu" or "cuda:0 (NVIDIA H200)".
        accuracy: on the held-out fifth, 0 to 1.
        samples_per_second: in training, without the first epoch, which compiles, and the last, which may be profiled.
        loss: of every step.
        layers: where the time of a step went; empty without `--profile`.
    """

    device: str
    dtype: str
    accuracy: float
    samples_per_second: float
    loss: list[float]
    layers: list[Layer]


class Digits(NamedTuple):
    """Images (n, 64) in [0, 1] and labels (n,), to train on and held out."""

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    held_out_images: np.ndarray[Any, Any]
    held_out_labels: np.ndarray[Any, Any]

    @property
    def batches(self) -> int:
        """Batches of an epoch. The few samples that do not fill one are left out, others in each epoch."""
        return len(self.labels) // _BATCH


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


def train(
    device: str,
    dtype: DTypeName,
    epochs: int,
    dropout: float,
    seed: int,
    progress: Progress | None = None,
    profiled: Profile | None = None,
) -> Result:
    """Trains and evaluates.

    Args:
        progress: is told of every epoch.
        profiled: looks at the last epoch.
    """
    digits = load_digits()
    model = MLP((digits.images.shape[1], *_HIDDEN, _CLASSES), dtype=dtype, dropout=dropout, seed=seed, device=device)
    total = epochs * digits.batches
    schedule = schedules.warmup_cosine(min(digits.batches, total - 1), total)
    optimizer = AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, schedule=schedule)
    with model.device.current():
        losses, seconds = _train_epochs(epochs, digits, model, optimizer, progress, profiled)
        images = model.device.asarray(digits.held_out_images.astype(model.dtype.numpy))
        scores = model.device.to_host(model(images)).astype(np.float32)
    accuracy = float(np.mean(scores.argmax(axis=1) == digits.held_out_labels))
    typical = seconds[1:-1] or seconds
    speed = digits.batches * _BATCH * len(typical) / sum(typical)
    layers = [] if profiled is None else [*profiled.layers()]
    return Result(model.device.description, dtype, accuracy, speed, losses, layers)


def _train_epochs(
    epochs: int, digits: Digits, model: MLP, optimizer: AdamW, progress: Progress | None, profiled: Profile | None
) -> tuple[list[float], list[float]]:
    """Losses by step and seconds by epoch."""
    device, losses, seconds = model.device, list[float](), list[float]()
    step = TrainStep(model, optimizer, batch_size=_BATCH)
    images, labels = device.asarray(digits.images.astype(model.dtype.numpy)), device.asarray(digits.labels)
    generator = np.random.default_rng(model.seed)
    for epoch in range(epochs):
        if progress:
            progress(epoch, epochs, "training")
        order = generator.permutation(len(digits.labels))[: digits.batches * _BATCH].reshape(-1, _BATCH)
        start = time.perf_counter()
        with profiled if profiled is not None and epoch == epochs - 1 else contextlib.nullcontext():
            of_steps = [step(images[batch], labels[batch]).copy() for batch in device.asarray(order)]
            # They are read once an epoch, so that no step waits for them.
            losses += map(float, device.to_host(device.namespace.stack(of_steps)))
        seconds.append(time.perf_counter() - start)
    return losses, seconds


def run(arguments: argparse.Namespace) -> int:
    """Trains with a progress bar and prints the results; returns the exit status."""
    options = {name: getattr(arguments, name) for name in ("device", "dtype", "epochs", "dropout", "seed")}
    profiled = profile(device=arguments.device) if arguments.profile else None
    if parse_device(arguments.device) is None:
        print_lines(["No GPU in use: this runs the NumPy reference (see `python -m lt_runtime doctor`)."])
    with _json_file(arguments.json) as file:
        with progress_bar() as progress:
            result = train(**options, progress=progress, profiled=profiled)
        if file is not None:
            file.write(json.dumps(asdict(result), indent=2).encode() + b"\n")
    if profiled is not None:
        print_lines(profiled.report.lines())
    print_lines(_lines(result))
    return 0


@contextlib.contextmanager
def _json_file(path: Path | None) -> Iterator[BinaryIO | None]:
    """The file that `--json` names, which gets its new content at the end. What is wrong with its place is told now."""
    with contextlib.ExitStack() as stack:
        file = None
        if path is not None:
            if not path.parent.is_dir():
                raise ArgumentError(f"--json is {path}, but {path.parent} is no directory")
            try:
                file = stack.enter_context(replacing(Path(os.path.realpath(path))))
            except OSError as error:
                raise ArgumentError(f"--json is {path}, which cannot be written ({error.strerror})") from None
        yield file


def _lines(result: Result) -> Iterator[str]:
    yield f"accuracy: {result.accuracy:.2%} of the held-out digits ({result.dtype})"
    yield f"{result.samples_per_second:,.0f} samples per second on {result.device}"
