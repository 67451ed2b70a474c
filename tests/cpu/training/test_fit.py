"""`lt.fit` on the host and on the pretended GPU."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.errors import ArgumentError, FileError, KindError
from tests.support.fake_gpu import FakeGpu

RATES: tuple[float, ...] = (0.05, 0.05, 0.0, -0.5, -0.5, -0.5)
"""Learning rates of the epochs: the model improves, stays, and then gets worse by negative rates."""


def data(rows: int = 8) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 4), np.float32), rng.standard_normal((rows, 2), np.float32)


class Run:
    """A step whose learning rate follows `rates`, and the model's values after each epoch."""

    rates = RATES

    def __init__(self, package: Any = lt, device: str = "cpu", dtype: str = "float32") -> None:
        self.model = package.MLP([4, 2], device=device, seed=0, dtype=dtype)
        self.optimizer = package.AdamW(self.model.parameters(), weight_decay=0)
        self.step = package.TrainStep(self.model, self.optimizer, loss="mse")
        self.states: list[Any] = []
        self.batch = tuple(each.astype(self.model.dtype.numpy) for each in data())

    def batches(self) -> Iterator[Any]:
        rate = self.rates[len(self.states)]
        self.optimizer.lr = abs(rate)
        x, target = self.batch
        yield x, target if rate >= 0 else target + 100

    def valid(self) -> Iterator[Any]:
        self.states.append(self.state())
        yield self.batch

    def state(self) -> dict[str, Any]:
        return {name: self.model.device.to_host(each) for name, each in self.model.state_dict().items()}


def check(run: Run, history: list[Any]) -> None:
    losses = [each.valid_loss for each in history]
    assert [each.epoch for each in history] == [1, 2, 3, 4]  # epochs 3 and 4 are no better than epoch 2
    assert losses[0] > losses[1] == losses[2] < losses[3]
    assert all(each.seconds > 0 and each.accuracy is each.valid_accuracy is None for each in history)
    for name, value in run.state().items():
        np.testing.assert_array_equal(value, run.states[1][name], err_msg=name)
        assert not np.array_equal(value, run.states[3][name])


