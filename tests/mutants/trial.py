"""Runs the tests of a fault in a copy of the tree that has it."""

from __future__ import annotations

import compileall
import enum
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

from tests.host_kernels.build import BUILD_DIRECTORY, BuildError
from tests.mutants.fault import ROOT, Fault

_COPIED: Final = (
    *("lt_runtime", "cuda_src", "docs", "tests", "benchmarks"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
)
_LIMIT_S: Final = 300.0


class Verdict(enum.Enum):
    """What became of a fault."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMED_OUT = "timed out"
    BROKEN = "broken"
    """The tests could not run: the fault says nothing about them."""


@dataclass(frozen=True)
class Result:
    """A verdict with what pytest printed."""

    verdict: Verdict
    seconds: float
    output: str


class Copy:
    """A copy of the tree, in which faults are planted one after the other.

    Args:
        directory: where the copy is made.
        built: where all copies keep the kernels that g++ has built for the host.

    Attributes:
        limit_s: seconds that the tests of a fault may take.
    """

    def __init__(self, directory: Path, built: Path) -> None:
        self._root, self._built, self.limit_s = directory, built, _LIMIT_S
        for name in _COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, directory / name)
        # By default Python tells by a file's size and by its time in whole seconds whether it has changed.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(directory / "lt_runtime", quiet=1, invalidation_mode=checked)

    def try_out(self, fault: Fault) -> Result:
        """Runs the fault's tests on a tree that has it."""
        file = self._root / fault.path
        text = file.read_text()
        file.write_text(fault.planted(text))
        try:
            return self._run(fault)
        finally:
            file.write_text(text)

    def passes(self, tests: Iterable[str], jobs: int) -> Result:
        """Runs tests on the tree as it is, in so many processes."""
        begun = time.monotonic()
        status, output = self._pytest([f"-n{jobs}", *tests], None)
        return Result(Verdict.SURVIVED if status == 0 else Verdict.BROKEN, time.monotonic() - begun, output)

    @property
    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(self._root), os.environ.get("PYTHONPATH"))))  # packages may be there
        return {"PYTHONPATH": path, BUILD_DIRECTORY: str(self._built), "LT_REQUIRE_GPU": "1"}

    def _run(self, fault: Fault) -> Result:
        begun = time.monotonic()
        status, output = self._pytest(["-n0", *fault.tests], self.limit_s)
        return Result(verdict_on(fault, status, output), time.monotonic() - begun, output)

    def _pytest(self, arguments: Sequence[str], limit: float | None) -> tuple[int | None, str]:
        """Its exit status, None where it ran beyond the limit, and its output."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
        profile = "--hypothesis-profile=mutants"
        with subprocess.Popen(
            [*command, profile, *arguments],
            cwd=self._root,
            env={**own_environment(), **self._environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                output, _ = process.communicate()
                return None, output
        return process.returncode, output


def own_environment() -> dict[str, str]:
    """Without what a pytest that runs this has set, and without the repository that the copy is none of."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GIT_"))}


def verdict_on(fault: Fault, status: int | None, output: str) -> Verdict:
    """What pytest's exit status says of a fault; None where its tests ran beyond the limit."""
    if status is None:
        return Verdict.KILLED if fault.hangs else Verdict.TIMED_OUT
    if status == pytest.ExitCode.OK:
        return Verdict.SURVIVED
    # Any other status is one of tests that did not run. Those of a kernel that does not compile did not either.
    ran = status == pytest.ExitCode.TESTS_FAILED and BuildError.__name__ not in output
    return Verdict.KILLED if ran else Verdict.BROKEN
