"""Groups of processes that torchrun, or anything that sets its variables, has started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

_PROGRAM = """
import sys, time
import lt_runtime as lt
group = lt.group(timeout=1.0)
for _ in range(3):
    letters = group.gather(b"abc"[group.rank : group.rank + 1], "letters")
print(group.rank, group.local_rank, b"".join(letters).decode(), flush=True)
group.agree({"lr": float(group.rank == 1 and sys.argv[1] == "differing")}, "the options")
if group.rank == 1 and sys.argv[1] == "hanging":
    time.sleep(3)
group.barrier("the end")
"""


def _run(way: str) -> list[tuple[int, str]]:
    """The exit status and all output of two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    environment = os.environ | place | {"PYTHONPATH": str(Path(__file__).parents[2])}
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", _PROGRAM, way]
    ranks = [environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    started = [subprocess.Popen(command, env=each, **options) for each in ranks]
    texts = [each.communicate(timeout=50)[0] for each in started]
    return [(each.returncode, text) for each, text in zip(started, texts, strict=True)]


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("hanging", "rank 0 of 2 ends all processes: it has waited 1 s for the end, to which rank 1 has not come"),
        ("differing", "rank 1 differs from rank 0 in the options: lr = 1.0 on rank 1, lr = 0.0 there"),
    ],
)
def test_values_go_through_the_store_and_a_failing_process_is_named(way: str, message: str) -> None:
    status, text = _run(way)[0]
    assert status == 1
    assert text.startswith("0 0 ab\n")
    assert message in text
