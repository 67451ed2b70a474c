"""The forward and backward problems of a chain's layers, and variants of these problems."""

from __future__ import annotations

from lt_runtime.problem import BackwardProblem, ForwardProblem, Saved
from lt_runtime.tuner.chain import Layer, LayerChain, plain_backward


def forward_of(chain: LayerChain, index: int = 0) -> ForwardProblem:
    found = chain.layers[index].forward
    assert found is not None
    return found


def backward_of(chain: LayerChain, index: int, saved: Saved | None = None) -> BackwardProblem:
    """Makes a layer's backward problem; `saved` changes the kind of tensor that the layer below keeps."""
    found = (chain if saved is None else chain.keeping({index - 1: saved})).layers[index].backward
    assert found is not None
    return found


def by_themselves(chain: LayerChain) -> LayerChain:
    """Makes backward problems of the same layers without `through`: each layer applies its own activation's derivative
    and computes all its gradients.
    """
    forwards = [forward_of(chain, index) for index in range(len(chain.layers))]
    return LayerChain(tuple(Layer(each, plain_backward(each)) for each in forwards))
