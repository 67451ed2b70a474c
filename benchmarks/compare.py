"""Compares two checkouts: `python -m benchmarks compare --old DIR --new DIR SUITE... [--processes 7] [--only PATTERN]`.

Processes of the old and of the new package take turns, so that the machine's state is the same for both. The benchmark
code is this one for both; only `lt_runtime` is the checkout's, and only its public calls are measured. A time is the
median over processes of their medians, and a ratio is the new time by the old one, so less than 1 is faster.

Each checkout has a cache of its own. A first process, which does not count, fills it: it compiles and tunes. Everything
is kept under --work, so that the same command goes on where an earlier one ended: give --minutes, and run it again.
With --gpus both processes of a pair run on the same one, and pairs run side by side; figures of the host want one GPU.

Two result files instead are compared by `agreement`: `python -m benchmarks compare OLD.json NEW.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from benchmarks import agreement, report
from benchmarks.report import Finding, Json
from benchmarks.suite import CACHE_VARIABLE, matches

ROUNDS: Final = {"host": 21, "layers": 5, "steps": 5}
"""The suites that can be compared, and their rounds in each process: few, because there are many processes."""

LIMITS: Final = {"host": (1.03, 1.10), "layers": (1.01, None), "steps": (1.01, None)}
"""For each suite the most that the geometric mean of the ratios may be, and the most for a single ratio."""

_SIDES: Final = ("old", "new")
_SHOWN: Final = 20  # ratios that are printed for a suite; the file holds all

Times = Mapping[tuple[str, str], float]
"""Microseconds by case and contender."""


class Process(NamedTuple):
    """One process of a comparison; number 0 fills the cache and does not count."""

    suite: str
    number: int
    side: str

    @property
    def name(self) -> str:
        """The folder of its results."""
        return f"{self.suite}-{self.number}-{self.side}"


def pair(suite: str, number: int) -> list[Process]:
    """Two processes in the order in which they run; every other pair begins with the new checkout."""
    return [Process(suite, number, side) for side in _SIDES[:: -1 if number % 2 else 1]]


class Comparison:
    """Two checkouts and the folder for everything that their processes leave."""

    def __init__(
        self, checkouts: Mapping[str, Path], work: Path, only: str | None = None, rounds: int | None = None
    ) -> None:
        self.checkouts, self.work, self._only, self._rounds = checkouts, work, only, rounds
        self._code = work / "code"

    def prepare(self) -> None:
        """Makes a folder from which a process imports this benchmark code, and checks that both packages are found.

        Raises:
            SystemExit: a process would import another lt_runtime than its checkout's; or the folder for the results
                holds those of another comparison.
        """
        self._code.mkdir(parents=True, exist_ok=True)
        what, file = json.dumps(self._what()), self.work / "what.json"
        if file.exists() and file.read_text() != what:
            raise SystemExit(f"{self.work} is of another comparison; give another --work\nit is of {file.read_text()}")
        file.write_text(what)
        link = self._code / "benchmarks"
        if not link.exists():
            link.symlink_to(Path(__file__).resolve().parent, target_is_directory=True)
        for side, checkout in self.checkouts.items():
            command = [sys.executable, "-c", "import lt_runtime; print(lt_runtime.__file__)"]
            environment = self.environment(side)
            done = subprocess.run(command, cwd=self._code, env=environment, capture_output=True, text=True, check=False)
            if checkout not in Path(done.stdout.strip() or "/").parents:
                raise SystemExit(f"--{side} is {checkout}: no lt_runtime can be imported from there\n{done.stderr}")

    def _what(self) -> dict[str, Any]:
        sides = {side: [str(folder), report.commit(folder)] for side, folder in self.checkouts.items()}
        return sides | {"only": self._only, "rounds": self._rounds}

    def environment(self, side: str, gpu: str | None = None) -> dict[str, str]:
        """The variables of a process; `gpu` is the one that it sees, None for all that this process does."""
        # What the command was given comes last: other packages may be found there, another lt_runtime may not.
        given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        path = os.pathsep.join((str(self._code), str(self.checkouts[side]), *filter(None, given)))
        seen = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        return os.environ | seen | {"PYTHONPATH": path, CACHE_VARIABLE: str(self.work / f"cache-{side}")}

    def command(self, process: Process) -> list[str]:
        """What a process runs."""
        command = [sys.executable, "-m", "benchmarks", process.suite, "--ours", "--out", str(self.work / process.name)]
        command += ["--rounds", str(self._rounds or ROUNDS[process.suite]) if process.number else "1"]
        command += ["--keep-plans"] if process.suite != "host" else []
        return command + (["--only", self._only] if self._only else [])

    def is_done(self, process: Process) -> bool:
        """Whether an earlier command has run a process to its end."""
        return (self.work / process.name / "done").exists()

    def run(self, process: Process, gpu: str | None = None) -> None:
        """Runs a process to its end; see `environment`.

        Raises:
            SystemExit: it failed, or measured nothing.
        """
        folder = self.work / process.name
        folder.mkdir(parents=True, exist_ok=True)
        command, log = self.command(process), folder / "log"
        with log.open("w") as output:
            done = subprocess.run(
                command,
                cwd=self._code,
                env=self.environment(process.side, gpu),
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            )
        if done.returncode:
            raise SystemExit(f"{process.name} failed; the end of {log} is\n{log.read_text()[-2000:]}")
        if not self.times(process):
            raise SystemExit(f"{process.name} has measured nothing; its output is in {log}")
        (folder / "done").touch()

    def times(self, process: Process) -> Times:
        """What a process has measured; prints why a row has no time."""
        rows = json.loads((self.work / process.name / f"{process.suite}.json").read_text())["rows"]
        for row in rows:
            if "error" in row:
                print(f"{process.name}: {row['case']}: {row['error']}")
        return times_of(rows)


def times_of(rows: Sequence[Json]) -> dict[tuple[str, str], float]:
    """The times in the rows of a result file."""
    return {(row["case"], contender): us for row in rows for contender, us in row["us"].items()}


def compared(suite: str, old: Sequence[Times], new: Sequence[Times]) -> list[dict[str, Any]]:
    """The rows of a comparison, the greatest ratio first, for the times that every process has."""
    common = [key for key in old[0] if all(key in times for times in (*old, *new))] if old and new else []
    rows = []
    for key in common:
        sides = {"old": [times[key] for times in old], "new": [times[key] for times in new]}
        medians = {side: statistics.median(each) for side, each in sides.items()}
        facts = {
            "suite": suite,
            "case": key[0],
            "contender": key[1],
            "ratio": round(medians["new"] / medians["old"], 4),
        }
        rows.append(facts | {f"{side}_us": round(us, 4) for side, us in medians.items()} | sides)
    return sorted(rows, key=lambda row: -row["ratio"])


def lacking(old: Sequence[Times], new: Sequence[Times]) -> list[str]:
    """Times that one process has and another has not."""
    every = [set(times) for times in (*old, *new)]
    missing = set().union(*every) - set.intersection(*every) if every else set()
    return sorted(f"{case}: {contender}" for case, contender in missing)


def findings(suite: str, rows: Sequence[Json], leave_out: Sequence[str] = ()) -> list[Finding]:
    """The geometric mean of a suite's ratios, and the worst."""
    kept = [row for row in rows if row["suite"] == suite and not is_left_out(row, leave_out)]
    ratios = {name_of(row): row["ratio"] for row in kept}
    most_mean, most = LIMITS[suite]
    return [
        report.mean(f"{suite}, new / old", ratios, most_mean, at_most=True),
        report.worst(f"{suite}, new / old", ratios, most, at_most=True),
    ]


