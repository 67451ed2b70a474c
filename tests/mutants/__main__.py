"""Plants each fault of the table in a copy of the tree, and runs the tests that must see it.

`python -m tests.mutants [--jobs N] [--only PATTERN] [--changed BASE] [--sample N] [--gpu]` exits with 1 if a fault
survives. A fault is killed when its tests run and fail. First they must pass on the tree as it is.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue

from rich.console import Console
from rich.progress import track
from rich.table import Table

from tests.host_kernels.build import BUILD_DIRECTORY
from tests.mutants.fault import ROOT, Fault
from tests.mutants.table import FAULTS
from tests.mutants.trial import Copy, Result, Verdict


def main(arguments: Sequence[str]) -> int:
    """The command."""
    options = _parsed(arguments)
    console = Console(width=None if sys.stdout.isatty() else 150)
    faults = _chosen(options)
    console.print(f"{len(faults)} of {len(FAULTS)} planted faults{_how(options)}, {options.jobs} at a time")
    for each in FAULTS if not options.gpu else ():
        if each.needs_gpu:
            console.print(f"  left out, because only a GPU shows it: {each.name}", highlight=False)
    if not faults:
        return 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        results = _tried(faults, options.jobs, Path(directory), console)
    if results is None:
        return 1
    _report(results, console)
    return 0 if all(result.verdict is Verdict.KILLED for result in results.values()) else 1


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="faults at a time")
    parser.add_argument("--only", metavar="PATTERN", help="faults whose name, file or a test matches, as in a shell")
    parser.add_argument("--changed", metavar="BASE", help="faults whose file or tests differ between a commit and HEAD")
    parser.add_argument("--sample", metavar="N", type=int, help="at most so many, another choice for each HEAD")
    parser.add_argument("--gpu", action="store_true", help="faults that only a GPU shows, one at a time")
    options = parser.parse_args(arguments)
    if options.gpu:
        options.jobs = 1
    return options


def _chosen(options: argparse.Namespace) -> list[Fault]:
    """In the order of the table."""
    faults = [each for each in FAULTS if each.needs_gpu == options.gpu]
    if options.only:
        faults = [each for each in faults if _matches(each, options.only)]
    if options.changed:
        paths = set(_git("diff", "--name-only", options.changed, "HEAD").splitlines())
        faults = [each for each in faults if each.concerns(paths)]
    if options.sample is not None and len(faults) > options.sample:
        sample = set(random.Random(_git("rev-parse", "HEAD")).sample(faults, options.sample))
        faults = [each for each in faults if each in sample]
    return faults


def _matches(fault: Fault, pattern: str) -> bool:
    return any(fnmatch.fnmatch(text, f"*{pattern}*") for text in (fault.name, fault.path, *fault.tests))


def _how(options: argparse.Namespace) -> str:
    only = f" that match {options.only!r}" if options.only else ""
    changed = f" in files changed since {options.changed}" if options.changed else ""
    return only + changed + (f", at most {options.sample}" if options.sample is not None else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def _tried(faults: Sequence[Fault], jobs: int, directory: Path, console: Console) -> dict[Fault, Result] | None:
    """Each fault's result; None where the tests fail without a fault."""
    built = _built_kernels(directory)
    copies: SimpleQueue[Copy] = SimpleQueue()
    for job in range(min(jobs, len(faults))):
        copies.put(Copy(directory / str(job), built))
    whole = copies.get()
    tests = list(dict.fromkeys(test for each in faults for test in each.tests))
    unchanged = whole.passes(tests, 0 if jobs == 1 else jobs)
    copies.put(whole)
    if unchanged.verdict is not Verdict.SURVIVED:
        console.print(unchanged.output, "Without any fault these tests must pass.", markup=False, highlight=False)
        return None
    console.print(f"their {len(tests)} tests pass without a fault, in {unchanged.seconds:.0f} s")

    def try_out(each: Fault) -> Result:
        copy = copies.get()
        try:
            return copy.try_out(each)
        finally:
            copies.put(copy)

    results, pool = {}, ThreadPoolExecutor(jobs)
    trials = {pool.submit(try_out, each): each for each in faults}
    try:
        done = as_completed(trials)
        for trial in track(done, "faults", len(trials), console=console, disable=not console.is_terminal):
            each = trials[trial]
            results[each] = result = trial.result()
            if result.verdict is not Verdict.KILLED:
                console.print(f"{result.verdict.value}: {each.name}", highlight=False)
    finally:
        pool.shutdown(cancel_futures=True)
    return {each: results[each] for each in faults}


def _built_kernels(directory: Path) -> Path:
    """A place for kernels that g++ builds for the host, with those that the tests of this tree have built before."""
    built = directory / "host_kernels"
    ours = Path(os.environ.get(BUILD_DIRECTORY, ROOT / ".pytest_cache" / "d" / "host_kernels"))
    if not ours.is_dir():
        built.mkdir()
        return built
    return Path(shutil.copytree(ours, built, ignore=shutil.ignore_patterns("*.partial", "*.lock")))


def _report(results: dict[Fault, Result], console: Console) -> None:
    table = Table("fault", "file", "verdict", "s", title="Planted faults")
    for each, result in results.items():
        table.add_row(each.name, each.path, result.verdict.value, f"{result.seconds:.1f}")
    console.print(table)
    for each, result in results.items():
        if result.verdict is not Verdict.KILLED:
            console.rule(f"{each.name}: {result.verdict.value}")
            console.print(result.output[-3000:], markup=False, highlight=False)
    counts = Counter(result.verdict.value for result in results.values())
    seconds = sum(result.seconds for result in results.values())
    console.print(f"{', '.join(f'{count} {verdict}' for verdict, count in counts.items())}; {seconds:.0f} s of tests")


if __name__ == "__main__":
    begun = time.monotonic()
    status = main(sys.argv[1:])
    print(f"{time.monotonic() - begun:.0f} s in all")
    sys.exit(status)
