"""What the sanitizers have passed: `python -m tests.host_kernels.sanitized` runs them, and records it if they pass.

Nothing that they see changes without one of these files, or the compiler. As long as all are the same, their long runs
are skipped, unless LT_COMPILE_ALL=1 asks for them.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Final

import pytest

from lt_runtime import kernels
from lt_runtime.paths import kernel_sources
from tests.host_kernels.build import HERE, compiler_version
from tests.support.kernel_digest import without_comments

RECORD: Final = HERE / "sanitized.txt"
COMPILE_ALL: Final = "LT_COMPILE_ALL"
_LAUNCHERS: Final = Path(kernels.__file__).parent


def digest() -> str:
    """Changes with the kernels, their launchers and tests, the shim and the compiler; not with a comment in C++."""
    made = hashlib.sha256(compiler_version().encode())
    for file in [*_files(kernel_sources(), ".cu", ".cuh"), *_files(HERE, ".cu", ".cuh", ".cpp", ".h")]:
        made.update(without_comments(file.read_text()).encode())
    for file in [*_files(_LAUNCHERS, ".py"), *_files(HERE, ".py")]:
        made.update(file.read_bytes())
    return made.hexdigest()[:32]


def _files(root: Path, *suffixes: str) -> list[Path]:
    return sorted(file for file in root.rglob("*") if file.suffix in suffixes)


def is_to_run() -> bool:
    """Whether the long runs are asked for, or something has changed since they passed."""
    return os.environ.get(COMPILE_ALL) == "1" or not RECORD.exists() or RECORD.read_text().strip() != digest()


def main() -> int:
    """Runs the sanitizers and returns pytest's exit status."""
    before = digest()
    os.environ[COMPILE_ALL] = "1"
    status = pytest.main(["-q", "-n", "2", "-p", "no:cacheprovider", str(HERE / "test_sanitizers.py")])
    if status == 0:
        RECORD.write_text(f"{before}\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
