"""The suite `cold`: how long a new process takes to import the package, to its first layer, and to its first step.

Each figure is the median over processes of their own. The first layer and the first step are measured with an empty
cache of compiled kernels, and in a second process with what the first has left there. A process that is not counted
reads all files first, so that they are in the operating system's cache.

What training steps measure before the first of them is left out there, and has rows of its own: what it takes on an
empty cache, and after how many steps it has paid for itself.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from benchmarks.processes import MODELS
from benchmarks.report import Finding, Json, Row
from benchmarks.suite import CACHE_VARIABLE, UNTUNED, Job, Suite, last_line
from benchmarks.timing import summarise

IMPORT: Final = "import of lt_runtime"
NAMES: Final = {
    "linear": "first linear_fwd GELU BF16 256×512×784, out=",
    "step": "first TrainStep step, mnist MLP BF16, batch 256",
}
_MEASURING: Final = {model: f"first TrainStep step that measures, on empty caches, {model}" for model in MODELS}
_IMPORT_MS: Final = 200.0
_NO_OTHER_CACHE: Final = "CUDA_CACHE_DISABLE"
"""Keeps the driver and NVRTC from a cache of their own, which would not be empty when ours is."""
_OTHER_SETTINGS: Final = ("LT_RUNTIME_RECORD", "PYTHONDONTWRITEBYTECODE")
"""Variables that are unset. Without the last, a first process leaves bytecode for the others, as installing does."""

Found = Mapping[str, Any]
"""What a process has printed."""


def child(task: Sequence[str], cache: str, *, tunes: bool = False) -> Found:
    """What a process does with a task and its arguments, given the folder of its caches."""
    variable, off = UNTUNED
    environment = {name: value for name, value in os.environ.items() if name not in (*_OTHER_SETTINGS, variable)}
    environment |= {CACHE_VARIABLE: cache, _NO_OTHER_CACHE: "1", **({} if tunes else {variable: off})}
    return last_line([sys.executable, "-m", "benchmarks.processes", *task], environment)


def pairs(task: str, count: int) -> list[tuple[Found, Found]]:
    """Pairs of processes, after one that is not counted."""
    with tempfile.TemporaryDirectory(prefix="lt_runtime_cold_") as cache:
        child([task], cache)
    return [pair(task) for _ in range(count)]


def pair(task: str) -> tuple[Found, Found]:
    """A process with an empty cache, and one with what that has left there."""
    with tempfile.TemporaryDirectory(prefix="lt_runtime_cold_") as cache:
        return child([task], cache), child([task], cache)


def measuring(model: str) -> tuple[Found, Found]:
    """Processes that train a model with an empty cache: one that measures before, and one that does not."""
    with (
        tempfile.TemporaryDirectory(prefix="lt_runtime_cold_") as tuned,
        tempfile.TemporaryDirectory(prefix="lt_runtime_cold_") as untuned,
    ):
        return child(["trained", model], tuned, tunes=True), child(["trained", model], untuned)


def row_of_imports(found: Sequence[Found]) -> Row:
    """The package alone, and with everything that its names stand for, from what processes have printed."""
    alone = summarise([each["us"]["import"] for each in found])
    whole = summarise([each["us"]["import"] + each["us"]["names"] for each in found])
    setting = {
        "processes": len(found),
        "loads_driver": any(each["loads_driver"] for each in found),
        "target_ms": _IMPORT_MS,
        "within_target": alone.median <= 1e3 * _IMPORT_MS,
    }
    return Row(IMPORT, {"lt": alone, "lt_all_names": whole}, setting=setting)


def row_of_firsts(task: str, found: Sequence[tuple[Found, Found]]) -> Row:
    """The first call with either cache, the second call, and what comes before, from pairs of processes."""
    empty, filled = ([each["us"] for each in one] for one in zip(*found, strict=True))
    timings = {
        "lt": summarise([us["first"] for us in filled]),
        "lt_empty_cache": summarise([us["first"] for us in empty]),
        "lt_second": summarise([us["second"] for us in filled]),
    }
    before = {name: round(summarise([us[name] for us in filled]).median, 1) for name in ("import", "operands")}
    return Row(NAMES[task], timings, setting={"processes": 2 * len(found), "before_us": before})


def row_of_measuring(model: str, found: Sequence[tuple[Found, Found]]) -> Row:
    """The first step with and without measuring, a later step by either, and when the difference is made up for."""
    tuned, untuned = ([each["us"] for each in one] for one in zip(*found, strict=True))
    timings = {"lt": summarise([us["first"] for us in tuned]), "lt_untuned": summarise([us["first"] for us in untuned])}
    step, other = (summarise([us["step"] for us in each]).median for each in (tuned, untuned))
    more = timings["lt"].median - timings["lt_untuned"].median
    setting = {"processes": 2 * len(found), "step_us": round(step, 2), "untuned_step_us": round(other, 2)}
    setting |= {"pays_after_steps": round(more / (other - step)) if other > step else None}
    return Row(_MEASURING[model], timings, setting=setting)


def findings(rows: Sequence[Json]) -> list[Finding]:
    """Whether the import is as short as it has to be, and touches no GPU."""
    row = next((row for row in rows if row["case"] == IMPORT and row["us"]), None)
    ms, loads = (None, None) if row is None else (row["us"]["lt"] / 1e3, float(row["loads_driver"]))
    return [
        Finding(f"milliseconds of the {IMPORT}", ms, _IMPORT_MS, int(ms is not None), at_most=True),
        Finding("processes in which it loaded the CUDA driver", loads, 0, int(ms is not None), at_most=True),
        *(finding for model, case in _MEASURING.items() for finding in _pays(model, case, rows)),
    ]


def _pays(model: str, case: str, rows: Sequence[Json]) -> list[Finding]:
    row = next((row for row in rows if row["case"] == case and row["us"]), None)
    seconds, steps = (None, None) if row is None else (row["us"]["lt"] / 1e6, row["pays_after_steps"])
    return [
        Finding(f"seconds to the first loss on an empty cache, {model}", seconds, None, int(row is not None)),
        Finding(f"steps after which that has paid for itself, {model}", steps, None, int(row is not None)),
    ]


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    def imports(_: Any) -> Row:
        return row_of_imports([*itertools.chain(*pairs("import", options.rounds))])

    def firsts(task: str, _: Any) -> Row:
        return row_of_firsts(task, pairs(task, options.rounds))

    def measures(model: str, _: Any) -> Row:
        return row_of_measuring(model, [measuring(model) for _ in range(options.rounds)])

    jobs = {IMPORT: imports, **{name: partial(firsts, task) for task, name in NAMES.items()}}
    return jobs | {name: partial(measures, model) for model, name in _MEASURING.items()}


_ORDER: Final = [IMPORT, *NAMES.values(), *_MEASURING.values()]
SUITE: Final = Suite(rounds=4, order=_ORDER, jobs=_jobs, findings=findings, has_context=False)
