"""One block: tuned anew, then measured side by side with everyone who does the same."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Final, NamedTuple

from benchmarks import block_lt, graphs, summary
from benchmarks.block_entries import Entries, entries_of
from benchmarks.block_lt import DEVICE, Arrays, Plans, Split
from benchmarks.blocks import Block
from benchmarks.fresh import fresh_plans
from benchmarks.graphs import Contender
from benchmarks.report import Row
from lt_runtime.store.entries import Effort, now
from lt_runtime.tuning.stacks import Stack
from lt_runtime.tuning.timing import buffer_sets
from lt_runtime.tuning.tuning import Tuned, tune_problems

_COMPILING_S: Final = 150.0  # that torch.compile has for a block
_NEAR: Final = 1.25  # candidates that by the tuner's times are further behind than this are not measured again
_MOST_CANDIDATES: Final = 10
_SHOWN: Final = 200  # characters of a reason

Builders = dict[str, Callable[[], Contender]]


class TunedBlock(NamedTuple):
    """What tuning a block said and took, what it left in the plan cache, and the plans that follow from that."""

    groups: list[Tuned]
    seconds: float
    entries: Entries
    plans: Plans


def tune(stack: Stack, effort: Effort = "default") -> TunedBlock:
    """Measures, unless the plan cache has it."""
    start = time.perf_counter()
    groups = tune_problems(stack.problems(), DEVICE, effort=effort)
    seconds = time.perf_counter() - start
    return TunedBlock(groups, seconds, entries_of(stack), block_lt.decided(stack))


def measure_block(block: Block, rounds: int, stream: Any, *, max_autotune: bool = False) -> Row:
    """Tunes a block in a fresh plan cache and lets all contenders and candidates take turns.

    Args:
        stream: a CuPy stream that can be captured.
        max_autotune: whether torch.compile takes part.
    """
    stack, sets = block.stack, buffer_sets(block.bytes, DEVICE)
    with fresh_plans():
        tuned = tune(stack)
        fused, refused = block_lt.fused_first(stack)
        plans = {"lt": tuned.plans, "lt_priors": block_lt.by_priors(stack)}
        plans |= {"lt_fused_top1": fused, "lt_split_top1": block_lt.split_first(stack)}
        buffers = [block_lt.arrays(block) for _ in range(sets)]
        candidates = _candidates(stack, tuned, buffers)
        builders: Builders = {name: partial(contender, each, buffers) for name, each in plans.items()}
        builders |= candidates | _torch(block, buffers, max_autotune=max_autotune)
        measured = graphs.measure(builders, sets, block.repetitions(sets), rounds, stream)
    facts = block.as_json() | {"when": now()}
    facts |= {"buffer_sets": sets, "repetitions": block.repetitions(sets), "rounds": rounds}
    facts |= {"tuning_s": round(tuned.seconds, 3), "tuned": [as_json(each) for each in tuned.groups]}
    facts |= {"splits": {name: str(block_lt.split_of(each)) for name, each in plans.items()}, "fusion_refused": refused}
    facts |= summary.no_loss(measured.timings, candidates) | {"entries": tuned.entries}
    timings = {name: timing for name, timing in measured.timings.items() if name not in candidates}
    return Row(block.name, timings, "lt", setting=facts, left_out=measured.left_out)


def contender(plans: Plans, buffers: list[Arrays]) -> Contender:
    """Plans over buffer sets."""
    addresses = [Arrays(*(array.data.ptr for array in each)) for each in buffers]
    return Contender(lambda i, stream: plans.run(addresses[i], stream), graphs.capture)


def _candidates(stack: Stack, tuned: TunedBlock, buffers: list[Arrays]) -> Builders:
    """What could have been chosen instead, with the algorithms that were measured, and the chosen with others."""
    chosen = block_lt.split_of(tuned.plans)

    def build(split: Split, choose: block_lt.Choose = block_lt.known_algorithm) -> Contender:
        return contender(block_lt.by_split(stack, split, choose), buffers)

    others = block_lt.near(stack, tuned.entries, chosen, _NEAR, _MOST_CANDIDATES)
    made: Builders = {str(each): partial(build, each) for each in others}
    return made | {"as chosen, first algorithms": partial(build, chosen, block_lt.heuristic_algorithm)}


def _torch(block: Block, buffers: list[Arrays], *, max_autotune: bool) -> Builders:
    """PyTorch's contenders; it is imported when they are built."""

    def build(name: str, *more: Any) -> Contender:
        return getattr(import_module("benchmarks.block_torch"), name)(block, buffers, *more)

    made: Builders = {"torch_graph": partial(build, "eager")}
    return made | ({"torch_max_autotune": partial(build, "compiled", _COMPILING_S)} if max_autotune else {})


def as_json(group: Tuned) -> dict[str, Any]:
    """What the tuner says of problems that it decided together."""
    return {
        "strategy": group.strategy,
        "before_us": round(group.before_us, 3),
        "after_us": round(group.after_us, 3),
        "measured": group.measured,
        "rejected": [each[:_SHOWN] for each in group.rejected],
        "seconds": round(group.seconds, 3),
    }
