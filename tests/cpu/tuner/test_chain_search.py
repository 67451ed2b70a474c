"""Chains of layers on a stand-in for a GPU: a plan that the chain is faster with takes its place, no other does."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.plans.backward import BackwardPlan
from lt_runtime.plans.strategies import BackwardStrategy, backward_strategies
from lt_runtime.problem import Activation, Compute, DType
from lt_runtime.store.entries import Alternative
from lt_runtime.store.keys import problem_key
from lt_runtime.tuner.chain import Chain
from lt_runtime.tuner.chain_operands import OperandSets
from lt_runtime.tuner.layer_search import plan_name
from lt_runtime.tuner.report import Tuned, describe, strategy_in_words
from lt_runtime.tuner.search import tune_chains
from lt_runtime.tuner.timing import Timing
from tests.support.chain_problems import backward_of, forward_of
from tests.support.layer_gpu import BY_HEURISTIC, LayerGpu


def chain_of(activation: str) -> Chain:
    return Chain.of_mlp(16, (24, 40, 8), Activation(activation), DType.FLOAT32, Compute.FLOAT32, input_gradient=True)


TANH = chain_of("tanh")
LAST = backward_of(TANH, 0)
AFTER, BESIDE = "products alone, from nothing", "products alone, dw beside dx, from nothing"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> LayerGpu:
    return LayerGpu(monkeypatch, tmp_path)


def decided_beside(gpu: LayerGpu) -> bool:
    entry = gpu.store.layer(problem_key(LAST))
    assert entry is not None
    assert entry.in_chain
    return entry.strategy["dw_concurrent"] is True


def alternatives(gpu: LayerGpu, chain: Chain) -> tuple[Alternative, ...]:
    """To what the chain's first layer is decided to do forward."""
    entry = gpu.store.layer(problem_key(forward_of(chain)))
    assert entry is not None
    return entry.alternatives


def tune(chain: Chain = TANH) -> list[Tuned]:
    return [*tune_chains([chain], 0)]


def whole(found: list[Tuned]) -> Tuned:
    (only,) = [each for each in found if each.strategy.startswith("as a chain")]
    return only


def test_what_is_faster_by_itself_stays_where_the_chain_is_faster_with_it(gpu: LayerGpu) -> None:
    gpu.us = {BESIDE: 9.0}
    tuned = whole(tune())
    assert decided_beside(gpu)
    assert tuned.strategy == "as a chain: as decided"
    assert tuned.before_us == tuned.after_us == 39.0


def test_a_gpu_that_gets_slower_meanwhile_makes_no_chain_slower(gpu: LayerGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of different moments are not compared: a GPU gets warm."""
    take_times, measurements = OperandSets.take_times, itertools.count(1)

    def slower_and_slower(*arguments: Any, **options: Any) -> dict[Any, Timing]:
        factor = 1.1 ** next(measurements)
        taken = take_times(*arguments, **options)
        return {name: replace(each, median_us=factor * each.median_us) for name, each in taken.items()}

    monkeypatch.setattr(OperandSets, "take_times", slower_and_slower)
    gpu.us = {BESIDE: 9.0}
    tuned = whole(tune())
    assert tuned.strategy == "as a chain: as decided"
    assert tuned.after_us == tuned.before_us
    assert next(measurements) > 3


def test_the_chain_decides_against_what_is_faster_by_itself(gpu: LayerGpu) -> None:
    gpu.tuned_us, gpu.chain_us = {BESIDE: 9.0}, {BESIDE: 13.0}
    tuned = whole(tune())
    assert not decided_beside(gpu)
    assert (tuned.before_us, tuned.after_us) == (43.0, 40.0)
    entry = gpu.store.layer(problem_key(LAST))
    assert entry is not None
    assert (entry.us, entry.alternatives[0].us) == (10.0, 9.0)
    assert LAST in gpu.forgotten


def test_what_leaves_the_next_run_something_in_the_caches_is_taken(gpu: LayerGpu) -> None:
    gpu.sets = 1
    gpu.us, gpu.clock.leaves_us = {BESIDE: 9.0}, {AFTER: 30.0}
    tune()
    assert not decided_beside(gpu)


def test_a_branch_is_tried_before_what_is_nearer_by_itself(gpu: LayerGpu) -> None:
    chain = chain_of("gelu")
    problem = backward_of(chain, 1)
    after, *_ = splits = [plan_name(problem, each) for each in backward_strategies(problem)]
    gpu.us = {name: 9.0 if "dw_concurrent" in name else 20.0 for name in splits} | {after: 10.0}
    gpu.us[splits[6]], gpu.chain_us = 8.9, {after: 5.0}
    tuned = whole(tune(chain))
    assert tuned.strategy == f"as a chain: {after.partition(', from')[0]} in {describe(problem)}"


def test_what_is_far_behind_by_itself_is_not_tried(gpu: LayerGpu) -> None:
    gpu.us, gpu.chain_us = {AFTER: 14.0}, {AFTER: 1.0}
    tune()
    assert decided_beside(gpu)


def test_what_computes_something_else_is_not_taken(gpu: LayerGpu) -> None:
    gpu.chain_us, gpu.wrong = {BESIDE: 1.0}, {BESIDE}
    tune()
    assert not decided_beside(gpu)


def test_forward_keeps_what_backward_was_decided_for(gpu: LayerGpu) -> None:
    chain, masked = chain_of("relu"), "relu_aux_bias, keeps mask"
    gpu.us, gpu.chain_us = {masked: 10.5}, {masked: 1.0}
    tuned = whole(tune(chain))
    assert masked in [strategy_in_words(each.strategy) for each in alternatives(gpu, chain)]
    assert tuned.strategy == "as a chain: as decided"


def test_what_a_file_offers_beyond_the_problem_is_not_tried(gpu: LayerGpu) -> None:
    tune()
    key = problem_key(LAST)
    entry = gpu.store.layer(key)
    assert entry is not None
    (near,) = (replace(each, strategy={**each.strategy, "db_below": "kernel"}) for each in entry.alternatives[:1])
    assert gpu.store.put({key: replace(entry, alternatives=(near,), in_chain=False, effort="deep")})
    whole(tune())
    entry = gpu.store.layer(key)
    assert entry is not None
    assert entry.in_chain
    assert entry.alternatives == (near,)


def test_an_algorithm_that_is_faster_by_itself_gives_way_to_the_heuristics(gpu: LayerGpu) -> None:
    gpu.tuned_us, gpu.chain_us = {AFTER: 8.0, BESIDE: 8.0}, {AFTER: 20.0, BESIDE: 20.0}
    tuned = whole(tune())
    assert "the heuristic's algorithms in backward" in tuned.strategy
    assert tuned.after_us == tuned.before_us - 10.0
    plan = BackwardPlan(LAST, 0, BackwardStrategy(), gpu._plan)
    entries = [gpu.store.product(problem_key(each.problem)) for each in plan.products.values()]
    assert [entry.algorithm for entry in entries if entry and entry.in_chain] == [BY_HEURISTIC] * 2
    gpu.tuned.clear()
    assert not [each for each in tune() if each.measured]
    assert not gpu.tuned


def test_a_chain_is_decided_once(gpu: LayerGpu) -> None:
    tune()
    launches = len(gpu.clock.launched)
    assert not [each for each in tune() if each.measured]
    assert len(gpu.clock.launched) == launches
