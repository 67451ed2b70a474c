"""Runs suites.

A suite's result file is written after each row, so that a run can end at any time and continue later.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import digests, report
from benchmarks.kept import is_peer
from benchmarks.report import Finding, Json, Row
from benchmarks.timing import has_gpu, release

MAX_AUTOTUNE: Final = "torch_max_autotune"
TORCH_COMPILE: Final = "torch_compile"
JAX: Final = "jax"
_ASKED: Final = {"max_autotune": MAX_AUTOTUNE, "torch_compile": TORCH_COMPILE, "jax": JAX}
"""For each option that adds a peer, the beginning of the peer's names."""
CACHE_VARIABLE: Final = "LT_RUNTIME_CACHE_DIR"
UNTUNED: Final = ("LT_RUNTIME_TUNE", "off")
"""The environment variable that switches measuring off in training steps, and its value: suites tune explicitly."""
_ROOT: Final = Path(__file__).parents[1]

Rows = dict[str, dict[str, Any]]
"""Type: the rows of a result file, by case."""
Job = Callable[[Any], Row]
"""Type: a function that measures a row on the given CuPy stream, which can be captured."""


def _nothing(_: Any) -> Any:
    return {}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A benchmark suite: its cases, jobs and summary.

    Attributes:
        rounds: the default number of rounds in which the contenders take turns.
        order: the cases, in the order of the result file.
        jobs: by case, the jobs for a command line.
        findings: computes the figures over all rows.
        facts: computes further entries of the result file.
        has_context: whether the jobs use the GPU in this process, and not only in other processes.
    """

    rounds: int
    order: Sequence[str]
    jobs: Callable[[argparse.Namespace], Mapping[str, Job]]
    findings: Callable[[Sequence[Json]], Sequence[Finding]] = _nothing
    facts: Callable[[Sequence[Json]], Json] = _nothing
    has_context: bool = True


def kept_rows(file: Path | None) -> Rows:
    """Reads the rows of a file that hold times, with the commit of each measurement; returns no rows without a file."""
    if file is None or not file.exists():
        return {}
    result = json.loads(file.read_text())
    done = [row for row in result["rows"] if row["us"] and "error" not in row]
    return {row["case"]: {**row, "commit": row.get("commit", result["commit"])} for row in done}


def matches(pattern: str | None, name: str) -> bool:
    """Whether a regular expression is found in a name, ignoring case; None matches every name."""
    return re.search(pattern or "", name, re.IGNORECASE) is not None


def file_of(name: str, options: argparse.Namespace) -> Path | None:
    """The result file; None if only a part is measured and neither `--out` nor `--resume` is given."""
    if options.out is not None:
        return Path(options.out) / f"{name}.json"
    narrowed = options.only or options.dtype or options.activation or options.ours
    return None if narrowed and not options.resume else report.RESULTS / f"{name}.json"


def run(name: str, suite: Suite, options: argparse.Namespace) -> Rows:
    """Measures the rows of a command line, prints them, and writes them if there is a result file.

    A row that fails holds the error instead of times, and the run continues. With `--resume` a row of older code, or
    without a peer that the options ask for, stays in the file until it is measured anew.

    Raises:
        SystemExit: there is no GPU, or the result file has rows of another one.
    """
    if not has_gpu():
        raise SystemExit(f"the suite {name} needs an NVIDIA GPU")
    file = file_of(name, options)
    rows = kept_rows(file) if options.resume else {}
    if rows and (gpu := json.loads(Path(str(file)).read_text())["machine"]["gpu"]) != report.machine()["gpu"]:
        raise SystemExit(f"{file} has rows of another GPU, {gpu}: name another folder by --out")
    origin = {"digest": digests.digest(name, digests.working_files()), "commit": report.commit()}
    done = {case for case, row in rows.items() if _is_done(row, origin["digest"], options)}
    wanted = {case: job for case, job in suite.jobs(options).items() if matches(options.only, case)}
    jobs, console = {case: job for case, job in wanted.items() if case not in done}, report.console()
    stream, start = None, time.monotonic()
    if suite.has_context:
        import cupy as cp

        stream = cp.cuda.Stream(non_blocking=True)
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # The progress bar has no thread that refreshes it: beside other threads, the package captures no repeated call.
    progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    with progress, variable(*UNTUNED):
        task = progress.add_task(name, total=len(jobs))
        for case, job in jobs.items():
            if time.monotonic() - start > 60 * options.minutes:
                break
            progress.update(task, description=case, refresh=True)
            made = _measured(case, job, stream, console)
            if made["us"] or case not in rows:
                rows[case] = made | origin
            if suite.has_context:
                release()
            save(suite, rows, file, origin["digest"])
            progress.advance(task)
    if found := suite.findings(_of_digest(rows.values(), origin["digest"])):
        console.print(report.findings_table(found))
    if file is not None:
        console.print(f"written to {file}")
    return rows


def _is_done(row: Json, digest: str, options: argparse.Namespace) -> bool:
    """Whether a row is of the present code and has either no peer at all or every peer that the options ask for."""
    tried = [name for name in (*row["us"], *row.get("left_out", ())) if is_peer(name)]
    asked = [name for option, name in _ASKED.items() if getattr(options, option)]
    has_all = all(any(name.startswith(each) for name in tried) for each in asked)
    return row.get("digest") == digest and (has_all or not tried)


def _measured(case: str, job: Job, stream: Any, console: Console) -> dict[str, Any]:
    try:
        row = job(stream)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        Console(stderr=True).print(f"{case}: {why}", markup=False)
        return {"case": case, "us": {}, "spread": {}, "error": why}
    console.print(report.table([row]))
    return {**row.as_json(), "when": report.now()}


def _of_digest(rows: Iterable[dict[str, Any]], digest: str) -> list[dict[str, Any]]:
    return [row for row in rows if row.get("digest") == digest]


def save(suite: Suite, rows: Rows, file: Path | None, digest: str) -> None:
    """Writes the rows in the order of the suite, and figures over those with the digest; needs a file and rows."""
    if file is None or not rows:
        return
    places = {name: place for place, name in enumerate(suite.order)}
    ordered = sorted(rows.values(), key=lambda row: places.get(row["case"], len(places)))
    found = suite.findings(_of_digest(ordered, digest))
    summary = {"summary": [each.as_json() for each in found]} if found else {}
    report.write(file, ordered, **suite.facts(ordered), **summary)


@contextlib.contextmanager
def plan_cache(directory: str | None = None, *, keep: bool = False) -> Iterator[Path]:
    """Gives this process a plan cache in another directory, whose path it yields; compiled kernels are shared.

    Args:
        directory: an existing directory; an empty temporary one if left out.
        keep: whether to stay with the present plan cache, whose path is then yielded.
    """
    from lt_runtime.paths import cache_directory

    current = cache_directory()
    if keep:
        yield current
        return
    with contextlib.ExitStack() as stack:
        if directory is None:
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="lt_runtime_plans_"))
        kernels, link = current / "kernels", Path(directory) / "kernels"
        kernels.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.symlink_to(kernels.resolve(), target_is_directory=True)
        stack.enter_context(variable(CACHE_VARIABLE, directory))
        yield Path(directory)


@contextlib.contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable within a `with` block."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def last_line(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a process, and returns the JSON in the last line that it prints.

    Raises:
        CalledProcessError: the process failed.
    """
    done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
