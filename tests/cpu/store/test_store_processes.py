"""Several processes write one plan cache at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
    assert {file.name for file in path.parent.iterdir()} <= {path.name, f"{path.name}.lock"}
