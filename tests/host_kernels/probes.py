"""Runs the kernels of shim_probe.cu. As a program, it runs some of them from a library built with a sanitizer."""

from __future__ import annotations

import ctypes
import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tests.host_kernels.build import Variant
from tests.host_kernels.harness import FORWARD, HostKernel, Pair

PROBE: Final = Variant("shim_probe.cu")


class ShimProbeParams(ctypes.Structure):
    _fields_ = (("out", ctypes.c_void_p), ("count", ctypes.c_void_p))


def run_probe(
    kernel: HostKernel, block: Pair = (16, 1), grid: Pair = (1, 1), order: int = FORWARD
) -> tuple[NDArray[np.float32], int]:
    """Output of a run: the value that each thread of the grid wrote, and the counter to which all threads added."""
    out = np.full((grid[1] * grid[0], block[1] * block[0]), -1.0, np.float32)
    count = np.zeros(1, np.uint32)
    kernel.launch(grid, block, ShimProbeParams(out.ctypes.data, count.ctypes.data), order=order)
    return out, int(count[0])


def main(library: str, *entries: str) -> None:
    loaded = ctypes.CDLL(library)
    for entry in entries:
        run_probe(HostKernel(loaded, entry, PROBE.max_threads[entry]), block=(64, 1))


if __name__ == "__main__":
    main(*sys.argv[1:])
