"""Every way to split a link that there is, as plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TypeAlias, TypeVar

from lt_runtime.errors import PlanError
from lt_runtime.plans.backward import BackwardPlan
from lt_runtime.plans.forward import ForwardPlan
from lt_runtime.plans.priors import backward_priors, forward_priors
from lt_runtime.plans.strategies import (
    BackwardStrategy,
    ForwardStrategy,
    backward_strategies,
    forward_strategies,
    to_entry,
)
from lt_runtime.problem import Derivative, ForwardProblem, MatmulProblem
from lt_runtime.products.choose import Choose
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.entries import RejectedStrategy
from lt_runtime.tuner.links import SIDES, LayerProblem, Link
from lt_runtime.tuner.names import strategy_in_words

Half: TypeAlias = ForwardPlan | BackwardPlan
Pair: TypeAlias = tuple[str, str]
"""Names of a forward and a backward half; "" where a link has none."""

Split: TypeAlias = ForwardStrategy | BackwardStrategy

_Half = TypeVar("_Half", ForwardPlan, BackwardPlan)


class Alternatives:
    """Plans of a link's two halves, by names that tell them apart. What each half may be depends on what is kept alone.

    Args:
        choose: makes the plans of products, each asked for once.
        known: strategies that are out already, by problem.
        only: names of the halves to plan; all if None.

    Attributes:
        forward, backward: those that can be planned.
        rejected: those that are out, known or refused by the library, by problem.
    """

    def __init__(
        self,
        link: Link,
        device: int,
        choose: Choose,
        known: Mapping[LayerProblem, Iterable[RejectedStrategy]],
        only: Collection[str] | None = None,
    ) -> None:
        self.link, self.device = link, device
        self.forward: dict[str, ForwardPlan] = {}
        self.backward: dict[str, BackwardPlan] = {}
        self.rejected: dict[LayerProblem, list[RejectedStrategy]] = {key: [*value] for key, value in known.items()}
        self._only = only
        choose = once_each(choose)
        if (problem := link.forward) is not None:
            for strategy in forward_strategies(problem):
                self._admit(self.forward, problem, strategy, partial(ForwardPlan, problem, device, strategy, choose))
        for variant in link.variants:
            for split in backward_strategies(variant):
                self._admit(self.backward, variant, split, partial(BackwardPlan, variant, device, split, choose))

    def _admit(
        self, halves: dict[str, _Half], problem: LayerProblem, strategy: Split, make: Callable[[], _Half]
    ) -> None:
        name = half_name(problem, strategy)
        out = [each.strategy for each in self.rejected.setdefault(problem, [])]
        if to_entry(strategy) in out or (self._only is not None and name not in self._only):
            return
        try:
            halves[name] = make()
        except PlanError as error:
            self.rejected[problem].append(RejectedStrategy(to_entry(strategy), f"refused: {error}"))

    @property
    def halves(self) -> dict[str, Half]:
        """All of both directions."""
        return {**self.forward, **self.backward}

    def reject(self, name: str, reason: str) -> None:
        """Takes a half out, if it is in."""
        half = self.forward.pop(name, None) or self.backward.pop(name, None)
        if half is not None:
            self.rejected[half.problem].append(RejectedStrategy(to_entry(half.strategy), reason))

    def pairs(self) -> list[Pair]:
        """Names of halves that go together."""
        forward = self.forward if self.link.forward is not None else [""]
        backward = self.backward if self.link.backward is not None else [""]
        return [pair for pair in itertools.product(forward, backward) if self._fits(*pair)]

    def _fits(self, forward: str, backward: str) -> bool:
        if self.link.side is None:
            return True
        derivative: Derivative = getattr(self.backward[backward].problem, self.link.side)
        return derivative.saved is self.forward[forward].strategy.saved

    def plans(self, pair: Pair) -> list[Half]:
        """A pair's plans, forward first."""
        halves = self.halves
        return [halves[name] for name in pair if name]

    def prior(self) -> Pair | None:
        """What the priors take of these; None if a half has nothing left."""
        return self._first_pair(partial(priors_of, device=self.device))

    def plainest(self) -> Pair | None:
        """Plain products and our kernels; None if a half has nothing left."""
        return self._first_pair(_plainest_first)

    def _first_pair(self, order: Callable[[LayerProblem], Iterable[Split]]) -> Pair | None:
        pairs, own = set(self.pairs()), self.link.forward
        firsts = [half_name(own, each) for each in order(own)] if own is not None else [""]
        seconds = [half_name(variant, each) for variant in self.link.variants for each in order(variant)] or [""]
        return next((pair for pair in itertools.product(firsts, seconds) if pair in pairs), None)

    def describe(self, pair: Pair) -> str:
        """A pair in words."""
        return " | ".join(describe(plan.strategy) for plan in self.plans(pair))


def priors_of(problem: LayerProblem, device: int) -> Iterable[Split]:
    """A problem's strategies in the order of the priors."""
    if isinstance(problem, ForwardProblem):
        return forward_priors(problem, device)
    return backward_priors(problem, device)


def _plainest_first(problem: LayerProblem) -> Iterable[Split]:
    if isinstance(problem, ForwardProblem):
        return reversed([*forward_strategies(problem)])
    return backward_strategies(problem)


def products_of(half: Half) -> list[AlgorithmPlan]:
    """The plans of the products that a half consists of."""
    return [*half.products.values()]


def half_name(problem: LayerProblem, strategy: Split) -> str:
    """A name among all halves of a link."""
    if isinstance(problem, ForwardProblem):
        return describe(strategy)
    saved = [derivative.saved.value for side in SIDES if (derivative := getattr(problem, side)) is not None]
    return f"{describe(strategy)}, from {' and '.join(saved)}"


def describe(strategy: Split) -> str:
    """A strategy in words."""
    return strategy_in_words(to_entry(strategy))


def once_each(choose: Choose) -> Choose:
    """`choose`, which remembers what it made of a problem, and why it refused one."""
    made: dict[MatmulProblem, AlgorithmPlan] = {}
    refused: dict[MatmulProblem, str] = {}  # not the error: its traceback would keep its callers' memory

    def remembered(problem: MatmulProblem, device: int) -> AlgorithmPlan:
        if problem in refused:
            raise PlanError(refused[problem])
        if problem not in made:
            try:
                made[problem] = choose(problem, device)
            except PlanError as error:
                refused[problem] = str(error)
                raise
        return made[problem]

    return remembered
