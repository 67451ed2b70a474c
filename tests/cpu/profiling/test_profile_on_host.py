"""Profiles of code that runs on the host: steps, layers, refused arguments and warnings."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime import ranges
from lt_runtime.errors import ArgumentError, GpuError, KindError
from lt_runtime.profiling import Profile, timer

ROWS, DIMS = 16, (12, 8, 4)


def trained(**options: Any) -> Any:
    """Returns a function that makes a training step of a small model."""
    model = lt.MLP(DIMS, activation="gelu", device="cpu", seed=1)
    step = lt.TrainStep(model, lt.AdamW(model.parameters()), batch_size=ROWS, **options)
    x = np.random.default_rng(2).standard_normal((ROWS, DIMS[0])).astype(np.float32)
    labels = (np.arange(ROWS) % DIMS[-1]).astype(np.int32)
    return lambda: step(x, labels)


def found(prof: Profile) -> dict[tuple[str, str], Any]:
    return {(layer.name, layer.phase): layer for layer in prof.layers()}


def test_every_layer_is_listed_for_each_pass() -> None:
    step = trained()
    with lt.profile(device="cpu") as prof:
        for _ in range(3):
            step()
    assert prof.report.timed_steps == 3
    layers, (k, n, last) = found(prof), DIMS
    assert {key: layer.flops for key, layer in layers.items() if key[0]} == {
        ("layer0", "forward"): 2 * ROWS * n * k,
        ("layer1", "forward"): 2 * ROWS * n * last,
        ("layer1", "backward"): 4 * ROWS * n * last,
        ("layer0", "backward"): 2 * ROWS * n * k,  # only one product, because the first layer needs no input gradient
    }
    assert {("", "loss"), ("", "optimizer")} <= set(layers)
    assert all(layer.calls == 1 for layer in prof.layers() if layer.name)
    assert not prof.kernels()
    assert prof.report.notes == []


def test_the_phases_and_the_layers_of_a_step_add_up_to_it() -> None:
    step = trained()
    with lt.profile(device="cpu", timed=1) as prof:
        step()
    totals, spans = prof.totals(), prof._timer.spans  # type: ignore[union-attr]
    (whole,) = [span for span in spans if span.range == ("step",)]
    assert totals.step_us == pytest.approx(whole.us)
    assert sum(totals.phase_us.values()) == pytest.approx(whole.us)
    assert sum(layer.us for layer in prof.layers()) == pytest.approx(whole.us)


def test_what_runs_between_training_steps_is_in_no_layer() -> None:
    step, (x, w) = trained(), (np.ones((4, 3), np.float32), np.ones((2, 3), np.float32))
    with lt.profile(device="cpu") as prof:
        for _ in range(3):
            with lt.range("augmentation"):
                lt.matmul(x, w.T)
            with lt.range("epoch"):
                step()
    assert {layer.name for layer in prof.layers()} == {"layer0", "layer1", ""}


def test_ranges_of_a_script_are_layers() -> None:
    x, w = np.ones((4, 3), np.float32), np.ones((2, 3), np.float32)
    with lt.profile(device="cpu") as prof:
        with lt.range("block0.fc1"):
            y, ctx = lt.linear_fwd(x, w)
        with lt.range("block0.fc1"):
            lt.linear_bwd(np.ones_like(y), ctx, need_db=False)
        lt.matmul(x, w.T)
    assert [(layer.name, layer.phase, layer.flops, layer.calls) for layer in prof.layers()] == [
        ("block0.fc1", "forward", 48, 1), ("matmul", "forward", 48, 1), ("block0.fc1", "backward", 96, 1),
    ]  # fmt: skip


def test_time_in_a_nested_layer_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 10, 30, 70, 100, 0])
    with lt.profile(device="cpu") as prof:
        monkeypatch.setattr(timer.time, "monotonic_ns", lambda: 1000 * next(clock))
        with lt.range("block"):
            with lt.range("block.a"):
                pass
            with lt.range("block.b"):
                pass
            next(clock)
            monkeypatch.undo()
            monkeypatch.setattr(timer.time, "monotonic_ns", lambda: 120_000)
    assert {layer.name: layer.us for layer in prof.layers()} == {"block.a": 20, "block.b": 30, "block": 70}


@pytest.mark.parametrize(("marks", "steps", "calls"), [(True, 3, 1), (False, 1, 9)])
def test_a_script_may_mark_its_steps_and_is_one_step_without_marks(*, marks: bool, steps: int, calls: int) -> None:
    with lt.profile(device="cpu", skip=2 * marks, timed=3) as prof:
        for _ in range(9):
            with lt.range("work"):
                pass
            if marks:
                prof.step()
    assert prof.report.timed_steps == steps
    assert found(prof)["work", ""].calls == calls
    assert prof.is_done is marks


def test_a_function_is_called_until_the_profile_is_full() -> None:
    calls = []
    prof = lt.profile(lambda: calls.append(1), steps=4, device="cpu")
    assert len(calls) == 2 + 4  # two steps of warm-up and four timed steps: on the host there are no traced steps
    assert prof.layers() == []
    prof = lt.profile(trained(accumulate=4), steps=3, device="cpu")
    assert prof.report.timed_steps == 3
    # Each step has four micro-batches, and enters the layer's range once in each.
    layer = found(prof)["layer0", "forward"]
    assert (layer.calls, layer.flops) == (4, 2 * ROWS * DIMS[0] * DIMS[1])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"timed": -1}, ArgumentError, "timed is -1; it must not be negative"),
        ({"skip": 1.5}, KindError, "skip is 1.5; it must be an integer"),
        ({"function": 5}, KindError, "function is 5; it must be None or take no arguments"),
        ({"device": "tpu"}, ArgumentError, "device is 'tpu'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        lt.profile(**{"device": "cpu", **options})


def test_marks_beside_training_steps_and_nested_profiles_are_refused() -> None:
    step = trained()
    with lt.profile(device="cpu") as prof:
        step()
        with pytest.raises(ArgumentError, match="whose calls count as steps already"):
            prof.step()
        with pytest.raises(ArgumentError, match="do not nest"), lt.profile(device="cpu"):
            pass
    with lt.profile(device="cpu") as after, lt.range("work"):
        pass
    assert [layer.name for layer in after.layers()] == ["work"]


def test_a_profile_measures_one_block() -> None:
    prof = lt.profile(device="cpu")
    with pytest.raises(ArgumentError, match=r"prof.step\(\) is for the block of a profile"):
        prof.step()
    with prof:
        pass
    with pytest.raises(ArgumentError, match="this profile has measured a block already"), prof:
        pass


def test_a_profile_that_cannot_begin_leaves_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise GpuError("no events")

    monkeypatch.setattr(timer.Timer, "__enter__", fail)
    with pytest.raises(GpuError), lt.profile(device="cpu"):
        pass
    monkeypatch.undo()
    with lt.profile(device="cpu") as prof, lt.range("work"):
        pass
    assert [layer.name for layer in prof.layers()] == ["work"]


def test_a_block_that_raises_is_reported_up_to_the_exception() -> None:
    step, prof = trained(), lt.profile(device="cpu")

    def run() -> None:
        with prof:
            step()
            with lt.range("work"):
                raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        run()
    assert prof.report.timed_steps == 1
    assert not ranges.watchers
    assert not ranges.is_heard


def test_a_range_left_open_ends_with_the_range_around_it_and_an_earlier_one_is_ignored() -> None:
    earlier = lt.range("earlier")
    earlier.__enter__()
    with lt.profile(device="cpu") as prof:
        with lt.range("outer"):
            lt.range("left open").__enter__()
            with lt.range("inner"):
                pass
        earlier.__exit__(None, None, None)
    assert {layer.name for layer in prof.layers()} == {"outer", "left open", "inner"}
    assert any("1 ranges were left open" in note for note in prof.report.notes)


def test_ranges_of_threads_do_not_mix() -> None:
    def work(name: str) -> None:
        for _ in range(50):
            with lt.range(name), lt.range(f"{name}.part"):
                pass

    with lt.profile(device="cpu") as prof, ThreadPoolExecutor(4) as pool:
        [*pool.map(work, [f"thread{i}" for i in range(4)])]
    assert {layer.name: layer.calls for layer in prof.layers()} == {
        f"thread{i}{part}": 50 for i in range(4) for part in ("", ".part")
    }
    assert prof.report.notes == []


def test_very_many_ranges_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "_MOST_SPANS", 100)
    monkeypatch.setattr(timer, "_MOST_PLACES", 10)
    with lt.profile(device="cpu") as prof:
        for number in range(10_000):
            with lt.range(f"range {number % 30}"):
                pass
        waiting = len(prof._timer._pending)  # type: ignore[union-attr]
    assert waiting <= timer._MOST_PENDING
    assert len(prof.layers()) == 11
    assert sum(layer.calls for layer in prof.layers()) == 10_000
    assert found(prof)["(other ranges)", ""].calls == sum(number % 30 >= 10 for number in range(10_000))
    assert any("the trace lacks 9900 ranges" in note for note in prof.report.notes)
