"""The version of the NVIDIA driver, which CUDA itself does not tell."""

from __future__ import annotations

import re
from pathlib import Path


def kernel_driver_version(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The driver's own version, such as 580.95.05; unknown under WSL, which has no such file."""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read_text()) if file.exists() else None
    return found[0] if found else None
