"""Every way to split what is decided together, a forward problem and the backward problem that reads it, as plans."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import TypeAlias

from lt_runtime.errors import PlanError
from lt_runtime.plans.decisions import LayerPlan, LayerProblem, Strategy, plan_for, priors_of, strategies_of
from lt_runtime.plans.strategies import to_entry
from lt_runtime.problem import BackwardProblem, ForwardProblem, MatmulProblem
from lt_runtime.products.choose import Choose
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.entries import RejectedStrategy
from lt_runtime.tuner.chain import Chain, saved_kinds
from lt_runtime.tuner.report import strategy_in_words
from lt_runtime.tuner.timing import Timing

Split: TypeAlias = tuple[str, ...]
"""Names of the plans that run a part, forward first."""


class Splits:
    """Plans for a part of a chain, by names that tell them apart.

    A backward problem has plans for everything that forward may keep, each by itself.

    Args:
        part: see `Chain.cut`.
        choose: makes the plans of products; it is asked for each only once.
        known: strategies that are out already, by problem.
        only: names of the plans to make; all if None.

    Attributes:
        plans: those that can be made and are not out.
        rejected: strategies that are out, known before or refused by the library, by problem.
    """

    def __init__(
        self,
        part: Chain,
        device: int,
        choose: Choose,
        known: Mapping[LayerProblem, Iterable[RejectedStrategy]],
        only: Collection[str] | None = None,
    ) -> None:
        self.part, self.device = part, device
        self.plans: dict[str, LayerPlan] = {}
        self.rejected = {problem: [*rejected] for problem, rejected in known.items()}
        self._only, self._choose = only, once_each(choose)
        self._problems = variants_of(part)
        for problem in itertools.chain.from_iterable(self._problems):
            for strategy in strategies_of(problem):
                self._admit(problem, strategy)

    def _admit(self, problem: LayerProblem, strategy: Strategy) -> None:
        name, entry = plan_name(problem, strategy), to_entry(strategy)
        rejected = self.rejected.setdefault(problem, [])
        if entry in [each.strategy for each in rejected] or (self._only is not None and name not in self._only):
            return
        try:
            self.plans[name] = plan_for(problem, self.device, strategy, self._choose)
        except PlanError as error:
            rejected.append(RejectedStrategy(entry, f"refused: {error}"))

    def reject(self, name: str, reason: str) -> None:
        """Takes a plan out."""
        plan = self.plans.pop(name)
        self.rejected[plan.problem].append(RejectedStrategy(to_entry(plan.strategy), reason))

    @property
    def directions(self) -> list[dict[str, LayerPlan]]:
        """The plans of each of the part's problems, forward first."""
        plans = self.plans.items()
        return [{name: plan for name, plan in plans if plan.problem in variants} for variants in self._problems]

    @property
    def splits(self) -> list[Split]:
        """Plans that go together: backward reads what forward keeps."""
        return [split for split in itertools.product(*self.directions) if self._goes_together(split)]

    def _goes_together(self, split: Split) -> bool:
        reader = self.part.reader(0)
        if reader is None:
            return True
        forward, backward = (self.plans[name] for name in split)
        return getattr(backward.problem, reader[1]).saved is forward.strategy.saved

    def placed(self, split: Split) -> list[tuple[int, LayerPlan]]:
        """A split's plans, each with the index of its layer in the part."""
        plans, last = [self.plans[name] for name in split], len(self.part.layers) - 1
        return [(0 if isinstance(each.problem, ForwardProblem) else last, each) for each in plans]

    def prior(self) -> Split | None:
        """What the priors take of these; None if one of the problems has no plan left."""
        return self._first(partial(priors_of, device=self.device))

    def plainest(self) -> Split | None:
        """Plain products and our kernels; None if one of the problems has no plan left."""
        return self._first(_plainest_first)

    def _first(self, order: Callable[[LayerProblem], Iterable[Strategy]]) -> Split | None:
        splits = set(self.splits)
        ordered = ([(each, strategy) for each in variants for strategy in order(each)] for variants in self._problems)
        named = ([plan_name(*each) for each in pairs] for pairs in ordered)
        return next((split for split in itertools.product(*named) if split in splits), None)

    def times(self, timings: Mapping[str, Timing]) -> dict[Split, float]:
        """Microseconds of all plans of the splits whose plans were timed, one after the other."""
        timed = [split for split in self.splits if all(name in timings for name in split)]
        return {split: sum(timings[name].median_us for name in split) for split in timed}


def variants_of(part: Chain) -> list[tuple[LayerProblem, ...]]:
    """The problems of a part, forward first; a backward problem for everything that forward may keep."""
    found: list[tuple[LayerProblem, ...]] = [(problem,) for problem in part.problems]
    forward = part.layers[0].forward
    if forward is not None and part.reader(0) is not None:
        found[-1] = tuple(part.keeping({0: saved}).problems[-1] for saved in saved_kinds(forward))
    return found


def _plainest_first(problem: LayerProblem) -> Iterable[Strategy]:
    strategies = [*strategies_of(problem)]
    return strategies[::-1] if isinstance(problem, ForwardProblem) else strategies


def plan_name(problem: LayerProblem, strategy: Strategy) -> str:
    """A name among all plans of a part, such as "bias, keeps output" or "db by kernel, from nothing and mask"."""
    words = strategy_in_words(to_entry(strategy))
    if not isinstance(problem, BackwardProblem):
        return words
    saved = [each.saved.value for each in (problem.own, problem.through) if each is not None]
    return f"{words}, from {' and '.join(saved)}"


def once_each(choose: Choose) -> Choose:
    """`choose`, which remembers the plan that it made for a problem, or why it refused one."""
    # The error itself would keep its callers' memory, by its traceback.
    made: dict[MatmulProblem, AlgorithmPlan | str] = {}

    def remembered(problem: MatmulProblem, device: int) -> AlgorithmPlan:
        if problem not in made:
            try:
                made[problem] = choose(problem, device)
            except PlanError as error:
                made[problem] = str(error)
        found = made[problem]
        if isinstance(found, str):
            raise PlanError(found)
        return found

    return remembered
