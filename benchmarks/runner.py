"""Runs suites: chooses their cases, prints and stores rows, and tells how many seconds each case took.

A result file is written after each row, so that a run can end at any time and continue later. Digests leave this module
out, because it changes no time: what does, is in `benchmarks.suite`.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import digests, report
from benchmarks.kept import is_peer
from benchmarks.report import Json
from benchmarks.suite import Job, Suite, matches, ready
from benchmarks.timing import has_gpu, release, spent

_ASKED: Final = {"max_autotune": "max_autotune", "torch_compile": "compile", "jax": "jax"}
"""Maps each option that adds peers to a part of these contenders' names."""
_FEWER: Final = ("ours", "contenders", "no_compile")
"""Options that leave contenders out; a row tells which of them it was measured with."""
WHOLE: Final = "whole"
"""The entry of a row's `seconds` for all that measuring the row took."""
_WRITTEN_ANEW: Final = ("machine", "commit", "when", "summary", "rows")
_PARTS: Final = 4  # number of stages, the longest ones, that the table of seconds names for each case

Rows = dict[str, dict[str, Any]]
"""Type: the rows of a result file, by case."""


def kept_rows(file: Path | None) -> Rows:
    """Reads the rows of a file that hold times, with the commit of each measurement; returns no rows without a file."""
    if file is None or not file.exists():
        return {}
    result = json.loads(file.read_text())
    done = [row for row in result["rows"] if row["us"] and "error" not in row]
    return {row["case"]: {**row, "commit": row.get("commit", result["commit"])} for row in done}


def file_of(name: str, options: argparse.Namespace) -> Path | None:
    """The result file; None if only a part is measured and neither `--out` nor `--resume` is given."""
    if options.out is not None:
        return Path(options.out) / f"{name}.json"
    is_part = any(getattr(options, each) for each in ("only", "dtype", "activation", *_FEWER))
    return None if is_part and not options.resume else report.RESULTS / f"{name}.json"


def run(name: str, suite: Suite, options: argparse.Namespace) -> Rows:
    """Measures the rows of a command line, prints them, and writes them if there is a result file.

    A row that fails holds the error instead of times, and the run continues. With `--resume` a row of older code, or
    without a peer that the options ask for, stays in the file until it is measured anew; rows that other processes
    write into the file in the meantime stay as well.

    Raises:
        SystemExit: there is no GPU, or the result file has rows of another GPU.
    """
    file, digest = file_of(name, options), digests.digest(name, digests.working_files())
    kept = kept_rows(file) if options.resume else {}
    jobs, console = _wanted(suite, kept, digest, options), report.console()
    if options.dry_run:
        console.print(_table(name, {case: kept.get(case, {}).get("seconds", {}) for case in jobs}))
        return kept
    if not has_gpu():
        raise SystemExit(f"the suite {name} needs an NVIDIA GPU")
    if kept and (gpu := json.loads(Path(str(file)).read_text())["machine"]["gpu"]) != report.machine()["gpu"]:
        raise SystemExit(f"{file} has rows of another GPU, {gpu}: name another folder by --out")
    origin, start = {"digest": digest, "commit": report.commit()}, time.monotonic()
    origin |= {"fewer": fewer} if (fewer := _fewer(options)) else {}
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # The progress bar has no thread that refreshes it: beside other threads, the package captures no repeated call.
    progress = Progress(*columns, console=Console(stderr=True), auto_refresh=False)
    rows, seconds = Rows(), dict[str, Mapping[str, float]]()
    with progress, ready(has_context=suite.has_context) as stream:
        task = progress.add_task(name, total=len(jobs))
        for case, job in jobs.items():
            if time.monotonic() - start > 60 * options.minutes:
                break
            progress.update(task, description=case, refresh=True)
            made = _measured(case, job, stream, console) | origin
            seconds[case] = made["seconds"]
            if made["us"] or case not in kept:
                rows[case] = made
            if suite.has_context:
                release()
            save(suite, rows, file, digest, resume=options.resume)
            progress.advance(task)
    every = (kept_rows(file) if options.resume else {}) | rows
    if found := suite.findings(of_digest(every.values(), digest)):
        console.print(report.findings_table(found))
    console.print(_table(name, seconds))
    if file is not None:
        console.print(f"written to {file}")
    return every


def _wanted(suite: Suite, kept: Rows, digest: str, options: argparse.Namespace) -> dict[str, Job]:
    """The jobs of the cases that the options choose and whose rows are not in the result file yet."""
    named = [item for item in suite.jobs(options).items() if matches(options.only, item[0])]
    number, parts = options.part
    done = {case for case, row in kept.items() if _is_done(row, digest, options)}
    return {case: job for case, job in named[number - 1 :: parts] if case not in done}


