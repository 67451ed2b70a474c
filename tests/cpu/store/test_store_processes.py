"""Several processes write one plan cache at once, some of them killed while they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lt_runtime.files import TEMPORARY
from lt_runtime.store.document import Document
from tests.support.plan_entries import H200

ROOT = Path(__file__).parents[3]
PROCESSES, ENTRIES = 8, 200

WRITER = """
import sys
from pathlib import Path
from lt_runtime.store.plan_store import PlanStore
from tests.support.plan_entries import H200, product

path, number, entries, batch = Path(sys.argv[1]), *map(int, sys.argv[2:])
store = PlanStore(path, H200)
for start in range(0, entries, batch):
    assert store.put({f"{number}.{index}": product() for index in range(start, start + batch)})
"""


def start_writer(path: Path, number: int, entries: int, batch: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "error", "-c", WRITER, *map(str, (path, number, entries, batch))]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)


def test_eight_processes_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "plans" / H200.file_name
    writers = [start_writer(path, number, ENTRIES, batch=10) for number in range(PROCESSES)]
    errors = [writer.communicate(timeout=300)[1] for writer in writers]
    assert [(writer.returncode, error) for writer, error in zip(writers, errors, strict=True)] == [(0, "")] * PROCESSES
    document = Document.read(path)
    wanted = {f"{number}.{index}" for number in range(PROCESSES) for index in range(ENTRIES)}
    assert set(document.raw) == wanted
    assert document.damaged() == {}
    assert {file.name for file in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2])
def test_a_killed_writer_harms_nobody(seconds: float, tmp_path: Path) -> None:
    path = tmp_path / "plans" / H200.file_name
    victim = start_writer(path, 0, 100_000, batch=5)
    while not path.exists():
        assert victim.poll() is None, victim.communicate()[1]
        time.sleep(0.005)
    time.sleep(seconds)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    before = set(Document.read(path).raw)
    writer = start_writer(path, 1, 10, batch=10)
    assert (writer.communicate(timeout=60)[1], writer.returncode) == ("", 0)
    document = Document.read(path)
    assert set(document.raw) == before | {f"1.{index}" for index in range(10)}
    assert document.damaged() == {}
    left = {file.name for file in path.parent.iterdir()} - {path.name, f"{path.name}.lock"}
    assert all(name.endswith(TEMPORARY) for name in left)
