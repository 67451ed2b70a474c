"""Runs tests in a copy of a checkout in which one file has been changed."""

from __future__ import annotations

import compileall
import enum
import math
import os
import py_compile
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.host_kernels.build import BUILD_DIRECTORY, BuildError

ROOT: Final = Path(__file__).resolve().parents[2]
_COPIED: Final = (
    *("lt_runtime", "cuda_src", "tests", "benchmarks", "docs"),
    *("pyproject.toml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
)


class Verdict(enum.Enum):
    """The outcome of running tests on a changed copy."""

    KILLED = "killed"
    SURVIVED = "survived"
    TIMED_OUT = "timed out"
    LEFT_OUT = "left out"
    """The tests did not end within the time that the command has."""
    BROKEN = "broken"
    """The tests could not run, so that they neither kill the change nor let it survive."""


class Copy:
    """A copy of a checkout, in which trials change one file after the other.

    Args:
        directory: the folder in which the copy is made.
        root: the checkout; its `.venv`, if it has one, runs the tests.
        built: directory of the kernels that g++ builds for the host; by default the checkout's own.
        deadline: the value of `time.monotonic()` at which every run is ended.
    """

    def __init__(
        self, directory: Path, root: Path = ROOT, built: Path | None = None, deadline: float = math.inf
    ) -> None:
        self.root, self._deadline = directory, deadline
        own = root / ".venv" / "bin" / "python"
        self._python = str(own if own.exists() else sys.executable)
        self._built = built or Path(os.environ.get(BUILD_DIRECTORY, root / ".pytest_cache" / "d" / "host_kernels"))
        self._built.mkdir(parents=True, exist_ok=True)
        for place in (root / name for name in _COPIED):
            if place.is_dir():
                shutil.copytree(place, directory / place.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif place.exists():
                shutil.copy(place, directory / place.name)
        # Bytecode is checked by hash: by default Python compares only a file's size and its time in whole seconds, and
        # could miss a change.
        checked = py_compile.PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(directory / "lt_runtime", quiet=1, invalidation_mode=checked)

    def try_out(self, path: str, text: str, tests: Sequence[str], limit_s: int) -> tuple[Verdict, str]:
        """Runs tests while the file `path` has another text; see `pytest`.

        Returns:
            The verdict and pytest's output.
        """
        file = self.root / path
        before = file.read_text()
        file.write_text(text)
        try:
            status, output = self.pytest(["-x", "--tb=short", *tests], limit_s)
        finally:
            file.write_text(before)
        return verdict_on(status, output), output

    def pytest(self, arguments: Sequence[str], limit_s: int | None = None) -> tuple[int | Verdict, str]:
        """Runs pytest, in one process by default.

        Args:
            arguments: arguments of pytest.
            limit_s: processor seconds that pytest may take; by the clock it may take five times as long, because of
                other work on the machine.

        Returns:
            Pytest's exit status, or the verdict if pytest was ended early; and pytest's output.
        """
        options = ["-n0", "-q", "-p", "no:cacheprovider", "--no-header", "--hypothesis-profile=mutants"]
        return self.python(["-m", "pytest", *options, *arguments], limit_s)

    def python(self, arguments: Sequence[str], limit_s: int | None = None) -> tuple[int | Verdict, str]:
        """Runs Python in the copy of the repository that has the fault; returns the same as `pytest`."""
        path = os.pathsep.join(
            filter(None, (str(self.root), os.environ.get("PYTHONPATH")))
        )  # so that Python finds the copy of the package before one that the virtual environment may have installed
        with subprocess.Popen(
            [self._python, *arguments],
            cwd=self.root,
            env={**own_environment(), "PYTHONPATH": path, BUILD_DIRECTORY: str(self._built), "LT_REQUIRE_GPU": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=None if limit_s is None else lambda: resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s)),
        ) as process:
            allowed_s = min(math.inf if limit_s is None else 5.0 * limit_s, max(0.0, self._deadline - time.monotonic()))
            try:
                output, _ = process.communicate(timeout=None if allowed_s == math.inf else allowed_s)
            except BaseException as error:
                os.killpg(process.pid, signal.SIGKILL)
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                is_over = time.monotonic() >= self._deadline
                return Verdict.LEFT_OUT if is_over else Verdict.TIMED_OUT, process.communicate()[0]
        took_too_long = process.returncode in (-signal.SIGXCPU, -signal.SIGKILL)
        return Verdict.TIMED_OUT if took_too_long else process.returncode, output


def own_environment() -> dict[str, str]:
    """Returns the environment without variables of a surrounding pytest and of git."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GIT_"))}


def verdict_on(status: int | Verdict, output: str) -> Verdict:
    """Translates a result of `Copy.pytest` into a verdict."""
    if isinstance(status, Verdict):
        return status
    if status == pytest.ExitCode.OK:
        return Verdict.SURVIVED
    # With any other status the tests did not run. Tests of a kernel that does not compile did not run either.
    ran = status == pytest.ExitCode.TESTS_FAILED and BuildError.__name__ not in output
    return Verdict.KILLED if ran else Verdict.BROKEN
