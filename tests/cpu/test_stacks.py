"""A stack's problems are those that its layers, run one after the other, ask for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lt_runtime.errors import ArgumentError
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.plans.strategies import backward_strategies, forward_strategies, unchanged
from lt_runtime.problem import ACTIVATIONS, Activation, BackwardProblem, Compute, DType, ForwardProblem, Saved, Spec
from lt_runtime.store.keys import parse_key, problem_key
from lt_runtime.tuner.stacks import Stack, derivative_of, plain_backward

GELU = Stack(64, (32, 48, 24, 10), Activation("gelu"), DType.BFLOAT16, Compute.FLOAT32)
RELU = replace(GELU, activation=Activation("relu"))


def spec(rows: int, cols: int) -> Spec:
    return Spec(packed(rows, cols), 256)


def test_forward_has_the_layers_shapes_and_activations() -> None:
    problems = [GELU.forward(index) for index in range(len(GELU))]
    assert [(each.x, each.w, each.y) for each in problems] == [
        (spec(64, 32), spec(48, 32), spec(64, 48)),
        (spec(64, 48), spec(24, 48), spec(64, 24)),
        (spec(64, 24), spec(10, 24), spec(64, 10)),
    ]
    assert [each.activation.name for each in problems] == ["gelu", "gelu", "none"]
    assert all(each.backward and each.bias == 256 for each in problems)


def test_only_hidden_layers_have_dropout() -> None:
    stack = replace(GELU, dropout=True, final_activation=Activation("tanh"))
    assert [stack.forward(index).dropout for index in range(3)] == [True, True, False]
    assert stack.forward(2).activation == Activation("tanh")
    assert stack.backward(2).own == derivative_of(stack.forward(2))
    assert stack.backward(2).through == derivative_of(stack.forward(1))
    assert stack.backward(2).through.dropout  # type: ignore[union-attr]


def test_a_chain_takes_every_derivative_once() -> None:
    first, middle, last = (GELU.backward(index) for index in range(3))
    below = derivative_of(GELU.forward(0))
    assert below.saved is Saved.PREACTIVATION
    assert below.db == 256
    assert (last.own, last.through) == (unchanged(256), derivative_of(GELU.forward(1)))
    assert (middle.own, middle.through) == (unchanged(None), below)
    assert (first.own, first.through) == (unchanged(None), None)
    assert (first.dx, middle.dx, last.dx) == (None, spec(64, 48), spec(64, 24))
    assert replace(GELU, input_gradient=True).backward(0).dx == spec(64, 32)


def test_layers_that_are_not_chained_take_their_own() -> None:
    stack = replace(GELU, chained=False)
    for index in range(3):
        problem = stack.backward(index)
        assert problem.own == derivative_of(stack.forward(index))
        assert problem.through is None


@pytest.mark.parametrize(
    ("saved", "layout"),
    [
        (Saved.MASK, Layout(64, 24, Order.ROW, 128)),
        (Saved.PREACTIVATION, Layout(64, 24, Order.ROW, 24)),
        (Saved.OUTPUT, packed(64, 24)),
    ],
)
def test_what_is_saved_lies_as_forward_leaves_it(saved: Saved, layout: Layout) -> None:
    problem = RELU.backward(2, [Saved.OUTPUT, saved, Saved.NOTHING])
    assert problem.through is not None
    assert (problem.through.saved, problem.through.saved_spec) == (saved, Spec(layout))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dropout", [False, True])
def test_what_is_saved_by_default_is_what_some_strategy_keeps(activation: str, dropout: bool) -> None:
    stack = replace(GELU, activation=Activation(activation), dropout=dropout)
    kept = {each.saved for each in forward_strategies(stack.forward(1))}
    below = stack.backward(2).through
    assert below is not None
    assert below.saved in kept
    assert (below.saved_spec is None) == (below.saved is Saved.NOTHING)
    assert next(backward_strategies(stack.backward(2)))


def test_without_bias_there_are_no_bias_gradients() -> None:
    stack = replace(GELU, bias=False)
    problems = [stack.backward(index) for index in range(3)]
    assert {each.own.db for each in problems} == {None}
    assert {each.through.db for each in problems if each.through} == {None}
    assert stack.forward(0).bias is None


def test_problems_are_listed_once_forward_first() -> None:
    problems = replace(GELU, dims=(32, 32, 32, 32)).problems()
    # Layers 0 and 1 are alike forward; each of the three differs backward: no dx, in the middle, with its own bias.
    assert [type(each) for each in problems] == [ForwardProblem] * 2 + [BackwardProblem] * 3
    assert len({problem_key(each) for each in problems}) == 5
    assert [parse_key(problem_key(each)) for each in problems] == problems


def test_the_plain_backward_of_a_layer() -> None:
    single = replace(GELU, dims=(32, 48), final_activation=Activation("gelu"), input_gradient=True)
    assert plain_backward(single.forward(0)) == single.backward(0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dims": (32,)}, r"dims is \[32\]; accepted are two or more"),
        ({"dims": (32, 0, 10)}, "dims has 0; accepted are integers of at least 1"),
        ({"dims": (32, 1.5)}, "dims has 1.5"),
        ({"rows": True}, "rows has True"),
        ({"rows": -1}, "rows has -1"),
    ],
)
def test_bad_stacks(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        replace(GELU, **changes)
