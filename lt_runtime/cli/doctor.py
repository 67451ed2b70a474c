"""Tells what lt_runtime can use of this machine, what is missing, what that prevents, and how to mend it."""

from __future__ import annotations

import argparse
import functools
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.box import SIMPLE
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from lt_runtime.cli import probes
from lt_runtime.cli.output import show
from lt_runtime.cli.probes import CacheDirectory, Driver, Library
from lt_runtime.gpu.devices import DeviceInfo

MIN_CUDA: Final = (13, 0)
MIN_DRIVER: Final = 580
MIN_COMPUTE_CAPABILITY: Final = 75

CUDA_REQUIREMENTS: Final = {
    "cuBLASLt": "nvidia-cublas>=13,<14",
    "NVRTC": "nvidia-cuda-nvrtc>=13,<14",
    "CUDA headers": "nvidia-cuda-runtime>=13,<14",
    "CuPy": "cupy-cuda13x>=14",
}
"""The requirements of the extra `cuda13`, by what each brings; a test holds the two equal."""

PACKAGES: Final = ("cuda-bindings", "cuda-pathfinder", "ml_dtypes", "numpy", "nvtx")
"""Distributions that lt_runtime cannot do without."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is missing or wrong, what that prevents, how to mend it, and whether this machine needs it."""

    what: str
    prevents: str
    mend: str
    needed: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """All that the doctor saw."""

    python: str
    platform: str
    driver: Driver | None
    gpus: tuple[DeviceInfo, ...]
    libraries: tuple[Library, ...]
    cache: CacheDirectory
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether everything is there that this machine needs for what it can do."""
        return not any(finding.needed for finding in self.findings)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report, as tables or as one JSON object.

    Returns:
        The exit status: 0 if everything is there that this machine needs for what it can do, else 1.
    """
    report = examine()
    return show({"ok": report.ok, **asdict(report)}, report_lines(report), as_json=arguments.json)


def examine() -> Report:
    """Looks at everything once."""
    driver, gpus, cache = probes.driver(), probes.gpus(), probes.cache_directory()
    cuda = probes.cublaslt, probes.nvrtc, probes.cuda_headers, probes.cupy
    looks: dict[str, probes.Look] = dict(zip(CUDA_REQUIREMENTS, cuda, strict=True))
    looks |= {name: functools.partial(probes.package, name) for name in PACKAGES}
    libraries = tuple(probes.library(name, look) for name, look in looks.items())
    findings = tuple(diagnose(driver, gpus, libraries, cache))
    return Report(platform.python_version(), platform.platform(), driver, gpus, libraries, cache, findings)


def diagnose(
    driver: Driver | None, gpus: Sequence[DeviceInfo], libraries: Sequence[Library], cache: CacheDirectory
) -> Iterator[Finding]:
    """What follows from what was seen. On a machine without a GPU nothing is missed that only a GPU needs."""
    problems = {library.name: library.problem for library in libraries if library.problem}
    yield from _missing(problems, {name: name for name in PACKAGES}, "importing lt_runtime")
    yield from _hardware(driver, gpus)
    if gpus:
        yield from _missing(problems, CUDA_REQUIREMENTS, "running on the GPU")
    if not cache.writable:
        kept = "keeping compiled kernels from one run to the next"
        yield Finding(f"{cache.path} cannot be written", kept, "export LT_RUNTIME_CACHE_DIR=DIRECTORY", needed=False)


def _missing(problems: Mapping[str, str], requirements: Mapping[str, str], prevents: str) -> Iterator[Finding]:
    """One finding for all libraries of a kind, because one command installs them."""
    names = [name for name in requirements if name in problems]
    if names:
        what = "; ".join(f"{name}: {problems[name]}" for name in names)
        command = [sys.executable, "-m", "pip", "install", *(requirements[name] for name in names)]
        yield Finding(what, prevents, shlex.join(command))


def _hardware(driver: Driver | None, gpus: Sequence[DeviceInfo]) -> Iterator[Finding]:
    prevents = "everything on the GPU"
    if driver and driver.problem:
        mend = f"install the NVIDIA driver, {MIN_DRIVER} or newer; a container must be started with its GPUs"
        yield Finding(f"NVIDIA driver: {driver.problem}", prevents, mend)
    elif driver and driver.cuda and driver.cuda < MIN_CUDA:
        what = f"NVIDIA driver {driver.version or ''}: runs CUDA up to {_dotted(driver.cuda)} only"
        yield Finding(what, prevents, f"update the NVIDIA driver to {MIN_DRIVER} or newer")
    if gpus and all(gpu.capability < MIN_COMPUTE_CAPABILITY for gpu in gpus):
        accepted = f"compute capability {MIN_COMPUTE_CAPABILITY / 10} or higher"
        yield Finding(f"no GPU has {accepted}", prevents, f"use a GPU of {accepted} (Turing)")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def report_lines(report: Report) -> Iterator[str | Text | Table]:
    """A report for people."""
    yield from _machine(report)
    table = Table("Library", "Version", Column("Where", overflow="fold"), box=SIMPLE)
    for library in report.libraries:
        table.add_row(library.name, library.version or "–", library.path or f"[dim]{escape(library.problem or '')}[/]")
    yield table
    for finding in report.findings:
        mark = ("missing", "red") if finding.needed else ("optional", "yellow")
        yield Text.assemble(mark, f" {finding.what}")
        yield f"  prevents: {finding.prevents}\n  mend:     {finding.mend}\n"
    yield _verdict(report)


def _machine(report: Report) -> Iterator[str]:
    yield f"Python {report.python} on {report.platform}"
    if report.driver:
        supported = _dotted(report.driver.cuda) if report.driver.cuda else "unknown"
        yield f"NVIDIA driver {report.driver.version or 'of unknown version'}, CUDA up to {supported}"
    for gpu in report.gpus:
        memory = f"{gpu.memory / 2**30:.1f} GiB"
        yield f"GPU {gpu.ordinal}: {gpu.name}, compute capability {gpu.capability / 10}, {memory}"
    yield f"Cache: {report.cache.path}, {report.cache.size / 1e6:.1f} MB"


def _verdict(report: Report) -> Text:
    if not report.ok:
        return Text.assemble(("Not ready:", "red"), " see what is missing above.")
    there = "everything needed to run on the GPU is there."
    if not report.gpus:
        there = "no GPU is usable here, so NumPy arrays run on the CPU; for that everything is there."
    return Text.assemble(("Ready:", "green"), f" {there}")
