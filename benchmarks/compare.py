"""Compares runs: `python -m benchmarks compare A B`, or several of each, `compare --old RUN... --new RUN...`.

A run is a result file or a folder of result files, and runs are paired in the order in which they were measured. A
ratio is a new time divided by the old time of the same pair, so less than 1 is faster. Only times in all runs are
compared. A time differs beyond its spread if it changed by more than the larger of the two distances between quartiles
in at least two thirds of the pairs. Times of other libraries tell how much the machine alone changes.

A row of lt_runtime is slower if its ratio exceeds the limit in at least two thirds of the pairs. The exit status is 1
if a row is slower, or if the geometric mean of lt_runtime's median ratios exceeds its limit.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import report
from benchmarks.timing import Timing

Time = tuple[str, str, str]
"""Type: the suite, the case and the contender of a time."""


class Changes(NamedTuple):
    """How times changed from the old runs to the new ones.

    Attributes:
        ratios: the ratios of all pairs of runs, by time.
        beyond: the times that differ beyond their spread.
        lacking: the times that some run lacks.
    """

    ratios: dict[Time, list[float]]
    beyond: set[Time]
    lacking: list[Time]


def changes(old: Sequence[Path], new: Sequence[Path]) -> Changes:
    """Compares all times that all runs have."""
    pairs = [(_times(first), _times(second)) for first, second in zip(old, new, strict=True)]
    runs = [set(times) for pair in pairs for times in pair]
    common = sorted(set.intersection(*runs))
    ratios = {time: [second[time].median / first[time].median for first, second in pairs] for time in common}
    beyond = {time for time in common if _most(_is_beyond(first[time], second[time]) for first, second in pairs)}
    return Changes(ratios, beyond, sorted(set.union(*runs) - {*common}))


def _times(run: Path) -> dict[Time, Timing]:
    return {
        (file.stem, row["case"], name): Timing(us, row["spread"][name])
        for file in (run.glob("*.json") if run.is_dir() else [run])
        for row in json.loads(file.read_text()).get("rows", ())
        for name, us in row["us"].items()
    }


def _is_beyond(old: Timing, new: Timing) -> bool:
    return abs(new.median - old.median) > max(old.spread, new.spread)


def _most(pairs: Iterable[bool]) -> bool:
    """Whether at least two thirds are true."""
    every = [*pairs]
    return 3 * sum(every) >= 2 * len(every)


def _is_ours(time: Time) -> bool:
    return time[2].startswith("lt")


def summary(medians: Mapping[Time, float], beyond: set[Time]) -> Iterator[str]:
    """For each suite, a line about lt_runtime's times and a line about other libraries' times."""
    for suite, ours in sorted({(time[0], _is_ours(time)) for time in medians}):
        some = [time for time in medians if (time[0], _is_ours(time)) == (suite, ours)]
        far = sorted(abs(medians[time] - 1) for time in some)[math.ceil(0.95 * len(some)) - 1]
        mean = report.geometric_mean(medians[time] for time in some)
        told = f"{suite}, {'lt_runtime' if ours else 'others'}: {len(beyond & {*some})} of {len(some)} times differ"
        yield f"{told} beyond their spread, new / old {mean:.4f}, 95 % within {100 * far:.1f} %"


def main(argv: Sequence[str]) -> None:
    """Prints the times that differ beyond their spread or are slower, and figures over all times.

    Raises:
        SystemExit: with status 1 if the new version is slower, and with a message if the runs have no row in common.
    """
    parser = report.command("compare", __doc__)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="an old run and a new one")
    for side in ("old", "new"):
        told = f"{side} runs, as many as of the other side"
        parser.add_argument(f"--{side}", nargs="+", type=Path, default=[], metavar="RUN", help=told)
    parser.add_argument("--limit", type=float, default=1.05, help="limit of the ratio of a row; default: %(default)g")
    parser.add_argument("--mean", type=float, default=1.01, help="limit of the geometric mean; default: %(default)g")
    options = parser.parse_args(argv)
    old, new = [*options.old, *options.runs[:1]], [*options.new, *options.runs[1:]]
    if len(old) != len(new) or not old:
        parser.error("name two runs, or as many of --old as of --new")
    ratios, beyond, lacking = changes(old, new)
    medians = {time: statistics.median(each) for time, each in ratios.items()}
    ours = {time: median for time, median in medians.items() if _is_ours(time)}
    if not ours:
        raise SystemExit("the runs have no row of lt_runtime in common")
    slower = {time for time in ours if _most(ratio > options.limit for ratio in ratios[time])}
    table = report.Table("new / old", "median", "pairs", "", box=None, header_style="bold")
    for time in sorted(beyond | slower, key=lambda time: (time not in slower, -abs(math.log(medians[time])))):
        pairs = " ".join(f"{ratio:.3f}" for ratio in ratios[time])
        table.add_row(": ".join(time), f"{medians[time]:.3f}", pairs, "slower" if time in slower else "")
    console = report.console()
    console.print(table)
    missing = (f"not in every run: {': '.join(time)}" for time in lacking if _is_ours(time))
    for line in (*missing, *summary(medians, beyond)):
        console.print(line, markup=False)
    mean = report.geometric_mean(ours.values())
    console.print(f"geometric mean of {len(ours)} rows over {len(old)} pairs: {mean:.4f} (≤ {options.mean:g})")
    console.print(f"rows slower by more than {options.limit:g} in two thirds of the pairs: {len(slower)}")
    sys.exit(bool(slower) or mean > options.mean)
