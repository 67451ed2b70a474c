"""Layers in a row, tuned as a whole: the fastest way to run a layer by itself need not be so between its neighbours."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from lt_runtime.errors import PlanError
from lt_runtime.planning.algorithms import known_algorithm
from lt_runtime.planning.alternatives import Half
from lt_runtime.planning.backward import BackwardPlan
from lt_runtime.planning.entries import Alternative, LayerEntry, Strategy, now
from lt_runtime.planning.forward import ForwardPlan
from lt_runtime.planning.layer_finals import Table
from lt_runtime.planning.links import LayerProblem
from lt_runtime.planning.names import strategy_in_words
from lt_runtime.planning.row_trial import alone, row_trial
from lt_runtime.planning.strategies import BackwardStrategy, ForwardStrategy, from_entry
from lt_runtime.planning.timing import Launch, buffer_sets, fastest, take_times
from lt_runtime.planning.trial import NORMAL
from lt_runtime.planning.workbench import Bench
from lt_runtime.problem import ForwardProblem

_NEAR: Final = 1.15
_MOST_OPTIONS: Final = 3
_ROUNDS: Final = 7
_BUDGET_S: Final = 0.25
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
        entries: of all its problems.
        before_us: microseconds of the row as its layers were decided by themselves. after_us: as decided now.
        changes: in words.
        measured: how often the row was timed in one way or another.
    """

    entries: Mapping[LayerProblem, LayerEntry]
    before_us: float
    after_us: float
    changes: tuple[str, ...]
    measured: int


def decide_row(bench: Bench, known: Mapping[LayerProblem, LayerEntry]) -> RowDecision:
    """Tries what else is nearly as fast for each problem of a row in turn, the others staying as they are.

    Args:
        known: the row's problems in their order, with what was decided for each by itself.

    Raises:
        PlanError: what was decided cannot be planned any more.
        MemoryError: there is not enough of it on the GPU for all operands of the row.
    """
    search = _Search(bench, known)
    for problem in known:
        search.improve(problem)
    return search.decision()


class _Search:
    def __init__(self, bench: Bench, known: Mapping[LayerProblem, LayerEntry]) -> None:
        self._bench, self._known = bench, known
        self._plans = {problem: _plan(problem, entry.strategy, bench.device) for problem, entry in known.items()}
        self._entries = {problem: replace(entry, in_row=True, when=now()) for problem, entry in known.items()}
        self._us: list[float] = []
        self._changes: list[str] = []
        self._measured = 0
        first = row_trial(bench.xp, known)
        sets = buffer_sets(sum(each.size for each in first.values()), bench.device)
        self._trials = [first, *(row_trial(bench.xp, known) for _ in range(1, sets))]
        for seed, trials in enumerate(self._trials):
            for trial in trials.values():
                trial.fill(NORMAL, seed)

    def improve(self, problem: LayerProblem) -> None:
        """Takes another strategy for a problem if the whole row is faster with it, and it computes the same."""
        options = self._options(problem)
        contenders = {_AS_IT_IS: self._launch(self._plans)}
        contenders |= {name: self._launch(self._plans | {problem: plan}) for name, (plan, _) in options.items()}
        if not options and self._us:
            return
        deadline = time.monotonic() + _BUDGET_S
        timings = take_times(contenders, self._bench.clock, len(self._trials), deadline, _ROUNDS)
        self._measured += len(timings)
        chosen = fastest(timings, _AS_IT_IS)
        if chosen != _AS_IT_IS and not self._agrees(problem, options[chosen][0]):
            chosen = _AS_IT_IS
        self._us += [timings[_AS_IT_IS].median_us, timings[chosen].median_us]
        if chosen != _AS_IT_IS:
            self._change(problem, *options[chosen])

    def _options(self, problem: LayerProblem) -> dict[str, tuple[Half, Alternative]]:
        entry = self._known[problem]
        made: dict[str, tuple[Half, Alternative]] = {}
        for each in entry.alternatives:
            fits = "saved" not in each.strategy or each.strategy["saved"] == entry.strategy["saved"]
            if not fits or each.us > _NEAR * entry.us or len(made) == _MOST_OPTIONS:
                continue
            try:
                made[strategy_in_words(each.strategy)] = _plan(problem, each.strategy, self._bench.device), each
            except PlanError:  # with the algorithms that are known now
                continue
        return made

    def _launch(self, plans: Mapping[LayerProblem, Half]) -> Launch:
        return partial(self._run, [*plans.items()])

    def _run(self, plans: Sequence[tuple[LayerProblem, Half]], number: int, stream: int) -> None:
        for problem, plan in plans:
            self._trials[number][problem].run(plan, stream)

    def _agrees(self, problem: LayerProblem, option: Half) -> bool:
        table = Table(self._bench, alone(problem))
        return table.disagreement([option], table.results([self._plans[problem]])) is None

    def _change(self, problem: LayerProblem, plan: Half, option: Alternative) -> None:
        before = self._entries[problem]
        others = [each for each in before.alternatives if each is not option]
        replaced = Alternative(before.strategy, before.us)
        self._plans[problem] = plan
        self._entries[problem] = replace(
            before, strategy=option.strategy, us=option.us, alternatives=(replaced, *others)
        )
        self._changes.append(f"{strategy_in_words(option.strategy)} for {strategy_in_words(before.strategy)}")

    def decision(self) -> RowDecision:
        """What is in force by now."""
        return RowDecision(self._entries, self._us[0], self._us[-1], tuple(self._changes), self._measured)


def _plan(problem: LayerProblem, strategy: Strategy, device: int) -> Half:
    if isinstance(problem, ForwardProblem):
        return ForwardPlan(problem, device, from_entry(ForwardStrategy, strategy), known_algorithm)
    return BackwardPlan(problem, device, from_entry(BackwardStrategy, strategy), known_algorithm)