def test_the_best_weights_come_back(tmp_path: Path) -> None:
    run = Run()
    check(run, lt.fit(run.step, run.batches, epochs=6, valid=run.valid, patience=2, checkpoint=tmp_path / "best"))
    saved = lt.load_model(tmp_path / "best", "cpu").state_dict()
    assert all(np.array_equal(value, saved[name]) for name, value in run.state().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu(gpu: FakeGpu, dtype: str) -> None:
    with gpu.stream:
        run = Run(gpu.lt, "cuda", dtype)
        gpu.streams.synchronize_all()
        check(run, gpu.lt.fit(run.step, run.batches, epochs=6, valid=run.valid, patience=2))
        for each in run.model.parameters():
            if each.master is not None:
                rounded = each.master.get().astype(each.data.get().dtype)
                np.testing.assert_array_equal(each.data.get(), rounded)


def test_patience_counts_epochs_in_a_row() -> None:
    run = Run()
    run.rates = (0.05, 0.0, 0.05, 0.0, 0.0, 0.05)
    assert len(lt.fit(run.step, run.batches, epochs=6, valid=run.valid, patience=2)) == 5


@pytest.mark.parametrize(("rate", "is_better"), [(-0.5, False), (0.05, True)])
def test_a_resumed_run_replaces_only_a_worse_checkpoint(rate: float, is_better: bool, tmp_path: Path) -> None:
    run, resumed, best = Run(), Run(), tmp_path / "best"
    lt.fit(run.step, run.batches, valid=[run.batch], checkpoint=best)
    lt.load_checkpoint(best, resumed.model, resumed.optimizer, changed=["lr"])
    found, resumed.rates = best.read_bytes(), (rate,)
    (epoch,) = lt.fit(resumed.step, resumed.batches, valid=[run.batch], checkpoint=best)
    assert epoch.epoch == 1
    assert (best.read_bytes() != found) == is_better
    assert np.array_equal(resumed.state()["layer0.weight"], run.state()["layer0.weight"]) != is_better


def test_an_interrupt_keeps_the_epochs_and_the_best_weights() -> None:
    run = Run()

    def batches() -> Iterator[Any]:
        yield from run.batches()
        if len(run.states) == 4:
            raise KeyboardInterrupt

    check(run, lt.fit(run.step, batches, epochs=6, valid=run.valid))


@pytest.mark.parametrize("times", [1, 2])
def test_a_step_on_the_host_is_cut_only_by_a_second_interrupt(times: int) -> None:
    run, usual = Run(), signal.getsignal(signal.SIGINT)

    def loss(outputs: Any, target: Any, gradient: Any, stream: None) -> Any:
        for _ in range(times * (run.optimizer.steps[0] == 1)):
            signal.raise_signal(signal.SIGINT)
        return np.float32(0)

    history = lt.fit(lt.TrainStep(run.model, run.optimizer, loss=loss), [run.batch], epochs=4)
    assert (len(history), *run.optimizer.steps) == (1, 3 - times)
    assert signal.getsignal(signal.SIGINT) is usual


def test_other_threads_train_too() -> None:
    run, history = Run(), list[Any]()
    thread = threading.Thread(target=lambda: history.extend(lt.fit(run.step, [run.batch])))
    thread.start()
    thread.join()
    assert len(history) == 1


def test_an_interrupt_ends_a_process_of_a_group() -> None:
    """The other processes would wait for this one, if its call returned."""
    run, group = Run(), lt.group()
    step = lt.TrainStep(run.model, run.optimizer, loss="mse", batch_size=8, group=group)
    vars(group)["size"] = 2

    def batches() -> Iterator[Any]:
        yield from run.batches()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        lt.fit(step, batches)


def test_a_checkpoint_that_cannot_be_written_is_found_before_training(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "best"
    path.write_text("an older file")
    for checkpoint in (tmp_path, tmp_path / "missing" / "best"):
        with pytest.raises(FileError):
            lt.fit(run.step, run.batches, checkpoint=checkpoint)
    with pytest.raises(ArgumentError, match="no batches"):
        lt.fit(run.step, [], checkpoint=path)
    assert run.step.metrics().steps == 0
    assert [each.name for each in tmp_path.iterdir()] == ["best"]
    assert path.read_text() == "an older file"


def test_without_validation_the_last_weights_stay_and_are_saved(tmp_path: Path) -> None:
    run = Run()
    run.step(*run.batch)  # this step must not count in the first epoch's means
    before = float(lt.mse_loss(run.model(run.batch[0]), run.batch[1]).loss)
    history = lt.fit(run.step, [(*run.batch, np.ones(8, np.float32))], epochs=3, checkpoint=tmp_path / "last")
    assert [each.valid_loss for each in history] == [None] * 3
    assert history[0].loss == pytest.approx(before, rel=1e-5)
    saved = lt.load_model(tmp_path / "last", "cpu").state_dict()
    assert all(np.array_equal(value, saved[name]) for name, value in run.state().items())


def test_a_progress_bar_counts_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, int, str]] = []
    bar = contextlib.nullcontext(lambda *each: told.append(each))
    monkeypatch.setattr("lt_runtime.tuner.report.progress_bar", lambda *, shown: bar)
    lt.fit(Run().step, [data()] * 2, epochs=2)
    assert [each[:2] for each in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert told[0][2].strip() == "epoch 1"
    assert told[2][2].startswith("epoch 2 loss ")


def test_batches_of_unknown_number() -> None:
    class Stream(list[Any]):
        def __len__(self) -> int:
            raise TypeError("as a DataLoader of an IterableDataset says")

    assert len(lt.fit(Run().step, Stream([data()]), epochs=2)) == 2


def test_several_inputs_and_classes() -> None:
    towers = lt.Parallel(*(lt.Linear(4, 3, seed=i, device="cpu") for i in (0, 1)), join="sum")
    step = lt.TrainStep(towers, lt.AdamW(towers.parameters()))
    x, labels = data()[0], np.arange(8) % 3
    (epoch,) = lt.fit(step, [((x, x), labels)], valid=[((x, x), labels)])
    outputs = towers((x, x))
    assert epoch.valid_loss == pytest.approx(float(lt.cross_entropy(outputs, labels).loss), rel=1e-6)
    assert epoch.valid_accuracy == (outputs.argmax(axis=1) == labels).mean()


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"epochs": 0}, ArgumentError, "epochs is 0; it must be positive"),
    ({"epochs": None}, KindError, "epochs is None; it must be an integer"),
    ({"patience": 0, "valid": [data()]}, ArgumentError, "patience is 0; it must be positive"),
    ({"patience": 1}, ArgumentError, "early stopping needs batches for validation"),
    ({"valid": []}, ArgumentError, "valid has no batches in epoch 1"),
    ({"batches": iter([data()]), "epochs": 2}, ArgumentError, "batches has no batches in epoch 2: an iterator"),
    ({"batches": lt.prefetch([], device="cpu"), "epochs": 2}, ArgumentError, "batches is Prefetcher.* for 2 epochs"),
    ({"valid": (each for each in [data()]), "epochs": 2}, ArgumentError, "valid is <generator .* for 2 epochs; an it"),
    ({"batches": 3}, KindError, "batches is 3; it must be an iterable"),
    ({"batches": [data()[0]]}, KindError, "number 0 of batches is .*; it must be a tuple"),
    ({"progress": 2}, KindError, "progress is 2"),
    ({"checkpoint": 1}, KindError, "checkpoint is 1; it must be None or the path"),
    ({"step": 1}, KindError, "step is 1; it must be an lt.TrainStep"),
]


@pytest.mark.parametrize(("options", "kind", "message"), WRONG, ids=[message for *_, message in WRONG])
def test_refusals(options: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        lt.fit(**{"step": Run().step, "batches": [data()], **options})


def test_a_checkpoint_of_another_block_holds_the_averages(tmp_path: Path) -> None:
    layer, other = (lt.Linear(4, 2, seed=i, device="cpu") for i in range(2))
    optimizer, ema = lt.AdamW(layer.parameters()), lt.EMA(layer)
    lt.fit(lt.TrainStep(layer, optimizer, loss="mse", ema=ema), [data()], checkpoint=tmp_path / "run")
    averages = lt.EMA(other)
    lt.load(tmp_path / "run", model=other, optimizer=lt.AdamW(other.parameters()), ema=averages)
    for mine, loaded in ((layer.weight.data, other.weight.data), (ema.averages, averages.averages)):
        np.testing.assert_equal(mine, loaded)
