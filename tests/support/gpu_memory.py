"""Memory of a GPU that other processes use as well."""

from __future__ import annotations

from collections.abc import Callable


def memory_taken(run: Callable[[], object], times: int = 4) -> int:
    """Bytes by which the GPU has less free memory after `run` than before it: the least of several times.

    Other processes allocate and free meanwhile. What `run` itself keeps, it would take each time.
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
