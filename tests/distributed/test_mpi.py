"""Steps over 2 and 4 processes that mpiexec starts: results, and what happens when a process fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Final

import pytest

from tests.distributed.cases import CASES

ROOT: Final = Path(__file__).parents[2]
MPIEXEC: Final = Path(sys.prefix, "bin", "mpiexec")


def run(size: int, module: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [str(MPIEXEC), "-n", str(size), sys.executable, "-m", f"tests.distributed.{module}", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=50)


@cache
def errors(size: int, directory: Path) -> dict[str, list[str]]:
    """The errors of each case; one start of mpiexec runs all cases."""
    done = run(size, "cases", str(directory))
    found = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert found.keys() == CASES.keys(), done.stdout + done.stderr
    return found


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mpi")


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_case(size: int, name: str, directory: Path) -> None:
    assert errors(size, directory)[name] == []


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("killed", "signal 9"),
        ("hanging", "has waited 1 s for a sum of arrays, to which rank 1 has not come"),
        ("raising", "rank 1 of 3 ends all processes: an exception: ValueError"),
        ("ending early", "it waits for a sum of arrays, and rank 1 has ended"),
        ("in another order", "the end of the epoch (call"),  # whether rank 1 or another one is the first to tell
    ],
)
def test_a_failing_process_ends_all(way: str, message: str) -> None:
    done = run(3, "failing", way)
    assert done.returncode != 0
    assert message in (text := done.stdout + done.stderr), text


def test_another_mpi_than_the_launcher_s_is_refused() -> None:
    done = run(1, "failing", "raising", OMPI_COMM_WORLD_SIZE="2")
    assert "the launcher has started 2 processes; mpi4py's MPI (MPICH" in done.stderr
