"""Compares runs: `python -m benchmarks compare A B`, or several of each, `compare --old RUN... --new RUN...`.

A run is a result file or a folder of result files, and runs are paired in the order in which they were measured. A
ratio is a new time divided by the old time of the same pair, so less than 1 is faster. Only times in all runs are
compared. A time differs beyond its spread if it changed by more than the larger of the two distances between quartiles
in at least two thirds of the pairs. Times of other libraries tell how much of a difference is the machine's.

A row of lt_runtime's is slower if its ratio exceeds the limit in at least two thirds of the pairs. The exit status is 1
if a row is slower, or if the geometric mean of lt_runtime's median ratios exceeds its limit.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from benchmarks.timing import Timing


class Time(NamedTuple):
    """Names a time of the result files."""

    suite: str
    case: str
    contender: str

    @property
    def is_ours(self) -> bool:
        """Whether the contender is lt_runtime's."""
        return self.contender.startswith("lt")


class Change(NamedTuple):
    """How one time changed: the ratios of all pairs of runs, and how many of them differ beyond their spread."""

    ratios: Sequence[float]
    beyond: int

    @property
    def ratio(self) -> float:
        """The median of the ratios."""
        return statistics.median(self.ratios)

    @property
    def is_beyond(self) -> bool:
        """Whether the time differs beyond its spread."""
        return self._are_most(self.beyond)

    def is_slower(self, limit: float) -> bool:
        """Whether most ratios exceed a limit."""
        return self._are_most(sum(ratio > limit for ratio in self.ratios))

    def _are_most(self, pairs: int) -> bool:
        return 3 * pairs >= 2 * len(self.ratios)


def changes(old: Sequence[Path], new: Sequence[Path]) -> tuple[dict[Time, Change], list[Time]]:
    """How the times that all runs have changed; and the times that some run lacks."""
    pairs = [(_times(first), _times(second)) for first, second in zip(old, new, strict=True)]
    runs = [set(times) for pair in pairs for times in pair]
    common, lacking = set.intersection(*runs), set.union(*runs) - set.intersection(*runs)
    return {time: _change([(first[time], second[time]) for first, second in pairs]) for time in common}, sorted(lacking)


def _change(pairs: Sequence[tuple[Timing, Timing]]) -> Change:
    beyond = sum(abs(new.median - old.median) > max(old.spread, new.spread) for old, new in pairs)
    return Change([new.median / old.median for old, new in pairs], beyond)


def _times(run: Path) -> dict[Time, Timing]:
    return {
        Time(file.stem, row["case"], name): Timing(us, row["spread"][name])
        for file in (run.glob("*.json") if run.is_dir() else [run])
        for row in json.loads(file.read_text()).get("rows", ())
        for name, us in row["us"].items()
    }


def summary(found: Mapping[Time, Change]) -> Iterable[str]:
    """A line for each suite about lt_runtime's times, and one about those of other libraries."""
    groups: dict[tuple[str, str], list[Change]] = {}
    for time, change in sorted(found.items()):
        groups.setdefault((time.suite, "lt_runtime" if time.is_ours else "others"), []).append(change)
    for (suite, whose), some in groups.items():
        far = sorted(abs(change.ratio - 1) for change in some)[math.ceil(0.95 * len(some)) - 1]
        mean = report.geometric_mean(change.ratio for change in some)
        beyond = f"{sum(change.is_beyond for change in some)} of {len(some)} times differ beyond their spread"
        yield f"{suite}, {whose}: {beyond}, new / old {mean:.4f}, 95 % within {100 * far:.1f} %"


def main(argv: Sequence[str]) -> None:
    """Prints the times that differ beyond their spread or are slower, and figures over all times.

    Raises:
        SystemExit: with status 1 if the new version is slower, and with a message if the runs have no row in common.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="an old run and a new one")
    for side in ("old", "new"):
        parser.add_argument(f"--{side}", nargs="+", type=Path, default=[], metavar="RUN", help=f"{side} runs")
    parser.add_argument("--limit", type=float, default=1.05, help="of a row's ratio; default: %(default)g")
    parser.add_argument("--mean", type=float, default=1.01, help="of the geometric mean; default: %(default)g")
    options = parser.parse_args(argv)
    if len(options.runs) not in (0, 2) or len(options.old) != len(options.new) or not (options.runs or options.old):
        parser.error("name two runs, or as many runs of --old as of --new")
    found, lacking = changes([*options.old, *options.runs[:1]], [*options.new, *options.runs[1:]])
    ours = {time: change for time, change in found.items() if time.is_ours}
    if not ours:
        raise SystemExit("the runs have no row of lt_runtime in common")
    slower = {time for time, change in ours.items() if change.is_slower(options.limit)}
    table = report.Table("new / old", "median", "pairs", "", box=None, header_style="bold")
    for time, change in sorted(found.items(), key=lambda item: (item[0] not in slower, -abs(math.log(item[1].ratio)))):
        if time in slower or change.is_beyond:
            pairs = " ".join(f"{ratio:.3f}" for ratio in change.ratios)
            table.add_row(": ".join(time), f"{change.ratio:.3f}", pairs, "slower" if time in slower else "")
    console = report.console()
    console.print(table)
    for line in (*(f"not in every run: {': '.join(time)}" for time in lacking if time.is_ours), *summary(found)):
        console.print(line, markup=False)
    mean = report.geometric_mean(change.ratio for change in ours.values())
    console.print(
        f"geometric mean of {len(ours)} rows over {len(options.old) or 1} pairs: {mean:.4f} (≤ {options.mean:g})"
    )
    console.print(f"rows slower by more than {options.limit:g} in two thirds of the pairs: {len(slower)}")
    sys.exit(bool(slower) or mean > options.mean)
