"""Rows of measurements and the figures over many rows, as JSON and as tables, with the machine and the commit."""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
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
_WIDTH: Final = 150  # columns of a table that goes to a file
_FLAT_LIST: Final = re.compile(r'\[\n\s+((?:"[^"]*"|[^"\[\]{}])*?)\n\s+\]')
"""A list of numbers and words, over several lines: it takes one line in a file."""
_LINES: Final = re.compile(r"\n\s*")
_DRIVER_FILE: Final = Path("/proc/driver/nvidia/version")

Json = Mapping[str, Any]
"""A row as it stands in a result file."""


@dataclass(frozen=True)
class Target:
    """What a case has to reach.

    Attributes:
        fraction_of_copy: of the bandwidth of the best copy kernel, at the case's bytes.
        ratio: by contender, the multiple of our time that its own time must be at least.
    """

    fraction_of_copy: float | None = None
    ratio: Mapping[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.fraction_of_copy is not None or bool(self.ratio)

    def as_json(self) -> dict[str, Any]:
        """The targets that are set."""
        fraction = {} if self.fraction_of_copy is None else {"fraction_of_copy": self.fraction_of_copy}
        return fraction | ({"ratio": dict(self.ratio)} if self.ratio else {})


NO_TARGET: Final = Target()
COPY_FLOOR: Final = "copy"
PEAK_FLOOR: Final = "peak"


@dataclass(frozen=True)
class Row:
    """What was measured of one case.

    Attributes:
        ours: the contender that the others are compared with.
        bytes: the fewest that the task moves; None where memory traffic is not the point.
        copy_gb_s: the bandwidth of the best copy kernel in the same run.
        setting: further facts for the record, by name.
        left_out: contenders that could not be measured, and why.
        flops: the fewest floating-point operations of the task's products; None where they are not the point.
        peak_tflops: the GPU's nominal peak rate of them, in 10¹² a second; None where it is not known.
    """

    case: str
    timings: Mapping[str, Timing]
    ours: str = "lt"
    bytes: int | None = None
    copy_gb_s: float | None = None
    target: Target = field(default_factory=Target)
    setting: Json = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)
    flops: int | None = None
    peak_tflops: float | None = None

    @property
    def ratio(self) -> dict[str, float]:
        """The other contenders' times as multiples of ours."""
        if self.ours not in self.timings:
            return {}
        own = self.timings[self.ours].median
        return {name: timing.median / own for name, timing in self.timings.items() if name != self.ours}

    @property
    def floors(self) -> dict[str, float]:
        """The least microseconds: `COPY_FLOOR` is of moving the bytes, `PEAK_FLOOR` of computing the products."""
        moving = {} if self.bytes is None or not self.copy_gb_s else {COPY_FLOOR: self.bytes / self.copy_gb_s / 1e3}
        if self.flops is None or not self.peak_tflops:
            return moving
        return moving | {PEAK_FLOOR: self.flops / self.peak_tflops / 1e6}

    @property
    def fraction_of_copy(self) -> float | None:
        """Our bandwidth, at the bytes of the case, as a fraction of the best copy's."""
        return self._fraction(COPY_FLOOR)

    @property
    def fraction_of_peak(self) -> float | None:
        """Our rate of computing, at the operations of the case, as a fraction of the nominal peak rate."""
        return self._fraction(PEAK_FLOOR)

    def _fraction(self, name: str) -> float | None:
        floors = self.floors
        return floors[name] / self.timings[self.ours].median if name in floors and self.ours in self.timings else None

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without a target, or if a part of it was not measured."""
        wanted = dict(self.target.ratio)
        reached: dict[str, float | None] = {name: self.ratio.get(name) for name in wanted}
        if self.target.fraction_of_copy is not None:
            wanted["copy"], reached["copy"] = self.target.fraction_of_copy, self.fraction_of_copy
        if not wanted or any(value is None for value in reached.values()):
            return None
        return all((reached[name] or 0.0) >= limit for name, limit in wanted.items())

    def as_json(self) -> dict[str, Any]:
        """The row of a result file, without the fields that have no value."""
        optional = {
            "bytes": self.bytes,
            "flops": self.flops,
            "floors_us": {name: _rounded(floor) for name, floor in self.floors.items()} or None,
            "fraction_of_copy": _rounded(self.fraction_of_copy),
            "fraction_of_peak": _rounded(self.fraction_of_peak),
            "ratio": {name: _rounded(value) for name, value in self.ratio.items()} or None,
            "target": self.target.as_json() or None,
            "met": self.met,
            "left_out": dict(self.left_out) or None,
        }
        return {
            "case": self.case,
            "us": {name: _rounded(timing.median) for name, timing in self.timings.items()},
            "spread": {name: _rounded(timing.spread) for name, timing in self.timings.items()},
            **self.setting,
            **{name: value for name, value in optional.items() if value is not None},
        }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def geometric_mean(values: Iterable[float]) -> float:
    """Of at least one value, all above 0."""
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def speedups(rows: Iterable[Json], contender: str, ours: str = "lt") -> dict[str, float]:
    """By case, a contender's time as a multiple of ours, for the rows in which both were measured."""
    times = {row["case"]: row.get("us", {}) for row in rows}
    return {case: us[contender] / us[ours] for case, us in times.items() if contender in us and ours in us}


