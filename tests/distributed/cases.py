"""Cases that several processes run together: `mpiexec -n N python -m tests.distributed.cases DIRECTORY`.

Each case compares a step over N processes with one process that splits the same batch into N times as many parts. The
first process prints a line of JSON for each case: the case's name and the errors of all processes.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import lt_runtime as lt

ROWS: Final = 8
"""Rows of a process."""
WIDTH, CLASSES = 16, 5
CASES: dict[str, Callable[[lt.Group, Path], None]] = {}


def case(function: Callable[[lt.Group, Path], None]) -> Callable[[lt.Group, Path], None]:
    CASES[function.__name__] = function
    return function


class Training:
    """A model with its optimizer and step, in a group or, without one, in this process alone."""

    def __init__(
        self,
        size: int,
        group: lt.Group | None,
        *,
        seed: int = 1,
        parts: int = 1,
        loss: Any = "cross_entropy",
        averages: bool = False,
        model: dict[str, Any] | None = None,
        sharded: bool = False,
        **options: Any,
    ) -> None:
        given = {"activation": "gelu", "dtype": "float32", "device": "cpu", "seed": seed} | (model or {})
        self.model = lt.MLP([WIDTH, 32, CLASSES], **given)
        self.optimizer = lt.AdamW(self.model.parameters(), 1e-2, **options)
        self.ema = lt.EMA(self.model, 0.5) if averages else None
        rows, parts = (ROWS, parts) if group else (size * ROWS, size * parts)
        more = {"group": group, "shard_state": True} if sharded and group else {"group": group}
        self.step = lt.TrainStep(
            self.model, self.optimizer, loss=loss, batch_size=rows, accumulate=parts, ema=self.ema, **more
        )

    @property
    def gradients(self) -> list[Any]:
        return [each.grad for each in self.model.parameters()]

    @property
    def values(self) -> list[Any]:
        averages = [] if self.ema is None else [*self.ema.averages.values()]
        return [*(each.data for each in self.model.parameters()), *averages]


def batches(size: int, count: int = 5) -> Iterator[tuple[Any, Any]]:
    random = np.random.default_rng(7)
    for _ in range(count):
        x = random.standard_normal((size * ROWS, WIDTH), dtype=np.float32)
        yield x, random.integers(0, CLASSES, size * ROWS).astype(np.int32)


def check_close(found: list[Any], wanted: list[Any], additions: int) -> None:
    """Compares arrays; elements may be off by the rounding errors of `additions` FP32 additions to the largest one."""
    for each, other in zip(found, wanted, strict=True):
        other = np.asarray(other, np.float64)
        np.testing.assert_allclose(each, other, rtol=0, atol=additions * 2.0**-24 * np.abs(other).max())


def check_equal_bits(group: lt.Group, arrays: list[Any]) -> None:
    assert len({*group.gather(b"".join(each.tobytes() for each in arrays), "a comparison")}) == 1


def compare(group: lt.Group, *, infinite: bool = False, **options: Any) -> tuple[Training, Training]:
    """Trains by all processes and by one; the gradients of the first step differ by additions in another order."""
    together, alone = Training(group.size, group, **options), Training(group.size, None, **options)
    for i, (x, labels) in enumerate(batches(group.size)):
        if infinite and i == 2:
            x[ROWS, 0] = np.inf  # row ROWS of the whole batch is the first row of process 1
        own = slice(group.rank * ROWS, (group.rank + 1) * ROWS)
        loss, whole = together.step(x[own], labels[own]), alone.step(x, labels)
        np.testing.assert_allclose(loss, whole, rtol=1e-5)
        if i == 0 and not options.get("sharded"):
            check_close(together.gradients, alone.gradients, 2 * group.size)
    check_equal_bits(group, together.values)
    for found, wanted in zip(together.values, alone.values, strict=True):
        np.testing.assert_allclose(found.astype(np.float32), wanted.astype(np.float32), atol=2e-5)
    assert together.optimizer.steps == alone.optimizer.steps
    assert together.optimizer.skipped_steps == alone.optimizer.skipped_steps == int(infinite)
    return together, alone


@case
def dropout_and_parts(group: lt.Group, _: Path) -> None:
    together, alone = compare(group, parts=2, model={"dropout": 0.5})
    found, wanted = together.step.metrics(), alone.step.metrics()
    assert (found.steps, found.accuracy) == (wanted.steps, wanted.accuracy)
    np.testing.assert_allclose(found.loss, wanted.loss, rtol=1e-6)


@case
def clipping(group: lt.Group, _: Path) -> None:
    together, alone = compare(group, max_norm=0.05)
    assert alone.optimizer.grad_norm > 0.05
    np.testing.assert_allclose(together.optimizer.grad_norm, alone.optimizer.grad_norm, rtol=1e-5)


@case
def an_infinite_batch_in_one_process(group: lt.Group, _: Path) -> None:
    compare(group, infinite=True, skip_nonfinite=True)


@case
def a_scaler_and_averages(group: lt.Group, _: Path) -> None:
    scalers = lt.GradScaler(1024.0, growth_interval=2), lt.GradScaler(1024.0, growth_interval=2)
    together = Training(group.size, group, averages=True, scaler=scalers[0])
    alone = Training(group.size, None, averages=True, scaler=scalers[1])
    for x, labels in batches(group.size):
        x[ROWS, 0] = np.inf if together.optimizer.steps == 3 else x[ROWS, 0]
        own = slice(group.rank * ROWS, (group.rank + 1) * ROWS)
        together.step(x[own], labels[own])
        alone.step(x, labels)
    # A skipped step leaves the step number at 3, so that all later batches have an infinite element too.
    assert alone.optimizer.skipped_steps == 2
    assert scalers[0].scale == scalers[1].scale == 1024 * 2 * 0.25
    check_equal_bits(group, together.values)
    check_close(together.values, alone.values, 1000)


@case
def bfloat16_rounded_stochastically(group: lt.Group, _: Path) -> None:
    model = {"dtype": "bfloat16", "master_weights": False}
    together = Training(group.size, group, model=model, stochastic_rounding=True)
    for x, labels in batches(group.size):
        own = slice(group.rank * ROWS, (group.rank + 1) * ROWS)
        together.step(x[own].astype(together.model.dtype.numpy), labels[own])
    check_equal_bits(group, together.values)


@case
def layers_in_fp8(group: lt.Group, _: Path) -> None:
    together = []
    for grouped in (group, None):
        block = lt.Linear(WIDTH, 16, device="cpu", dtype="bfloat16", precision="fp8", seed=3)
        optimizer = lt.AdamW(block.parameters(), 1e-2)
        rows, parts = (16, 1) if grouped else (16 * group.size, group.size)
        step = lt.TrainStep(block, optimizer, loss="mse", batch_size=rows, accumulate=parts, group=grouped)
        random = np.random.default_rng(3)
        for _step in range(3):
            x = random.standard_normal((16 * group.size, WIDTH)).astype(block.dtype.numpy)
            own = slice(group.rank * 16, (group.rank + 1) * 16) if grouped else slice(None)
            step(x[own], x[own])
        together.append(block.scales)
        if grouped:
            check_equal_bits(group, [block.weight.data, block.scales.slots, block.scales.history])
    # The first step makes scales from the first part of the batch, and later ones from the magnitudes of all parts.
    np.testing.assert_allclose(together[0].history[0], together[1].history[0], rtol=1e-6)


@case
def other_initial_values(group: lt.Group, _: Path) -> None:
    training = Training(group.size, group, model={"seed": 0}, averages=True)
    for each in training.model.parameters():
        each.assign(np.full(each.data.shape, float(group.rank), np.float32))
    again = lt.TrainStep(training.model, training.optimizer, batch_size=ROWS, group=group)
    assert again.group is group
    assert all((each.data == 0).all() for each in training.model.parameters())


@case
def uneven_batches(group: lt.Group, _: Path) -> None:
    """The last batch has fewer rows than the processes want, so that the last process has none of its own."""
    (x, labels), (rest, other) = batches(group.size, 2)
    count, one_hot = (group.size - 1) * ROWS - 3, np.eye(CLASSES, dtype=np.float32)
    for loss, targets in (("cross_entropy", (labels, other)), ("mse", (one_hot[labels], one_hot[other]))):
        given = [(x, targets[0]), (rest[:count], targets[1][:count])]
        together, alone = Training(group.size, group, loss=loss, parts=2), Training(1, None, loss=loss)
        alone.step = lt.TrainStep(alone.model, alone.optimizer, loss=loss)
        for batch in lt.prefetch(lt.share(given, group, ROWS), device="cpu"):
            found = together.step(*batch)
        for batch in given:
            wanted = alone.step(*batch)
        np.testing.assert_allclose(found, wanted, rtol=1e-5)
        check_close(together.gradients, alone.gradients, 200)
    assert [len(batch) for batch in lt.share(given, group, ROWS)] == [2, 3]
    assert [len(batch) for batch in lt.share(given, group, ROWS, drop_uneven=True)] == [2]


@case
def evaluation(group: lt.Group, _: Path) -> None:
    training = Training(group.size, group)
    given = [*batches(group.size, 7), (np.ones((3, WIDTH), np.float32), np.full(3, 2, np.int32))]
    assert training.step.evaluate(given) == lt.evaluate(training.model, given)
    with pytest.raises(lt.errors.GroupError, match=r"rank 1.*number of batches"):
        training.step.evaluate(given[: 2 if group.rank == 1 else 3])


def train(training: Training, group: lt.Group, given: Iterable[tuple[Any, Any]]) -> None:
    grouped = training.step.group is not None
    own = slice(group.rank * ROWS, (group.rank + 1) * ROWS) if grouped else slice(None)
    for x, labels in given:
        training.step(x[own].astype(training.model.dtype.numpy), labels[own])


@case
def epochs_with_a_checkpoint(group: lt.Group, directory: Path) -> None:
    training, path = Training(group.size, group), directory / f"fit-{group.size}.safetensors"
    given, valid = [*batches(group.size)], [*batches(group.size, 3)]
    history = lt.fit(training.step, lambda: lt.share(given, group, ROWS), epochs=2, valid=valid, checkpoint=path)
    group.agree([[each.loss, each.valid_loss] for each in history], "the history")
    check_equal_bits(group, training.values)
    best = Training(group.size, None)
    lt.load_checkpoint(path, best.model, best.optimizer)
    assert [each.tobytes() for each in best.values] == [each.tobytes() for each in training.values]


@case
def sharded_state(group: lt.Group, directory: Path) -> None:
    """Dividing moments and master copies among the processes changes no bit."""
    for options in ({}, {"max_norm": 0.1}):  # without a norm, only its owner has the sum of a gradient
        _check_sharded_state(group, directory, options)


def _check_sharded_state(group: lt.Group, directory: Path, options: dict[str, Any]) -> None:
    whole, parted = (
        Training(group.size, group, model={"dtype": "bfloat16"}, sharded=sharded, **options)
        for sharded in (False, True)
    )
    files = []
    for training in (whole, parted):
        train(training, group, batches(group.size))
        paths = [directory / f"{name}-{group.size}.safetensors" for name in ("sharded", "model")]
        lt.save_checkpoint(paths[0], training.model, training.optimizer, group=group)
        lt.save_model(paths[1], training.model, optimizer=training.optimizer, group=group)
        files.append([path.read_bytes() for path in paths])
    assert files[0] == files[1]
    check_equal_bits(group, parted.values)
    assert [each.tobytes() for each in parted.values] == [each.tobytes() for each in whole.values]
    kept = [each.master is not None for each in parted.model.parameters()]
    assert kept == [len(each) == 2 for each in parted.optimizer.moments]
    every = [json.loads(each) for each in group.gather(json.dumps(kept).encode(), "what is kept")]
    assert [sum(each) for each in zip(*every, strict=True)] == [1] * len(kept)


@case
def resumed_by_another_number_of_processes(group: lt.Group, directory: Path) -> None:
    given = [*batches(group.size)]
    for kind in ("together", "alone", "sharded"):
        path = directory / f"{kind}-{group.size}.safetensors"
        before, after = (Training(group.size, group if kind != "alone" else None, sharded=kind == "sharded"), None)
        train(before, group, given[:2])
        lt.save_checkpoint(path, before.model, before.optimizer, group=group)
        train(before, group, given[2:])
        after = Training(group.size, group if kind == "alone" else None, model={"seed": 9})
        with pytest.raises(lt.errors.CheckpointError, match="seed"):
            lt.load_checkpoint(path, after.model, after.optimizer)
        lt.load_checkpoint(path, after.model, after.optimizer, changed=["seed"])
        train(after, group, given[2:])
        check_equal_bits(group, after.values)
        check_close(after.values, before.values, 200)
        assert after.optimizer.steps == before.optimizer.steps == 5


@case
def a_sharded_run_is_resumed(group: lt.Group, directory: Path) -> None:
    given, path = [*batches(group.size)], directory / f"run-{group.size}.safetensors"
    made = [Training(group.size, group, model={"dtype": "bfloat16"}, sharded=True) for _ in range(2)]
    train(made[0], group, given[:2])
    lt.save(path, group=group, model=made[0].model, optimizer=made[0].optimizer, epoch=3)
    assert lt.load(path, model=made[1].model, optimizer=made[1].optimizer) == {"epoch": 3}
    for training in made:
        train(training, group, given[2:])
    assert [each.tobytes() for each in made[0].values] == [each.tobytes() for each in made[1].values]


@case
def a_second_step_of_a_divided_optimizer(group: lt.Group, directory: Path) -> None:
    """It goes on as the first step would; files without the optimizer, and averages, would lack master copies."""
    first, second = (Training(group.size, group, model={"dtype": "bfloat16"}, sharded=True) for _ in range(2))
    for i, batch in enumerate(batches(group.size)):
        if i == 2:
            made = lt.TrainStep(second.model, second.optimizer, batch_size=ROWS, group=group)
            second.step = made
        train(first, group, [batch])
        train(second, group, [batch])
    assert [each.tobytes() for each in first.values] == [each.tobytes() for each in second.values]
    for save in (lt.save, lt.save_model):
        given = {"path": directory / "parts", "model": first.model, "group": group}
        with pytest.raises(lt.errors.GroupError, match="master copies; pass the optimizer too"):
            save(**given)
    with pytest.raises(lt.errors.ArgumentError, match="an earlier step has divided the optimizer's state, but group"):
        lt.TrainStep(first.model, first.optimizer)


@case
def a_file_that_cannot_be_written(group: lt.Group, directory: Path) -> None:
    training = Training(group.size, group)
    with pytest.raises(lt.errors.LtError, match="missing") as caught:
        lt.save_checkpoint(directory / "missing" / "run", training.model, training.optimizer, group=group)
    assert isinstance(caught.value, OSError) == (group.rank == 0)


@case
def a_difference_is_named(group: lt.Group, _: Path) -> None:
    for options, words in (({"max_norm": 1.0}, "max_norm"), ({"parts": 2}, "accumulate"), ({"seed": 2}, "seed")):
        with pytest.raises(lt.errors.GroupError, match=f"rank 1.*{words}"):
            Training(group.size, group, **(options if group.rank == 1 else {}))


@case
def a_batch_of_another_kind_is_named(group: lt.Group, _: Path) -> None:
    training = Training(group.size, group)
    batch = *next(batches(1)), *[np.ones(ROWS, np.float32)] * (group.rank == 1)
    with pytest.raises(lt.errors.GroupError, match=r"rank 1.*shapes"):
        training.step(*batch)


@case
def arrays_of_other_shapes_are_not_summed(group: lt.Group, _: Path) -> None:
    values = np.ones(3 + group.rank, np.float32)
    with pytest.raises(lt.errors.GroupError, match=r"rank 1.*shapes and types of a sum"):
        group.sum(values)
    assert (values == 1).all()


def main(directory: Path) -> None:
    group = lt.group(timeout=40)
    for name, function in CASES.items():
        error = ""
        try:
            function(group, directory)
        except Exception:
            error = traceback.format_exc()
        errors = [each.decode() for each in group.gather(error.encode(), f"the end of {name}")]
        if group.rank == 0:
            print(json.dumps([name, [each for each in errors if each]]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