def name_of(row: Json) -> str:
    """Case and contender."""
    return f"{row['case']}: {row['contender']}"


def is_left_out(row: Json, patterns: Sequence[str]) -> bool:
    """Whether a row is measured and shown, but goes into no figure over many rows."""
    return any(matches(pattern, name_of(row)) for pattern in patterns)


def table(rows: Sequence[Json], leave_out: Sequence[str]) -> report.Table:
    """The rows with the greatest ratios."""
    made = report.Table("case", "contender", box=None, header_style="bold")
    for heading in ("old µs", "new µs", "new / old"):
        made.add_column(heading, justify="right")
    made.add_column("")
    for row in rows[:_SHOWN]:
        figures = f"{row['old_us']:.2f}", f"{row['new_us']:.2f}", f"{row['ratio']:.3f}"
        made.add_row(row["case"], row["contender"], *figures, "left out" if is_left_out(row, leave_out) else "")
    return made


def parser() -> argparse.ArgumentParser:
    """What the command line accepts."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("suites", nargs="+", choices=ROUNDS, metavar="SUITE", help=", ".join(ROUNDS))
    for side in _SIDES:
        made.add_argument(f"--{side}", type=Path, required=True, metavar="DIR", help=f"the {side} checkout")
    made.add_argument("--processes", type=int, default=7, metavar="N", help="of each; default: %(default)s")
    made.add_argument("--rounds", type=int, metavar="N", help=f"in a process; default: {ROUNDS}")
    made.add_argument("--only", metavar="PATTERN", help="cases in whose name this regular expression is found")
    told = "rows whose case and contender have this pattern are shown, but go into no mean; can be repeated"
    made.add_argument("--leave-out", action="append", default=[], metavar="PATTERN", help=told)
    made.add_argument("--gpus", nargs="+", default=[None], metavar="N", help="ordinals; default: the first visible one")
    made.add_argument(
        "--minutes", type=float, default=float("inf"), metavar="N", help="begin no process after this time"
    )
    work = Path("/tmp/lt_runtime_compare")
    made.add_argument("--work", type=Path, default=work, metavar="DIR", help="caches and results; default: %(default)s")
    made.add_argument("--out", type=Path, metavar="FILE", help="the comparison as JSON; default: WORK/compare.json")
    return made


def main(argv: Sequence[str]) -> None:
    """Runs what is not done yet, as long as there is time, and compares what there is; or compares two files."""
    if len(argv) == len(_SIDES) and all(each.endswith(".json") for each in argv):
        agreement.main(argv)
        return
    options = parser().parse_args(argv)
    checkouts = {side: getattr(options, side).resolve() for side in _SIDES}
    comparison = Comparison(checkouts, options.work.resolve(), options.only, options.rounds)
    comparison.prepare()
    end = time.monotonic() + 60 * options.minutes
    for suite in options.suites:
        pairs = [pair(suite, number) for number in range(options.processes + 1)]
        _run(comparison, [[each] for each in pairs[0]], options.gpus, end)
        _run(comparison, pairs[1:], options.gpus, end)
    if time.monotonic() >= end:
        print("time is up; the same command goes on from here")
    _report(comparison, options)


def _run(comparison: Comparison, together: Sequence[Sequence[Process]], gpus: Sequence[str | None], end: float) -> None:
    """Runs what is not done yet on the GPUs, one after another what belongs together, and begins none after the end."""
    free: SimpleQueue[str | None] = SimpleQueue()
    for each in gpus:
        free.put(each)

    def run(belonging: Sequence[Process]) -> None:
        gpu = free.get()
        try:
            for process in belonging:
                if time.monotonic() < end and not comparison.is_done(process):
                    comparison.run(process, gpu)
                    print(f"{process.name} is done", flush=True)
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(len(gpus)) as pool:
        for _ in pool.map(run, together):  # raises what the processes raised
            pass


def _report(comparison: Comparison, options: argparse.Namespace) -> None:
    console, rows, found = report.console(), list[dict[str, Any]](), list[Finding]()
    for suite in options.suites:
        numbers = range(1, options.processes + 1)
        pairs = [number for number in numbers if all(map(comparison.is_done, pair(suite, number)))]
        old, new = ([comparison.times(Process(suite, n, side)) for n in pairs] for side in _SIDES)
        of_suite = compared(suite, old, new)
        rows += of_suite
        found += findings(suite, of_suite, options.leave_out)
        console.print(f"{suite}: {len(pairs)} of {options.processes} pairs of processes, {len(of_suite)} rows")
        console.print(table(of_suite, options.leave_out))
        for name in lacking(old, new):
            console.print(f"not in every process: {name}", markup=False)
    console.print(report.findings_table(found))
    commits = {side: report.commit(checkout) for side, checkout in comparison.checkouts.items()}
    summary = [each.as_json() for each in found]
    content = {"commits": commits, "leave_out": options.leave_out, "summary": summary, "rows": rows}
    file = options.out or comparison.work / "compare.json"
    report.write_json(file, content)
    console.print(f"written to {file}")
