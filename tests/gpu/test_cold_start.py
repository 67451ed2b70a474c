"""Modules that a process loads before its first result from raw addresses."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from lt_runtime.paths import CACHE_VARIABLE

ROOT = Path(__file__).parents[2]

ADDRESSES = """
import sys
from pathlib import Path

from lt_runtime import raw
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call

with activated(0):
    a, b, y = (int(call("cuMemAlloc", 4 * 64 * 64)) for _ in range(3))
    raw.forward_raw(a, b, 0, y, 64, 64, 64, False, True, "gelu_erf", False, 0.0, False, 0)
    call("cuStreamSynchronize", 0)
print("cupy" in sys.modules, "libnvrtc" in Path("/proc/self/maps").read_text())
"""


def loads_cupy_and_nvrtc(cache: Path) -> tuple[bool, bool]:
    environment = os.environ | {CACHE_VARIABLE: str(cache)}
    command = [sys.executable, "-c", ADDRESSES]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    cupy, nvrtc = done.stdout.split()
    return cupy == "True", nvrtc == "True"


def test_addresses_need_no_cupy_and_a_second_process_no_compiler(tmp_path: Path) -> None:
    assert loads_cupy_and_nvrtc(tmp_path) == (False, True)
    assert loads_cupy_and_nvrtc(tmp_path) == (False, False)


def test_cupy_compiles_nothing_for_training(tmp_path: Path) -> None:
    """CuPy compiles a kernel in half a second; such kernels made the first step on a new machine take 30 s."""
    command = [sys.executable, "-m", "tests.support.first_step", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "first step: " in done.stdout
