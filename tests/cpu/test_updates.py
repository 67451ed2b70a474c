"""Updates beside the backward pass: which layers have a branch, what is launched where, and who waits for whom."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lt_runtime as lt
from lt_runtime.ops._adamw_parts import StepInParts
from lt_runtime.training import body, updates
from lt_runtime.training.body import StepBody
from lt_runtime.training.updates import late_layers

STREAM, BESIDE = 0x10, 0x20
DIMS = [4, 8, 8, 2]
ROWS = [range(i, i + 1) for i in range(6)]


class Model(lt.MLP):
    """On the host, with a GPU's ordinal; what it is asked for is written down."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__(DIMS, device="cpu")
        self.device, self._log, self.fails_at = SimpleNamespace(ordinal=0), log, -1

    def forward(self, x: Any, *_: Any, micro_batch: int = 0, **__: Any) -> tuple[Any, list[Any]]:
        self._log.append(("forward", micro_batch))
        return x, [None] * 3

    def backward(self, *_: Any, accumulate: bool = False, layer_done: Any = None, **__: Any) -> None:
        for i in reversed(range(3)):
            if i == self.fails_at:
                raise ZeroDivisionError
            self._log.append(("backward", i))
            if layer_done is not None:
                layer_done(i)


class Optimizer:
    """Its launches are written down, with the parameters' positions."""

    def __init__(self, model: lt.MLP, log: list[Any], in_parts: bool = True) -> None:
        self.parameters, self.scaler, self.steps = tuple(model.parameters()), None, None
        self._log, self._in_parts = log, in_parts

    def step(self, *, stream: Any) -> None:
        self._log.append(("step", stream))

    def step_in_parts(self) -> StepInParts | None:
        def launch(rows: range, stream: Any) -> None:
            self._log.append(("update", [*rows], stream))

        return StepInParts(launch, ROWS) if self._in_parts else None


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def order(stream: int, producer: int) -> None:
        calls.append(("order", stream, producer))

    def private(_: int, purpose: str) -> int:
        assert purpose == f"updates beside {STREAM:#x}"
        return BESIDE

    memory = SimpleNamespace(stream="tally")
    monkeypatch.setattr(updates, "order_after", order)
    monkeypatch.setattr(body, "private_stream", private)
    monkeypatch.setattr(body, "is_capturing", lambda stream: stream == STREAM)
    monkeypatch.setattr(body, "stream_memory", lambda *_: memory)
    monkeypatch.setattr(body, "branch", contextlib.nullcontext)
    monkeypatch.setitem(body.LOSSES, "mse", lambda *_, **__: (0.0, None))
    return calls


def run(log: list[Any], parts: int = 1, in_parts: bool = True, beside_from: float = 0, **options: Any) -> list[Any]:
    model = Model(log)
    made = StepBody(model, Optimizer(model, log, in_parts), "mse", beside_from=beside_from)
    tally = SimpleNamespace(add=lambda *_, **__: None)
    made.run([(None, None)] * parts, tally, options.pop("stream", STREAM), **options)
    return log


BACKWARD = [("backward", i) for i in (2, 1, 0)]


def test_late_layers_are_updated_beside_the_layers_before_them(log: list[Any]) -> None:
    assert run(log) == [
        ("forward", 0),
        ("backward", 2),
        ("order", BESIDE, STREAM),
        ("update", [4, 5], BESIDE),
        ("backward", 1),
        ("order", BESIDE, STREAM),
        ("update", [2, 3], BESIDE),
        ("backward", 0),
        ("update", [0, 1], STREAM),
        ("order", STREAM, BESIDE),
    ]


def test_only_the_last_micro_batch_updates(log: list[Any]) -> None:
    run(log, parts=3)
    assert [entry for entry in log if entry[0] == "update"] == [
        ("update", [4, 5], BESIDE),
        ("update", [2, 3], BESIDE),
        ("update", [0, 1], STREAM),
    ]
    assert log.index(("update", [4, 5], BESIDE)) > log.index(("forward", 2))


def test_small_layers_are_updated_at_the_end(log: list[Any]) -> None:
    run(log, beside_from=8 * 8 + 8)
    assert [entry for entry in log if entry[0] in ("order", "update")] == [
        ("order", BESIDE, STREAM),
        ("update", [2, 3], BESIDE),
        ("update", [0, 1], STREAM),
        ("update", [4, 5], STREAM),
        ("order", STREAM, BESIDE),
    ]


@pytest.mark.parametrize(
    "options", [{"stream": STREAM + 1}, {"in_parts": False}, {"beside_from": math.inf}], ids=["eager", "judged", "off"]
)
def test_else_one_launch_comes_last(log: list[Any], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(body, "private_stream", lambda *_: BESIDE)
    assert run(log, **options) == [("forward", 0), *BACKWARD, ("step", options.get("stream", STREAM))]


def test_a_rehearsal_updates_nothing_but_makes_the_stream(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(body, "private_stream", lambda *arguments: made.append(arguments) or BESIDE)
    assert run(log, updates=False, stream=7) == [("forward", 0), *BACKWARD]
    assert made == [(0, "updates beside 0x7")]


@pytest.mark.parametrize("fails_at", [2, 1, 0])
def test_a_branch_is_joined_when_the_step_fails(log: list[Any], fails_at: int) -> None:
    model = Model(log)
    model.fails_at = fails_at
    made = StepBody(model, Optimizer(model, log), "mse", beside_from=0)
    with pytest.raises(ZeroDivisionError):
        made.run([(None, None)], SimpleNamespace(add=lambda *_, **__: None), STREAM)
    assert [entry[1:] for entry in log if entry[0] == "order"] == [
        *((BESIDE, STREAM),) * (2 - fails_at),
        *((STREAM, BESIDE),) * (fails_at < 2),
    ]
    assert ("update", [0, 1], STREAM) not in log


def of(parameters: list[lt.Parameter]) -> Any:
    return SimpleNamespace(parameters=tuple(parameters))


def test_parameters_are_found_wherever_the_optimizer_has_them() -> None:
    model = lt.MLP(DIMS, device="cpu")
    given = model.parameters()
    other = lt.Parameter(np.zeros(3), np.zeros(3))
    assert late_layers(model, of(given), 0) == {1: [2, 3], 2: [4, 5]}
    assert late_layers(model, of([other, *reversed(given)]), 0) == {1: [4, 3], 2: [2, 1]}
    assert late_layers(model, of([given[0], given[4]]), 0) == {2: [1]}
    assert late_layers(model, of(given), 73) == {}


def test_without_the_first_layer_nothing_is_left_for_the_end() -> None:
    model = lt.MLP(DIMS, device="cpu")
    assert late_layers(model, of(model.parameters()[2:]), 0) == {}
