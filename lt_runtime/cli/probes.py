"""The doctor's probes, one for each dependency of lt_runtime, which work without that dependency.

A probe writes no file and makes no GPU context. It reports failures instead of raising, because it is meant for broken
installations.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from lt_runtime import paths
from lt_runtime.errors import LtError

if TYPE_CHECKING:
    from lt_runtime.gpu.devices import DeviceInfo

PCI_DEVICES: Final = Path("/sys/bus/pci/devices")

Look: TypeAlias = Callable[[], tuple[str, str]]
"""Probe: returns a library's version and path, or raises an exception."""


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


def library(name: str, look: Look) -> Library:
    """Runs the probe of a library."""
    try:
        return Library(name, *look())
    except (FileNotFoundError, ModuleNotFoundError):
        return Library(name, problem="not installed")
    except LtError as error:
        return Library(name, problem=str(error))
    except Exception as error:
        return Library(name, problem=f"{type(error).__name__}: {str(error).strip().partition(os.linesep)[0]}")


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
    status, major, minor = api.nvrtcVersion()
    if status:
        raise RuntimeError(f"nvrtcVersion returned {status.name}")
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
    environment = os.environ | {"CUPY_CACHE_DIR": os.sep}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"its import ended with {done.returncode}")
    version, path = done.stdout.splitlines()[-2:]
    return version, path


def package(distribution: str) -> tuple[str, str]:
    """Probes a Python package by finding it, without an import."""
    if importlib.util.find_spec(distribution.replace("-", ".")) is None:
        raise ModuleNotFoundError(distribution)
    found = importlib.metadata.distribution(distribution)
    return found.version, str(found.locate_file(""))


def driver(pci_devices: Path = PCI_DEVICES) -> Driver | None:
    """The driver; None if there is neither a driver nor an NVIDIA GPU, or if cuda-bindings is missing."""
    try:
        from cuda.bindings import driver as api

        from lt_runtime.gpu import devices
    except ImportError:  # the missing package has a finding of its own
        return None
    try:
        (status,) = api.cuInit(0)
    except RuntimeError:  # cuda-bindings raises this if it finds no libcuda
        return Driver(problem="no libcuda.so.1") if nvidia_gpu_on_pci(pci_devices) else None
    _, version = api.cuDriverGetVersion()
    # A driver without a device is no fault: the machine may have no GPU, or all may be hidden.
    fault = status and status != api.CUresult.CUDA_ERROR_NO_DEVICE
    problem = f"cuInit returned {status.name}" if fault else None
    return Driver(devices.kernel_driver_version(), (version // 1000, version % 1000 // 10), problem)


def nvidia_gpu_on_pci(devices: Path) -> bool:
    """Whether the machine has a display controller (class 0x03) of NVIDIA's (vendor 0x10de), with or without driver."""
    return any(
        (device / "vendor").read_text().startswith("0x10de") and (device / "class").read_text().startswith("0x03")
        for device in devices.glob("*")
    )


def gpus() -> tuple[DeviceInfo, ...]:
    """The GPUs that CUDA lists; empty if the driver fails, which `driver` reports."""
    try:
        from lt_runtime.gpu import devices

        return tuple(map(devices.device_info, range(devices.device_count())))
    except (ImportError, LtError):
        return ()


def cache_directory() -> CacheDirectory:
    """Probes the cache directory, which need not exist yet."""
    try:
        path = paths.cache_directory()
    except ImportError as error:
        return CacheDirectory(None, problem=str(error))
    try:
        existing = next(place for place in (path, *path.absolute().parents) if os.path.lexists(place))
        usable = existing.is_dir() and os.access(existing, os.R_OK | os.W_OK | os.X_OK)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return CacheDirectory(str(path), usable, size)
    except OSError as error:
        return CacheDirectory(str(path), problem=str(error.strerror))
