"""Measures memory of a GPU that other processes use as well."""

from __future__ import annotations

from collections.abc import Callable


def memory_taken(run: Callable[[], object], times: int = 4) -> int:
    """Returns the bytes by which a call of `run` shrinks the free memory: the least of several calls.

    Because other processes allocate and free memory meanwhile, only memory that is missing after every call counts. If
    some is missing after each of `times` calls, more calls follow, up to five times as many.
    """
    import cupy as cp

    def free() -> int:
        cp.cuda.Device().synchronize()
        return int(cp.cuda.runtime.memGetInfo()[0])

    taken = list[int]()
    while len(taken) < times or (min(taken) > 0 and len(taken) < 5 * times):
        before = free()
        run()
        taken.append(before - free())
    return min(taken)
