"""Fingerprints: measured plans hold for one GPU model with one version of cuBLASLt, driver and our kernels."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import asdict, dataclass

from lt_runtime import cublaslt
from lt_runtime.errors import LtError
from lt_runtime.gpu.devices import device_count, device_info, kernel_driver_version
from lt_runtime.gpu.driver import call
from lt_runtime.paths import kernel_sources
from lt_runtime.store.keys import SCHEMA


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The properties of a machine on which measurements depend. Equal machines have equal fingerprints.

    Attributes:
        gpu: name of the GPU, as the driver gives it.
        capability: compute capability, major·10 + minor.
        multiprocessors: number of multiprocessors; a partition of a GPU (MIG) has fewer than the whole.
        cublaslt: version, major·10000 + minor·100 + patch.
        driver: version, such as "580.95.05", or "CUDA 13.0" if the driver does not report its own version.
        kernels: digest of the sources of our kernels, because the choice depends on their speed.
    """

    gpu: str
    capability: int
    multiprocessors: int
    cublaslt: int
    driver: str
    kernels: str

    @property
    def file_name(self) -> str:
        """Name of the file that holds the plans, such as nvidia-h200-sm90-132-cublaslt130100-0123abcd.json."""
        gpu = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        digest = hashlib.sha256(json.dumps([SCHEMA, asdict(self)], sort_keys=True).encode()).hexdigest()
        return f"{gpu}-sm{self.capability}-{self.multiprocessors}-cublaslt{self.cublaslt}-{digest[:8]}.json"

    def differences(self, other: Fingerprint) -> list[str]:
        """The differences of `other` in words, such as "driver 570.86 instead of 580.95.05"; empty for equal ones."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if ours[name] != theirs[name]]


def fingerprint(device: int) -> Fingerprint:
    """The fingerprint of one of this machine's GPUs, by its ordinal.

    Raises:
        MissingLibraryError: there is no driver or no cuBLASLt.
        DriverError: there is no such GPU.
    """
    info = device_info(device)
    gpu = info.name, info.capability, info.multiprocessors
    return Fingerprint(*gpu, cublaslt.get_version(), driver_version(), kernels_digest())


@functools.cache
def machine() -> tuple[Fingerprint, ...]:
    """The different fingerprints of this machine's GPUs; none if it has no usable GPU or no cuBLASLt."""
    try:
        return tuple(dict.fromkeys(fingerprint(device) for device in range(device_count())))
    except LtError:
        return ()


@functools.cache
def driver_version() -> str:
    """The driver's version; if the driver does not report it, the highest CUDA version that the driver supports."""
    known = kernel_driver_version()
    if known is not None:
        return known
    version = call("cuDriverGetVersion")
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


@functools.cache
def kernels_digest() -> str:
    """Sixteen hexadecimal digits that change when any file of `cuda_src` changes."""
    digest = hashlib.sha256()
    for path in sorted(kernel_sources().glob("*.cu*")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
