"""Rows of measurements, figures over many rows, tables of both for the terminal, and result files."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.timing import Timing

RESULTS: Final = Path(__file__).parent / "results" / "h200"
_WIDTH: Final = 150  # width in characters of a table that is written to a file
_FLAT_LIST: Final = re.compile(r'\[\n\s+((?:"[^"]*"|[^"\[\]{}])*?)\n\s+\]')
"""Finds a list of numbers and strings that JSON wrote over several lines; a result file gives it one line."""
_LINES: Final = re.compile(r"\n\s*")
_PEERS: Final = ("torch", "jax", "transformers", "liger_kernel", "torchao")
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")

Json = Mapping[str, Any]
"""A row as it stands in a result file."""

COPY_FLOOR: Final = "copy"
PEAK_FLOOR: Final = "peak"


@dataclass(frozen=True)
class Row:
    """The measurements of one case.

    Attributes:
        ours: the contender that the others are compared with.
        bytes: the fewest bytes that the task moves; None where memory traffic is not the point.
        copy_gb_s: the bandwidth of the fastest copy kernel in the same run.
        setting: further facts for the result file, by name.
        left_out: the reason for each contender that could not be measured.
        flops: the fewest floating-point operations of the task's products; None where they are not the point.
        peak_tflops: the GPU's nominal peak rate, in 10¹² operations a second; None where it is not known.
    """

    case: str
    timings: Mapping[str, Timing]
    ours: str = "lt"
    bytes: int | None = None
    copy_gb_s: float | None = None
    setting: Json = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    flops: int | None = None
    peak_tflops: float | None = None

    @property
    def ratio(self) -> dict[str, float]:
        """The times of the other contenders as multiples of the time of `ours`."""
        if self.ours not in self.timings:
            return {}
        own = self.timings[self.ours].median
        return {name: timing.median / own for name, timing in self.timings.items() if name != self.ours}

    @property
    def floors(self) -> dict[str, float]:
        """Floors: the least µs to move the bytes (`COPY_FLOOR`), and to compute the products (`PEAK_FLOOR`)."""
        made = {}
        if self.bytes is not None and self.copy_gb_s:
            made[COPY_FLOOR] = self.bytes / self.copy_gb_s / 1e3
        if self.flops is not None and self.peak_tflops:
            made[PEAK_FLOOR] = self.flops / self.peak_tflops / 1e6
        return made

    @property
    def fractions(self) -> dict[str, float]:
        """Each lower bound (floor) as a fraction of our time."""
        if self.ours not in self.timings:
            return {}
        return {name: least / self.timings[self.ours].median for name, least in self.floors.items()}

    def as_json(self) -> dict[str, Any]:
        """The row as an entry of a result file, without the fields that have no value."""
        optional = {
            "bytes": self.bytes,
            "flops": self.flops,
            "floors_us": _rounded(self.floors),
            **{f"fraction_of_{name}": round(value, 4) for name, value in self.fractions.items()},
            "ratio": _rounded(self.ratio),
            "left_out": dict(self.left_out),
        }
        return {
            "case": self.case,
            "us": _rounded({name: timing.median for name, timing in self.timings.items()}),
            "spread": _rounded({name: timing.spread for name, timing in self.timings.items()}),
            **self.setting,
            **{name: value for name, value in optional.items() if value not in (None, {})},
        }


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}


# Functions that compute figures over many rows.


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of at least one value, all above 0."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def speedups(rows: Iterable[Json], contender: str, ours: str = "lt") -> dict[str, float]:
    """A contender's time as a multiple of ours, by case, for the rows in which both were measured."""
    times = {row["case"]: row.get("us", {}) for row in rows}
    return {case: us[contender] / us[ours] for case, us in times.items() if contender in us and ours in us}


@dataclass(frozen=True)
class Finding:
    """One figure over many rows.

    Attributes:
        value: None if no row has the needed times.
        target: the limit for the value; None if the figure is only reported.
        rows: how many rows the figure is over.
        where: the case that has the value, if the value is the worst of all rows.
        at_most: whether the target is an upper limit rather than a lower one.
    """

    what: str
    value: float | None
    target: float | None = None
    rows: int = 1
    where: str | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the value keeps to the target; None without a value or a target."""
        if self.value is None or self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def wanted(self) -> str:
        """The target as text, such as a limit with "at most" or "at least"."""
        return "" if self.target is None else f"{'≤' if self.at_most else '≥'} {self.target:g}"

    def as_json(self) -> dict[str, Any]:
        """The entry of a result file's summary."""
        where = {} if self.where is None else {"where": self.where}
        facts = {"target": self.wanted, "met": self.met, "rows": self.rows}
        return {"what": self.what, "value": None if self.value is None else round(self.value, 4), **facts, **where}


def mean(what: str, values: Mapping[str, float], target: float | None = None, *, at_most: bool = False) -> Finding:
    """Makes the finding of a geometric mean; `values` are by case."""
    value = geometric_mean(values.values()) if values else None
    return Finding(f"{what}, geometric mean", value, target, len(values), at_most=at_most)


