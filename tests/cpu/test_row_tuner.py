"""Layers in a row on a stand-in for a GPU: what the row is faster with takes its place, and only that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lt_runtime.plans.backward import BackwardPlan
from lt_runtime.plans.strategies import BackwardStrategy, backward_strategies
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem
from lt_runtime.store.keys import problem_key
from lt_runtime.tuner import row_tuner
from lt_runtime.tuner.alternatives import half_name
from lt_runtime.tuner.names import describe
from lt_runtime.tuner.row_trial import row_trial
from lt_runtime.tuner.row_tuner import are_neighbours, rows_of
from lt_runtime.tuner.stacks import Stack
from lt_runtime.tuner.tuning import Tuned, tune_problems
from tests.layer_gpu import BY_HEURISTIC, LayerGpu

STACK = Stack(16, (24, 40, 8), Activation("tanh"), DType.FLOAT32, Compute.FLOAT32, input_gradient=True)
LAST = STACK.backward(0)
AFTER, BESIDE = "products alone, from nothing", "products alone, dw beside dx, from nothing"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LayerGpu:
    return LayerGpu(monkeypatch, tmp_path)


def decided_beside(gpu: LayerGpu) -> bool:
    entry = gpu.store.layer(problem_key(LAST))
    assert entry is not None
    assert entry.in_chain
    return entry.strategy["beside"] is True


def row(found: list[Tuned]) -> Tuned:
    (only,) = [each for each in found if each.strategy.startswith("in a row")]
    return only


def test_what_is_faster_by_itself_stays_where_the_row_is_faster_with_it(gpu: LayerGpu) -> None:
    gpu.us = {BESIDE: 9.0}
    tuned = row(tune_problems(STACK.problems(), 0))
    assert decided_beside(gpu)
    assert tuned.strategy == "in a row: as decided"
    assert tuned.before_us == tuned.after_us == 39.0


def test_the_row_decides_against_what_is_faster_by_itself(gpu: LayerGpu) -> None:
    gpu.tuned_us, gpu.row_us = {BESIDE: 9.0}, {BESIDE: 13.0}
    tuned = row(tune_problems(STACK.problems(), 0))
    assert not decided_beside(gpu)
    assert (tuned.before_us, tuned.after_us) == (43.0, 40.0)
    entry = gpu.store.layer(problem_key(LAST))
    assert entry is not None
    assert (entry.us, entry.alternatives[0].us) == (10.0, 9.0)
    assert LAST in gpu.forgotten


def test_what_leaves_the_next_run_something_in_the_caches_is_taken(
    gpu: LayerGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_tuner, "buffer_sets", lambda *_: 1)
    gpu.us, gpu.clock.leaves_us = {BESIDE: 9.0}, {AFTER: 30.0}
    tune_problems(STACK.problems(), 0)
    assert not decided_beside(gpu)


def test_a_branch_is_tried_before_what_is_nearer_by_itself(gpu: LayerGpu) -> None:
    stack = Stack(16, (24, 40, 8), Activation("gelu"), DType.FLOAT32, Compute.FLOAT32, input_gradient=True)
    problem = stack.backward(1)
    after, *_ = splits = [half_name(problem, each) for each in backward_strategies(problem)]
    gpu.us = {name: 9.0 if "beside" in name else 20.0 for name in splits} | {after: 10.0}
    gpu.us[splits[6]], gpu.row_us = 8.9, {after: 5.0}
    tuned = row(tune_problems(stack.problems(), 0))
    assert tuned.strategy == f"in a row: {after.partition(', from')[0]} in {describe(problem)}"


def test_what_is_far_behind_by_itself_is_not_tried(gpu: LayerGpu) -> None:
    gpu.us, gpu.row_us = {AFTER: 14.0}, {AFTER: 1.0}
    tune_problems(STACK.problems(), 0)
    assert decided_beside(gpu)


def test_what_computes_something_else_is_not_taken(gpu: LayerGpu) -> None:
    gpu.row_us, gpu.wrong = {BESIDE: 1.0}, {BESIDE}
    tune_problems(STACK.problems(), 0)
    assert not decided_beside(gpu)


def test_an_algorithm_that_is_faster_by_itself_gives_way_to_the_heuristics(gpu: LayerGpu) -> None:
    gpu.tuned_us, gpu.row_us = {AFTER: 8.0, BESIDE: 8.0}, {AFTER: 20.0, BESIDE: 20.0}
    tuned = row(tune_problems(STACK.problems(), 0))
    assert "the heuristic's algorithms in backward" in tuned.strategy
    assert tuned.after_us == tuned.before_us - 10.0
    plan = BackwardPlan(LAST, 0, BackwardStrategy(), gpu._plan)
    entries = [gpu.store.product(problem_key(each.problem)) for each in plan.products.values()]
    assert [entry.algorithm for entry in entries if entry and entry.in_chain] == [BY_HEURISTIC] * 2
    gpu.tuned.clear()
    assert not [each for each in tune_problems(STACK.problems(), 0) if each.measured]
    assert not gpu.tuned


def test_a_row_is_decided_once(gpu: LayerGpu) -> None:
    tune_problems(STACK.problems(), 0)
    launches = len(gpu.clock.launched)
    assert not [each for each in tune_problems(STACK.problems(), 0) if each.measured]
    assert len(gpu.clock.launched) == launches


def test_rows() -> None:
    other = Stack(32, (24, 40), Activation("tanh"), DType.FLOAT32, Compute.FLOAT32)
    both = [*STACK.problems(), *other.problems()]
    layers = [each for each in both if not isinstance(each, MatmulProblem)]
    assert [*map(len, rows_of(layers))] == [4, 2]
    assert rows_of(layers[:1]) == []
    assert rows_of(reversed(layers))[-1][-1] == layers[0]
    assert are_neighbours(STACK.forward(0), STACK.forward(1))
    assert not are_neighbours(STACK.forward(0), other.forward(0))


@pytest.mark.parametrize("activation", ["gelu", "relu", "none"])
def test_what_one_problem_writes_others_read(activation: str) -> None:
    stack = Stack(16, (24, 40, 24), Activation(activation), DType.FLOAT32, Compute.FLOAT32, input_gradient=True)
    first, last = stack.forward(0), stack.forward(1)
    above, below = stack.backward(1), stack.backward(0)
    made = {problem: trial.buffers for problem, trial in row_trial(np, [first, last, above, below]).items()}
    assert made[last]["x"] is made[first]["y"]
    assert made[last]["y"] is not made[first]["x"]  # of one layout, and nothing to do with each other
    assert made[above]["x"] is made[first]["y"]
    assert made[above]["w"] is made[last]["w"]
    assert made[below]["dy"] is made[above]["dx"]
    assert made[below]["x"] is made[first]["x"]
    assert made[below]["w"] is made[first]["w"]
    kept = {"gelu": "kept preactivation", "relu": "y"}.get(activation)
    assert made[above].get("saved through") is (made[first][kept] if kept else None)
    written = [made[above]["dw"], made[below]["dw"], made[below]["dx"], made[last]["y"], made[above]["dy"]]
    assert len(set(map(id, written))) == len(written)


def test_layers_of_one_shape_have_weights_of_their_own() -> None:
    stack = Stack(8, (16, 16, 16, 16), Activation("gelu"), DType.FLOAT32, Compute.FLOAT32, input_gradient=True)
    inner, last = stack.forward(0), stack.forward(2)
    above, between, below = (stack.backward(i) for i in (2, 1, 0))
    made = {each: trial.buffers for each, trial in row_trial(np, [inner, last, above, between, below]).items()}
    assert made[above]["w"] is made[last]["w"]
    assert made[above]["x"] is made[inner]["y"]
    assert made[above]["saved through"] is made[inner]["kept preactivation"]
    assert made[between]["w"] is made[inner]["w"]
    assert made[below]["w"] is made[inner]["w"]  # the inner layers are one problem, which is there once
    assert made[below]["dy"] is made[between]["dx"]


def test_the_two_layers_of_a_square_block_are_not_taken_for_one() -> None:
    stack = Stack(8, (16, 16, 16), Activation("gelu"), DType.FLOAT32, Compute.FLOAT32, input_gradient=True)
    problems = [stack.forward(0), stack.forward(1), stack.backward(1), stack.backward(0)]
    first, last, above, below = (trial.buffers for trial in row_trial(np, problems).values())
    assert last["x"] is above["x"] is first["y"]
    assert above["w"] is last["w"]
    assert above["saved through"] is first["kept preactivation"]
    assert (below["x"], below["w"]) == (first["x"], first["w"])
    assert first["w"] is not last["w"]
