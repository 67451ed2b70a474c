"""The tests of a GPU, which are left out where there is none, can be imported and collected everywhere."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_tests_of_a_gpu_are_collected_where_the_command_names_them() -> None:
    options = ["--collect-only", "-q", "-n0", "-p", "no:cacheprovider", "--assert=plain"]
    command = [sys.executable, "-m", "pytest", *options, "tests/gpu"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert collected.returncode == 0, [line for line in collected.stdout.splitlines() if line.startswith("ERROR")]
    assert "tests/gpu/test_linear.py::" in collected.stdout
