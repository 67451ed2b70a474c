"""What measured plans are good for: the same GPU, the same cuBLASLt, the same driver, the same kernels of ours."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import asdict, dataclass

from lt_runtime import cublaslt
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.driver_version import kernel_driver_version
from lt_runtime.paths import kernel_sources
from lt_runtime.store.keys import SCHEMA


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """All that a measurement depends on besides the problem. Two equal machines have the same.

    Attributes:
        gpu: its name, as the driver gives it.
        capability: compute capability, major·10 + minor.
        multiprocessors: how many the GPU has; a partition of one (MIG) has fewer.
        cublaslt: version, major·10000 + minor·100 + patch.
        driver: version, such as "580.95.05"; where only CUDA can be asked, "CUDA 13.0".
        kernels: digest of our kernels' sources, because their speed is part of what is chosen between.
    """

    gpu: str
    capability: int
    multiprocessors: int
    cublaslt: int
    driver: str
    kernels: str

    @property
    def file_name(self) -> str:
        """Name of the file that holds its plans, such as nvidia-h200-sm90-132-cublaslt130100-0123abcd.json."""
        return _file_name(self, SCHEMA)

    def differences(self, other: Fingerprint) -> list[str]:
        """In what `other` differs, such as "driver 570.86 instead of 580.95.05"; empty if in nothing."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if ours[name] != theirs[name]]


@functools.cache
def _file_name(known: Fingerprint, schema: int) -> str:
    gpu = re.sub(r"[^a-z0-9]+", "-", known.gpu.lower()).strip("-")
    digest = hashlib.sha256(json.dumps([schema, asdict(known)], sort_keys=True).encode()).hexdigest()
    return f"{gpu}-sm{known.capability}-{known.multiprocessors}-cublaslt{known.cublaslt}-{digest[:8]}.json"


def fingerprint(device: int) -> Fingerprint:
    """The fingerprint of one of this machine's GPUs, by its ordinal, with what is installed.

    Raises:
        MissingLibraryError: there is no driver or no cuBLASLt.
        DriverError: there is no such GPU.
    """
    info = device_info(device)
    return Fingerprint(
        info.name, info.capability, info.multiprocessors, cublaslt.get_version(), driver_version(), kernels_digest()
    )


@functools.cache
def driver_version() -> str:
    """The driver's version, or where it does not tell it, the highest CUDA version that it runs."""
    known = kernel_driver_version()
    if known is not None:
        return known
    version = call("cuDriverGetVersion")
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


@functools.cache
def kernels_digest() -> str:
    """Sixteen hexadecimal digits that change with any file of `cuda_src`."""
    digest = hashlib.sha256()
    for path in sorted(kernel_sources().glob("*.cu*")):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:16]