def _is_done(row: Json, digest: str, options: argparse.Namespace) -> bool:
    """Whether a row need not be measured again.

    The row is then of the present code, no option that is absent now left out contenders, and every peer that the
    present options ask for was tried, unless the case has no peers.
    """
    tried = [name for name in (*row["us"], *row.get("left_out", ())) if is_peer(name)]
    asked = [part for option, part in _ASKED.items() if getattr(options, option)]
    has_all = all(any(each in name for name in tried) for each in asked)
    lacks = row.get("fewer", {}).items() - _fewer(options).items()
    return row.get("digest") == digest and not lacks and (has_all or not tried)


def _fewer(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in _FEWER if getattr(options, name)}


def _measured(case: str, job: Job, stream: Any, console: Console) -> dict[str, Any]:
    spent.clear()
    start = time.monotonic()
    try:
        row = job(stream)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        Console(stderr=True).print(f"{case}: {why}", markup=False)
        made = {"case": case, "us": {}, "spread": {}, "error": why}
    else:
        console.print(report.table([row]))
        made = {**row.as_json(), "when": report.now()}
    seconds = {WHOLE: time.monotonic() - start, **spent}
    return made | {"seconds": {name: round(each, 2) for name, each in seconds.items()}}


def _table(name: str, seconds: Mapping[str, Mapping[str, float]]) -> report.Table:
    """The table of the seconds that each case took, or took when it was last measured, and of their sum."""
    known = [each[WHOLE] for each in seconds.values() if each]
    unknown = len(seconds) - len(known)
    told = f"{name}: {len(seconds)} cases" + (f", {unknown} of them never timed" if unknown else "")
    made = report.Table(told, "seconds", "of these", box=None, header_style="bold")
    for case, each in seconds.items():
        parts = sorted((item for item in each.items() if item[0] != WHOLE), key=lambda item: -item[1])[:_PARTS]
        made.add_row(case, f"{each[WHOLE]:.1f}" if each else "", ", ".join(f"{part} {s:.1f}" for part, s in parts))
    made.add_row("all", f"{sum(known):.0f}")
    return made


def of_digest(rows: Iterable[dict[str, Any]], digest: str) -> list[dict[str, Any]]:
    """The rows whose recorded code digest is `digest`."""
    return [row for row in rows if row.get("digest") == digest]


def save(suite: Suite, rows: Rows, file: Path | None, digest: str, *, resume: bool, origin: Json | None = None) -> None:
    """Writes rows in the order of the suite, and figures over the rows of the digest; without rows or a file, nothing.

    Args:
        resume: whether other rows of the file stay, also rows that another process has written since. Facts of the file
            that cannot be computed from the rows stay too.
        origin: machine, commit and date for the file; by default those of this process.
    """
    if file is None or not rows:
        return
    places = {name: place for place, name in enumerate(suite.order)}
    with _locked(file.parent):
        every = ((kept_rows(file) if resume else {}) | rows).values()
        ordered = sorted(every, key=lambda row: places.get(row["case"], len(places)))
        found = suite.findings(of_digest(ordered, digest))
        summary = {"summary": [each.as_json() for each in found]} if found else {}
        content = json.loads(file.read_text()) if resume and file.exists() else {}
        earlier = {name: each for name, each in content.items() if name not in _WRITTEN_ANEW}
        report.write(file, ordered, origin, **{**earlier, **suite.facts(ordered), **summary})


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Within a `with` block, other processes that lock the folder wait."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some file systems have no locks; a single process needs none
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def merge(name: str, suite: Suite, folder: Path, digest: str) -> int:
    """Puts the rows of another run, DIR/SUITE.json, into the kept results where they are newer; returns how many.

    Raises:
        SystemExit: the other run was on another GPU.
    """
    theirs, file = folder / f"{name}.json", report.RESULTS / f"{name}.json"
    kept = kept_rows(file)
    newer = {case: row for case, row in kept_rows(theirs).items() if row["when"] > kept.get(case, {}).get("when", "")}
    if newer:
        origin, other = (json.loads(each.read_text()) if each.exists() else None for each in (theirs, file))
        if other is not None and other["machine"]["gpu"] != origin["machine"]["gpu"]:
            gpus = f"{origin['machine']['gpu']}, and {file} of {other['machine']['gpu']}"
            raise SystemExit(f"{theirs} has rows of {gpus}: rows of two GPUs are not merged")
        place = {name: origin[name] for name in ("machine", "commit", "when")}
        save(suite, newer, file, digest, resume=True, origin=place)
    return len(newer)
