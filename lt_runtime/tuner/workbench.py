"""What is measured on: a GPU's clock, and CuPy's memory on the clock's stream."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lt_runtime.arrays.libraries import cupy_stream
from lt_runtime.gpu.clock import Clock
from lt_runtime.tuner.timing import timing_session


@dataclass(frozen=True, slots=True)
class Bench:
    """A device, which is current, its clock, and CuPy, with that clock's stream current."""

    device: int
    clock: Clock
    xp: Any


@contextlib.contextmanager
def workbench(device: int) -> Iterator[Bench]:
    """For one thread at a time; CuPy's memory comes from a pool that is emptied in the end.

    Raises:
        MissingLibraryError: CuPy is not installed.
        CaptureError: see `timing_session`.
    """
    with timing_session(device) as clock, cupy_stream(device, clock.stream) as xp:
        pool = xp.cuda.MemoryPool()
        with xp.cuda.using_allocator(pool.malloc):
            try:
                yield Bench(device, clock, xp)
            finally:
                clock.wait()
        pool.free_all_blocks()
