"""Results as JSON and as a table, with the machine and the commit that they belong to."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.cases import Target
from benchmarks.timing import Timing

RESULTS: Final = Path(__file__).parent / "results" / "h200"
_WIDTH: Final = 150  # of a table that goes to a file


@dataclass(frozen=True)
class Row:
    """What was measured of one case.

    Attributes:
        ours: the contender that the others are compared with.
        bytes: the fewest that the task moves; None where they are not the point.
        copy_gb_s: the best copy's bandwidth in the same run.
        setting: further facts for the record, by name.
        left_out: contenders that could not be measured, and why.
    """

    case: str
    timings: Mapping[str, Timing]
    ours: str
    bytes: int | None = None
    copy_gb_s: float | None = None
    target: Target = field(default_factory=Target)
    setting: Mapping[str, Any] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def ratio(self) -> dict[str, float]:
        """The others' time as multiples of ours."""
        if self.ours not in self.timings:
            return {}
        own = self.timings[self.ours].median
        return {name: timing.median / own for name, timing in self.timings.items() if name != self.ours}

    @property
    def fraction_of_copy(self) -> float | None:
        """Our bandwidth, at the bytes of the case, as a fraction of the best copy's."""
        if self.bytes is None or self.copy_gb_s is None or self.ours not in self.timings:
            return None
        return self.bytes / self.timings[self.ours].median / 1e3 / self.copy_gb_s

    @property
    def met(self) -> bool | None:
        """Whether the target is reached; None without a target, or if something it speaks of was not measured."""
        wanted = dict(self.target.ratio)
        reached: dict[str, float | None] = {name: self.ratio.get(name) for name in wanted}
        if self.target.fraction_of_copy is not None:
            wanted["copy"], reached["copy"] = self.target.fraction_of_copy, self.fraction_of_copy
        if not wanted or any(value is None for value in reached.values()):
            return None
        return all((reached[name] or 0.0) >= limit for name, limit in wanted.items())

    def as_json(self) -> dict[str, Any]:
        """The row of a result file; what it does not have is left out."""
        optional = {
            "bytes": self.bytes,
            "fraction_of_copy": _rounded(self.fraction_of_copy),
            "ratio": {name: _rounded(value) for name, value in self.ratio.items()} or None,
            "target": _target_as_json(self.target) or None,
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


def _target_as_json(target: Target) -> dict[str, Any]:
    fraction = {} if target.fraction_of_copy is None else {"fraction_of_copy": target.fraction_of_copy}
    return {**fraction, **({"ratio": dict(target.ratio)} if target.ratio else {})}


def write(file: Path, rows: Iterable[Row | Mapping[str, Any]], **more: Any) -> None:
    """Writes a result file: machine, commit, whatever else is given, and every row, some as they stood in a file."""
    plain = [row.as_json() if isinstance(row, Row) else row for row in rows]
    result = {"machine": machine(), "commit": commit(), **more, "rows": plain}
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f"{file.name}.new")  # a run that is cut off leaves the file whole
    new.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    new.replace(file)


def table(rows: Sequence[Row]) -> Table:
    """A line a contender: its time and spread, how it compares with ours, and what ours had to reach."""
    made = Table("case", "contender", box=None, header_style="bold")
    for heading in ("µs", "±", "× ours", "of copy"):
        made.add_column(heading, justify="right")
    made.add_column("target")
    for row in rows:
        for number, line in enumerate(_lines(row)):
            made.add_row(row.case if number == 0 else "", *line)
        made.add_section()
    return made


def _lines(row: Row) -> list[list[str]]:
    lines = [
        [name, f"{timing.median:.2f}", f"{timing.spread:.2f}", _times(row.ratio.get(name)), "", ""]
        for name, timing in row.timings.items()
    ]
    lines += [[name, "left out", "", "", "", escape(reason)] for name, reason in row.left_out.items()]
    ours = next((line for line in lines if line[0] == row.ours), lines[0])
    ours[4] = _percent(row.fraction_of_copy)
    ours[5] = f"{ours[5]} {_verdict(row)}".strip()
    return lines


def _verdict(row: Row) -> str:
    if not row.target:
        return ""
    parts = [f"{name} ≥ {limit:.3g}×" for name, limit in row.target.ratio.items()]
    if row.target.fraction_of_copy is not None:
        parts.insert(0, f"≥ {_percent(row.target.fraction_of_copy)} of copy")
    word = {True: "[green]met[/]", False: "[red]MISSED[/]", None: "[yellow]not measured[/]"}[row.met]
    return f"{word}: {', '.join(parts)}"


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}"


def _percent(fraction: float | None) -> str:
    return "" if fraction is None else f"{100 * fraction:.1f} %"


def console() -> Console:
    """Where tables are printed: the terminal, or a file with room for a whole line."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH)


def machine() -> dict[str, Any]:
    """The GPU, and the version of everything that has a part in its times."""
    from cuda.bindings import nvrtc

    from lt_runtime import cublaslt
    from lt_runtime.cli.probes import kernel_driver_version
    from lt_runtime.gpu.devices import device_info

    _, major, minor = nvrtc.nvrtcVersion()
    libraries = {name: _version(name) for name in ("cupy", "torch", "nvmath")}
    return {
        "gpu": device_info(0).name,
        "capability": device_info(0).capability,
        "driver": kernel_driver_version(),
        "cpu": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "cublaslt": cublaslt.get_version(),
        "nvrtc": f"{major}.{minor}",
        **{name: version for name, version in libraries.items() if version is not None},
    }


def _version(module: str) -> str | None:
    try:
        return str(importlib.import_module(module).__version__)
    except ImportError:
        return None


def commit() -> str:
    """$GIT_COMMIT, for a copy without its history, or what git says."""
    if "GIT_COMMIT" in os.environ:
        return os.environ["GIT_COMMIT"]
    try:
        return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