def worst(what: str, values: Mapping[str, float], target: float | None = None, *, at_most: bool = False) -> Finding:
    """The finding of the worst case, which a target must hold for: the least value, or the greatest if `at_most`."""
    where = (max if at_most else min)(values, key=values.__getitem__) if values else None
    value = None if where is None else values[where]
    return Finding(f"{what}, worst", value, target, len(values), where, at_most)


def against_ours(rows: Sequence[Json], contenders: Iterable[str]) -> list[Finding]:
    """Makes two findings for each contender: the geometric mean and the worst of its times as multiples of ours."""
    found = {name: speedups(rows, name) for name in contenders}
    return [make(f"{name} / lt", values) for name, values in found.items() if values for make in (mean, worst)]


# Functions that make tables for the terminal.


def table(rows: Iterable[Row]) -> Table:
    """A table of times: a line for each contender and for each floor of the rows."""
    made = _table(("case", "contender"), ("µs", "±", "× ours", "of copy", "of peak"), ("",))
    for row in rows:
        case = row.case
        for name, timing in row.timings.items():
            ratio = f"{row.ratio[name]:.2f}" if name in row.ratio else ""
            fractions = row.fractions if name == row.ours else {}
            floors = (fractions.get(each) for each in (COPY_FLOOR, PEAK_FLOOR))
            shares = ("" if each is None else f"{100 * each:.1f} %" for each in floors)
            made.add_row(case, name, f"{timing.median:.2f}", f"{timing.spread:.2f}", ratio, *shares)
            case = ""
        for name, least in row.floors.items():
            made.add_row("", f"(least by {name})", f"{least:.2f}")
        for name, why in row.left_out.items():
            made.add_row(case, name, "left out", "", "", "", "", escape(why))
            case = ""
        made.add_section()
    return made


def findings_table(findings: Iterable[Finding]) -> Table:
    """A table of findings: a line for each figure."""
    shown = _table(("over all rows",), ("figure", "target", "rows"), ("", "where"))
    words = {True: "[green]met[/]", False: "[red]MISSED[/]", None: ""}
    for each in findings:
        value = "not measured" if each.value is None else f"{each.value:.3f}"
        shown.add_row(each.what, value, each.wanted, str(each.rows), words[each.met], each.where or "")
    return shown


def _table(left: Iterable[str], numbers: Iterable[str], right: Iterable[str]) -> Table:
    made = Table(*left, box=None, header_style="bold")
    for heading in numbers:
        made.add_column(heading, justify="right")
    for heading in right:
        made.add_column(heading)
    return made


def command(name: str, description: str | None) -> argparse.ArgumentParser:
    """Makes the parser of `python -m benchmarks NAME`; the description keeps its line breaks."""
    prog, raw = f"python -m benchmarks {name}".strip(), argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=prog, description=description, formatter_class=raw)


def console() -> Console:
    """Makes the console that prints tables: as wide as the terminal, or `_WIDTH` characters if stdout is a file."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


# Functions that write result files.


def write(file: Path, rows: Iterable[Json], origin: Json | None = None, **more: Any) -> None:
    """Writes a result file: its origin (by default the present machine, commit and date), `more`, and the rows."""
    origin = origin or {"machine": machine(), "commit": commit(), "when": now()}
    write_json(file, {**origin, **more, "rows": list(rows)})


def write_json(file: Path, content: Json) -> None:
    """Replaces a file in one step, so that an interrupted run leaves either the old file or the new one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")
    text = json.dumps(content, indent=2, ensure_ascii=False)
    new.write_text(_FLAT_LIST.sub(lambda found: f"[{_LINES.sub(' ', found[1])}]", text) + "\n")
    new.replace(file)


def now() -> str:
    """The date and time in UTC, such as 2026-01-31T23:59:59Z."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@functools.cache
def machine() -> dict[str, Any]:
    """The GPU, and the version of everything that influences its times."""
    import cupy as cp
    from cuda.bindings import nvrtc

    from lt_runtime import cublaslt

    properties = cp.cuda.runtime.getDeviceProperties(0)
    _, major, minor = nvrtc.nvrtcVersion()
    driver = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _DRIVER_FILE.read_text()) if _DRIVER_FILE.exists() else None
    return {
        "gpu": properties["name"].decode(),
        "capability": 10 * properties["major"] + properties["minor"],
        "driver": driver and driver[0],
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "cublaslt": cublaslt.get_version(),
        "nvrtc": f"{major}.{minor}",
        "cupy": cp.__version__,
        # Importing these takes long, and only their versions are needed.
        **{name: metadata.version(name) for name in _PEERS if find_spec(name)},
    }


def commit() -> str:
    """$GIT_COMMIT, which is set for a copy without its history, or the commit that git reports."""
    return os.environ.get("GIT_COMMIT") or _git("rev-parse", "HEAD") or UNKNOWN


def clean_commit(folders: Iterable[str]) -> str:
    """The last commit that changed code in some folders; `UNKNOWN` if the code has changed since."""
    code = [*(f":(top){each}" for each in folders), ":(top,exclude)benchmarks/results", ":(top,exclude)*.md"]
    changed = _git("status", "--porcelain", "--", *code)
    return UNKNOWN if changed else _git("log", "-1", "--format=%H", "--", *code) or UNKNOWN


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=RESULTS.parent, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


UNKNOWN: Final = "unknown"
