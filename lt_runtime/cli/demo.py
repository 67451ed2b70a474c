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
from lt_runtime.arrays.transfer import copied
from lt_runtime.cli.output import print_lines, writable
from lt_runtime.errors import MissingLibraryError
from lt_runtime.files import replace_file
from lt_runtime.gpu.devices import parse_device
from lt_runtime.nn.mlp import MLP
from lt_runtime.ops.optimizers.adamw import AdamW
from lt_runtime.profiling import Layer, Profile, profile
from lt_runtime.training.prefetch import prefetch
from lt_runtime.training.step import TrainStep
from lt_runtime.tuner.report import Progress, progress_bar

_DIMS: Final = (64, 256, 128, 10)  # widths of the model: pixels, two hidden layers, classes
_BATCH: Final = 64
_SPLIT_SEED: Final = 1797  # seed of the split: the held-out fifth does not depend on the training seed


@dataclass(frozen=True, slots=True)
class Result:
    """The results of a training run, as written to the file of `--json`.

    Attributes:
        device: where the model was trained, such as "cpu" or "cuda:0 (NVIDIA H200)".
        accuracy: share of correct predictions on the held-out fifth of the images, 0 to 1.
        preparation_seconds: time to the end of the first step: compiles kernels, measures layers, captures the graph.
        samples_per_second: rate of the steps after the first, without profiled steps.
        loss: the loss of every step.
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
    """Images (n, 64) with values in [0, 1], and their labels (n,): a training set and a held-out set."""

    images: np.ndarray[Any, Any]
    labels: np.ndarray[Any, Any]
    held_out_images: np.ndarray[Any, Any]
    held_out_labels: np.ndarray[Any, Any]


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
    """Trains the classifier and evaluates it on the held-out set.

    Args:
        options: the command's device, dtype, epochs, dropout and seed.
        progress: called with the number of each epoch, their count, and a word for the progress bar.
        profiled: a profile in which the last epoch runs; None for no profile.
    """
    digits = load_digits()
    # Number of batches in an epoch. The samples left over after the last full batch are not used in that epoch; each
    # epoch leaves out different ones.
    batches = len(digits.labels) // _BATCH
    settings = {name: getattr(options, name) for name in ("dtype", "dropout", "seed", "device")}
    model, total = MLP(_DIMS, **settings), options.epochs * batches
    schedule = schedules.warmup_cosine(min(batches, total - 1), total)
    optimizer = AdamW(model.parameters(), lr=3e-3, weight_decay=0.01, schedule=schedule)
    images, losses, seconds, steps = digits.images.astype(model.dtype.numpy), list[Any](), 0.0, 0

    def shuffled() -> Iterator[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
        generator = np.random.default_rng(model.seed)
        for _ in range(options.epochs):
            order = generator.permutation(len(digits.labels))[: batches * _BATCH]
            yield from ((images[batch], digits.labels[batch]) for batch in order.reshape(-1, _BATCH))

    with model.device.current(), prefetch(shuffled(), device=model.device) as prefetched:
        begun, step = time.perf_counter(), TrainStep(model, optimizer, batch_size=_BATCH)
        losses.append(float(step(*next(prefetched))))
        preparation = time.perf_counter() - begun
        for epoch in range(options.epochs):
            if progress:
                progress(epoch, options.epochs, "training")
            count, is_last, start = batches - (epoch == 0), epoch == options.epochs - 1, time.perf_counter()
            with profiled if profiled is not None and is_last else contextlib.nullcontext():
                losses += [copied(step(*batch)) for batch in itertools.islice(prefetched, count)]
                losses[-1] = float(losses[-1])  # waits until the epoch has run
            if profiled is None or not is_last or not steps:
                seconds, steps = seconds + time.perf_counter() - start, steps + count
        held_out = model.device.asarray(digits.held_out_images.astype(model.dtype.numpy))
        scores = model.device.to_host(model(held_out)).astype(np.float32)
    accuracy, speed = float(np.mean(scores.argmax(axis=1) == digits.held_out_labels)), steps * _BATCH / seconds
    loss, layers = [*map(float, losses)], [] if profiled is None else [*profiled.layers()]
    return Result(model.device.description, options.dtype, accuracy, preparation, speed, loss, layers)


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
