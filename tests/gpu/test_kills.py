"""Training runs on a GPU that are killed at random moments, or that lose the CUDA context."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
KILLS: Final = int(os.environ.get("LT_TEST_KILLS", "10"))
RUNS: Final = min(10, KILLS)
"""The number of runs side by side. A killed process takes seconds on a GPU, most of them to start CUDA."""


def test_killed_training_runs_continue_bit_by_bit(tmp_path: Path) -> None:
    runs = []
    for index in range(RUNS):
        (tmp_path / str(index)).mkdir()
        kills = str((KILLS + index) // RUNS)
        command = [sys.executable, "-m", "tests.support.killed_training", "cuda", str(tmp_path / str(index)), kills]
        runs.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    told = [run.communicate()[0] for run in runs]
    assert all(run.returncode == 0 for run in runs), "\n".join(told)


def test_the_first_error_after_a_bad_replay_names_the_step_and_later_ones_say_what_is_lost() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.lost_context"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
