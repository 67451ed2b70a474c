"""The operands of layers in a row: what one problem writes, others read, as in a training step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from lt_runtime.problem import BackwardProblem, Derivative, ForwardProblem, Saved
from lt_runtime.tuner.layer_trial import LayerTrial
from lt_runtime.tuner.links import LayerProblem, Link
from lt_runtime.tuner.trial import Buffer

RowTrial: TypeAlias = Mapping[LayerProblem, LayerTrial]
"""A trial of each problem."""


def row_trial(xp: Any, problems: Iterable[LayerProblem]) -> RowTrial:
    """Trials that share weights, outputs that are inputs, what is kept, and gradients.

    The cache then holds what it holds in a step, which matters where a branch would drive it out.

    Args:
        xp: see `LayerTrial`.
        problems: in the order in which they run.
    """
    made: dict[LayerProblem, LayerTrial] = {}
    for problem in problems:
        made[problem] = LayerTrial(xp, alone(problem), _shared(problem, made))
    return made


def alone(problem: LayerProblem) -> Link:
    """A link of one problem."""
    return Link(problem) if isinstance(problem, ForwardProblem) else Link(None, problem)


def _shared(problem: LayerProblem, made: RowTrial) -> dict[str, Buffer]:
    """What there is of a problem's operands, by their names in its trial."""
    if isinstance(problem, ForwardProblem):
        below = _forward_into(problem, made, None)
        return {"x": made[below].buffers["y"]} if below else {}
    layer = _forward_of(problem, made)
    below = _forward_into(problem, made, layer)
    saved = (("own", layer, problem.own), ("through", below, problem.through))
    found = {f"saved {side}": _kept(made[forward], of) for side, forward, of in saved if forward and of}
    if layer is not None:
        found |= {name: made[layer].buffers[name] for name in ("x", "w")}
    if (above := _backward_into(problem, made)) is not None:
        found["dy"] = made[above].buffers["dx"]
    return {name: buffer for name, buffer in found.items() if buffer is not None}


def _forward_into(problem: LayerProblem, made: RowTrial, own: ForwardProblem | None) -> ForwardProblem | None:
    """The forward problem of the layer below: the last before this layer's own whose output fits."""
    found = None
    for each in made:
        if each == own:
            break
        if isinstance(each, ForwardProblem) and each.y == problem.x:
            found = each
    return found


def _forward_of(problem: BackwardProblem, made: RowTrial) -> ForwardProblem | None:
    """The same layer's. Where layers are of one shape, their backward passes come in the opposite order."""
    alike = [each for each in made if (each.x, each.w) == (problem.x, problem.w)]
    forwards = [each for each in alike if isinstance(each, ForwardProblem)]
    layers_above = len(alike) - len(forwards)
    return forwards[max(len(forwards) - 1 - layers_above, 0)] if forwards else None


def _backward_into(problem: BackwardProblem, made: RowTrial) -> BackwardProblem | None:
    """That of the layer above: the last one before."""
    backwards = [each for each in made if isinstance(each, BackwardProblem)]
    return backwards[-1] if backwards and backwards[-1].dx == problem.dy else None


def _kept(trial: LayerTrial, derivative: Derivative) -> Buffer | None:
    """What forward has left for a derivative; None if nothing is needed."""
    if derivative.saved is Saved.NOTHING:
        return None
    return trial.buffers.get("y" if derivative.saved is Saved.OUTPUT else f"kept {derivative.saved.value}")
