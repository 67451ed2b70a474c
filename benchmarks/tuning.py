"""The suite `tuning`: how long tuning takes, and what a second process still has to do."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from benchmarks.layers import REPRESENTATIVE, Block, blocks, measure_block
from benchmarks.report import Finding, Json, Row
from benchmarks.suite import CACHE_VARIABLE, Job, Suite, last_line, plan_cache, run_folder
from benchmarks.timing import summarise

SECOND: Final = "plans in a second process"
_CUBES: Final = ((64, 64, 64), (256, 256, 256), (2048, 2048, 2048))
LAYERS: Final = (*REPRESENTATIVE, *_CUBES, (8192, 768, 3072), (2048, 1, 256), (16, 4096, 4096))
"""The blocks of the suite: small and large layers, in every type."""
_BLOCKS: Final = [block for block in blocks() if block.layer in LAYERS and block.activation == "gelu"]


def measure(block: Block, options: argparse.Namespace, plans: str, stream: Any) -> Row:
    """Tunes a block and measures it; `plans` is the folder for the plan cache, which the second process reads."""
    alone = argparse.Namespace(**vars(options) | {"keep_plans": True, "ours": True})
    with plan_cache(plans):
        return measure_block(block, alone, stream, strategies=False)


def measure_second_process(names: Sequence[str], plans: str, _: Any) -> Row:
    """Builds plans of blocks, given by name, in a new process, whose plan cache `plans` has all measurements."""
    command = [sys.executable, "-m", "benchmarks.processes", "plans", *names]
    found = last_line(command, os.environ | {CACHE_VARIABLE: plans})
    facts = {name: found[name] for name in ("measurements", "known")} | {"plans_us": found["us"]}
    return Row(SECOND, {"lt_plan": summarise(found["us"])}, "lt_plan", setting=facts)


def findings(rows: Sequence[Json]) -> list[Finding]:
    """Summarises how long tuning took, and what a process started afterwards still had to measure and to build."""
    groups = [group["seconds"] for row in rows for group in row.get("tuned", ())]
    made = [
        *_quantiles("seconds of tuning problems that are decided together", groups),
        *_quantiles("seconds of tuning a block", [row["tuning_s"] for row in rows if "tuning_s" in row]),
    ]
    for row in rows:
        if us := row.get("plans_us"):
            made += [
                Finding("measurements of a second process", row["measurements"], 0, len(us), at_most=True),
                Finding("problems in it without a measured plan", len(us) - row["known"], 0, len(us), at_most=True),
                *_quantiles("milliseconds of building a plan in it", [each / 1e3 for each in us]),
            ]
    return made


def _quantiles(what: str, values: Sequence[float]) -> list[Finding]:
    """Findings of some values: the median, the ninth decile and the greatest; none without values."""
    found = np.quantile(values, (0.5, 0.9, 1.0)).tolist() if values else []
    names = ("median", "90 %", "most")
    return [Finding(f"{what}, {name}", value, rows=len(values)) for name, value in zip(names, found, strict=False)]


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    """The last job starts a process that reads the plan cache filled by the jobs before it."""
    folder, tuned = run_folder(), list[str]()

    def measured(block: Block, stream: Any) -> Row:
        tuned.append(block.name)
        return measure(block, options, folder, stream)

    made: dict[str, Job] = {block.name: partial(measured, block) for block in _BLOCKS}
    return made | {SECOND: lambda stream: measure_second_process(tuned, folder, stream)}


SUITE: Final = Suite(rounds=9, order=[*(block.name for block in _BLOCKS), SECOND], jobs=_jobs, findings=findings)
