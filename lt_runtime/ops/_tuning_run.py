"""Tuning of any number of problems, with a bar that shows how far it is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from lt_runtime.planning.entries import Effort
from lt_runtime.planning.keys import Problem
from lt_runtime.problem import Derivative, ForwardProblem, MatmulProblem

if TYPE_CHECKING:
    from lt_runtime.planning.tuning import Tuned

_Progress = Callable[[int, int, str], None]


def tune_in_parts(
    problems: Iterable[Problem], device: int, *, effort: Effort, progress: _Progress | None
) -> Iterator[list[Tuned]]:
    """Tunes problems and yields what was decided, part by part, so that who stops it has what came before."""
    from lt_runtime.planning.tuning import tune_problems

    parts = split(problems)
    done, total = 0, sum(map(len, parts))
    for part in parts:
        shown = _shifted(progress, done, total, len(part)) if progress is not None else None
        yield tune_problems(part, device, effort=effort, progress=shown)
        done += len(part)
    if progress is not None:
        progress(total, total, "")


def _shifted(progress: _Progress, before: int, total: int, size: int) -> _Progress:
    """Progress within a part, as progress of the whole, counted in problems."""

    def show(done: int, of: int, description: str) -> None:
        progress(before + (size * done // of if of else 0), total, description)

    return show


def split(problems: Iterable[Problem]) -> list[list[Problem]]:
    """The problems in parts that have nothing to do with each other, none twice.

    A forward pass and the backward passes that take its derivative are to be decided together.
    """
    parts: list[tuple[set[object], list[Problem]]] = []
    for problem in dict.fromkeys(problems):
        links = set(_links(problem))
        joined = [part for part in parts if links & part[0]]
        parts = [part for part in parts if not links & part[0]]
        members = [member for part in joined for member in part[1]]
        parts.append((links.union(*(part[0] for part in joined)), [*members, problem]))
    return [members for _, members in parts]


def _links(problem: Problem) -> Iterator[object]:
    """The activations that a problem applies or takes the derivative of, each with the shape that it acts on."""
    if isinstance(problem, MatmulProblem):
        return
    kind = problem.dtype, problem.compute
    if isinstance(problem, ForwardProblem):
        yield kind, problem.y.layout.shape, problem.activation, problem.dropout
        return
    yield kind, problem.dy.layout.shape, *_function(problem.own)
    if problem.through is not None:
        yield kind, problem.x.layout.shape, *_function(problem.through)


def _function(derivative: Derivative) -> tuple[object, bool]:
    return derivative.activation, derivative.dropout


@contextlib.contextmanager
def progress_bar(*, shown: bool = True) -> Iterator[_Progress | None]:
    """A bar on the terminal, with what is being measured and when it will be done; None where there is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not shown or not console.is_terminal:
        yield None
        return
    times = TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn()
    text = TextColumn("{task.description}", markup=False)
    with Progress(BarColumn(), MofNCompleteColumn(), *times, text, console=console) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total, description: bar.update(task, completed=done, total=total, description=description)
