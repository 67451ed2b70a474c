"""Tells what of lt_runtime this machine can use, what is missing, what that prevents, and how to mend it."""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from lt_runtime.cli import probes
from lt_runtime.cli.probes import CacheDirectory, Driver, Gpu, Library

MIN_CUDA: Final = (13, 0)
MIN_DRIVER: Final = 580
MIN_COMPUTE_CAPABILITY: Final = (7, 5)

CUDA_REQUIREMENTS: Final = {
    "cuBLASLt": "nvidia-cublas>=13,<14",
    "NVRTC": "nvidia-cuda-nvrtc>=13,<14",
    "CUDA headers": "nvidia-cuda-runtime>=13,<14",
    "CuPy": "cupy-cuda13x>=14",
}
"""What the extra `cuda13` installs, by what it brings; a test holds the two equal."""

PACKAGES: Final = {
    "cuda-bindings": "cuda.bindings",
    "cuda-pathfinder": "cuda.pathfinder",
    "ml_dtypes": "ml_dtypes",
    "numpy": "numpy",
    "nvtx": "nvtx",
}
"""Distributions that lt_runtime cannot do without, and the module that each brings."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is amiss, what that prevents, and how to mend it; `needed` tells whether this machine waits for it."""

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
    gpus: tuple[Gpu, ...]
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
    if arguments.json:
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
    else:
        _show(report, Console())
    return 0 if report.ok else 1


def examine() -> Report:
    """Looks at everything once."""
    driver, gpus, cache = probes.driver(), probes.gpus(), probes.cache_directory()
    cuda = (probes.cublaslt(), probes.nvrtc(), probes.cuda_headers(), probes.cupy())
    packages = tuple(probes.package(*names) for names in PACKAGES.items())
    libraries = (*cuda, *packages, probes.host_compiler())
    findings = tuple(diagnose(driver, gpus, libraries, cache))
    return Report(platform.python_version(), platform.platform(), driver, gpus, libraries, cache, findings)


def diagnose(
    driver: Driver | None, gpus: Sequence[Gpu], libraries: Sequence[Library], cache: CacheDirectory
) -> Iterator[Finding]:
    """What follows from what was seen. Without a GPU only what the CPU needs is missed."""
    faulty = {library.name: library for library in libraries if library.problem}
    yield from _packages(faulty)
    yield from _driver(driver)
    if gpus:
        yield from _gpus(gpus)
        yield from _cuda_libraries(faulty)
    if not cache.writable:
        kept = "keeping compiled kernels from one run to the next"
        yield Finding(f"{cache.path} cannot be written", kept, "export LT_RUNTIME_CACHE_DIR=DIRECTORY", needed=False)
    if "g++" in faulty:
        yield Finding("g++: not found", "testing the kernels on the CPU", "apt-get install g++", needed=False)


def _packages(faulty: dict[str, Library]) -> Iterator[Finding]:
    missing = [name for name in PACKAGES if name in faulty]
    if missing:
        yield Finding(_problems(missing, faulty), "importing lt_runtime", _pip_install(missing))


def _driver(driver: Driver | None) -> Iterator[Finding]:
    if driver is None:
        return
    if driver.problem:
        mend = f"install the NVIDIA driver, {MIN_DRIVER} or newer; a container must be started with its GPUs"
        yield Finding(f"NVIDIA driver: {driver.problem}", "everything on the GPU", mend)
    elif driver.cuda and driver.cuda < MIN_CUDA:
        what = f"NVIDIA driver {driver.version or ''}: runs CUDA up to {_dotted(driver.cuda)} only"
        yield Finding(what, "everything on the GPU", f"update the NVIDIA driver to {MIN_DRIVER} or newer")


def _gpus(gpus: Sequence[Gpu]) -> Iterator[Finding]:
    if all(gpu.compute_capability < MIN_COMPUTE_CAPABILITY for gpu in gpus):
        least = _dotted(MIN_COMPUTE_CAPABILITY)
        what = f"no GPU has compute capability {least} or higher"
        yield Finding(what, "everything on the GPU", f"use a GPU of compute capability {least} or higher (Turing)")


def _cuda_libraries(faulty: dict[str, Library]) -> Iterator[Finding]:
    missing = [name for name in CUDA_REQUIREMENTS if name in faulty]
    if missing:
        mend = _pip_install(CUDA_REQUIREMENTS[name] for name in missing)
        yield Finding(_problems(missing, faulty), "running on the GPU", mend)


def _problems(names: Sequence[str], faulty: dict[str, Library]) -> str:
    return "; ".join(f"{name}: {faulty[name].problem}" for name in names)


def _pip_install(requirements: Iterator[str] | Sequence[str]) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _show(report: Report, console: Console) -> None:
    for line in _machine(report):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print(_table(report.libraries))
    for finding in report.findings:
        _show_finding(finding, console)
    console.print(_verdict(report), highlight=False, soft_wrap=True)


def _machine(report: Report) -> Iterator[str]:
    yield f"Python {report.python} on {report.platform}"
    if report.driver:
        supported = _dotted(report.driver.cuda) if report.driver.cuda else "unknown"
        yield f"NVIDIA driver {report.driver.version or 'of unknown version'}, CUDA up to {supported}"
    for gpu in report.gpus:
        capability = _dotted(gpu.compute_capability)
        yield f"GPU {gpu.index}: {gpu.name}, compute capability {capability}, {gpu.memory / 2**30:.1f} GiB"
    yield f"Cache: {report.cache.path}, {report.cache.size / 1e6:.1f} MB"


def _table(libraries: Sequence[Library]) -> Table:
    table = Table("Library", "Version", Column("Where", overflow="fold"), box=SIMPLE)
    for library in libraries:
        where = library.path or f"[dim]{escape(library.problem or '')}[/]"
        table.add_row(library.name, library.version or "–", where)
    return table


def _show_finding(finding: Finding, console: Console) -> None:
    mark = "[red]missing[/]" if finding.needed else "[yellow]optional[/]"
    console.print(f"{mark} {escape(finding.what)}", highlight=False, soft_wrap=True)
    console.print(f"  prevents: {finding.prevents}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"  mend:     {finding.mend}\n", markup=False, highlight=False, soft_wrap=True)


def _verdict(report: Report) -> str:
    if not report.ok:
        return "[red]Not ready:[/] see what is missing above."
    if report.gpus:
        return "[green]Ready:[/] everything needed to run on the GPU is there."
    return "[green]Ready:[/] no GPU is usable here, so NumPy arrays run on the CPU; for that everything is there."
