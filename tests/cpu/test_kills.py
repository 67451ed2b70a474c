"""Processes killed with SIGKILL while they write plans and compiled kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROUNDS = 20


@pytest.mark.parametrize("kind", ["plans", "kernels"])
def test_killed_writers_lose_nothing_and_leave_nothing(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_writers", kind, str(tmp_path / "cache"), str(ROUNDS)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(f"of {ROUNDS} rounds left half a file\n")
