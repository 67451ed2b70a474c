"""The optimizer's update of a layer beside the backward pass of the layers before it.

The update is bound by memory and the backward pass by tensor cores. In a captured step they are branches of one graph:
that of a layer may begin once the layer's own backward pass has read its weight for the last time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from lt_runtime.gpu.streams import order_after
from lt_runtime.ops._adamw_parts import StepInParts
from lt_runtime.ops.adamw import AdamW
from lt_runtime.ranges import range_of
from lt_runtime.training.mlp import MLP

BESIDE_FROM: Final = 1 << 20
"""Parameters of a layer from which on its update is a branch. An estimate: so many take an H200 about 7 µs, at 28 bytes
each, a few times what a fork, a launch and a join add. `lt_update_last` of `benchmarks.steps` shows what is gained."""

LayerDone: TypeAlias = Callable[[int], object]
"""Is told of a layer, by its index, once the stream has been given its backward pass."""


def late_layers(model: MLP, optimizer: AdamW, least: float) -> dict[int, list[int]]:
    """The layers whose update may come beside the backward pass, with their parameters' positions in the optimizer.

    Never the first: the number of the step, which dropout's masks are drawn for, advances once all is updated, so that
    something has to be left for the end.

    Args:
        least: parameters that such a layer has.
    """
    positions = {id(parameter): i for i, parameter in enumerate(optimizer.parameters)}
    layers = [[layer.weight, layer.bias] for layer in model.layers]
    found = [[positions[id(each)] for each in layer if id(each) in positions] for layer in layers]
    sizes = [sum(math.prod(optimizer.parameters[i].data.shape) for i in each) for each in found]
    if not found[0]:
        return {}
    return {i: each for i, each in enumerate(found) if i and each and sizes[i] >= least}


@contextlib.contextmanager
def updates_beside(
    step: StepInParts, layers: Mapping[int, Sequence[int]], stream: int, beside: int
) -> Iterator[LayerDone]:
    """Updates each of some layers on a branch when it is told of it, and all other parameters on the stream at its end.

    Args:
        layers: positions of the parameters in the optimizer, by layer.
        stream: that is being captured. beside: one for nothing else, which the stream waits for at the end.
    """
    forked = False

    def update(layer: int) -> None:
        nonlocal forked
        if layer not in layers:
            return
        order_after(beside, stream)
        forked = True
        with range_of("optimizer"):
            step.update(layers[layer], beside)

    try:
        yield update
        with range_of("optimizer"):
            step.finish(stream)
    finally:
        if forked:
            order_after(stream, beside)
