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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
"""The requirements of the extra `cuda13`, by the library that each contains; a test compares them with pyproject.toml.
"""

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
    """A missing or faulty component: the problem, its effect, its remedy, and whether this machine needs it."""

    what: str
    prevents: str
    mend: str
    needed: bool = True


@dataclass(frozen=True, slots=True)
class Machine:
    """The results of all probes."""

    driver: Driver | None
    gpus: tuple[DeviceInfo, ...]
    libraries: tuple[Library, ...]
    cache: CacheDirectory


def run(arguments: argparse.Namespace) -> int:
    """Prints what was found, as lines of text or as one JSON object.

    Returns:
        The exit status: 0 if this machine has everything that it needs, else 1.
    """
    cuda = probes.cublaslt, probes.nvrtc, probes.cuda_headers, probes.cupy, probes.cupti
    looks: dict[str, probes.Look] = dict(zip(CUDA_REQUIREMENTS, cuda, strict=True))
    looks |= {name: functools.partial(probes.package, name) for name in PACKAGES}
    libraries = tuple(probes.library(name, look) for name, look in looks.items())
    machine = Machine(probes.driver(), probes.gpus(), libraries, probes.cache_directory())
    findings = [*diagnose(machine)]
    result = {
        "ok": not any(finding.needed for finding in findings),  # a machine without a GPU needs no CUDA
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **asdict(machine),
        "variables": {name: os.environ.get(name) for name in environment.VARIABLES},
        "findings": [*map(asdict, findings)],
    }
    return show(result, report_lines(machine, findings), as_json=arguments.json)


def diagnose(machine: Machine) -> Iterator[Finding]:
    """Findings from the results of the probes. GPU libraries are reported as missing only on a machine with a GPU."""
    problems = {library.name: library.problem for library in machine.libraries if library.problem}
    yield from _missing(problems, {name: name for name in PACKAGES}, "all or parts of lt_runtime")
    yield from _hardware(machine.driver, machine.gpus)
    named = os.environ.get(_CUBLASLT_VARIABLE)
    if named and (problem := problems.pop("cuBLASLt", None)):
        what = f"{_CUBLASLT_VARIABLE} is {named}: {problem}"
        yield Finding(what, "running on the GPU", f"unset {_CUBLASLT_VARIABLE}")
    if machine.gpus:
        needed = {name: requirement for name, requirement in CUDA_REQUIREMENTS.items() if name != "CUPTI"}
        yield from _missing(problems, needed, "running on the GPU")
        optional = {"CUPTI": CUDA_REQUIREMENTS["CUPTI"]}
        yield from _missing(problems, optional, "seeing kernels in profiles", needed=False)
    for name in environment.VARIABLES:
        fault = environment.fault_of(name)
        if fault is not None:
            yield Finding(fault, "nothing: the variable has no effect", f"unset {name}", needed=False)
    cache = machine.cache
    if cache.path is not None and not cache.writable:
        kept = "keeping compiled kernels and plans from one run to the next"
        what = f"{cache.path} cannot be used" if cache.problem is None else f"{cache.path}: {cache.problem}"
        yield Finding(what, kept, "export LT_RUNTIME_CACHE_DIR=DIRECTORY", needed=False)


def _missing(
    problems: Mapping[str, str], requirements: Mapping[str, str], prevents: str, *, needed: bool = True
) -> Iterator[Finding]:
    """One finding for all missing libraries of a group, because one command installs them."""
    names = [name for name in requirements if name in problems]
    if names:
        what = "; ".join(f"{name}: {problems[name]}" for name in names)
        command = [sys.executable, "-m", "pip", "install", *(requirements[name] for name in names)]
        yield Finding(what, prevents, shlex.join(command), needed)


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


def report_lines(machine: Machine, findings: Iterable[Finding]) -> Iterator[str]:
    """The results of the probes, the environment's variables, and the findings, as lines of text."""
    driver, cache = machine.driver, machine.cache
    yield f"lt_runtime {__version__}, Python {platform.python_version()} on {platform.platform()}"
    if driver:
        supported = _dotted(driver.cuda) if driver.cuda else "unknown"
        yield f"NVIDIA driver {driver.version or 'of unknown version'}, CUDA up to {supported}"
    for gpu in machine.gpus:
        memory = f"{gpu.memory / 2**30:.1f} GiB"
        yield f"GPU {gpu.ordinal}: {gpu.name}, compute capability {gpu.capability / 10}, {memory}"
    yield f"Cache: {cache.path or 'unknown'}, {cache.problem or f'{cache.size / 1e6:.1f} MB'}\n"
    libraries = [(each.name, each.version or "-", each.path or each.problem or "") for each in machine.libraries]
    yield from _aligned([("Library", "Version", "Where"), *libraries])
    yield ""
    yield from _aligned([(name, os.environ.get(name) or "(not set)") for name in environment.VARIABLES])
    yield ""
    is_ready = True
    for finding in findings:
        is_ready = is_ready and not finding.needed
        yield f"{'missing' if finding.needed else 'optional'}  {finding.what}"
        yield f"  prevents: {finding.prevents}\n  mend:     {finding.mend}\n"
    if not is_ready:
        yield "Not ready: see what is missing above."
    elif not machine.gpus:
        yield "Ready: no GPU is usable here, so NumPy arrays run on the CPU; for that everything is there."
    else:
        yield "Ready: everything needed to run on the GPU is there."


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Rows of equal length as lines, whose columns but the last are as wide as their longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *cells, last in rows:
        yield "  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), last])
