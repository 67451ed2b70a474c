"""Compares result files of two versions: `python -m benchmarks compare --old FILE... --new FILE...`.

The files are runs of one suite, as many old ones as new ones, in the order in which they were measured. A ratio is a
new time divided by the old time of the same run, so less than 1 is faster. Only times of lt_runtime are compared, and
only rows that all files hold. A row is slower if its ratio exceeds the limit in at least two thirds of the runs. The
exit status is 1 if a row is slower, or if the geometric mean of the rows' median ratios exceeds its limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from benchmarks import report

_SHOWN: Final = 20  # number of rows that the printed table shows


def ratios(old: Sequence[Path], new: Sequence[Path]) -> tuple[dict[str, list[float]], list[str]]:
    """For each row that all files have, the ratios new / old of the pairs of files; and the rows that a file lacks."""
    pairs = [(_times(first), _times(second)) for first, second in zip(old, new, strict=True)]
    rows = [set(times) for pair in pairs for times in pair]
    common, lacking = set.intersection(*rows), set.union(*rows) - set.intersection(*rows)
    return {row: [second[row] / first[row] for first, second in pairs] for row in sorted(common)}, sorted(lacking)


def _times(file: Path) -> dict[str, float]:
    """lt_runtime's times in a result file, by case and contender."""
    rows = json.loads(file.read_text())["rows"]
    return {f"{row['case']}: {name}": us for row in rows for name, us in row["us"].items() if name.startswith("lt")}


def slower_rows(found: Mapping[str, Sequence[float]], limit: float) -> list[str]:
    """The rows that became slower: their ratio exceeds the limit in at least two thirds of the runs."""
    return [row for row, runs in found.items() if 3 * sum(ratio > limit for ratio in runs) >= 2 * len(runs)]


def main(argv: Sequence[str]) -> None:
    """Prints the comparison of old and new results.

    Raises:
        SystemExit: with status 1 if the new version is slower, and with a message if the files have no row in common.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for side in ("old", "new"):
        parser.add_argument(f"--{side}", nargs="+", type=Path, required=True, metavar="FILE", help=f"{side} results")
    parser.add_argument("--limit", type=float, default=1.05, help="of a row's ratio; default: %(default)g")
    parser.add_argument("--mean", type=float, default=1.01, help="of the geometric mean; default: %(default)g")
    options = parser.parse_args(argv)
    if len(options.old) != len(options.new):
        parser.error("--old and --new need the same number of files")
    found, lacking = ratios(options.old, options.new)
    if not found:
        raise SystemExit("the files have no row of lt_runtime in common")
    medians = {row: statistics.median(runs) for row, runs in found.items()}
    mean, slower = report.geometric_mean(medians.values()), slower_rows(found, options.limit)
    table = report.Table("new / old", "median", "runs", "", box=None, header_style="bold")
    for row in sorted(found, key=lambda row: (row not in slower, -medians[row]))[: max(_SHOWN, len(slower))]:
        runs = " ".join(f"{ratio:.3f}" for ratio in found[row])
        table.add_row(row, f"{medians[row]:.3f}", runs, "slower" if row in slower else "")
    console = report.console()
    console.print(table)
    for row in lacking:
        console.print(f"not in every file: {row}", markup=False)
    console.print(f"geometric mean of {len(found)} rows over {len(options.old)} runs: {mean:.4f} (≤ {options.mean:g})")
    console.print(f"rows slower by more than {options.limit:g} in two thirds of the runs: {len(slower)}")
    sys.exit(bool(slower) or mean > options.mean)
