"""Layers in a row, tuned as a whole: the fastest way to run a layer by itself need not be so between its neighbours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, TypeAlias

from lt_runtime.errors import PlanError
from lt_runtime.plans.backward import BackwardPlan
from lt_runtime.plans.forward import ForwardPlan
from lt_runtime.plans.strategies import BackwardStrategy, ForwardStrategy, from_entry
from lt_runtime.problem import ForwardProblem, MatmulProblem
from lt_runtime.products.blobs import plan_by
from lt_runtime.products.choose import Choose, heuristic_algorithm, known_algorithm
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.entries import Alternative, LayerEntry, ProductEntry, now
from lt_runtime.tuner.alternatives import Half, products_of
from lt_runtime.tuner.candidates import with_algorithm
from lt_runtime.tuner.layer_finals import Table
from lt_runtime.tuner.links import LayerProblem
from lt_runtime.tuner.names import describe, strategy_in_words
from lt_runtime.tuner.row_trial import alone, row_trial
from lt_runtime.tuner.timing import Launch, buffer_sets, fastest, take_times
from lt_runtime.tuner.trial import NORMAL
from lt_runtime.tuner.workbench import Bench

_NEAR: Final = 1.25
_MOST_OPTIONS: Final = 5
_MOST_SWEEPS: Final = 2
_ROUNDS: Final = 9
_BUDGET_S: Final = 0.4
_AS_IT_IS: Final = "as it is"


def rows_of(problems: Iterable[LayerProblem]) -> list[list[LayerProblem]]:
    """Problems of layers that are neighbours, each row in the order given; none of a single one."""
    rows: list[list[LayerProblem]] = []
    given = list(dict.fromkeys(problems))
    for problem in given:
        joined = [row for row in rows if any(are_neighbours(problem, each) for each in row)]
        members = {problem, *(each for row in joined for each in row)}
        rows = [row for row in rows if row not in joined] + [[each for each in given if each in members]]
    return [row for row in rows if len(row) > 1]


def are_neighbours(one: LayerProblem, other: LayerProblem) -> bool:
    """Whether two problems are the same layer's, or one layer's output may be the other's input."""
    if (one.dtype, one.compute) != (other.dtype, other.compute):
        return False
    if (one.x, one.w) == (other.x, other.w):
        return True
    forwards = [each for each in (one, other) if isinstance(each, ForwardProblem)]
    return any(forward.y == each.x for forward in forwards for each in (one, other) if each is not forward)


@dataclass(frozen=True, slots=True)
class RowDecision:
    """What was found for a row.

    Attributes:
        layers: entries of all its problems. products: of those whose algorithm is another than by themselves.
        before_us: microseconds of the row as its layers were decided by themselves. after_us: as decided now.
        changes: in words.
        measured: how often the row was timed in one way or another.
    """

    layers: Mapping[LayerProblem, LayerEntry]
    products: Mapping[MatmulProblem, ProductEntry]
    before_us: float
    after_us: float
    changes: tuple[str, ...]
    measured: int


Known: TypeAlias = Callable[[MatmulProblem], ProductEntry | None]
"""What the plan cache knows of a product."""


def decide_row(bench: Bench, layers: Mapping[LayerProblem, LayerEntry], known: Known) -> RowDecision:
    """Tries what else is nearly as fast for each problem of a row in turn, the others staying as they are.

    Args:
        layers: the row's problems in the order in which they run, with what was decided for each by itself.

    Raises:
        PlanError: what was decided cannot be planned any more.
        MemoryError: there is not enough of it on the GPU for all operands of the row.
    """
    search = _Search(bench, layers, known)
    for _ in range(_MOST_SWEEPS):
        if not sum([search.improve(problem) for problem in layers]):
            break
    return search.decision()


@dataclass(frozen=True, slots=True)
class _Option:
    """Another way to run a problem.

    Attributes:
        entry: what there is to remember if it is taken.
        products: of its products, where their algorithms are others than are known.
    """

    plan: Half
    entry: LayerEntry
    products: Mapping[MatmulProblem, ProductEntry]


