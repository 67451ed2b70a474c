"""Every command of `python -m lt_runtime` in its own process, on scripts whose first use of the GPU is in a step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
LAYER: Final = """
import lt_runtime as lt

arrays = []

def step():
    import cupy as cp
    if not arrays:
        arrays.append(cp.ones((64, 64), cp.float32))
    with lt.range("fc"):
        return lt.linear_fwd(arrays[0], arrays[0])[0]
"""
LOOP: Final = """
for _ in range(30):
    with lt.range("step"):
        step()
"""
FILES: Final = ("a.json", "tables/layers.csv", "tables/kernels.csv", "trace.json", "plot.png")
TABLES: Final = ("on cuda:0", "Layers: 10 steps", "Kernels: 10 steps", "fc")
CASES: Final[dict[str, list[tuple[str, tuple[str, ...]]]]] = {
    "profile": [("profile loop.py", TABLES)],
    "profile of a device": [("profile --device cuda:0 loop.py", TABLES)],
    "profile into files": [
        (
            "profile --steps 1:5 --json a.json --csv tables --trace trace.json --plot plot.png loop.py",
            ("Layers: 2 steps on cuda:0", "Kernels: 2 steps"),
        ),
        ("compare a.json a.json", ("Share of kernel time", "kernels took as long as before")),
        ("compare --json a.json a.json", ('"changes"', '"shares"')),
    ],
    "check": [("check layer.py", ("step: no faults", "compared: result"))],
    "warmup": [
        ("warmup --recorded recorded.json", ("64",)),
        ("cache list", ("yes",)),
        ("cache verify", ("sound", "Nothing is damaged.")),
        ("cache show *", ("measured",)),
        ("cache export plans", ("products",)),
        ("cache merge plans", ("merged into",)),
        ("cache prune", ("Nothing to remove",)),
    ],
    "demo": [("demo --epochs 3 --profile --json demo.json", ("accuracy", "samples per second on cuda:0", "Layers"))],
    "doctor": [("doctor", ("GPU 0", "Ready: everything needed to run on the GPU is there."))],
}


def run(directory: Path, *command: str, **variables: str) -> str:
    """Runs a Python process, which must succeed and write no error; returns its standard output."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "LT_RUNTIME_CACHE_DIR": str(directory / "cache")} | variables
    done = subprocess.run(
        [sys.executable, *command], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rror" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", CASES)
def test_commands(tmp_path: Path, name: str) -> None:
    (tmp_path / "layer.py").write_text(LAYER)
    (tmp_path / "loop.py").write_text(LAYER + LOOP)
    if name == "demo":
        pytest.importorskip("sklearn")
    if name == "warmup":
        run(tmp_path, "loop.py", LT_RUNTIME_RECORD="recorded.json")
    for command, expected in CASES[name]:
        printed = run(tmp_path, "-m", "lt_runtime", *command.split())
        assert [text for text in expected if text not in printed] == [], printed
    if name == "profile into files":
        assert [file for file in FILES if not (tmp_path / file).stat().st_size] == []
