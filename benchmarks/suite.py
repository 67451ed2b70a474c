"""What a suite is, and how it is run: its file is written after each row, so that a run can end and go on later."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks import report
from benchmarks.clocks import gpu_state
from benchmarks.report import Finding, Json, Row
from benchmarks.timing import has_gpu, release

MAX_AUTOTUNE: Final = "torch_max_autotune"
TORCH_COMPILE: Final = "torch_compile"
JAX: Final = "jax"
_OPTIONS: Final = {MAX_AUTOTUNE: "max_autotune", TORCH_COMPILE: "torch_compile", JAX: "jax"}
"""The option that asks for a contender."""
CACHE_VARIABLE: Final = "LT_RUNTIME_CACHE_DIR"
UNTUNED: Final = ("LT_RUNTIME_TUNE", "off")
"""A variable, by which training steps follow what is known. What a suite wants tuned it tunes itself, and says so."""
_SAVE_AFTER_S: Final = 5.0  # A long file takes half a second to write, as long as some rows.
_ROOT: Final = Path(__file__).parents[1]

Rows = dict[str, dict[str, Any]]
"""Rows as they stand in a file, by case."""
Job = Callable[[Any], Row]
"""Measures a row; is given a CuPy stream that can be captured."""


def _nothing(_: Any) -> Any:
    return {}


@dataclass(frozen=True, kw_only=True)
class Suite:
    """One suite.

    Attributes:
        rounds: in which the contenders take turns, if the command line does not say.
        order: the cases, in the order in which a file holds them.
        jobs: what the command line asks for, by case.
        findings: the figures over all rows.
        facts: what else a file says beside its rows.
        lines: a table of rows as they stand in the file, printed at the end instead of one after each row.
        optional: by contender that takes part only if it is asked for, the cases in which it then does.
        has_context: whether the jobs work on the GPU themselves, and not only in other processes.
    """

    rounds: int
    order: Sequence[str]
    jobs: Callable[[argparse.Namespace], Mapping[str, Job]]
    findings: Callable[[Sequence[Json]], Sequence[Finding]] = _nothing
    facts: Callable[[Sequence[Json]], Json] = _nothing
    lines: Callable[[Sequence[Json]], Table] | None = None
    optional: Mapping[str, Collection[str]] = field(default_factory=dict)
    has_context: bool = True


def kept_rows(file: Path | None) -> Rows:
    """The rows that a file holds, with the commit that each was measured at; none if there is no file."""
    if file is None or not file.exists():
        return {}
    result = json.loads(file.read_text())
    return {row["case"]: {**row, "commit": row.get("commit", result["commit"])} for row in result["rows"]}


def is_done(row: Json | None, wanted: Iterable[str] = ()) -> bool:
    """Whether a row holds every figure that it is to hold, or the reason why it does not.

    Args:
        wanted: contenders that take part only if they are asked for.
    """
    if not row or "error" in row or not row["us"]:
        return False
    return all(name in row["us"] or name in row.get("left_out", {}) for name in wanted)


def missing(suite: Suite, options: argparse.Namespace, rows: Rows) -> dict[str, Job]:
    """The jobs that the command line asks for and whose rows are not done."""
    jobs = {name: job for name, job in suite.jobs(options).items() if matches(options.only, name)}
    asked = {contender: cases for contender, cases in suite.optional.items() if getattr(options, _OPTIONS[contender])}

    def wanted(name: str) -> list[str]:
        return [contender for contender, cases in asked.items() if name in cases]

    return {name: job for name, job in jobs.items() if not is_done(rows.get(name), wanted(name))}


def matches(pattern: str | None, name: str) -> bool:
    """Whether a regular expression is found in a name, in any case of letters; None is found in every name."""
    return re.search(pattern or "", name, re.IGNORECASE) is not None


def file_of(name: str, options: argparse.Namespace) -> Path | None:
    """Where a suite's rows go: nowhere if only a part is measured, unless the command line says otherwise."""
    if options.out is not None:
        return Path(options.out) / f"{name}.json"
    narrowed = options.only or options.dtype or options.activation or options.ours
    return None if narrowed and not options.resume else report.RESULTS / f"{name}.json"


def run(name: str, suite: Suite, options: argparse.Namespace) -> Rows:
    """Measures what the command line asks for, prints it, and writes it if there is a file for it.

    A row that fails says why in its place and does not end the run. Targets that are missed are printed.

    Raises:
        SystemExit: there is no GPU.
    """
    if not has_gpu():
        raise SystemExit(f"the suite {name} needs an NVIDIA GPU")
    file = file_of(name, options)
    rows = kept_rows(file) if options.resume else {}
    jobs, console = missing(suite, options, rows), report.console()
    stream, start = _stream() if suite.has_context else None, time.monotonic()
    saved = start
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with contextlib.ExitStack() as stack:
        progress = stack.enter_context(Progress(*columns, console=Console(stderr=True)))
        stack.enter_context(variable(*UNTUNED))
        stack.callback(save, suite, rows, file)
        task = progress.add_task(name, total=len(jobs))
        for case, job in jobs.items():
            if time.monotonic() - start > 60 * options.minutes:
                break
            progress.update(task, description=case)
            before = gpu_state() if suite.has_context else {}
            rows[case] = _measured(case, job, stream, None if suite.lines else console)
            if before:
                rows[case]["gpu"] = {"before": before, "after": gpu_state()}
            if suite.has_context:
                release()
            if time.monotonic() - saved >= _SAVE_AFTER_S:
                save(suite, rows, file)
                saved = time.monotonic()
            progress.advance(task)
    if suite.lines is not None:
        console.print(suite.lines([rows[case] for case in jobs if case in rows]))
    if found := suite.findings(list(rows.values())):
        console.print(report.findings_table(found))
    if file is not None:
        console.print(f"written to {file}")
    return rows


def _stream() -> Any:
    import cupy as cp

    return cp.cuda.Stream(non_blocking=True)


def _measured(case: str, job: Job, stream: Any, console: Console | None) -> dict[str, Any]:
    try:
        row = job(stream)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        Console(stderr=True).print(f"{case}: {why}", markup=False)
        return {"case": case, "us": {}, "spread": {}, "error": why}
    if console is not None:
        console.print(report.table([row]))
    return row.as_json()


def save(suite: Suite, rows: Rows, file: Path | None) -> None:
    """Writes the rows in the order of the suite, and the figures over them; nothing without a file or rows."""
    if file is None or not rows:
        return
    places = {name: place for place, name in enumerate(suite.order)}
    ordered = sorted(rows.values(), key=lambda row: places.get(row["case"], len(places)))
    found = suite.findings(ordered)
    summary = {"summary": [each.as_json() for each in found]} if found else {}
    report.write(file, ordered, **suite.facts(ordered), **summary)


@contextlib.contextmanager
def plan_cache(directory: str | None = None, *, keep: bool = False) -> Iterator[Path]:
    """Lets this process keep plans in a directory of their own, whose path it yields; kernels stay where they are.

    Args:
        directory: an existing one; a temporary one, which holds no plans, if left out.
        keep: use the plan cache that the process has already, and change nothing.
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
    """Sets a variable of the environment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


def last_line(command: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """The JSON in the last line that a process prints.

    Raises:
        CalledProcessError: the process failed.
    """
    done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
