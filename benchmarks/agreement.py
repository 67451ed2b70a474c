"""Compares two result files of a suite: `python -m benchmarks compare OLD.json NEW.json`.

A time stands for an interval: its median, and on either side half the distance of its quartiles and half of what runs
of the suite differ by. A time has changed if its intervals in the two files are apart. The exit status is 1 if fewer
than 95 % of the times agree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks import report
from benchmarks.report import Finding, Json

BETWEEN_RUNS: Final = {"kernels": 0.02, "layers": 0.03, "steps": 0.07, "host": 0.30}
"""By suite, what the times of two runs differ by beyond their quartiles, as a fraction: the least of these steps within
which 95 % of 593 times of PyTorch, CuPy and nvmath-python stayed, which no change of this package can have made."""

_OTHERWISE: Final = 0.03  # in the suites that have no runs to compare yet
_AGREEING: Final = 0.95


class Pair(NamedTuple):
    """A contender's time in two runs, in microseconds."""

    name: str
    old: float
    new: float
    allowed: float

    @property
    def ratio(self) -> float:
        """The new time by the old one: less than 1 is faster."""
        return self.new / self.old

    @property
    def agrees(self) -> bool:
        """Whether the intervals of the two times meet."""
        return abs(self.new - self.old) <= self.allowed


def pairs(suite: str, old: Sequence[Json], new: Sequence[Json]) -> list[Pair]:
    """The times that both files hold, those first that differ most."""
    before, between = {row["case"]: row for row in old}, BETWEEN_RUNS.get(suite, _OTHERWISE)
    made = []
    for row in new:
        kept = before.get(row["case"], {"us": {}})
        for contender in row["us"].keys() & kept["us"].keys():
            first, second = kept["us"][contender], row["us"][contender]
            quartiles = kept["spread"][contender] + row["spread"][contender]
            allowed = (quartiles + between * (first + second)) / 2
            made.append(Pair(f"{row['case']}: {contender}", first, second, allowed))
    return sorted(made, key=lambda pair: (-max(pair.ratio, 1 / pair.ratio), pair.name))


def findings(found: Sequence[Pair]) -> list[Finding]:
    """How many times agree, and by how much all of them differ in the mean."""
    ratios = {pair.name: pair.ratio for pair in found}
    agree = {pair.name: float(pair.agrees) for pair in found}
    return [
        report.share("that agree within their stated spread", agree, bool, _AGREEING),
        report.mean("new / old", ratios),
    ]


def table(found: Sequence[Pair]) -> report.Table:
    """The times that have changed."""
    made = report.Table("has changed", box=None, header_style="bold")
    for heading in ("old µs", "new µs", "new / old", "± allowed"):
        made.add_column(heading, justify="right")
    for pair in found:
        if not pair.agrees:
            made.add_row(pair.name, f"{pair.old:.2f}", f"{pair.new:.2f}", f"{pair.ratio:.3f}", f"{pair.allowed:.2f}")
    return made


def main(files: Sequence[str]) -> None:
    """Prints what has changed.

    Raises:
        SystemExit: with status 1 if too few times agree; with a message if the files have no time in common.
    """
    old, new = (json.loads(Path(file).read_text()) for file in files)
    found = pairs(Path(files[1]).stem, old["rows"], new["rows"])
    if not found:
        raise SystemExit(f"{files[0]} and {files[1]} have no time in common")
    console, summary = report.console(), findings(found)
    console.print(f"{files[0]} at {old['commit']}, {files[1]} at {new['commit']}", markup=False)
    console.print(table(found))
    console.print(report.findings_table(summary))
    sys.exit(not summary[0].met)
