"""Measures memory of a GPU that other processes use as well."""

from __future__ import annotations

from collections.abc import Callable


def memory_taken(run: Callable[[], object], times: int = 4) -> int:
    """Bytes by which free memory shrinks over `run`: the least of several runs.

    Other processes allocate and free meanwhile; memory that `run` keeps is missing after every run.
    """
    import cupy as cp

    def free() -> int:
        cp.cuda.Device().synchronize()
        return int(cp.cuda.runtime.memGetInfo()[0])

    taken = []
    for _ in range(times):
        before = free()
        run()
        taken.append(before - free())
    return min(taken)
