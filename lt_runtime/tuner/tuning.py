"""Tunes any number of problems, and remembers what was found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from lt_runtime.errors import ArgumentError, PlanError
from lt_runtime.plans.cache import forget
from lt_runtime.plans.strategies import BackwardStrategy, ForwardStrategy, from_entry, to_entry
from lt_runtime.problem import BackwardProblem, ForwardProblem, MatmulProblem, Saved
from lt_runtime.products.product import library_may_fuse, plain_product
from lt_runtime.store.entries import EFFORTS, Effort, LayerEntry, ProductEntry
from lt_runtime.store.keys import Problem, problem_key
from lt_runtime.store.plan_store import plan_store
from lt_runtime.tuner.alternatives import Split
from lt_runtime.tuner.layer_tuner import decide
from lt_runtime.tuner.links import LayerProblem, Link, links, saved_kinds, settled
from lt_runtime.tuner.names import algorithm_in_words, describe, strategy_in_words
from lt_runtime.tuner.product_tuner import BUDGET_S, tune_on
from lt_runtime.tuner.row_tuner import decide_row, rows_of
from lt_runtime.tuner.workbench import workbench

Progress: TypeAlias = Callable[[int, int, str], None]
"""Is told how many groups of problems are done, how many there are, and in words what comes next."""

_Split = TypeVar("_Split", ForwardStrategy, BackwardStrategy)


@dataclass(frozen=True, slots=True)
class Tuned:
    """What became of problems that were decided together.

    Attributes:
        problems: a forward problem and its backward problem, or one alone.
        before_us: microseconds as they run untuned, measured in the same rounds as the others; 0.0 where nothing runs.
            after_us: as decided. Where they were decided before, both are what was measured then.
        strategy: in words.
        measured: strategies and algorithms timed.
        rejected: in words: what is refused, wrong, not twice the same, or slow.
        seconds: that it took.
    """

    problems: tuple[Problem, ...]
    before_us: float
    after_us: float
    strategy: str
    measured: int
    rejected: tuple[str, ...]
    seconds: float


def tune_problems(
    problems: Iterable[Problem], device: int, *, effort: Effort = "default", progress: Progress | None = None
) -> list[Tuned]:
    """Decides problems by measurement, those of a layer's forward and backward together; saves each group when done.

    Layers of which one's output may be another's input are then measured in a row, and what is near to what was decided
    for one by itself takes its place if the row is faster with it.
    What was decided at that effort, or at a greater one, is not measured again. Groups in which nothing is to be
    multiplied are left out. Plans made from now on follow what was decided.

    Args:
        problems: in the order in which they run, if they do in a row.
        device: ordinal of the GPU.
        effort: see `tune_product`.

    Raises:
        ArgumentError: the effort is neither "default" nor "deep".
        MissingLibraryError: CuPy is not installed.
        CaptureError: a stream is being captured that this would disturb.
        MemoryError: there is not enough of it on the GPU.
    """
    if effort not in EFFORTS:
        raise ArgumentError(f"effort is {effort!r}; accepted are {', '.join(map(repr, EFFORTS))}")
    session = _Session(list(dict.fromkeys(problems)), device, effort)
    groups, tell, found = links(session.problems), progress or _nobody, []
    for number, group in enumerate(groups):
        tell(number, len(groups), _description(group))
        tuned = session.tune_product(group) if isinstance(group, MatmulProblem) else session.tune_link(group)
        found += [tuned] if tuned is not None else []
    found += session.tune_rows()
    tell(len(groups), len(groups), "")
    return found


def tune_rows(problems: Iterable[Problem], device: int, *, effort: Effort = "default") -> list[Tuned]:
    """The last stage of `tune_problems` alone, for problems that are decided by themselves. Raises as that does."""
    return _Session(list(dict.fromkeys(problems)), device, effort).tune_rows()


class _Session:
    def __init__(self, problems: list[Problem], device: int, effort: Effort) -> None:
        self.problems, self._device, self._effort = problems, device, effort
        self._forwards = [each for each in problems if isinstance(each, ForwardProblem)]
        self._kept: dict[ForwardProblem, Saved] = {}
        self._store = plan_store(device)

    def tune_link(self, link: Link) -> Tuned | None:
        """Decides a layer; None if it is empty."""
        link = settled(link, self._forwards, self._kept)
        if any(_is_empty(each) for each in link.problems):
            return None
        return self._decided(link) or self._decide(link)

    def _decided(self, link: Link) -> Tuned | None:
        """What is known of the forward problem, and of the backward problem that goes with it; None if one is not."""
        found: list[tuple[Split, float]] = []
        variants = link.variants
        if link.forward is not None:
            strategy = self._known(link.forward, ForwardStrategy, found)
            if strategy is None:
                return None
            self._kept[link.forward] = strategy.saved
            variants = variants[saved_kinds(link.forward).index(strategy.saved) :][:1]
        if any(self._known(each, BackwardStrategy, found) is None for each in variants):
            return None
        words, us = " | ".join(strategy_in_words(to_entry(each)) for each, _ in found), sum(us for _, us in found)
        return Tuned(link.problems, us, us, words, 0, (), 0.0)

    def _known(self, problem: Problem, kind: type[_Split], found: list[tuple[Split, float]]) -> _Split | None:
        entry = self._store.layer(problem_key(problem))
        if entry is None or not self._is_deep_enough(entry):
            return None
        try:
            strategy = from_entry(kind, entry.strategy)
        except ValueError:
            return None
        found.append((strategy, entry.us))
        return strategy

    def _is_deep_enough(self, entry: LayerEntry | ProductEntry) -> bool:
        return EFFORTS.index(entry.effort) >= EFFORTS.index(self._effort)

    def _decide(self, link: Link) -> Tuned:
        started = time.monotonic()
        try:
            with workbench(self._device) as bench:
                made = decide(bench, link, self._effort)
        except PlanError as error:
            return Tuned(link.problems, 0.0, 0.0, "none", 0, (str(error),), time.monotonic() - started)
        self._store.put(made.products, made.layers)
        forget((*link.problems, *link.variants), self._device)
        if link.forward is not None and made.saved is not None:
            self._kept[link.forward] = made.saved
        seconds = time.monotonic() - started
        return Tuned(link.problems, made.before_us, made.after_us, made.strategy, made.measured, made.rejected, seconds)

    def tune_rows(self) -> list[Tuned]:
        """Decides layers in a row, those of them that are decided by themselves."""
        kept = {each: strategy.saved for each in self._forwards if (strategy := self._known(each, ForwardStrategy, []))}
        layers: list[LayerProblem] = []
        for each in self.problems:
            if isinstance(each, BackwardProblem):
                layers.append(settled(Link(None, each), self._forwards, kept).backward or each)
            elif isinstance(each, ForwardProblem):
                layers.append(each)
        rows = rows_of(layers)
        return [tuned for row in rows if (tuned := self._tune_row(row)) is not None]

    def _tune_row(self, row: list[LayerProblem]) -> Tuned | None:
        """None if there is nothing more to decide."""
        found = {each: self._store.layer(problem_key(each)) for each in row}
        known = {problem: entry for problem, entry in found.items() if entry is not None}
        if len(known) < 2 or len(links(known)) < 2 or all(each.in_chain for each in known.values()):
            return None
        started = time.monotonic()
        try:
            with workbench(self._device) as bench:
                made = decide_row(bench, known, lambda problem: self._store.product(problem_key(problem)))
        except (MemoryError, PlanError) as error:
            return Tuned(tuple(known), 0.0, 0.0, "not measured in a row", 0, (str(error),), time.monotonic() - started)
        self._store.put(
            {problem_key(problem): product for problem, product in made.products.items()},
            {problem_key(problem): layer for problem, layer in made.layers.items()},
        )
        forget(known, self._device)
        words = "in a row: " + ("; ".join(made.changes) or "as decided")
        return Tuned(tuple(known), made.before_us, made.after_us, words, made.measured, (), time.monotonic() - started)

    def tune_product(self, problem: MatmulProblem) -> Tuned | None:
        """Decides a product, or what of it is left to the library (see `ProductPlan`); None if it is empty."""
        if problem.is_empty:
            return None
        started = time.monotonic()
        refused: list[str] = []
        for each in dict.fromkeys([problem] * library_may_fuse(problem) + [plain_product(problem)]):
            known = self._known_product(each)
            try:
                entry = known or self._measure(each)
            except PlanError as error:
                refused.append(f"{each.epilogue.value}: refused: {error}")
                continue
            forget((problem,), self._device)
            words = f"{each.epilogue.value} by {algorithm_in_words(entry.config)}"
            rejected = () if known else tuple(one.reason for one in entry.rejected)
            measured, seconds = 0 if known else entry.candidates, time.monotonic() - started
            return Tuned((problem,), entry.first_us, entry.us, words, measured, (*refused, *rejected), seconds)
        return Tuned((problem,), 0.0, 0.0, "none", 0, tuple(refused), time.monotonic() - started)

    def _known_product(self, problem: MatmulProblem) -> ProductEntry | None:
        entry = self._store.product(problem_key(problem))
        return entry if entry is not None and self._is_deep_enough(entry) else None

    def _measure(self, problem: MatmulProblem) -> ProductEntry:
        with workbench(self._device) as bench:
            entry = tune_on(bench, problem, self._effort, BUDGET_S[self._effort]).entry
        self._store.put({problem_key(problem): entry})
        return entry


def _is_empty(problem: LayerProblem) -> bool:
    layouts = [problem.x.layout, problem.w.layout]
    return any(layout.size == 0 for layout in layouts)


def _description(group: Link | MatmulProblem) -> str:
    """Such as "forward 8192x3072x768 bfloat16 gelu and backward 8192x768x3072 bfloat16 none through gelu"."""
    problems = [group] if isinstance(group, MatmulProblem) else group.problems
    return " and ".join(describe(each) for each in problems)


def _nobody(_: int, __: int, ___: str) -> None:
    """Is told, and does nothing."""
