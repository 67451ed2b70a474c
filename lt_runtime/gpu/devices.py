"""The GPUs of this machine: their number, properties and driver, and the current one."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from cuda.bindings import driver

from lt_runtime.arguments import shown
from lt_runtime.environment import local_rank
from lt_runtime.errors import ArgumentError, GpuError, LtError
from lt_runtime.gpu.driver import call

_FP8_CAPABILITY: Final = 89
# Larger numbers than this cannot be ordinals of GPUs, and Python refuses to print integers of thousands of digits.
_MOST_GPUS: Final = 10**9


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """Properties of a GPU.

    Attributes:
        capability: compute capability, major·10 + minor.
        memory: bytes.
    """

    ordinal: int
    name: str
    capability: int
    multiprocessors: int
    memory: int

    @property
    def architecture(self) -> str:
        """The compilers' name for the GPU's architecture, such as "sm_90"."""
        return f"sm_{self.capability}"

    @property
    def has_fp8(self) -> bool:
        """Whether the tensor cores multiply FP8 matrices, as those of Ada, Hopper and later architectures do."""
        return self.capability >= _FP8_CAPABILITY


@functools.cache
def _initialise() -> None:
    call("cuInit", 0)


def device_count() -> int:
    """Number of GPUs; 0 without a driver or without a GPU."""
    try:
        _initialise()
        return int(call("cuDeviceGetCount"))
    except LtError:
        return 0


def parse_device(device: object) -> int | None:
    """The ordinal of a GPU from any way of naming it; None for the host.

    Args:
        device: a GPU's ordinal N; "cpu", "cuda" (the first GPU), "cuda:N" or "N"; "auto", which is the host if
            there is no GPU, and otherwise the first GPU, or for a process of mpiexec, srun or torchrun the GPU of its
            local rank, modulo the number of GPUs; or an object with `type` and `index`, such as a `torch.device`.

    Raises:
        ArgumentError: another value, or a GPU that this machine does not have.
    """
    name = _device_name(device)
    if name in ("cpu", "cpu:0"):
        return None
    count = device_count()
    if name == "auto":
        return local_rank() % count if count else None
    match = re.fullmatch(r"cuda|(?:cuda:)?(-?\d{1,9})", name)
    if match is None:
        others = "a GPU's ordinal, and a torch.device"
        raise ArgumentError(f"device is {shown(device)}; accepted are 'auto', 'cpu', 'cuda' and 'cuda:N', {others}")
    ordinal = int(match[1] or 0)
    if not 0 <= ordinal < count:
        raise ArgumentError(f"device is {shown(device)}, but this machine has {count} usable GPUs; try 'cpu'")
    return ordinal


def _device_name(device: Any) -> str:
    if hasattr(device, "type") and hasattr(device, "index"):
        return str(device.type) if device.index is None else f"{device.type}:{device.index}"
    if isinstance(device, (int, np.integer)) and not isinstance(device, bool):
        return str(device) if abs(int(device)) < _MOST_GPUS else ""
    return device if isinstance(device, str) else ""


@functools.cache
def device_info(ordinal: int) -> DeviceInfo:
    """The properties of one GPU, queried from the driver once."""
    names = "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MULTIPROCESSOR_COUNT"
    major, minor, multiprocessors = device_attributes(ordinal, *names)
    device = call("cuDeviceGet", ordinal)
    name = call("cuDeviceGetName", 256, device).split(b"\0")[0].decode()
    return DeviceInfo(ordinal, name, 10 * major + minor, multiprocessors, call("cuDeviceTotalMem", device))


@functools.cache
def device_attributes(ordinal: int, *names: str) -> tuple[int, ...]:
    """Attributes of one GPU, given by their names in `CUdevice_attribute` without the prefix."""
    _initialise()
    device = call("cuDeviceGet", ordinal)
    ids = (getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}") for name in names)
    return tuple(int(call("cuDeviceGetAttribute", each, device)) for each in ids)


def check_fp8(device: int) -> None:
    """Raises `GpuError` unless the GPU has instructions for FP8."""
    info = device_info(device)
    if not info.has_fp8:
        has, needed = info.capability / 10, _FP8_CAPABILITY / 10
        raise GpuError(f"GPU {device} ({info.name}) has compute capability {has}; FP8 needs {needed} or higher")


def kernel_driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of the NVIDIA driver, such as 580.95.05; None without the file, as under WSL.

    CUDA itself reports only the CUDA version that the driver supports.
    """
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read_text()) if file.exists() else None
    return found[0] if found else None


@functools.cache
def _primary_context(ordinal: int) -> driver.CUcontext:
    # The primary context, which all libraries share, is retained for the life of the process.
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", ordinal))


def _device_of_thread() -> int | None:
    """Ordinal of the device of the calling thread's context; None if the thread has no context yet."""
    _initialise()
    status, device = driver.cuCtxGetDevice()
    return int(device) if status == driver.CUresult.CUDA_SUCCESS else None


def current_device() -> int:
    """Ordinal of the calling thread's current device; 0, CUDA's default, if the thread has none yet."""
    return _device_of_thread() or 0


def make_context_current() -> None:
    """Makes device 0's primary context current if the calling thread has no context, as CUDA's runtime API would."""
    if _device_of_thread() is None:
        call("cuCtxSetCurrent", _primary_context(0))


@contextlib.contextmanager
def activated(ordinal: int) -> Iterator[None]:
    """Makes a device's primary context current for the calling thread, and restores the previous one at the end.

    Raises:
        GpuError: the CUDA context is lost, so that no library can use a GPU in this process any more.
    """
    if GpuError.aftermath:
        raise GpuError(f"GPU {ordinal} cannot be used{GpuError.aftermath}")
    if _device_of_thread() == ordinal:
        yield
        return
    call("cuCtxPushCurrent", _primary_context(ordinal))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")
