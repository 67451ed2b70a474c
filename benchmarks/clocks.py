"""What the GPU does meanwhile: its clock, its power, and its temperature, as nvidia-smi tells them."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from typing import Any, Final

_FIGURES: Final = {"sm_mhz": "clocks.sm", "watts": "power.draw", "celsius": "temperature.gpu"}
_TIMEOUT: Final = 10.0  # seconds


def gpu_state() -> dict[str, float]:
    """MHz of the multiprocessors, watts and °C of the GPU in use; nothing where nvidia-smi cannot tell."""
    import cupy as cp

    wanted = ",".join(_FIGURES.values())
    command = ["nvidia-smi", f"--id={cp.cuda.Device().pci_bus_id}", f"--query-gpu={wanted}"]
    try:
        done = subprocess.run(
            [*command, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=_TIMEOUT, check=True
        )
        return dict(zip(_FIGURES, map(float, done.stdout.split(",")), strict=True))
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}


def during(work: Callable[[], Any], seconds: float) -> tuple[Any, dict[str, float]]:
    """What some work returns, and the GPU's state so many seconds after its beginning."""
    seen: list[dict[str, float]] = []
    watch = threading.Timer(seconds, lambda: seen.append(gpu_state()))
    watch.start()
    try:
        done = work()
    finally:
        watch.join()
    return done, seen[0]
