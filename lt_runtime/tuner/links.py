"""Which problems are decided together: a forward pass, and the backward pass that takes its derivative.

What forward keeps moves cost from one to the other. A problem alone is a link of one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from lt_runtime.plans.strategies import forward_strategies, kept_spec
from lt_runtime.problem import BackwardProblem, Derivative, ForwardProblem, MatmulProblem, Saved, Spec
from lt_runtime.store.keys import Problem

Side: TypeAlias = Literal["own", "through"]
"""Which of a backward problem's derivatives."""

LayerProblem: TypeAlias = ForwardProblem | BackwardProblem

SIDES: Final[tuple[Side, ...]] = ("own", "through")


@dataclass(frozen=True, slots=True)
class Link:
    """Problems that are decided together.

    Attributes:
        forward, backward: at least one of them.
        side: which of the backward problem's derivatives is the forward problem's; None if there is only one problem.
    """

    forward: ForwardProblem | None = None
    backward: BackwardProblem | None = None
    side: Side | None = None

    @property
    def problems(self) -> tuple[LayerProblem, ...]:
        """Those that there are."""
        return tuple(each for each in (self.forward, self.backward) if each is not None)

    @property
    def variants(self) -> tuple[BackwardProblem, ...]:
        """The backward problem for everything that forward may keep; as it is, where that is not to be decided."""
        if self.backward is None:
            return ()
        if self.forward is None or self.side is None:
            return (self.backward,)
        return tuple(with_saved(self.backward, self.side, self.forward, saved) for saved in saved_kinds(self.forward))


def saved_kinds(problem: ForwardProblem) -> tuple[Saved, ...]:
    """What a forward pass may keep, by one strategy or another."""
    return tuple(dict.fromkeys(strategy.saved for strategy in forward_strategies(problem)))


def saved_spec(problem: ForwardProblem, saved: Saved) -> Spec | None:
    """How that lies which backward reads; None if it reads nothing."""
    if saved is Saved.NOTHING:
        return None
    return problem.y if saved is Saved.OUTPUT else kept_spec(problem, saved)


def with_saved(backward: BackwardProblem, side: Side, forward: ForwardProblem, saved: Saved) -> BackwardProblem:
    """The same backward problem, the forward pass of one of its derivatives having kept something else."""
    derivative: Derivative | None = getattr(backward, side)
    assert derivative is not None
    changed = dataclasses.replace(derivative, saved=saved, saved_spec=saved_spec(forward, saved))
    if side == "own":
        return dataclasses.replace(backward, own=changed)
    return dataclasses.replace(backward, through=changed)


def links(problems: Iterable[Problem]) -> list[Link | MatmulProblem]:
    """Problems in groups, a matrix product being one by itself; forward problems stand before what depends on them.

    A backward problem that takes two derivatives is in a link with the layer below, then in one with its own. A forward
    problem that several backward problems depend on is in a link with each: the first decides, see `settled`.
    """
    distinct = list(dict.fromkeys(problems))
    forwards = [each for each in distinct if isinstance(each, ForwardProblem)]
    backwards = [each for each in distinct if isinstance(each, BackwardProblem)]
    found = [link for backward in backwards for link in _links_of(backward, forwards)]
    linked = {link.forward for link in found}
    alone = [Link(forward) for forward in forwards if forward not in linked]
    return [*alone, *found, *(each for each in distinct if isinstance(each, MatmulProblem))]


def settled(link: Link, forwards: Iterable[ForwardProblem], decided: Mapping[ForwardProblem, Saved]) -> Link:
    """A link with what was decided meanwhile: what other forward passes keep, or its own."""
    backward, known = link.backward, list(forwards)
    if backward is None:
        return link
    for side in SIDES:
        forward = forward_of(backward, side, known)
        if forward is not None and forward in decided:
            backward = with_saved(backward, side, forward, decided[forward])
    if link.forward in decided:
        return Link(None, backward)
    return dataclasses.replace(link, backward=backward)


def forward_of(backward: BackwardProblem, side: Side, forwards: Iterable[ForwardProblem]) -> ForwardProblem | None:
    """The forward problem whose derivative a backward problem takes; None if there is none, or nothing is kept."""
    derivative: Derivative | None = getattr(backward, side)
    if derivative is None or derivative.saved is Saved.NOTHING:
        return None
    return next((each for each in forwards if _belongs(each, backward, side, derivative)), None)


def _links_of(backward: BackwardProblem, forwards: list[ForwardProblem]) -> list[Link]:
    found = [Link(forward, backward, side) for side in SIDES[::-1] if (forward := forward_of(backward, side, forwards))]
    return found or [Link(None, backward)]


def _belongs(forward: ForwardProblem, backward: BackwardProblem, side: Side, derivative: Derivative) -> bool:
    types = (forward.dtype, forward.compute, forward.activation, forward.dropout)
    if types != (backward.dtype, backward.compute, derivative.activation, derivative.dropout):
        return False
    if derivative.saved not in saved_kinds(forward) or (derivative.db is not None and forward.bias is None):
        return False
    if side == "through":
        return forward.y == backward.x
    is_same_layer = (forward.x, forward.w) == (backward.x, backward.w)
    return is_same_layer and forward.y.layout.shape == backward.dy.layout.shape
