"""Directories: the user's cache, and the CUDA sources that ship with the package."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "LT_RUNTIME_CACHE_DIR"


def cache_directory() -> Path:
    """`$LT_RUNTIME_CACHE_DIR`, or the platform's cache directory for lt_runtime. It may not exist yet."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override)
    import platformdirs

    return Path(platformdirs.user_cache_dir("lt_runtime"))


def kernel_sources() -> Path:
    """The directory `cuda_src`: inside the package in a wheel, beside it in a checkout or an editable install."""
    package = Path(__file__).resolve().parent
    inside = package / "cuda_src"
    return inside if inside.is_dir() else package.parent / "cuda_src"
