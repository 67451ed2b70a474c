"""Plans are kept for each problem, and problems are tuned at first use; the tuner is replaced by one that only records
calls.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.environment import RECORD_VARIABLE, TUNE_VARIABLE
from lt_runtime.errors import CaptureError, PlanError
from lt_runtime.ops import first_use
from lt_runtime.plans import cache
from lt_runtime.plans.cache import LayerProblem, forget, strategies_of
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem, Saved
from lt_runtime.store.entries import LayerEntry
from lt_runtime.store.keys import Problem, problem_key, to_json
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.store.recording import read_recorded
from lt_runtime.tuner import search
from lt_runtime.tuner.chain import Layer, LayerChain, plain_backward
from tests.support.chain_problems import backward_of, forward_of
from tests.support.plan_entries import H200, layer, product

CHAIN = LayerChain.of_mlp(64, (32, 48, 24), Activation("relu"), DType.BFLOAT16, Compute.FLOAT32)
FORWARD, BACKWARD = forward_of(CHAIN), backward_of(CHAIN, 1)
PRODUCT = MatmulProblem(DType.BFLOAT16, DType.BFLOAT16, Compute.FLOAT32, FORWARD.x, FORWARD.w.transposed, FORWARD.y)


def measured_layer(problem: LayerProblem, **changes: Any) -> LayerEntry:
    return layer(strategy=to_json(next(iter(strategies_of(problem)))), **changes)


def plan_of(problem: Problem, device: int, stream: int) -> Any:
    """Requests a plan in the same way as an operation does."""
    anew = first_use.asked_for.get()
    return cache.plan_of(problem, device, stream, first_use.before_first_use, anew=anew)


class World:
    """Stands in for a machine: its plans are empty objects, and its tuner writes its decisions to the plan cache.

    Attributes:
        capturing: streams that are being captured.
        planned: problems for which plans were made, in order.
        tuned: the tuner's arguments.
    """

    def __init__(self, store: PlanStore) -> None:
        self.store = store
        self.capturing: set[int] = set()
        self.planned: list[Problem] = []
        self.tuned: list[tuple[list[LayerChain | MatmulProblem], str]] = []
        self.failure: BaseException | None = None

    def plan(self, problem: Problem, device: int) -> Any:
        self.planned.append(problem)
        return object()

    def tune(self, chains: Iterable[Any], device: int, **_: Any) -> list[Any]:
        given = list(chains)
        self.tuned.append(given)
        if self.failure is not None:
            raise self.failure
        problems = [problem for each in given for problem in ([each] if each == PRODUCT else each.problems)]
        for each in problems:
            self.store.put({problem_key(each): self.entry(each)})
        # The tuner makes plans of the problems that it measures; those plans must not start another tuning.
        plan_of(replace(PRODUCT, batch=2), device, 0)
        forget(problems, device)
        return []

    def entry(self, problem: Problem) -> Any:
        return product() if isinstance(problem, MatmulProblem) else measured_layer(problem)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    made = World(PlanStore(tmp_path / H200.file_name, H200))
    monkeypatch.setattr(cache, "make_plan", made.plan)
    monkeypatch.setattr(cache, "_plans", {})
    monkeypatch.setattr(cache, "is_capturing", lambda stream: stream in made.capturing)
    monkeypatch.setattr(first_use, "_seen", set())
    monkeypatch.setattr(first_use, "plan_store", lambda device: made.store)
    monkeypatch.setattr(search, "tune_chains", made.tune)
    return made


def test_a_capture_takes_the_plan_that_is_there_and_makes_none(world: World) -> None:
    plan = plan_of(FORWARD, 0, 7)
    world.capturing.add(7)
    assert plan_of(FORWARD, 0, 7) is plan
    with first_use.tuning():
        assert plan_of(FORWARD, 0, 7) is plan
        with pytest.raises(CaptureError, match=r"no plan yet for BackwardProblem.*stream 0x7 is being captured"):
            plan_of(BACKWARD, 0, 7)
    assert world.tuned == []


def test_a_backward_pass_is_forgotten_whatever_forward_has_saved(world: World) -> None:
    with_mask = backward_of(CHAIN, 1, Saved.MASK)
    assert with_mask != BACKWARD
    plan = plan_of(with_mask, 0, 0)
    forget([BACKWARD], 0)
    assert plan_of(with_mask, 0, 0) is not plan


@pytest.mark.parametrize("mode", ["off", ""])
def test_nothing_is_tuned_unless_asked(world: World, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TUNE_VARIABLE, mode)
    plan_of(FORWARD, 0, 0)
    assert world.tuned == []


def test_first_use_tunes_before_it_plans(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TUNE_VARIABLE, "first-use")
    for _ in range(2):
        plan_of(FORWARD, 0, 0)
        plan_of(BACKWARD, 0, 0)
        plan_of(PRODUCT, 0, 0)
    forward, backward = LayerChain((Layer(FORWARD, plain_backward(FORWARD)),)), LayerChain((Layer(None, BACKWARD),))
    assert world.tuned == [[forward], [backward], [PRODUCT]]


def test_inference_is_tuned_alone(world: World) -> None:
    inference = replace(FORWARD, backward=False)
    with first_use.tuning():
        plan_of(inference, 0, 0)
    assert world.tuned == [[LayerChain((Layer(inference),))]]


def test_within_the_block_what_ran_before_is_tuned_too(world: World) -> None:
    untuned = plan_of(PRODUCT, 0, 0)
    with first_use.tuning():
        tuned = plan_of(PRODUCT, 0, 0)
    assert tuned is not untuned
    assert plan_of(PRODUCT, 0, 0) is tuned


def test_the_block_is_of_its_thread_and_ends(world: World) -> None:
    with first_use.tuning():
        thread = threading.Thread(target=plan_of, args=(PRODUCT, 0, 0))
        thread.start()
        thread.join()
    plan_of(FORWARD, 0, 0)
    assert world.tuned == []


def test_an_interrupted_measurement_goes_on_at_the_next_call(world: World) -> None:
    world.failure = KeyboardInterrupt()
    with first_use.tuning():
        with pytest.raises(KeyboardInterrupt):
            plan_of(PRODUCT, 0, 0)
        world.failure = None
        plan_of(PRODUCT, 0, 0)
    assert world.tuned == [[PRODUCT], [PRODUCT]]
    assert first_use.is_measured(PRODUCT, 0)


@pytest.mark.parametrize("failure", [PlanError("no algorithm"), MemoryError("too large")])
def test_what_cannot_be_tuned_runs_untuned(world: World, failure: Exception) -> None:
    world.failure = failure
    with first_use.tuning():
        with pytest.warns(UserWarning, match=f"could not be tuned and runs untuned .{failure}."):
            plan = plan_of(PRODUCT, 0, 0)
        assert plan_of(PRODUCT, 0, 0) is plan  # the warning is given only once: the second call is silent
    assert len(world.tuned) == 1


def test_problems_are_recorded_when_planned(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "met.jsonl"
    monkeypatch.setenv(RECORD_VARIABLE, str(file))
    for _ in range(2):
        plan_of(FORWARD, 0, 0)
        plan_of(BACKWARD, 0, 0)
        plan_of(PRODUCT, 1, 0)
        forget([FORWARD], 0)
    assert read_recorded(file) == [FORWARD, BACKWARD, PRODUCT]
