"""Suites whose file is written after each row, so that a run can end at any time and go on later."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks import report
from benchmarks.layers import Rows, kept_rows
from benchmarks.report import Row

Measures = Mapping[str, Callable[[], Row]]
"""What measures each row of a suite, by the row's case."""


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


def save(rows: Rows, order: Sequence[str], file: Path | None) -> None:
    """Writes the rows in the order of the suite; nothing without a file, or without rows."""
    if file is None or not rows:
        return
    places = {name: place for place, name in enumerate(order)}
    ordered = sorted(rows.values(), key=lambda row: places.get(row["case"], len(places)))
    report.write(file, ordered)
