"""`fit`: trains a model over epochs, with validation, early stopping and checkpoints."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from lt_runtime.arguments import batches_of, check_instance, flag, integer, shown
from lt_runtime.arrays.transfer import copied
from lt_runtime.errors import ArgumentError
from lt_runtime.files import AnyPath
from lt_runtime.nn.block import Block
from lt_runtime.nn.device import ComputeDevice
from lt_runtime.nn.mlp import MLP
from lt_runtime.ops.optimizers.adamw import AdamW
from lt_runtime.saving.checkpoint_file import check_writable
from lt_runtime.saving.checkpoints import by_first, save_checkpoint
from lt_runtime.saving.state import save
from lt_runtime.training.prefetch import Prefetcher, prefetch
from lt_runtime.training.step import TrainStep

Batches: TypeAlias = Iterable[Any] | Callable[[], Iterable[Any]]
_AGAIN: Final = "an iterator gives its batches once; pass a list, or a function that returns an epoch's batches"


class Epoch(NamedTuple):
    """Mean loss and accuracy over one epoch of `fit`.

    Attributes:
        epoch: the epoch's number, counted from 1.
        loss, accuracy: of training, before each update, as in `TrainStep.metrics`.
        valid_loss, valid_accuracy: of the model at the end of the epoch; None without validation.
        seconds: the time that training and validation took.
    """

    epoch: int
    loss: float
    accuracy: float | None
    valid_loss: float | None
    valid_accuracy: float | None
    seconds: float


def fit(
    step: TrainStep,
    batches: Batches,
    *,
    epochs: int = 1,
    valid: Batches | None = None,
    patience: int | None = None,
    checkpoint: AnyPath | None = None,
    progress: bool = True,
) -> list[Epoch]:
    """Trains a step's model over epochs, and keeps the weights of the epoch with the lowest validation loss.

    With `valid`, the best weights so far are kept in the device's memory, and the model has them when the call returns.
    If the optimizer has made steps before, as after `lt.load_checkpoint`, the weights at the start are validated too,
    and an epoch is the best only if its loss is lower than theirs. An iterator as `valid` gives its batches only once,
    so that the first epoch then counts as the best. Without `valid`, every epoch counts as the best.

    The optimizer's state and an EMA stay those of the last step. Ctrl-C ends training early: the call returns as usual,
    with the epochs that were completed. On the host the running step is completed first, unless a second Ctrl-C
    interrupts it. In a group of several processes Ctrl-C ends all of them.

    Args:
        step: the training step; its sums for `metrics` start anew.
        batches: the batches of an epoch: tuples (x, target) or (x, target, row_weights) as the step takes them, in a
            list or another object that can be iterated again, or a function that returns such an object for each epoch.
            NumPy arrays are copied to a GPU by `lt.prefetch`.
        epochs: the largest number of epochs.
        valid: batches (x, target) for validation, given as `batches`.
        patience: stop after this many epochs without a lower validation loss; None never stops early.
        checkpoint: path of a file that is written after each epoch that is the best so far: for an `lt.MLP` with
            `lt.AdamW` and without an EMA by `lt.save_checkpoint`, otherwise by `lt.save` with the arguments model,
            optimizer and, if there is an EMA, ema.
        progress: whether to show a progress bar on a terminal.

    Returns:
        An `Epoch` for each completed epoch, in order.

    Raises:
        ArgumentError: a number that is not positive, `patience` without `valid`, an epoch without batches, or a
            generator or an `lt.prefetch` for several epochs.
        KindError: a batch is no tuple.
        FileError: the checkpoint cannot be written; this is tried before the first epoch.
        LtError: as the step and `lt.evaluate` raise.
        Any exception that the iteration over the batches raises.
    """
    check_instance("step", step, TrainStep, "an lt.TrainStep")
    for name, value in (("epochs", epochs), ("patience", 1 if patience is None else patience)):
        if integer(name, value) < 1:
            raise ArgumentError(f"{name} is {shown(value)}; it must be positive")
    if patience is not None and valid is None:
        raise ArgumentError(f"patience is {patience}, but valid is None: early stopping needs batches for validation")
    for name, given in (("batches", batches), ("valid", valid)):
        if epochs > 1 and isinstance(given, (Generator, Prefetcher)):
            raise ArgumentError(f"{name} is {shown(given)}, for {epochs} epochs; {_AGAIN}")
    check_instance("checkpoint", checkpoint, (str, os.PathLike, type(None)), "None or the path of a file")
    if checkpoint is not None:
        by_first(checkpoint, step.group, (), partial(check_writable, checkpoint))
    from lt_runtime.tuner.report import progress_bar  # imported here, because only the progress bar needs the tuner

    history, best, waited = list[Epoch](), list[Any](), 0
    # `length_hint` returns 0 where `len` raises, as for a PyTorch DataLoader of an IterableDataset.
    lowest, device, size = math.inf, step.model.device, operator.length_hint(batches)
    step.metrics()
    # With several processes Ctrl-C is not caught: they would stop at different steps, and wait for each other.
    stops = () if step.group is not None and step.group.size > 1 else (KeyboardInterrupt,)
    with _whole_calls() if stops and device.ordinal is None else contextlib.nullcontext(_call) as whole:
        with progress_bar(shown=flag("progress", progress)) as tell, contextlib.suppress(*stops):
            if valid is not None and not isinstance(valid, Iterator) and step.optimizer.steps.item():
                at_start = step.evaluate(_placed("valid", valid, 1, device))
                if at_start.loss < lowest:  # not if it is NaN
                    best, lowest = _copies(step.model), at_start.loss
            for epoch in range(1, epochs + 1):
                start, text = time.monotonic(), f"loss {history[-1].loss:.4g}" if history else ""
                for i, batch in enumerate(_placed("batches", batches, epoch, device), 1):
                    whole(step, *batch)
                    if tell is not None:
                        done = (epoch - 1) * size + i if size else epoch - 1
                        tell(done, epochs * (size or 1), f"epoch {epoch} {text}")
                trained = step.metrics()
                tested = None if valid is None else step.evaluate(_placed("valid", valid, epoch, device))
                loss, accuracy = (None, None) if tested is None else (tested.loss, tested.accuracy)
                history.append(Epoch(epoch, trained.loss, trained.accuracy, loss, accuracy, time.monotonic() - start))
                if tested is not None and not tested.loss < lowest:
                    waited += 1
                    if patience is not None and waited >= patience:
                        break
                    continue
                if tested is not None:
                    best, lowest, waited = _copies(step.model), tested.loss, 0
                if checkpoint is not None:
                    _write(checkpoint, step)
        if best:
            whole(_assign, step.model, best)
    return history


def _call(function: Callable[..., object], *arguments: Any) -> None:
    function(*arguments)


@contextlib.contextmanager
def _whole_calls() -> Iterator[Callable[..., None]]:
    """Yields a function `whole(function, *arguments)` that delays Ctrl-C until its call of `function` has returned.

    A second Ctrl-C during the call takes effect at once. Ctrl-C is delayed only in the main thread, and only if
    SIGINT's handler is a Python callable.
    """
    usual, running, held = signal.getsignal(signal.SIGINT), False, False
    if not callable(usual) or threading.current_thread() is not threading.main_thread():
        yield _call
        return

    def hold(number: int, frame: Any) -> None:
        nonlocal held
        if running and not held:
            held = True
        else:
            usual(number, frame)

    def whole(function: Callable[..., object], *arguments: Any) -> None:
        nonlocal running, held
        running, held = True, False
        try:
            function(*arguments)
        finally:
            running = False
        if held:
            usual(signal.SIGINT, None)

    signal.signal(signal.SIGINT, hold)
    try:
        yield whole
    finally:
        signal.signal(signal.SIGINT, usual)


def _assign(model: Block, best: list[Any]) -> None:
    for parameter, values in zip(model.parameters(), best, strict=True):
        parameter.assign(values)


def _write(path: AnyPath, step: TrainStep) -> None:
    if isinstance(step.model, MLP) and isinstance(step.optimizer, AdamW) and step.ema is None:
        save_checkpoint(path, step.model, step.optimizer, group=step.group)
    else:
        save(
            path,
            group=step.group,
            model=step.model,
            optimizer=step.optimizer,
            **({} if step.ema is None else {"ema": step.ema}),
        )


def _placed(name: str, batches: Batches, epoch: int, device: ComputeDevice) -> Iterator[Any]:
    """Iterates over an epoch's batches; those of NumPy arrays are copied to the model's device."""
    batch, accepted = "tuple (x, target) or (x, target, row_weights)", "an iterable of tuples (x, target)"
    accepted += ", or a function that returns one"
    given = batches_of(name, batches() if callable(batches) else batches, (2, 3), batch, accepted)
    first = next(given, None)
    if first is None:
        raise ArgumentError(f"{name} has no batches in epoch {epoch}: {_AGAIN}")
    x, whole = first[0], itertools.chain([first], given)
    is_on_host = isinstance(x[0] if isinstance(x, tuple) else x, np.ndarray)
    return prefetch(whole, device=device) if is_on_host and device.ordinal is not None else whole


def _copies(model: Block) -> list[Any]:
    """Copies all parameters, or their master copies if there are any, on the model's device; waits for the GPU."""
    model.device.synchronize()
    with model.device.current():
        made = [copied(each.data if each.master is None else each.master) for each in model.parameters()]
    model.device.synchronize()
    return made
