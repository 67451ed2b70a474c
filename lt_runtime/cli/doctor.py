"""The command `doctor`: lists what lt_runtime finds on this machine, what is missing, and how to mend it.

It needs no package but Python's own, so that it can report any other as missing.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

from lt_runtime import __version__, environment
from lt_runtime.cli import probes
from lt_runtime.cli.output import show
from lt_runtime.cli.probes import CacheDirectory, Driver, Library

if TYPE_CHECKING:
    from lt_runtime.gpu.devices import DeviceInfo

MIN_CUDA: Final = (13, 0)
MIN_DRIVER: Final = 580
MIN_COMPUTE_CAPABILITY: Final = 75

CUDA_REQUIREMENTS: Final = {
    "cuBLASLt": "nvidia-cublas>=13,<14",
    "NVRTC": "nvidia-cuda-nvrtc>=13,<14",
    "CUDA headers": "nvidia-cuda-runtime>=13,<14",
    "CuPy": "cupy-cuda13x>=14",
    "CUPTI": "nvidia-cuda-cupti>=13,<14",
}
"""The requirements of the extra `cuda13`, by the library that each contains; a test compares them with it."""

PACKAGES: Final = (
    "cuda-bindings",
    "cuda-pathfinder",
    "filelock",
    "ml_dtypes",
    "numpy",
    "nvtx",
    "platformdirs",
    "rich",
    "safetensors",
)
"""Distributions that lt_runtime requires; a test compares them with pyproject.toml."""

_CUBLASLT_VARIABLE: Final = "LT_RUNTIME_CUBLASLT"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something missing or wrong, what it prevents, how to mend it, and whether this machine needs it."""

    what: str
    prevents: str
    mend: str
    needed: bool = True


@dataclass(frozen=True, slots=True)
class Report:
    """The doctor's observations and findings.

    Attributes:
        version: of lt_runtime.
        variables: the values of the environment variables that lt_runtime reads; None for one that is not set.
    """

    version: str
    python: str
    platform: str
    driver: Driver | None
    gpus: tuple[DeviceInfo, ...]
    libraries: tuple[Library, ...]
    cache: CacheDirectory
    variables: Mapping[str, str | None]
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is missing that this machine needs; a machine without a GPU needs no CUDA."""
        return not any(finding.needed for finding in self.findings)


def run(arguments: argparse.Namespace) -> int:
    """Prints the report, as tables or as one JSON object.

    Returns:
        The exit status: 0 if nothing is missing that this machine needs, else 1.
    """
    report = examine()
    return show({"ok": report.ok, **asdict(report)}, report_lines(report), as_json=arguments.json)


def examine() -> Report:
    """Runs all probes."""
    driver, gpus, cache = probes.driver(), probes.gpus(), probes.cache_directory()
    cuda = probes.cublaslt, probes.nvrtc, probes.cuda_headers, probes.cupy, probes.cupti
    looks: dict[str, probes.Look] = dict(zip(CUDA_REQUIREMENTS, cuda, strict=True))
    looks |= {name: functools.partial(probes.package, name) for name in PACKAGES}
    libraries = tuple(probes.library(name, look) for name, look in looks.items())
    findings = tuple(diagnose(driver, gpus, libraries, cache))
    variables = {name: os.environ.get(name) for name in environment.VARIABLES}
    machine = platform.python_version(), platform.platform(), driver, gpus
    return Report(__version__, *machine, libraries, cache, variables, findings)


def diagnose(
    driver: Driver | None, gpus: Sequence[DeviceInfo], libraries: Sequence[Library], cache: CacheDirectory
) -> Iterator[Finding]:
    """Findings from the results of the probes. Libraries for GPUs are missing only where there is a GPU."""
    problems = {library.name: library.problem for library in libraries if library.problem}
    yield from _missing(problems, {name: name for name in PACKAGES}, "all or parts of lt_runtime")
    yield from _hardware(driver, gpus)
    named = os.environ.get(_CUBLASLT_VARIABLE)
    if named and (problem := problems.pop("cuBLASLt", None)):
        yield Finding(
            f"{_CUBLASLT_VARIABLE} is {named}: {problem}", "running on the GPU", f"unset {_CUBLASLT_VARIABLE}"
        )
    without_cupti = {name: problems.pop(name) for name in ("CUPTI",) if name in problems}
    if gpus:
        yield from _missing(problems, CUDA_REQUIREMENTS, "running on the GPU")
        for finding in _missing(without_cupti, CUDA_REQUIREMENTS, "seeing kernels in profiles"):
            yield replace(finding, needed=False)
    for name in environment.VARIABLES:
        fault = environment.fault_of(name)
        if fault is not None:
            yield Finding(fault, "nothing: the variable has no effect", f"unset {name}", needed=False)
    if cache.path is not None and not cache.writable:
        kept = "keeping compiled kernels and plans from one run to the next"
        what = f"{cache.path} cannot be used" if cache.problem is None else f"{cache.path}: {cache.problem}"
        yield Finding(what, kept, "export LT_RUNTIME_CACHE_DIR=DIRECTORY", needed=False)


def _missing(problems: Mapping[str, str], requirements: Mapping[str, str], prevents: str) -> Iterator[Finding]:
    """One finding for all missing libraries of a group, because one command installs them."""
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


def report_lines(report: Report) -> Iterator[str]:
    """The report as lines of text."""
    yield from _machine(report)
    yield ""
    lines = [("Library", "Version", "Where")]
    lines += [(each.name, each.version or "-", each.path or each.problem or "") for each in report.libraries]
    first, second = (max(len(line[column]) for line in lines) for column in (0, 1))
    yield from (f"{name:<{first}}  {version:<{second}}  {where}" for name, version, where in lines)
    yield ""
    first = max(map(len, report.variables))
    yield from (f"{name:<{first}}  {value or '(not set)'}" for name, value in report.variables.items())
    yield ""
    for finding in report.findings:
        yield f"{'missing' if finding.needed else 'optional'}  {finding.what}"
        yield f"  prevents: {finding.prevents}\n  mend:     {finding.mend}\n"
    if not report.ok:
        yield "Not ready: see what is missing above."
    elif not report.gpus:
        yield "Ready: no GPU is usable here, so NumPy arrays run on the CPU; for that everything is there."
    else:
        yield "Ready: everything needed to run on the GPU is there."


def _machine(report: Report) -> Iterator[str]:
    yield f"lt_runtime {report.version}, Python {report.python} on {report.platform}"
    if report.driver:
        supported = _dotted(report.driver.cuda) if report.driver.cuda else "unknown"
        yield f"NVIDIA driver {report.driver.version or 'of unknown version'}, CUDA up to {supported}"
    for gpu in report.gpus:
        memory = f"{gpu.memory / 2**30:.1f} GiB"
        yield f"GPU {gpu.ordinal}: {gpu.name}, compute capability {gpu.capability / 10}, {memory}"
    size = report.cache.problem or f"{report.cache.size / 1e6:.1f} MB"
    yield f"Cache: {report.cache.path or 'unknown'}, {size}"
