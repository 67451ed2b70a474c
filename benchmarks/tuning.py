"""The suite `tuning`: what tuning takes, what more effort adds, and what a second process still has to do."""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks import report, timing
from benchmarks.layers import REPRESENTATIVE, Block, arrays, blocks, ours, tune
from benchmarks.report import Finding, Json, Row
from benchmarks.suite import CACHE_VARIABLE, Job, Suite, last_line, plan_cache
from benchmarks.timing import summarise

SECOND: Final = "plans in a second process"
_LAYERS: Final = (
    *REPRESENTATIVE,
    *((64, 64, 64), (256, 256, 256), (2048, 2048, 2048), (8192, 768, 3072), (2048, 1, 256), (16, 4096, 4096)),
)


def sample() -> list[Block]:
    """Some layers of every size, in both types."""
    return [block for block in blocks() if block.layer in _LAYERS and block.activation == "gelu"]


def is_searched_deeply(block: Block) -> bool:
    """Whether more effort is tried."""
    return block.layer in REPRESENTATIVE and block.kind == "bf16"


def measure(block: Block, options: argparse.Namespace, plans: str, stream: Any) -> Row:
    """Tunes a block, and where that is tried once more with more effort; both plans take turns.

    Args:
        plans: the folder for the plan cache, which the second process reads.
    """
    sets = block.sets(timing.cache_size())
    count, buffers = block.repetitions(sets), [arrays(block) for _ in range(sets)]
    turns: dict[str, timing.Turn] = {}
    kept: list[timing.Contender] = []  # their graphs read what they hold
    facts = block.as_json()
    with plan_cache(plans):
        for name, effort in {"lt": "default", "lt_deep": "deep"}.items():
            if name == "lt" or is_searched_deeply(block):
                tuned = tune(block, effort)
                facts |= tuned.as_json() if name == "lt" else {"deep_s": round(tuned.seconds, 3)}
                made = ours(block, buffers)  # captured before the next tuning changes the plans
                kept.append(made)
                turns[name] = timing.timed(made.capture(made.run, count, sets, stream), count, stream)
    return Row(block.name, timing.take_turns(turns, options.rounds), setting=facts)


def measure_second_process(names: Sequence[str], plans: str, _: Any) -> Row:
    """What a process reports that builds the plans of the blocks of those names, and finds every problem measured."""
    command = [sys.executable, "-m", "benchmarks.processes", "plans", *names]
    environment = os.environ | {CACHE_VARIABLE: plans}
    found = last_line(command, environment)
    facts = {name: found[name] for name in ("measurements", "known")} | {"plans_us": found["us"]}
    return Row(SECOND, {"lt_plan": summarise(found["us"])}, "lt_plan", setting=facts)


def findings(rows: Sequence[Json]) -> list[Finding]:
    """Seconds of tuning, what depth adds and takes, and what plans from the cache cost."""
    groups = [group["seconds"] for row in rows for group in row.get("tuned", ())]
    blocks_, deep = ([row[name] for row in rows if name in row] for name in ("tuning_s", "deep_s"))
    second = next((row for row in rows if "plans_us" in row), None)
    return [
        *quantiles("seconds of tuning problems that are decided together", groups, 2.0),
        *quantiles("seconds of tuning a block", blocks_),
        *quantiles("seconds of tuning a block deeply", deep),
        report.mean("lt / lt_deep", report.speedups(rows, "lt", "lt_deep")),
        *([] if second is None else _of_second_process(second)),
    ]


def _of_second_process(row: Json) -> list[Finding]:
    us = row["plans_us"]
    return [
        Finding("measurements of a second process", row["measurements"], 0, len(us), at_most=True),
        Finding("problems in it without a measured plan", len(us) - row["known"], 0, len(us), at_most=True),
        *quantiles("milliseconds of building a plan in it", [each / 1e3 for each in us], 1.0),
    ]


def quantiles(what: str, values: Sequence[float], target: float | None = None) -> list[Finding]:
    """The median, which has the target, the ninth decile, and the greatest of some values."""
    if not values:
        return [Finding(f"{what}, median", None, target, 0, at_most=True)]
    found = np.quantile(values, (0.5, 0.9, 1.0)).tolist()
    limits = {"median": target, "90 %": None, "most": None}
    return [
        Finding(f"{what}, {name}", value, limit, len(values), at_most=True)
        for (name, limit), value in zip(limits.items(), found, strict=True)
    ]


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    """The last row is of a process that reads what this run's other rows have left in their plan cache."""
    folder, tuned = tempfile.mkdtemp(prefix="lt_runtime_plans_"), list[str]()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)

    def measured(block: Block, stream: Any) -> Row:
        tuned.append(block.name)
        return measure(block, options, folder, stream)

    made: dict[str, Job] = {block.name: partial(measured, block) for block in sample()}
    return made | {SECOND: lambda stream: measure_second_process(tuned, folder, stream)}


_NAMES: Final = [block.name for block in sample()]
SUITE: Final = Suite(rounds=9, order=[*_NAMES, SECOND], jobs=_jobs, findings=findings)