@dataclass(frozen=True)
class Finding:
    """One figure over many rows, and what it has to be.

    Attributes:
        value: None if no row has what it needs.
        target: None if the figure is only reported.
        rows: how many rows the figure is over.
        where: the row that a worst case is from.
        at_most: whether the target is an upper limit, and not a lower one.
    """

    what: str
    value: float | None
    target: float | None = None
    rows: int = 1
    where: str | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without a value or a target."""
        if self.value is None or self.target is None:
            return None
        return self.value <= self.target if self.at_most else self.value >= self.target

    @property
    def wanted(self) -> str:
        """The target in words."""
        return "" if self.target is None else f"{'≤' if self.at_most else '≥'} {self.target:g}"

    def as_json(self) -> dict[str, Any]:
        """The entry of a result file's summary."""
        where = {} if self.where is None else {"where": self.where}
        facts = {"target": self.wanted, "met": self.met, "rows": self.rows}
        return {"what": self.what, "value": _rounded(self.value), **facts, **where}


def mean(what: str, values: Mapping[str, float], target: float | None = None, *, at_most: bool = False) -> Finding:
    """The geometric mean."""
    value = geometric_mean(values.values()) if values else None
    return Finding(f"{what}, geometric mean", value, target, len(values), at_most=at_most)


def worst(what: str, values: Mapping[str, float], target: float | None = None, *, at_most: bool = False) -> Finding:
    """The least value, or the greatest if the target is an upper limit."""
    where = (max if at_most else min)(values, key=values.__getitem__) if values else None
    value = None if where is None else values[where]
    return Finding(f"{what}, worst", value, target, len(values), where, at_most)


def share(what: str, values: Mapping[str, float], holds: Callable[[float], bool], target: float) -> Finding:
    """The share of rows whose value passes a test."""
    held = sum(map(holds, values.values())) / len(values) if values else None
    return Finding(f"share of rows {what}", held, target, len(values))


# Tables for the terminal.


def table(rows: Iterable[Row]) -> Table:
    """A line for each contender: its time and spread, its ratio to ours, and for ours the fractions and the target."""
    made = _table("case", ("µs", "±", "× ours", "of copy", "of peak"), ("contender",), ("target",))
    for row in rows:
        for number, line in enumerate(_lines(row)):
            made.add_row(row.case if number == 0 else "", *line)
        made.add_section()
    return made


def _table(first: str, numbers: Iterable[str], before: Iterable[str] = (), after: Iterable[str] = ()) -> Table:
    made = Table(first, *before, box=None, header_style="bold")
    for heading in numbers:
        made.add_column(heading, justify="right")
    for heading in after:
        made.add_column(heading)
    return made


