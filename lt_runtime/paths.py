"""Where things lie: the user's cache directory and the CUDA sources that ship with the package."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "LT_RUNTIME_CACHE_DIR"


def cache_directory() -> Path:
    """`$LT_RUNTIME_CACHE_DIR`, or lt_runtime's in the user's cache directory. Looking does not create it."""
    override = os.environ.get(CACHE_VARIABLE)
    if override:
        return Path(override)
    # Not `Path.expanduser`, which raises where nobody knows a home directory.
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lt_runtime")  # noqa: PTH111


def kernel_sources() -> Path:
    """The directory `cuda_src`: inside the package in a wheel, beside it in a checkout or an editable install."""
    package = Path(__file__).resolve().parent
    inside = package / "cuda_src"
    return inside if inside.is_dir() else package.parent / "cuda_src"
