"""Plants each fault of the table in a copy of the tree, and runs the tests that must fail.

`python -m tests.mutants [--jobs N] [--only PATTERN] [--changed BASE] [--seconds S] [--gpu]` exits with 1 if a fault
survives. A fault is killed if its tests run and fail with it, and pass without it. With `--seconds` the faults are
tried in random order, as many as the time allows.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Final

from tests.mutants import FAULTS
from tests.mutants.fault import Fault
from tests.mutants.trial import ROOT, Copy, Verdict

LIMIT_S: Final = 60


def main(arguments: Sequence[str]) -> int:
    """Runs the command `python -m tests.mutants`."""
    begun = time.monotonic()
    options = _parsed(arguments)
    faults = _chosen(options)
    print(f"{len(faults)} of {len(FAULTS)} planted faults, {options.jobs} at a time", flush=True)
    copies: SimpleQueue[Copy] = SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory, ThreadPoolExecutor(options.jobs) as pool:
        for job in range(min(options.jobs, len(faults))):
            copies.put(Copy(Path(directory, str(job)), deadline=begun + options.seconds))

        def try_out(each: Fault) -> Verdict:
            copy = copies.get()
            try:
                return _tried(each, copy)
            finally:
                copies.put(copy)

        counts = Counter(pool.map(try_out, faults))
    print(", ".join(f"{count} {verdict.value}" for verdict, count in counts.items()))
    print(f"{time.monotonic() - begun:.0f} s in all")
    return 0 if set(counts) <= {Verdict.KILLED, Verdict.LEFT_OUT} else 1


def _tried(each: Fault, copy: Copy) -> Verdict:
    """Tries a fault and prints the verdict, with pytest's output unless the fault is killed."""
    planted = each.planted((ROOT / each.path).read_text())
    verdict, output = copy.try_out(each.path, planted, each.tests, LIMIT_S)
    if verdict is Verdict.KILLED:
        status, output = copy.pytest(each.tests, LIMIT_S)
        verdict = verdict if status == 0 else status if isinstance(status, Verdict) else Verdict.BROKEN
    if verdict is not Verdict.LEFT_OUT:
        print(f"{verdict.value}: {each.name} ({each.path})", flush=True)
        if verdict is not Verdict.KILLED:
            print(output[-3000:], flush=True)
    return verdict


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="faults at a time")
    parser.add_argument("--only", metavar="PATTERN", help="faults whose name, file or a test matches, as in a shell")
    parser.add_argument("--changed", metavar="BASE", help="faults whose file or tests differ between a commit and HEAD")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="the command ends after so many")
    parser.add_argument("--gpu", action="store_true", help="faults that only a GPU shows, one at a time")
    options = parser.parse_args(arguments)
    options.jobs = 1 if options.gpu else options.jobs
    return options


def _chosen(options: argparse.Namespace) -> list[Fault]:
    faults = [each for each in FAULTS if each.needs_gpu == options.gpu]
    if options.only:
        pattern = f"*{options.only}*"
        faults = [f for f in faults if any(fnmatch.fnmatch(text, pattern) for text in (f.name, f.path, *f.tests))]
    if options.changed:
        command = ["git", "diff", "--name-only", options.changed, "HEAD"]
        paths = set(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines())
        faults = [each for each in faults if each.concerns(paths)]
    if options.seconds < float("inf"):
        random.shuffle(faults)
    return faults


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
