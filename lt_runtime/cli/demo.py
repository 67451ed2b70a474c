"""The command `demo`: trains a classifier of handwritten digits, on a GPU or with the NumPy reference."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from lt_runtime import schedules
from lt_runtime.cli.output import print_lines, writable
from lt_runtime.errors import MissingLibraryError
from lt_runtime.files import replace_file
from lt_runtime.gpu.devices import parse_device
from lt_runtime.ops.adamw import AdamW
from lt_runtime.profiling import Layer, Profile, profile
from lt_runtime.training import MLP, TrainStep
from lt_runtime.training.prefetch import prefetch
from lt_runtime.training.state_dict import copied
from lt_runtime.tuner.report import Progress, progress_bar

_PIXELS: Final = 64
_HIDDEN: Final = (256, 128)
_CLASSES: Final = 10
_BATCH: Final = 64
_LEARNING_RATE: Final = 3e-3
_WEIGHT_DECAY: Final = 0.01
_SPLIT_SEED: Final = 1797  # the held-out fifth is the same whatever the training seed


@dataclass(frozen=True, slots=True)
class Result:
    """The content of the file of `--json`.

    Attributes:
        device: such as "cpu" or "cuda:0 (NVIDIA H200)".
        accuracy: on the held-out fifth, 0 to 1.
        preparation_seconds: time to the end of the first step: compiles kernels, measures layers, captures the graph.
        samples_per_second: of the steps after the first, without those that were profiled.
        loss: of every step.
        layers: the time of each layer in a step; empty without `--profile`.
    """

    device: str
    dtype: str
    accuracy: float
    preparation_seconds: float
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
        """Batches of an epoch. The samples that do not fill a batch are left out; they differ from epoch to epoch."""
        return len(self.labels) // _BATCH


def load_digits() -> Digits:
    """Loads scikit-learn's 1,797 scanned digits of 8×8 pixels, of which a fixed fifth is held out.

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


def train(options: argparse.Namespace, progress: Progress | None, profiled: Profile | None) -> Result:
    """Trains and evaluates.

    Args:
        options: the command's device, dtype, epochs, dropout and seed.
        progress: called with the number of each epoch, their count, and a word for the progress bar.
        profiled: profiles the last epoch.
    """
    digits, dims = load_digits(), (_PIXELS, *_HIDDEN, _CLASSES)
    settings = {name: getattr(options, name) for name in ("dtype", "dropout", "seed", "device")}
    model, total = MLP(dims, **settings), options.epochs * digits.batches
    schedule = schedules.warmup_cosine(min(digits.batches, total - 1), total)
    optimizer = AdamW(model.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY, schedule=schedule)
    with model.device.current():
        losses, preparation, speed = _train_epochs(options.epochs, digits, model, optimizer, progress, profiled)
        images = model.device.asarray(digits.held_out_images.astype(model.dtype.numpy))
        scores = model.device.to_host(model(images)).astype(np.float32)
    accuracy = float(np.mean(scores.argmax(axis=1) == digits.held_out_labels))
    layers = [] if profiled is None else [*profiled.layers()]
    return Result(model.device.description, options.dtype, accuracy, preparation, speed, losses, layers)


def _train_epochs(
    epochs: int, digits: Digits, model: MLP, optimizer: AdamW, progress: Progress | None, profiled: Profile | None
) -> tuple[list[float], float, float]:
    """Trains; returns every step's loss, the seconds of the first step, and samples per second of the others."""
    losses, seconds, steps = list[Any](), 0.0, 0
    begun = time.perf_counter()
    step = TrainStep(model, optimizer, batch_size=_BATCH)
    with prefetch(_batches(digits, model, epochs), device=model.device) as batches:
        losses.append(float(step(*next(batches))))
        preparation = time.perf_counter() - begun
        for epoch in range(epochs):
            if progress:
                progress(epoch, epochs, "training")
            count = digits.batches - (epoch == 0)
            is_last, start = epoch == epochs - 1, time.perf_counter()
            with profiled if profiled is not None and is_last else contextlib.nullcontext():
                losses += [copied(step(*batch)) for batch in itertools.islice(batches, count)]
                losses[-1] = float(losses[-1])  # waits for the epoch
            if profiled is None or not is_last or not steps:
                seconds, steps = seconds + time.perf_counter() - start, steps + count
    return [*map(float, losses)], preparation, steps * _BATCH / seconds


def _batches(digits: Digits, model: MLP, epochs: int) -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Images and labels of each step, in an order of its own for each epoch."""
    generator, images = np.random.default_rng(model.seed), digits.images.astype(model.dtype.numpy)
    for _ in range(epochs):
        order = generator.permutation(len(digits.labels))[: digits.batches * _BATCH]
        yield from ((images[batch], digits.labels[batch]) for batch in order.reshape(-1, _BATCH))


def run(arguments: argparse.Namespace) -> int:
    """Trains with a progress bar and prints the results; returns the exit status."""
    profiled = profile(device=arguments.device) if arguments.profile else None
    if parse_device(arguments.device) is None:
        print("No GPU in use: this runs the NumPy reference (see `python -m lt_runtime doctor`).")
    file = None if arguments.json is None else writable("--json", arguments.json)
    with progress_bar() as progress:
        result = train(arguments, progress, profiled)
    if file is not None:
        replace_file(file, json.dumps(asdict(result), indent=2).encode() + b"\n")
    if profiled is not None:
        print_lines(profiled.report.lines())
    print(f"accuracy: {result.accuracy:.2%} of the held-out digits ({result.dtype})")
    speed, seconds = result.samples_per_second, result.preparation_seconds
    print(f"{speed:,.0f} samples per second on {result.device}, after {seconds:.1f} s of preparation")
    return 0