class _Search:
    def __init__(self, bench: Bench, layers: Mapping[LayerProblem, LayerEntry], known: Known) -> None:
        self._bench, self._known = bench, known
        self._layers = {problem: replace(entry, in_chain=True, when=now()) for problem, entry in layers.items()}
        self._plans = {problem: self._plan(problem, entry, known_algorithm) for problem, entry in layers.items()}
        self._products: dict[MatmulProblem, ProductEntry] = {}
        self._us: list[float] = []
        self._changes: list[str] = []
        self._measured = 0
        first = row_trial(bench.xp, layers)
        sets = buffer_sets(sum(each.size for each in first.values()), bench.device)
        self._trials = [first, *(row_trial(bench.xp, layers) for _ in range(1, sets))]
        for seed, trials in enumerate(self._trials):
            for trial in trials.values():
                trial.fill(NORMAL, seed)

    def _plan(self, problem: LayerProblem, entry: LayerEntry, choose: Choose) -> Half:
        device = self._bench.device
        if isinstance(problem, ForwardProblem):
            return ForwardPlan(problem, device, from_entry(ForwardStrategy, entry.strategy), choose)
        return BackwardPlan(problem, device, from_entry(BackwardStrategy, entry.strategy), choose)

    def improve(self, problem: LayerProblem) -> bool:
        """Takes another way to run a problem if the whole row is faster with it, and it computes the same."""
        options = self._options(problem)
        contenders = {_AS_IT_IS: self._launch(self._plans)}
        contenders |= {name: self._launch(self._plans | {problem: each.plan}) for name, each in options.items()}
        timings = take_times(contenders, self._bench.clock, len(self._trials), _BUDGET_S, _ROUNDS, in_a_loop=True)
        self._measured += len(timings)
        chosen = fastest(timings, _AS_IT_IS)
        takes = chosen != _AS_IT_IS and self._agrees(problem, options[chosen].plan)
        self._us += [timings[_AS_IT_IS].median_us, timings[chosen if takes else _AS_IT_IS].median_us]
        if takes:
            self._take(problem, options[chosen])
            self._changes.append(f"{chosen} in {describe(problem)}")
        return takes

    def _options(self, problem: LayerProblem) -> dict[str, _Option]:
        """Other strategies that are near by themselves, and the present one by the heuristic's algorithms."""
        entry, made = self._layers[problem], {}
        near = [each for each in entry.alternatives if each.us <= _NEAR * entry.us and _keeps_the_same(each, entry)]
        # Branches share caches and bandwidth with the neighbours: of all that may change in a row, they come first.
        near.sort(key=lambda each: not _differs_in_branches_alone(each, entry))
        for each in near[:_MOST_OPTIONS]:
            others = (Alternative(entry.strategy, entry.us), *(one for one in entry.alternatives if one is not each))
            changed = replace(entry, strategy=each.strategy, us=each.us, alternatives=others)
            with contextlib.suppress(PlanError):  # by the algorithms that are known by now
                plan = self._plan(problem, changed, self._algorithm)
                made[strategy_in_words(each.strategy)] = _Option(plan, changed, {})
        by_heuristic = self._by_heuristic(problem, entry)
        return made | ({"the heuristic's algorithms": by_heuristic} if by_heuristic is not None else {})

    def _algorithm(self, problem: MatmulProblem, device: int) -> AlgorithmPlan:
        """By what was found in the row, or else is known; see `Choose`."""
        entry = self._products.get(problem)
        if entry is None:
            return known_algorithm(problem, device)
        return plan_by(problem, device, entry.algorithm)

    def _by_heuristic(self, problem: LayerProblem, entry: LayerEntry) -> _Option | None:
        """None where that is how it runs already, or one of the algorithms was rejected or is none."""
        try:
            plan = self._plan(problem, entry, heuristic_algorithm)
        except PlanError:
            return None
        products: dict[MatmulProblem, ProductEntry] = {}
        for each in products_of(plan):
            known = None if each.problem.is_empty else self._products.get(each.problem) or self._known(each.problem)
            if known is None or each.blob == known.algorithm:
                continue
            if each.blob in [one.algorithm for one in known.rejected]:
                return None
            products[each.problem] = replace(with_algorithm(known, each.blob), in_chain=True)
        return _Option(plan, entry, products) if products else None

    def _launch(self, plans: Mapping[LayerProblem, Half]) -> Launch:
        return partial(self._run, [*plans.items()])

    def _run(self, plans: Sequence[tuple[LayerProblem, Half]], number: int, stream: int) -> None:
        for problem, plan in plans:
            self._trials[number][problem].run(plan, stream)

    def _agrees(self, problem: LayerProblem, option: Half) -> bool:
        table = Table(self._bench, alone(problem))
        return table.disagreement([option], table.results([self._plans[problem]])) is None

    def _take(self, problem: LayerProblem, option: _Option) -> None:
        self._plans[problem], self._layers[problem] = option.plan, option.entry
        self._products |= option.products

    def decision(self) -> RowDecision:
        """What is in force by now."""
        before, after = self._us[0], self._us[-1]
        return RowDecision(self._layers, self._products, before, after, tuple(self._changes), self._measured)


def _keeps_the_same(option: Alternative, entry: LayerEntry) -> bool:
    """A forward pass may not keep anything else: backward has been decided for what it does."""
    return option.strategy.get("saved") == entry.strategy.get("saved")


def _differs_in_branches_alone(option: Alternative, entry: LayerEntry) -> bool:
    """Whether it is the same split, with dw after dx and not beside it, or the other way round."""
    return {**option.strategy, "beside": entry.strategy.get("beside")} == entry.strategy
