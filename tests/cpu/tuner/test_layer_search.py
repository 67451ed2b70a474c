"""The tuner of layers from end to end, with plans, a clock and operands that need no GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lt_runtime.epilogue import Epilogue
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.plans.strategies import BackwardStrategy, ForwardStrategy, MadeBy
from lt_runtime.problem import Activation, BackwardProblem, Compute, DType, ForwardProblem, MatmulProblem, Saved, Spec
from lt_runtime.products.product import plain_product
from lt_runtime.store.entries import LayerEntry, ProductEntry
from lt_runtime.store.keys import from_json, problem_key
from lt_runtime.tuner import chain, layer_search
from lt_runtime.tuner.chain import Layer, LayerChain, Part, chains_of
from lt_runtime.tuner.operands import Memory
from lt_runtime.tuner.report import Tuned
from lt_runtime.tuner.search import tune_chains
from tests.support.chain_problems import backward_of, forward_of
from tests.support.layer_gpu import BY_HEURISTIC, TUNED, LayerGpu
from tests.support.product_problems import input_gradient

RELU = LayerChain.of_mlp(16, (8, 24, 8), Activation("relu"), DType.FLOAT32, Compute.FLOAT32)
GELU = LayerChain.of_mlp(16, (8, 24, 8), Activation("gelu"), DType.BFLOAT16, Compute.FLOAT32)

FUSED, MASKED = "relu_bias, keeps output", "relu_aux_bias, keeps mask"
SPLIT, PLAIN = "bias, keeps output", "none, keeps output"
BY_KERNELS = "db by kernel, derivative by kernel, db below by kernel, from nothing and {}"
BY_LIBRARY = "db by kernel, derivative by epilogue, db below by epilogue, from nothing and mask"
BGRAD = "db by epilogue, derivative by kernel, db below by kernel, from nothing and {}"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, host_memory: Memory) -> LayerGpu:
    # No chain is tuned as one fused kernel here, which other tests do.
    monkeypatch.setattr(chain, "supports", lambda *_: False)
    return LayerGpu(monkeypatch, tmp_path, host_memory)


def pair(chain: LayerChain = RELU) -> tuple[ForwardProblem, BackwardProblem]:
    return forward_of(chain), backward_of(chain, 1)


def tune_all(*chains: LayerChain | MatmulProblem, **options: Any) -> list[Tuned]:
    return [*tune_chains(chains, 0, **options)]


def tune(chain: LayerChain = RELU, **options: Any) -> Tuned:
    (tuned,) = tune_all(chain.cut(Part(0, 1)), **options)
    return tuned


def entry(gpu: LayerGpu, problem: Any) -> LayerEntry:
    found = gpu.store.layer(problem_key(problem))
    assert found is not None
    return found


def entry_of(gpu: LayerGpu, problem: MatmulProblem) -> ProductEntry:
    found = gpu.store.product(problem_key(problem))
    assert found is not None
    return found


def bar_forward(gpu: LayerGpu) -> None:
    """Makes the plan cache forget the forward problem's strategy, so that its part is measured again."""
    problem = forward_of(RELU)
    gpu.store.bar(problem_key(problem), entry(gpu, problem), "refused now")


def saved_by(gpu: LayerGpu, chain: LayerChain = RELU) -> Saved:
    return from_json(ForwardStrategy, entry(gpu, forward_of(chain)).strategy).saved


def test_the_fastest_pair_wins_even_if_its_forward_is_slower(gpu: LayerGpu) -> None:
    gpu.us, gpu.default_us = {FUSED: 10.0, MASKED: 13.0, SPLIT: 12.0, PLAIN: 12.5, BY_LIBRARY: 20.0}, 30.0
    tuned = tune()
    assert (tuned.before_us, tuned.after_us) == (40.0, 33.0)
    assert tuned.strategy == "relu_aux_bias, keeps mask | db by kernel, derivative by epilogue, db below by epilogue"
    forward = entry(gpu, forward_of(RELU))
    assert from_json(ForwardStrategy, forward.strategy) == ForwardStrategy(Epilogue.RELU_AUX_BIAS, Saved.MASK)
    assert forward.us == 13.0
    assert [each.us for each in forward.alternatives] == [10.0, 12.0, 12.5]