def _lines(row: Row) -> list[list[str]]:
    lines = []
    for name, timing in row.timings.items():
        ratio = f"{row.ratio[name]:.2f}" if name in row.ratio else ""
        lines.append([name, f"{timing.median:.2f}", f"{timing.spread:.2f}", ratio, "", "", ""])
    lines += [[name, "left out", "", "", "", "", escape(why)] for name, why in row.left_out.items()]
    ours = next((line for line in lines if line[0] == row.ours), lines[0])
    ours[4:6] = percent(row.fraction_of_copy), percent(row.fraction_of_peak)
    ours[6] = f"{ours[6]} {_verdict(row)}".strip()
    floors = [[f"(least by {name})", f"{least:.2f}", "", "", "", "", ""] for name, least in row.floors.items()]
    return [*lines, *floors]


def _verdict(row: Row) -> str:
    if not row.target:
        return ""
    parts = [f"{name} ≥ {limit:.3g}×" for name, limit in row.target.ratio.items()]
    if row.target.fraction_of_copy is not None:
        parts.insert(0, f"≥ {percent(row.target.fraction_of_copy)} of copy")
    word = {True: "[green]met[/]", False: "[red]MISSED[/]", None: "[yellow]not measured[/]"}[row.met]
    return f"{word}: {', '.join(parts)}"


def percent(fraction: float | None) -> str:
    """Such as "89.9 %"; empty for None."""
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def compact_table(
    rows: Iterable[Json], contenders: Sequence[str], more: Mapping[str, Callable[[Json], str]] | None = None
) -> Table:
    """A line for each row: our time, the contenders' times as multiples of it, and `more` columns."""
    more = more or {}
    made = _table("case", ("µs", "±", *(f"× {name}" for name in contenders), *more))
    for row in rows:
        us = row["us"]
        cells = ["see below" if us else "no result"]
        if "lt" in us:
            ratios = [f"{us[name] / us['lt']:.3f}" if name in us else "" for name in contenders]
            cells = [f"{us['lt']:.1f}", f"{row['spread']['lt']:.2f}", *ratios, *(cell(row) for cell in more.values())]
        made.add_row(row["case"], *cells)
    return made


def findings_table(findings: Iterable[Finding]) -> Table:
    """A line for each figure."""
    shown = _table("over all rows", ("figure", "target", "rows"), after=("", "where"))
    words = {True: "[green]met[/]", False: "[red]MISSED[/]", None: ""}
    for each in findings:
        value, verdict = (
            ("", "[yellow]not measured[/]") if each.value is None else (f"{each.value:.3f}", words[each.met])
        )
        shown.add_row(each.what, value, each.wanted, str(each.rows), verdict, each.where or "")
    return shown


def console() -> Console:
    """Where tables are printed: the terminal, or a file with room for a whole line."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


# Result files.


def write(file: Path, rows: Iterable[Json], **more: Any) -> None:
    """Writes a result file: the machine, the commit, `more`, and the rows."""
    write_json(file, {"machine": machine(), "commit": commit(), **more, "rows": list(rows)})


def write_json(file: Path, content: Json) -> None:
    """Replaces a file at once, so that a run that is cut off leaves either the old file or the new one."""
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
    libraries = {name: _version(name) for name in ("cupy", "torch", "nvmath")}
    return {
        "gpu": properties["name"].decode(),
        "capability": 10 * properties["major"] + properties["minor"],
        "driver": driver and driver[0],
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "cublaslt": cublaslt.get_version(),
        "nvrtc": f"{major}.{minor}",
        **{name: version for name, version in libraries.items() if version is not None},
        **({"jax": metadata.version("jax")} if find_spec("jax") else {}),  # is slow to import, and seldom takes part
    }


def _version(module: str) -> str | None:
    try:
        return str(importlib.import_module(module).__version__)
    except ImportError:
        return None


def commit(directory: Path | None = None) -> str:
    """$GIT_COMMIT, for a copy without its history, or what git says; of a given directory, if that is a checkout."""
    if directory is None and "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    command = ["git", "rev-parse", "--show-prefix", "HEAD"]
    try:
        found = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    prefix, _, head = found.strip("\n").rpartition("\n")
    return "unknown" if directory is not None and prefix else head  # A folder in a checkout may hold anything.
