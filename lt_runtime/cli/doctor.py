"""The command `doctor`: lists what lt_runtime finds on this machine, what is missing, and how to install or repair it.

The command needs no package but Python's own, so that it can report any other as missing. Each dependency has a probe,
which works without the dependency, writes no file and makes no GPU context. A probe reports failures instead of
raising, because it is meant for broken installations.
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from lt_runtime import __version__, environment, paths
from lt_runtime.cli.output import show
from lt_runtime.errors import LtError
from lt_runtime.files import require_private_directory

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
"""Maps each library to the package of the extra `cuda13` that contains it; a test compares pyproject.toml.
"""

PACKAGES: Final = (
    "cuda-bindings", "cuda-pathfinder", "filelock", "ml_dtypes", "numpy", "nvtx", "platformdirs", "rich", "safetensors",
)  # fmt: skip
"""Distributions that lt_runtime requires; a test compares them with pyproject.toml."""

FOR_GROUPS: Final = {"mpi4py": "mpi4py", "nccl4py": "nccl", "nvidia-nccl-cu13": "nvidia.nccl"}
"""Distributions that only `lt.group` needs, and their modules; they are listed, but not reported as missing."""

_CUBLASLT_VARIABLE: Final = "LT_RUNTIME_CUBLASLT"
PCI_DEVICES: Final = Path("/sys/bus/pci/devices")


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver: its own version, and the highest CUDA version that it runs."""

    version: str | None = None
    cuda: tuple[int, int] | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Library:
    """A library or a set of headers: its version and path, or its fault."""

    name: str
    version: str | None = None
    path: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CacheDirectory:
    """The directory of compiled kernels and plans, whether it is writable, and the bytes of its files.

    The path is None if it is unknown, because the package platformdirs is missing.
    """

    path: str | None
    writable: bool = False
    size: int = 0
    problem: str | None = None


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


def library(name: str, look: Callable[[], tuple[str, str]]) -> Library:
    """Runs the probe of a library, which returns its version and path, or raises an exception."""
    try:
        return Library(name, *look())
    except (FileNotFoundError, ModuleNotFoundError):
        return Library(name, problem="not installed")
    except Exception as error:
        kind = "" if isinstance(error, LtError) else f"{type(error).__name__}: "
        return Library(name, problem=f"{kind}{str(error).strip().partition(os.linesep)[0]}")


def _cuda13(version: str) -> str:
    if not version.startswith("13."):
        raise RuntimeError(f"version {version} is not of CUDA 13")
    return version


def cublaslt() -> tuple[str, str]:
    """Probes cuBLASLt."""
    from lt_runtime import cublaslt as bindings

    version = bindings.library.version_text(bindings.get_version())
    return _cuda13(version), bindings.library_path()


def nvrtc() -> tuple[str, str]:
    """Probes NVRTC, the run-time compiler, by loading it."""
    from cuda.bindings import nvrtc as api

    from lt_runtime.gpu.compiler import nvrtc_libraries

    *_, path = nvrtc_libraries()
    _, major, minor = api.nvrtcVersion()
    return _cuda13(f"{major}.{minor}"), str(path)


def cupti() -> tuple[str, str]:
    """Probes CUPTI, which profiles need, without calling it: a call would attach it to this process."""
    from cuda import pathfinder

    found = pathfinder.load_nvidia_dynamic_lib("cupti").abs_path
    return importlib.metadata.version("nvidia-cuda-cupti"), str(found)


def cuda_headers() -> tuple[str, str]:
    """Probes the CUDA headers that the kernels include; one of them states the version."""
    from lt_runtime.gpu.compiler import runtime_headers

    directory = runtime_headers()
    text = (Path(directory) / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    defined = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    version = int(defined[1]) if defined else 0
    return _cuda13(f"{version // 1000}.{version % 1000 // 10}"), directory


def cupy() -> tuple[str, str]:
    """Probes CuPy by importing it, because finding it does not tell whether it works.

    Another process imports CuPy. There CuPy's cache directory is set to an existing directory, so that CuPy creates
    none.
    """
    if importlib.util.find_spec("cupy") is None:
        raise ModuleNotFoundError("cupy")
    code = "import cupy; print(cupy.__version__, cupy.__path__[0], sep='\\n')"
    variables = os.environ | {"CUPY_CACHE_DIR": os.sep}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=variables)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"its import ended with {done.returncode}")
    version, path = done.stdout.splitlines()[-2:]
    return version, path