def test_backward_is_decided_for_everything_that_forward_may_keep(gpu: LayerGpu) -> None:
    gpu.us = {BY_KERNELS.format("output"): 8.0, BY_LIBRARY: 9.0, BY_KERNELS.format("mask"): 9.5}
    tune()
    by_mask = backward_of(RELU, 1, Saved.MASK)
    assert saved_by(gpu) is Saved.OUTPUT
    found = {problem: from_json(BackwardStrategy, entry(gpu, problem).strategy) for problem in (pair()[1], by_mask)}
    assert found[pair()[1]] == BackwardStrategy(MadeBy.KERNEL, MadeBy.KERNEL, MadeBy.KERNEL)
    assert found[by_mask] == BackwardStrategy(MadeBy.KERNEL, MadeBy.EPILOGUE, MadeBy.EPILOGUE)
    assert {*gpu.forgotten} == {*pair(), by_mask}


def test_a_wrong_split_is_rejected_and_recorded(gpu: LayerGpu) -> None:
    gpu.us = {BGRAD.format("output"): 5.0, BY_KERNELS.format("output"): 8.0}
    gpu.wrong = {BGRAD.format("output")}
    tuned = tune()
    assert "db by kernel" in tuned.strategy
    assert any("wrong: dx is off by 1" in each for each in tuned.rejected)
    (rejected,) = entry(gpu, pair()[1]).rejected
    assert rejected.reason.startswith("wrong: dx is off by 1")
    assert rejected.strategy["db"] == "epilogue"
    gpu.clock.launched.clear()
    bar_forward(gpu)
    assert "db by kernel" in tune().strategy
    assert BGRAD.format("output") not in [name for name, _ in gpu.clock.launched]


def test_being_slower_than_a_wrong_split_is_no_reason(gpu: LayerGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_search, "supports", lambda _: False)
    gpu.us, gpu.wrong = {SPLIT: 1.0, MASKED: 5.0, FUSED: 8.0}, {SPLIT}
    tuned = tune()
    assert tuned.strategy.startswith(MASKED)
    assert [each.reason[:14] for each in entry(gpu, forward_of(RELU)).rejected] == ["wrong: y is of"]
    assert not any(MASKED in each for each in tuned.rejected)


def test_a_slow_split_is_left_behind(gpu: LayerGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_search, "supports", lambda _: False)
    gpu.us = {BGRAD.format("output"): 25.0, SPLIT: 500.0}
    tuned = tune()
    assert f"{BGRAD.format('output')}: slow: 25.0 µs" in tuned.rejected
    assert f"{SPLIT}: slow: 500.0 µs" in tuned.rejected
    assert 25.0 in [each.us for each in entry(gpu, pair()[1]).alternatives]
    tuned_products = [problem for problem, _ in gpu.tuned]
    assert Epilogue.BIAS not in [problem.epilogue for problem in tuned_products]


def test_a_slow_split_stays_in_where_our_kernel_takes_a_product(gpu: LayerGpu) -> None:
    gpu.us, gpu.tuned_us = {BGRAD.format("output"): 25.0}, {BGRAD.format("output"): 5.0}
    assert "db by epilogue" in tune().strategy


def test_what_runs_untuned_is_tuned_however_slow_it_is(gpu: LayerGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_search, "supports", lambda _: False)
    gpu.us, gpu.tuned_us = {FUSED: 50.0}, {FUSED: 5.0}
    tuned = tune()
    assert tuned.strategy.startswith("relu_bias")
    assert (tuned.before_us, tuned.after_us) == (60.0, 15.0)


