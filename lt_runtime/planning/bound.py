"""Plans bound to buffers: all that can be done beforehand is done, and a call is nothing but launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from lt_runtime.gpu.memory import StreamMemory

BoundCall: TypeAlias = Callable[[], None]
"""Puts the operation on its stream, over its buffers, which must be there still. GpuError if a launch fails."""


def in_order(steps: Sequence[BoundCall], memory: StreamMemory) -> BoundCall:
    """Launches that nothing of another thread's gets between on the same stream."""
    lock = memory.lock
    if len(steps) == 1:
        (only,) = steps

        def launch_one() -> None:
            with lock:
                only()

        return launch_one

    def launch() -> None:
        with lock:
            for step in steps:
                step()

    return launch
