"""One small look at each thing that lt_runtime depends on.

Looking changes nothing: no file is written and no GPU context is made. A probe that fails says how instead of raising,
because a broken installation is what it is called for.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lt_runtime import paths
from lt_runtime.gpu.devices import kernel_driver_version

NOT_INSTALLED: Final = "not installed"


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver: its own version, and the highest CUDA version that it runs."""

    version: str | None = None
    cuda: tuple[int, int] | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU that CUDA can use; its memory in bytes."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    memory: int


@dataclass(frozen=True, slots=True)
class Library:
    """A library, a set of headers or a tool: which version lies where, or what is wrong with it."""

    name: str
    version: str | None = None
    path: str | None = None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CacheDirectory:
    """Where compiled kernels are kept, whether they can be, and the bytes they take."""

    path: str
    writable: bool = False
    size: int = 0
    problem: str | None = None


def _library(name: str) -> Callable[[Callable[[], tuple[str, str]]], Callable[[], Library]]:
    """Makes a probe of a function that returns a version and a path, or raises."""

    def decorate(look: Callable[[], tuple[str, str]]) -> Callable[[], Library]:
        @functools.wraps(look)
        def probe() -> Library:
            try:
                return Library(name, *look())
            except Exception as error:
                return Library(name, problem=_explain(error))

        return probe

    return decorate


def _explain(error: Exception) -> str:
    if isinstance(error, (FileNotFoundError, ModuleNotFoundError, importlib.metadata.PackageNotFoundError)):
        return NOT_INSTALLED
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line}"


def _cuda13(version: str) -> str:
    if not version.startswith("13."):
        raise RuntimeError(f"version {version} is not of CUDA 13")
    return version


def _load(name: str) -> str:
    """Loads a CUDA library and returns its path."""
    from cuda import pathfinder

    try:
        return str(pathfinder.load_nvidia_dynamic_lib(name).abs_path)
    except pathfinder.DynamicLibNotFoundError:
        raise FileNotFoundError(name) from None


@_library("cuBLASLt")
def cublaslt() -> tuple[str, str]:
    """The library that carries out the matrix products."""
    from lt_runtime.cublaslt import get_version

    path, version = _load("cublasLt"), get_version()
    return _cuda13(f"{version // 10000}.{version // 100 % 100}.{version % 100}"), path


@_library("NVRTC")
def nvrtc() -> tuple[str, str]:
    """The run-time compiler."""
    path = _load("nvrtc")
    from cuda.bindings import nvrtc as library

    status, major, minor = library.nvrtcVersion()
    if status:
        raise RuntimeError(f"nvrtcVersion returned {status.name}")
    return _cuda13(f"{major}.{minor}"), path


@_library("CUDA headers")
def cuda_headers() -> tuple[str, str]:
    """The headers that the kernels include; one of them states the version of all."""
    from cuda import pathfinder

    directory = pathfinder.find_nvidia_header_directory("cudart")
    if directory is None:
        raise FileNotFoundError("cudart")
    text = (Path(directory) / "cuda_runtime_api.h").read_text(encoding="utf-8", errors="replace")
    defined = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
    version = int(defined[1]) if defined else 0
    return _cuda13(f"{version // 1000}.{version % 1000 // 10}"), str(directory)


@_library("CuPy")
def cupy() -> tuple[str, str]:
    """CuPy, imported, because nothing less tells whether it works.

    It is done in another process, told of a cache directory that exists: the import makes one where there is none.
    """
    if importlib.util.find_spec("cupy") is None:
        raise ModuleNotFoundError("cupy")
    code = "import cupy; print(cupy.__version__, cupy.__path__[0], sep='\\n')"
    done = _run([sys.executable, "-c", code], CUPY_CACHE_DIR=os.sep)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().rpartition("\n")[2] or f"its import ended with {done.returncode}")
    version, path = done.stdout.splitlines()[-2:]
    return version, path


@_library("g++")
def host_compiler() -> tuple[str, str]:
    """The host's compiler, for tests alone: they run the kernels on the CPU."""
    path = shutil.which("g++")
    if path is None:
        raise FileNotFoundError("g++")
    return _run([path, "-dumpfullversion", "-dumpversion"]).stdout.strip(), path


def _run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


def package(distribution: str, module: str) -> Library:
    """A Python package, found but not imported."""

    @_library(distribution)
    def look() -> tuple[str, str]:
        version = importlib.metadata.version(distribution)
        spec = importlib.util.find_spec(module)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(module)
        return version, str(Path(spec.origin).parent)

    return look()


def driver() -> Driver | None:
    """The driver, or None where there is none and no NVIDIA GPU waits for one."""
    try:
        from cuda.bindings import driver as api

        try:
            (status,) = api.cuInit(0)
        except RuntimeError:
            return Driver(problem="no libcuda.so.1") if nvidia_gpu_on_pci() else None
        _, version = api.cuDriverGetVersion()
        # No device is no fault: a driver may be there without a GPU, or with all of them hidden.
        fault = status and status != api.CUresult.CUDA_ERROR_NO_DEVICE
        problem = f"cuInit returned {status.name}" if fault else None
        return Driver(kernel_driver_version(), (version // 1000, version % 1000 // 10), problem)
    except Exception as error:
        return Driver(problem=_explain(error))


def nvidia_gpu_on_pci(devices: Path = Path("/sys/bus/pci/devices")) -> bool:
    """Whether NVIDIA (vendor 0x10de) made a display controller (class 0x03) that is there, used by a driver or not."""
    return any(
        (device / "vendor").read_text().startswith("0x10de") and (device / "class").read_text().startswith("0x03")
        for device in devices.glob("*")
    )


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA sees; none where the driver cannot say, which `driver` reports."""
    try:
        from cuda.bindings import driver as api

        (status,) = api.cuInit(0)
        count = 0 if status else api.cuDeviceGetCount()[1]
        return tuple(_gpu(index) for index in range(count))
    except Exception:
        return ()


def _gpu(index: int) -> Gpu:
    from cuda.bindings import driver as api

    attribute = api.CUdevice_attribute
    _, device = api.cuDeviceGet(index)
    _, name = api.cuDeviceGetName(128, device)
    _, major = api.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device)
    _, minor = api.cuDeviceGetAttribute(attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device)
    _, memory = api.cuDeviceTotalMem(device)
    return Gpu(index, name.split(b"\0")[0].decode(), (major, minor), memory)


def cache_directory() -> CacheDirectory:
    """The cache directory, which need not exist yet."""
    path = paths.cache_directory()
    try:
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        return CacheDirectory(str(path), existing.is_dir() and os.access(existing, os.W_OK | os.X_OK), size)
    except OSError as error:
        return CacheDirectory(str(path), problem=_explain(error))
