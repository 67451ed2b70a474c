"""The problems of a `LayerChain`: those that its layers would request one by one.

Plans of layers that depend on each other are chosen together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lt_runtime.layout import packed
from lt_runtime.plans.strategies import backward_strategies, forward_strategies
from lt_runtime.problem import (
    ACTIVATIONS,
    Activation,
    BackwardProblem,
    Compute,
    DType,
    ForwardProblem,
    MatmulProblem,
    Saved,
    Spec,
)
from lt_runtime.store.keys import parse_key, problem_key
from lt_runtime.tuner.chain import Layer, LayerChain, Part, chains_of, derivative_of, plain_backward, saved_kinds
from tests.support.chain_problems import backward_of, by_themselves, forward_of


def mlp(activation: str = "gelu", rows: int = 64, dims: Any = (32, 48, 24, 10), **options: Any) -> LayerChain:
    return LayerChain.of_mlp(rows, dims, Activation(activation), DType.BFLOAT16, Compute.FLOAT32, **options)


GELU, RELU = mlp("gelu"), mlp("relu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dropout", [False, True])
def test_what_is_saved_by_default_is_what_some_strategy_keeps(activation: str, dropout: bool) -> None:
    chain = mlp(activation, dropout=dropout)
    kept = {each.saved for each in forward_strategies(forward_of(chain, 1))}
    below = backward_of(chain, 2).input_derivative
    assert below is not None
    assert below.saved in kept
    assert (below.saved_spec is None) == (below.saved is Saved.NOTHING)
    assert next(backward_strategies(backward_of(chain, 2)))


def test_without_bias_there_are_no_bias_gradients() -> None:
    chain = mlp(bias=False)
    problems = [backward_of(chain, index) for index in range(3)]
    assert {each.output_derivative.db for each in problems} == {None}
    assert {each.input_derivative.db for each in problems if each.input_derivative} == {None}
    assert forward_of(chain, 0).bias is None


def test_problems_are_listed_once_forward_first() -> None:
    problems = mlp(dims=(32, 32, 32, 32)).problems
    # Layers 0 and 1 have equal forward problems. The three backward problems differ: the first computes no dx, the last
    # computes its own bias gradient.
    assert [type(each) for each in problems] == [ForwardProblem] * 2 + [BackwardProblem] * 3
    assert len({problem_key(each) for each in problems}) == 5
    assert [parse_key(problem_key(each)) for each in problems] == problems


def parts_of(chain: LayerChain) -> list[tuple[list[object], object]]:
    cuts = [chain.cut(part) for part in chain.parts]
    return [([*cut.problems], cut.reader(0)) for cut in cuts]


def test_each_layer_is_decided_with_the_one_above() -> None:
    chain = mlp("relu")
    assert parts_of(chain) == [
        ([forward_of(chain, 2)], None),
        ([forward_of(chain, 1), backward_of(chain, 2)], (1, "input_derivative")),
        ([forward_of(chain, 0), backward_of(chain, 1)], (1, "input_derivative")),
        ([backward_of(chain, 0)], None),
    ]


def test_layers_by_themselves_are_decided_with_their_own_backward() -> None:
    chain = by_themselves(mlp("relu", dims=(8, 24, 8), output_activation=Activation("gelu")))
    assert mlp(dims=(8, 24)).parts == [Part(0, None), Part(None, 0)], "a linear layer saves nothing"
    assert chain.parts == [Part(1, 1), Part(0, 0)]
    assert chain.reader(0) == (0, "output_derivative")


def test_the_last_layer_comes_after_the_one_below() -> None:
    chain = mlp("relu", dims=(8, 24, 8), output_activation=Activation("gelu"))
    assert chain.parts == [Part(0, 1), Part(1, 1), Part(None, 0)]
    decided = chain.keeping({0: Saved.MASK})
    second = decided.cut(Part(1, 1))
    assert second.layers == (Layer(forward_of(chain, 1), backward_of(decided, 1)),)
    assert second.reader(0) == (0, "output_derivative")


def test_keeping_something_else_changes_who_reads_it() -> None:
    chain = mlp("relu", dims=(8, 24, 8))
    assert saved_kinds(forward_of(chain, 0)) == (Saved.OUTPUT, Saved.MASK)
    by_mask = chain.keeping({0: Saved.MASK})
    assert (by_mask.layers[0], by_mask.layers[1].forward) == (chain.layers[0], chain.layers[1].forward)
    own, through = derivative_of(forward_of(chain, 1)), backward_of(by_mask, 1).input_derivative
    assert backward_of(by_mask, 1).output_derivative == own
    assert through is not None
    assert through.saved is Saved.MASK
    assert by_mask.keeping({0: Saved.OUTPUT}) == chain
    asked = Spec(packed(64, 24), 64)
    gelu = replace(forward_of(mlp(dims=(8, 24)), 0), activation=Activation("gelu"), preactivation=asked)
    lone = LayerChain.of_problem(gelu).keeping({0: Saved.PREACTIVATION})
    assert backward_of(lone, 0).output_derivative.saved_spec == asked
    assert backward_of(lone.keeping({0: Saved.NOTHING}), 0).output_derivative.saved_spec is None


def test_a_problem_by_itself() -> None:
    one, last = forward_of(GELU, 0), backward_of(GELU, 0)
    assert LayerChain.of_problem(one).layers == (Layer(one, plain_backward(one)),)
    single = mlp(dims=(32, 48), output_activation=Activation("gelu"), input_gradient=True)
    assert LayerChain.of_problem(forward_of(single, 0)) == single
    inference = replace(one, backward=False)
    assert LayerChain.of_problem(inference).layers == (Layer(inference),)
    assert LayerChain.of_problem(last).layers == (Layer(None, last),)


def decided(chains: Any) -> set[tuple[object, ...]]:
    """For each part of a chain, the problems that are decided together."""
    return {tuple(chain.cut(part).problems) for chain in chains for part in chain.parts}


@pytest.mark.parametrize("dims", [(32, 48, 24, 10), (16, 16, 16, 16)])
@pytest.mark.parametrize("output_activation", ["none", "gelu"])
@pytest.mark.parametrize("activation", ["relu", "gelu", "none"])
def test_flat_problems_are_decided_as_those_of_the_chain(activation: str, output_activation: str, dims: Any) -> None:
    output = Activation(output_activation)  # type: ignore[arg-type]
    chain = mlp(activation, dims=dims, output_activation=output, input_gradient=True)
    kept = chain.keeping({index: saved_kinds(forward_of(chain, index))[-1] for index in range(3)})
    for each in (chain, kept, by_themselves(chain)):
        assert decided(chains_of(each.problems)) == decided(chains_of(reversed(each.problems))) == decided([each])
    both = chain, mlp(activation, rows=32)
    assert decided(chains_of([problem for each in both for problem in each.problems])) == decided(both)


def test_a_backward_problem_is_in_a_chain_with_the_forward_problems_that_it_reads() -> None:
    (pair,) = chains_of([forward_of(RELU, 0), backward_of(RELU, 1)])
    assert pair == RELU.cut(Part(0, 1))
    first, second = (replace(forward_of(RELU, index), backward=False) for index in (0, 1))
    assert chains_of([first, second]) == [LayerChain((Layer(each),)) for each in (first, second)]


def test_a_forward_of_two_backwards_is_in_a_chain_with_each() -> None:
    one = backward_of(RELU, 1)
    other = replace(one, accumulate=True)
    below = Layer(forward_of(RELU, 0))
    assert chains_of([forward_of(RELU, 0), one, other]) == [
        LayerChain((below, Layer(None, one))),
        LayerChain((below, Layer(None, other))),
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": Activation("gelu")},
        {"dropout": True},
        {"backward": False},
        {"bias": None},
        {"y": Spec(packed(64, 48), 16)},
        {"dtype": DType.FLOAT16},
    ],
)
def test_what_does_not_belong_together(changes: dict[str, Any]) -> None:
    other, above = replace(forward_of(RELU, 0), **changes), backward_of(RELU, 1)
    assert chains_of([other, above]) == [LayerChain((Layer(other),)), LayerChain((Layer(None, above),))]


def test_products_stand_for_themselves() -> None:
    product = MatmulProblem(DType.FLOAT32, DType.FLOAT32, Compute.FLOAT32, *[Spec(packed(4, 4))] * 3)
    assert chains_of([product, product]) == [product]