def test_a_challenger_within_the_noise_does_not_replace_the_priors_choice(gpu: LayerGpu) -> None:
    gpu.us = {PLAIN: 9.95}
    tune()
    assert from_json(ForwardStrategy, entry(gpu, forward_of(RELU)).strategy).epilogue is Epilogue.RELU_BIAS


@pytest.mark.parametrize(
    ("us", "tuned_us", "totals", "winner", "algorithm"),
    [
        ({SPLIT: 10.5}, {FUSED: 9.5, SPLIT: 7.0}, (20.0, 17.0), "bias", TUNED),
        ({}, dict.fromkeys((FUSED, MASKED, SPLIT, PLAIN), 11.0), (20.0, 20.0), "relu_bias", BY_HEURISTIC),
        ({FUSED: 20.0, PLAIN: 20.0, MASKED: 20.0}, {SPLIT: 12.0}, (30.0, 20.0), "bias", BY_HEURISTIC),
        ({SPLIT: 8.0}, {SPLIT: 15.0}, (20.0, 18.0), "bias", BY_HEURISTIC),
    ],
    ids=["tuned algorithms count", "the untuned plan stays", "faster untuned", "the tuned algorithm is far slower"],
)
def test_algorithms_are_compared_in_place(
    gpu: LayerGpu, us: dict[str, float], tuned_us: dict[str, float], totals: Any, winner: str, algorithm: bytes
) -> None:
    gpu.us, gpu.tuned_us = us, tuned_us
    tuned = tune()
    assert (tuned.before_us, tuned.after_us) == totals
    assert tuned.strategy.startswith(f"{winner}, keeps output")
    entries = {problem.epilogue.value: entry_of(gpu, problem) for problem, _ in gpu.tuned}
    assert entries[winner].algorithm == algorithm


def test_what_runs_untuned_does_not_stay_where_its_algorithm_is_wrong(gpu: LayerGpu) -> None:
    gpu.tuned_us = dict.fromkeys((FUSED, MASKED, SPLIT, PLAIN), 11.0)
    gpu.wrong_first = {"relu_bias", "relu_aux_bias", "bias", "none"}
    tuned = tune()
    assert (tuned.before_us, tuned.after_us) == (20.0, 21.0)
    assert any("relu_bias by" in each and "wrong: d[0, 0, 0]" in each for each in tuned.rejected)
    assert {entry_of(gpu, problem).algorithm for problem, _ in gpu.tuned} == {TUNED}


def test_what_runs_untuned_does_not_stay_where_it_is_wrong(gpu: LayerGpu) -> None:
    gpu.us, gpu.wrong = {FUSED: 5.0}, {FUSED}
    tuned = tune()
    assert (tuned.before_us, tuned.after_us) == (15.0, 20.0)
    assert saved_by(gpu)
    assert not tuned.strategy.startswith("relu_bias")


def test_what_is_refused_is_remembered(gpu: LayerGpu) -> None:
    gpu.refused = {"relu_aux_bias", "drelu_bgrad"}
    tuned = tune()
    assert saved_by(gpu) is Saved.OUTPUT
    assert sum("refused: cuBLASLt offers 0" in each for each in tuned.rejected) == 1 + 2 * 2
    gpu.asked.clear()
    bar_forward(gpu)
    assert tune().measured
    assert "drelu_bgrad" not in [each.epilogue.value for each in gpu.asked]


def test_a_product_without_a_right_algorithm_takes_its_strategies_out(gpu: LayerGpu) -> None:
    gpu.us, gpu.useless = {FUSED: 5.0}, {"relu_bias"}
    assert "relu_bias" not in tune().strategy
    assert "none of cuBLASLt's" in entry(gpu, forward_of(RELU)).rejected[0].reason


def test_where_nothing_runs(gpu: LayerGpu) -> None:
    gpu.refused = {epilogue.value for epilogue in Epilogue}
    tuned = tune()
    assert (tuned.before_us, tuned.after_us, tuned.strategy) == (0.0, 0.0, "none")
    assert "refused: cuBLASLt offers 0" in tuned.rejected[0]