def package(distribution: str, module: str | None = None) -> tuple[str, str]:
    """Probes a Python package by finding it, without an import.

    Args:
        module: name of its module; None if it is the distribution's name with dots for hyphens.
    """
    if importlib.util.find_spec(module or distribution.replace("-", ".")) is None:
        raise ModuleNotFoundError(distribution)
    found = importlib.metadata.distribution(distribution)
    return found.version, str(found.locate_file(""))


def driver_of(pci_devices: Path = PCI_DEVICES) -> Driver | None:
    """The driver; None if there is neither a driver nor an NVIDIA GPU, or if cuda-bindings is missing."""
    try:
        from cuda.bindings import driver as api

        from lt_runtime.gpu import devices
    except ImportError:  # a missing cuda-bindings is reported as a missing package
        return None
    try:
        (status,) = api.cuInit(0)
    # cuda-bindings raises RuntimeError if it finds no libcuda, which means that no driver is installed.
    except RuntimeError:
        for device in pci_devices.glob("*"):  # PCI numbers: class 0x03 is a display controller, vendor 0x10de is NVIDIA
            if (device / "vendor").read_text()[:6] == "0x10de" and (device / "class").read_text()[:4] == "0x03":
                return Driver(problem="no libcuda.so.1")
        return None
    _, version = api.cuDriverGetVersion()
    # A driver without a device is no fault: the machine may have no GPU, or all may be hidden.
    fault = status and status != api.CUresult.CUDA_ERROR_NO_DEVICE
    problem = f"cuInit returned {status.name}" if fault else None
    return Driver(devices.kernel_driver_version(), (version // 1000, version % 1000 // 10), problem)


def gpus() -> tuple[DeviceInfo, ...]:
    """The GPUs that CUDA lists; empty if the driver fails, which `driver` reports."""
    try:
        from lt_runtime.gpu import devices

        return tuple(map(devices.device_info, range(devices.device_count())))
    except (ImportError, LtError):
        return ()


def cache_directory() -> CacheDirectory:
    """Probes the cache directory, which need not exist yet."""
    path: Path | None = None
    try:
        path = paths.cache_directory()
        existing = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
        usable = existing.is_dir() and os.access(existing, os.R_OK | os.W_OK | os.X_OK)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        for each in path.iterdir() if path.is_dir() else ():
            if each.is_dir():
                require_private_directory(each)
        return CacheDirectory(str(path), usable, size)
    except (ImportError, OSError) as error:
        problem = getattr(error, "strerror", None) or str(error)
        return CacheDirectory(None if path is None else str(path), problem=problem)


def run(arguments: argparse.Namespace) -> int:
    """Prints the results of all probes, as lines of text or as one JSON object.

    Returns:
        The exit status: 0 if this machine has everything that it needs, else 1.
    """
    probes: list[Callable[[], tuple[str, str]]] = [cublaslt, nvrtc, cuda_headers, cupy, cupti]
    probes += [functools.partial(package, name) for name in PACKAGES]
    probes += [functools.partial(package, *names) for names in FOR_GROUPS.items()]
    libraries = tuple(map(library, (*CUDA_REQUIREMENTS, *PACKAGES, *FOR_GROUPS), probes))
    machine = Machine(driver_of(), gpus(), libraries, cache_directory())
    findings = [*diagnose(machine)]
    result = {
        # Without a GPU, `diagnose` reports a missing CUDA library only if an environment variable names the library.
        "ok": not any(finding.needed for finding in findings),
        "version": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **asdict(machine),
        "variables": {name: os.environ.get(name) for name in environment.VARIABLES},
        "findings": [*map(asdict, findings)],
    }
    return show(result, report_lines(machine, findings), as_json=arguments.json)


def diagnose(machine: Machine) -> Iterator[Finding]:
    """Findings from the results of all probes. GPU libraries are reported as missing only on a machine with a GPU."""
    problems = {library.name: library.problem for library in machine.libraries if library.problem}
    yield from _missing(problems, PACKAGES, "all or parts of lt_runtime")
    yield from _hardware(machine.driver, machine.gpus)
    named = os.environ.get(_CUBLASLT_VARIABLE)
    if named and (problem := problems.pop("cuBLASLt", None)):
        what = f"{_CUBLASLT_VARIABLE} is {named}: {problem}"
        yield Finding(what, "running on the GPU", f"unset {_CUBLASLT_VARIABLE}")
    if machine.gpus:
        needed = [name for name in CUDA_REQUIREMENTS if name != "CUPTI"]
        yield from _missing(problems, needed, "running on the GPU")
        yield from _missing(problems, ["CUPTI"], "seeing kernels in profiles", needed=False)
    for name in environment.VARIABLES:
        fault = environment.fault_of(name)
        if fault is not None:
            yield Finding(fault, "nothing: the variable has no effect", f"unset {name}", needed=False)
    cache = machine.cache
    if cache.path is not None and not cache.writable:
        kept = "keeping compiled kernels and plans from one run to the next"
        problem = cache.problem or f"{cache.path} cannot be used"
        what = problem if cache.path in problem else f"{cache.path}: {problem}"
        yield Finding(what, kept, "export LT_RUNTIME_CACHE_DIR=DIRECTORY", needed=False)


def _missing(problems: dict[str, str], group: Iterable[str], prevents: str, needed: bool = True) -> Iterator[Finding]:
    """One finding for all missing libraries of a group, because one command installs them."""
    names = [name for name in group if name in problems]
    if names:
        what = "; ".join(f"{name}: {problems[name]}" for name in names)
        command = [sys.executable, "-m", "pip", "install", *(CUDA_REQUIREMENTS.get(name, name) for name in names)]
        yield Finding(what, prevents, shlex.join(command), needed)


def _hardware(driver: Driver | None, gpus: Sequence[DeviceInfo]) -> Iterator[Finding]:
    prevents = "everything on the GPU"
    if driver and driver.problem:
        mend = f"install the NVIDIA driver, {MIN_DRIVER} or newer; a container must be started with its GPUs"
        yield Finding(f"NVIDIA driver: {driver.problem}", prevents, mend)
    elif driver and driver.cuda and driver.cuda < MIN_CUDA:
        what = f"NVIDIA driver {driver.version or ''}: runs CUDA up to {driver.cuda[0]}.{driver.cuda[1]} only"
        yield Finding(what, prevents, f"update the NVIDIA driver to {MIN_DRIVER} or newer")
    if gpus and all(gpu.capability < MIN_COMPUTE_CAPABILITY for gpu in gpus):
        accepted = f"compute capability {MIN_COMPUTE_CAPABILITY / 10} or higher"
        yield Finding(f"no GPU has {accepted}", prevents, f"use a GPU of {accepted} (Turing)")


def report_lines(machine: Machine, findings: Sequence[Finding]) -> Iterator[str]:
    """The results of the probes, the environment's variables, and the findings, as lines of text."""
    driver, cache = machine.driver, machine.cache
    yield f"lt_runtime {__version__}, Python {platform.python_version()} on {platform.platform()}"
    if driver:
        supported = f"{driver.cuda[0]}.{driver.cuda[1]}" if driver.cuda else "unknown"
        yield f"NVIDIA driver {driver.version or 'of unknown version'}, CUDA up to {supported}"
    for gpu in machine.gpus:
        memory = f"{gpu.memory / 2**30:.1f} GiB"
        float8 = "float8 products" if gpu.has_fp8 else "no float8 products, which need compute capability 8.9"
        yield f"GPU {gpu.ordinal}: {gpu.name}, compute capability {gpu.capability / 10}, {memory}, {float8}"
    yield f"Cache: {cache.path or 'unknown'}, {cache.problem or f'{cache.size / 1e6:.1f} MB'}\n"
    libraries = [(each.name, each.version or "-", each.path or each.problem or "") for each in machine.libraries]
    yield from _aligned([("Library", "Version", "Where"), *libraries])
    yield ""
    yield from _aligned([(name, os.environ.get(name) or "(not set)") for name in environment.VARIABLES])
    yield ""
    for finding in findings:
        yield f"{'missing' if finding.needed else 'optional'}  {finding.what}"
        yield f"  prevents: {finding.prevents}\n  mend:     {finding.mend}\n"
    if any(finding.needed for finding in findings):
        yield "Not ready: see what is missing above."
    elif not machine.gpus:
        yield "Ready: no GPU is usable here, so NumPy arrays run on the CPU; for that everything is there."
    else:
        yield "Ready: everything needed to run on the GPU is there."


def _aligned(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Formats rows of equal length as lines; every column but the last is padded to its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    for *cells, last in rows:
        yield "  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), last])
