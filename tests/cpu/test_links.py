"""Which problems are decided together, and what a backward problem becomes when forward keeps something else."""

from __future__ import annotations

from dataclasses import replace

from lt_runtime.layout import Order, packed
from lt_runtime.problem import Activation, Compute, DType, MatmulProblem, Saved, Spec
from lt_runtime.tuner.links import Link, links, saved_kinds, saved_spec, settled, with_saved
from lt_runtime.tuner.stacks import Stack

RELU, GELU = Activation("relu"), Activation("gelu")


def stack(*dims: int, activation: Activation = RELU, **options: object) -> Stack:
    return Stack(16, dims, activation, DType.BFLOAT16, Compute.FLOAT32, **options)  # type: ignore[arg-type]


def test_a_chain_links_each_layer_with_the_one_above() -> None:
    layers = stack(8, 24, 40, 8)
    found = links(reversed(layers.problems()))
    assert {(each.forward, each.backward, each.side) for each in found if isinstance(each, Link)} == {
        (layers.forward(0), layers.backward(1), "through"),
        (layers.forward(1), layers.backward(2), "through"),
        (layers.forward(2), None, None),
        (None, layers.backward(0), None),
    }


def test_layers_by_themselves_are_linked_with_their_own_backward() -> None:
    layers = stack(8, 24, 8, chained=False, final_activation=GELU)
    assert links(layers.problems()) == [Link(layers.forward(index), layers.backward(index), "own") for index in (1, 0)]


def test_the_last_layer_comes_after_the_one_below() -> None:
    layers = stack(8, 24, 8, final_activation=GELU)
    found = [each for each in links(layers.problems()) if each.side]
    assert [(each.forward, each.side) for each in found] == [
        (layers.forward(0), "through"),
        (layers.forward(1), "own"),
    ]
    decided = {layers.forward(0): Saved.MASK}
    second = settled(found[1], [layers.forward(0), layers.forward(1)], decided)
    assert second.forward == layers.forward(1)
    assert second.backward == with_saved(layers.backward(1), "through", layers.forward(0), Saved.MASK)


def test_a_forward_of_two_backwards_is_decided_once() -> None:
    layers = stack(8, 24, 8)
    forward, first = layers.forward(0), layers.backward(1)
    second = replace(first, accumulate=True)
    found = links([forward, first, second])
    assert [each.forward for each in found] == [forward, forward]
    after = settled(found[1], [forward], {forward: Saved.MASK})
    assert after == Link(None, with_saved(second, "through", forward, Saved.MASK))


def test_what_does_not_belong_together() -> None:
    layers = stack(8, 24, 8)
    forward, backward = layers.forward(0), layers.backward(1)
    others = [
        replace(forward, activation=GELU),
        replace(forward, dropout=True),
        replace(forward, backward=False),
        replace(forward, bias=None),
        replace(forward, y=Spec(packed(16, 24), 16)),
        replace(forward, dtype=DType.FLOAT16),
    ]
    for other in others:
        assert links([other, backward]) == [Link(other), Link(None, backward)]


def test_a_linear_layer_keeps_nothing_and_is_alone() -> None:
    layers = stack(8, 24, chained=False)
    assert links(layers.problems()) == [Link(layers.forward(0)), Link(None, layers.backward(0))]


def test_products_stand_alone() -> None:
    specs = [Spec(packed(4, 4))] * 3
    product = MatmulProblem(DType.FLOAT32, DType.FLOAT32, Compute.FLOAT32, *specs)
    assert links([product, product]) == [product]


def test_variants_are_all_that_forward_may_keep() -> None:
    layers = stack(8, 24, 8)
    forward, backward = layers.forward(0), layers.backward(1)
    assert saved_kinds(forward) == (Saved.OUTPUT, Saved.MASK)
    by_output, by_mask = Link(forward, backward, "through").variants
    assert by_output == backward
    assert by_mask.through is not None
    assert (by_mask.through.saved, by_mask.through.saved_spec) == (Saved.MASK, saved_spec(forward, Saved.MASK))
    assert Link(None, backward).variants == (backward,)
    assert Link(forward).variants == ()


def test_what_backward_reads() -> None:
    forward = stack(8, 24, activation=GELU).forward(0)
    gelu = replace(forward, activation=GELU)
    assert saved_spec(gelu, Saved.NOTHING) is None
    assert saved_spec(gelu, Saved.OUTPUT) == gelu.y
    kept = saved_spec(gelu, Saved.PREACTIVATION)
    assert kept is not None
    assert (kept.layout.shape, kept.layout.order) == ((16, 24), Order.ROW)
    asked = Spec(packed(16, 24), 64)
    assert saved_spec(replace(gelu, preactivation=asked), Saved.PREACTIVATION) == asked
