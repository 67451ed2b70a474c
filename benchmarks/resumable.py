"""Suites whose file is written after each row, so that a run can end at any time and go on later."""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import report
from benchmarks.report import Row

Rows = dict[str, dict[str, Any]]
"""Rows as they stand in a file, by their case."""

Measures = Mapping[str, Callable[[], Row]]
"""What measures each row of a suite, by the row's case."""


def kept_rows(file: Path | None) -> Rows:
    """The rows that a file holds, with the commit that each was measured at; none if there is no file."""
    if file is None or not file.exists():
        return {}
    result = json.loads(file.read_text())
    return {row["case"]: {**row, "commit": row.get("commit", result["commit"])} for row in result["rows"]}


def arguments_of(parser: argparse.ArgumentParser, result: Path, rounds: int) -> None:
    """Adds the options that every suite has."""
    parser.add_argument("--only", metavar="PATTERN", help="cases whose name has this regular expression")
    parser.add_argument("--rounds", type=int, default=rounds, metavar="N", help="default: %(default)s")
    parser.add_argument("--minutes", type=float, default=float("inf"), metavar="N", help="begin no row after this time")
    parser.add_argument("--resume", action="store_true", help="keep the file's rows, and measure those that it lacks")
    told = f"default, for a whole suite or with --resume: {result}"
    parser.add_argument("--out", type=Path, metavar="FILE", help=told)


def chosen(names: Sequence[str], pattern: str | None) -> list[str]:
    """Those that have the pattern, in any case of letters."""
    return [name for name in names if re.search(pattern or "", name, re.IGNORECASE)]


def run(measures: Measures, arguments: argparse.Namespace, result: Path) -> Rows:
    """Measures what is asked for and not yet in the file, prints it, and returns all rows that there are.

    What goes wrong with one row is told, and does not end the run.
    """
    file = arguments.out or (None if arguments.only and not arguments.resume else result)
    rows = kept_rows(file) if arguments.resume else {}
    wanted = [name for name in chosen([*measures], arguments.only) if not rows.get(name, {}).get("us")]
    console, start = report.console(), time.monotonic()
    for name in wanted:
        if time.monotonic() - start > 60 * arguments.minutes:
            break
        _measure(name, measures[name], rows, console)
        save(rows, [*measures], file)
    if file is not None:
        console.print(f"written to {file}")
    return rows


def _measure(name: str, measure: Callable[[], Row], rows: Rows, console: Console) -> None:
    try:
        row = measure()
    except Exception as error:
        Console(stderr=True).print(f"{name}: {type(error).__name__}: {error}", markup=False)
        return
    rows[name] = row.as_json()
    console.print(report.table([row]))


def run_with_bar(
    jobs: Mapping[str, Callable[[Any], dict[str, Any]]], rows: Rows, minutes: float, save: Callable[[], None]
) -> None:
    """Measures rows until all are done or time is up, with a bar, and saves after each.

    Args:
        jobs: by case, what makes a row as it stands in a file, given a CuPy stream that can be captured.
        rows: get what is made.
    """
    import cupy as cp

    from benchmarks.graphs import release

    stream, start = cp.cuda.Stream(non_blocking=True), time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(jobs))
        for name, job in jobs.items():
            if time.monotonic() - start > 60 * minutes:
                break
            progress.update(task, description=name)
            rows[name] = job(stream)
            release()
            save()
            progress.advance(task)


def row_or_reason(name: str, measure: Callable[[], Row], facts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A row as it stands in a file; what goes wrong with one is told in its place, and does not end the run.

    Args:
        facts: that a row without figures has as well.
    """
    try:
        return measure().as_json()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        Console(stderr=True).print(f"{name}: {reason}", markup=False)
        return {"case": name, **(facts or {}), "us": {}, "spread": {}, "error": reason}


def save(rows: Rows, order: Iterable[str], file: Path | None, **more: Any) -> None:
    """Writes the rows in the order of the suite, and more beside them; nothing without a file, or without rows."""
    if file is None or not rows:
        return
    report.write(file, in_order(rows, order), **more)


def in_order(rows: Rows, order: Iterable[str]) -> list[dict[str, Any]]:
    """The rows in the order of the suite."""
    places = {name: place for place, name in enumerate(order)}
    return sorted(rows.values(), key=lambda row: places.get(row["case"], len(places)))
