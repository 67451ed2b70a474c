"""Tuning of any number of problems, with a bar that shows how far it is."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from lt_runtime.problem import MatmulProblem
from lt_runtime.store.entries import Effort
from lt_runtime.store.keys import Problem
from lt_runtime.tuner.links import links
from lt_runtime.tuner.names import describe

if TYPE_CHECKING:
    from lt_runtime.tuner.tuning import Tuned

_Progress = Callable[[int, int, str], None]


def tune_in_parts(
    problems: Iterable[Problem], device: int, *, effort: Effort, progress: _Progress | None
) -> Iterator[list[Tuned]]:
    """Tunes problems and yields what was decided, part by part, so that who stops it has what came before.

    What the GPU has not enough memory for costs a warning and stays as it is.
    """
    from lt_runtime.tuner.tuning import tune_problems, tune_rows

    problems = list(problems)
    parts = split(problems)
    done, total = 0, sum(map(len, parts))
    for part in parts:
        shown = _shifted(progress, done, total, len(part)) if progress is not None else None
        try:
            yield tune_problems(part, device, effort=effort, progress=shown)
        except MemoryError as error:
            names = ", ".join(map(describe, part))
            warnings.warn(f"not tuned, for want of memory on the GPU: {names} ({error})", stacklevel=2)
        done += len(part)
    yield tune_rows(problems, device, effort=effort)
    if progress is not None:
        progress(total, total, "")


def _shifted(progress: _Progress, before: int, total: int, size: int) -> _Progress:
    """Progress within a part, as progress of the whole, counted in problems."""

    def show(done: int, of: int, description: str) -> None:
        progress(before + (size * done // of if of else 0), total, description)

    return show


def split(problems: Iterable[Problem]) -> list[list[Problem]]:
    """The problems in parts that have nothing to decide together, none twice."""
    parts: list[list[Problem]] = []
    for link in links(problems):
        members = [link] if isinstance(link, MatmulProblem) else [*link.problems]
        joined = [part for part in parts if not set(members).isdisjoint(part)]
        parts = [part for part in parts if part not in joined]
        parts.append(list(dict.fromkeys([*(each for part in joined for each in part), *members])))
    return parts


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
