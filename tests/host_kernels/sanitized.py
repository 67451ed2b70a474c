"""Records that the kernels' tests passed under the sanitizers: `python -m tests.host_kernels.sanitized` runs them all.

The record is a digest of the compiler's version and of all files that can change the sanitizers' result. As long as it
matches, one test runs under one sanitizer, a different one each day. LT_COMPILE_ALL=1 runs them all.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Final, TypeVar

import pytest

from lt_runtime import kernels
from lt_runtime.paths import kernel_sources
from tests.host_kernels.build import HERE, compiler_version
from tests.support.kernel_digest import without_comments, without_prose

RECORD: Final = HERE / "sanitized.txt"
COMPILE_ALL: Final = "LT_COMPILE_ALL"
_ROOT: Final = HERE.parents[1]
_Run = TypeVar("_Run")
_LAUNCHERS: Final = Path(kernels.__file__).parent


@functools.cache
def digest() -> str:
    """Digest of the compiler's version and the code of all `covered_files`, without comments and docstrings."""
    made = hashlib.sha256(compiler_version().encode())
    for file in covered_files():
        bare = without_prose if file.suffix == ".py" else without_comments
        made.update(bare(file.read_text()).encode())
    return made.hexdigest()[:32]


def covered_files() -> list[Path]:
    """The files on which the sanitizers' result depends.

    These are the kernels, their launchers, their tests, the CPU shim, and every module of `lt_runtime` and `tests` that
    the tests import.
    """
    tests = _files(HERE, ".py")
    sources = [*_files(kernel_sources(), ".cu", ".cuh"), *_files(HERE, ".cu", ".cuh", ".cpp", ".h")]
    imported = {file for test in tests for file in _imported(test)}
    return sorted({*sources, *_files(_LAUNCHERS, ".py"), *tests, *imported})


def _files(root: Path, *suffixes: str) -> list[Path]:
    return sorted(file for file in root.rglob("*") if file.suffix in suffixes)


def _imported(test: Path) -> Iterator[Path]:
    """Files of the modules of `lt_runtime` and `tests` that a test imports; of an imported package, all files."""
    for node in ast.walk(ast.parse(test.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("lt_runtime", "tests")):
            package = _ROOT / node.module.replace(".", "/")
            for place in (package / alias.name for alias in node.names):
                module = place if place.is_dir() or place.with_suffix(".py").is_file() else package
                yield from _files(module, ".py") if module.is_dir() else [module.with_suffix(".py")]


def is_to_run() -> bool:
    """Whether all tests have to run: LT_COMPILE_ALL=1 is set, or a covered file has changed since the tests passed."""
    return os.environ.get(COMPILE_ALL) == "1" or not RECORD.exists() or RECORD.read_text().strip() != digest()


def of_the_day(runs: Sequence[_Run], day: date) -> _Run:
    """Chooses the test under a sanitizer that runs today: each is chosen once in as many days as there are."""
    return runs[day.toordinal() % len(runs)]


def main() -> int:
    """Runs all tests under the sanitizers, and returns pytest's exit status."""
    before = digest()
    os.environ[COMPILE_ALL] = "1"
    status = pytest.main(["-q", "-n", "2", "-p", "no:cacheprovider", str(HERE / "test_sanitizers.py")])
    if status == 0:
        RECORD.write_text(f"{before}\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
