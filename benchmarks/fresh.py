"""Plan caches that hold nothing yet, so that what is tuned is really measured."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lt_runtime.paths import CACHE_VARIABLE, cache_directory


@contextlib.contextmanager
def fresh_plans() -> Iterator[Path]:
    """Lets this process keep plans in a directory of its own, whose path it gives; kernels stay where they are."""
    before, kernels = os.environ.get(CACHE_VARIABLE), cache_directory() / "kernels"
    kernels.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lt_runtime_plans_") as directory:
        (Path(directory) / "kernels").symlink_to(kernels.resolve(), target_is_directory=True)
        os.environ[CACHE_VARIABLE] = directory
        try:
            yield Path(directory)
        finally:
            if before is None:
                del os.environ[CACHE_VARIABLE]
            else:
                os.environ[CACHE_VARIABLE] = before
