"""Processes killed with SIGKILL while they write plans and compiled kernels, or train."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROUNDS = 20
KILLS = os.environ.get("LT_TEST_KILLS", "10")


@pytest.mark.parametrize("kind", ["plans", "kernels"])
def test_killed_writers_lose_nothing_and_leave_nothing(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_writers", kind, str(tmp_path / "cache"), str(ROUNDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"of {ROUNDS} rounds left half a file\n")


def test_a_killed_training_run_continues_bit_by_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_training", "cpu", str(tmp_path)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}  # without OpenBLAS's threads, because the program forks
    done = subprocess.run([*command, KILLS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