def test_what_is_decided_is_not_measured_again(gpu: LayerGpu) -> None:
    first = tune_all(GELU)
    products = [problem for problem, _ in gpu.tuned]
    assert len(products) == len(set(products)), "a product of two parts is tuned once"
    launches = len(gpu.clock.launched)
    second = tune_all(GELU)
    assert [each.problems for each in second] == [each.problems for each in first]
    assert [each.strategy for each in second] == [each.strategy for each in first]
    assert {each.measured for each in second} == {0}
    assert len(gpu.clock.launched) == launches


def test_stages_keep_to_their_budgets(gpu: LayerGpu) -> None:
    gpu.us = {FUSED: 3e5, MASKED: 3e5, SPLIT: 3e5, PLAIN: 3e5}
    tune()
    assert sum(seconds for _, seconds in gpu.tuned) == pytest.approx(2.0)
    assert saved_by(gpu)


def test_problems_alone(gpu: LayerGpu) -> None:
    forward, backward = forward_of(GELU, 1), backward_of(GELU, 0)
    tuned = tune_all(*chains_of([forward, backward]))
    assert [each.problems for each in tuned] == [(forward,), (backward,)]
    assert entry(gpu, forward).us == tuned[0].after_us == 10.0
    assert entry(gpu, backward).us == 10.0


def a_product(epilogue: Epilogue, order: Order = Order.ROW) -> MatmulProblem:
    d = Layout(16, 24, order, 24 if order is Order.ROW else 16)
    return input_gradient(16, 24, 40, epilogue, dtype=DType.FLOAT32, d=Spec(d))


def test_a_product_by_itself(gpu: LayerGpu) -> None:
    problem = a_product(Epilogue.RELU_BIAS)
    (tuned,) = tune_all(problem)
    assert (tuned.problems, tuned.before_us, tuned.after_us, tuned.measured) == ((problem,), 6.0, 5.0, 3)
    assert tuned.strategy == "relu_bias by id 1"
    assert gpu.forgotten == [problem]
    (again,) = tune_all(problem)
    assert (again.measured, len(gpu.tuned)) == (0, 1)


def test_what_is_left_of_a_product_that_the_library_refuses(gpu: LayerGpu) -> None:
    gpu.refused = {"relu_bias"}
    for problem in (a_product(Epilogue.RELU_BIAS), a_product(Epilogue.BIAS, Order.COLUMN)):
        (tuned,) = tune_all(problem)
        assert tuned.strategy == "none by id 1"
        assert gpu.store.product(problem_key(plain_product(problem)))
    assert [problem.epilogue.value for problem, _ in gpu.tuned] == ["relu_bias", "none", "none"]


def test_what_is_empty_is_left_out(gpu: LayerGpu) -> None:
    forward = replace(forward_of(RELU, 1), x=Spec(packed(0, 24)), y=Spec(packed(0, 8)))
    assert tune_all(input_gradient(16, 24, 0), LayerChain((Layer(forward),))) == []


def test_what_there_is_no_memory_for_is_left_alone(gpu: LayerGpu) -> None:
    gpu.too_large = [pair(GELU)[1]]
    with pytest.warns(UserWarning, match="for want of memory on the GPU: forward 16x24x8 bfloat16 gelu and backward"):
        alone = tune_all(GELU)
    assert [each.problems for each in alone] == [(forward_of(GELU, 1),), (backward_of(GELU, 0),)]
    assert not gpu.store.layer(problem_key(forward_of(GELU)))


def test_layers_that_are_alike_are_decided_once(gpu: LayerGpu) -> None:
    chain = LayerChain.of_mlp(16, (8, 8, 8, 8, 8), Activation("gelu"), DType.FLOAT32, Compute.FLOAT32)
    decided = [problem for each in tune_all(chain) for problem in each.problems]
    assert len(decided) == len(set(decided))
    assert {*decided} >= {*chain.problems} - {backward_of(chain, 1)}
