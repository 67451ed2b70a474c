"""What a process does that finds every plan in the plan cache: `python3 -m benchmarks.warm_start BLOCK...`.

Prints JSON: how many plans it built, how many of their problems had been measured, how often it measured itself, and
the host's microseconds for each plan, the first of which loads the libraries.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.blocks import Block, blocks
from lt_runtime.gpu.clock import Clock
from lt_runtime.gpu.devices import activated
from lt_runtime.plans.decisions import decide_backward, decide_forward
from lt_runtime.store.keys import Problem, problem_key
from lt_runtime.store.plan_store import plan_store

_DEVICE = 0


class Counts:
    """What was built, and how often the clock was used, which is what every measurement does."""

    def __init__(self) -> None:
        self.measurements, self.known = 0, 0
        self.us: list[float] = []

    def watch(self, name: str) -> None:
        """Counts the calls of one of the clock's methods."""
        method = getattr(Clock, name)

        def counted(clock: Clock, *arguments: Any) -> Any:
            self.measurements += 1
            return method(clock, *arguments)

        setattr(Clock, name, counted)

    def build(self, decide: Callable[[Any, int], Any], problem: Problem) -> Any:
        """A plan, and how long it took."""
        start = time.perf_counter()
        plan = decide(problem, _DEVICE)
        self.us.append(1e6 * (time.perf_counter() - start))
        self.known += plan_store(_DEVICE).layer(problem_key(problem)) is not None
        return plan

    def build_block(self, block: Block) -> None:
        """The plans of all of its passes."""
        stack = block.stack
        saved = [self.build(decide_forward, stack.forward(i)).saved for i in range(2)]
        for i in (1, 0):
            self.build(decide_backward, stack.backward(i, saved))


def main(names: Sequence[str]) -> None:
    """Builds the plans of the blocks of those names."""
    counts = Counts()
    for method in ("once", "replay"):
        counts.watch(method)
    with activated(_DEVICE):
        for block in blocks():
            if block.name in names:
                counts.build_block(block)
    print(json.dumps({"measurements": counts.measurements, "known": counts.known, "us": counts.us}))


if __name__ == "__main__":
    main(sys.argv[1:])
