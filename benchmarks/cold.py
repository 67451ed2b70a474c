"""The suite `cold`: how long a new process takes to import the package, to its first layer and to its first step.

Each figure is the median over several processes. The first layer and the first step are measured with empty caches of
the package and of CuPy, and again in a second process with the caches that the first has filled. One process that does
not count reads all files first, so that they are in the operating system's cache.

Training steps do not measure their layers in these rows. Measuring has rows of its own: with empty caches, the time to
the first loss, and the number of steps after which measuring has paid for itself.
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
from benchmarks.report import Row
from benchmarks.suite import CACHE_VARIABLE, UNTUNED, Job, Suite, last_line
from benchmarks.timing import summarise

IMPORT: Final = "import of lt_runtime"
NAMES: Final = {
    "linear": "first linear_fwd GELU BF16 256×512×784, out=",
    "step": "first TrainStep step, mnist MLP BF16, batch 256",
}
_MEASURING: Final = {model: f"first TrainStep step that measures, on empty caches, {model}" for model in MODELS}
_NO_OTHER_CACHE: Final = "CUDA_CACHE_DISABLE"
"""Environment variable that disables the caches of the driver and of NVRTC, which would not be empty."""
_UNSET: Final = ("LT_RUNTIME_RECORD", "PYTHONDONTWRITEBYTECODE")
"""Environment variables that measured processes do not inherit.

Without PYTHONDONTWRITEBYTECODE, the first process writes bytecode, as an installation does.
"""

_folder: Final = partial(tempfile.TemporaryDirectory, prefix="lt_runtime_cold_")

Found = Mapping[str, Any]
"""Type of the JSON object that a process has printed."""


def child(task: Sequence[str], cache: str, *, tunes: bool = False) -> Found:
    """Runs a task with its arguments in a new process whose caches are in a folder."""
    variable, off = UNTUNED
    environment = {name: value for name, value in os.environ.items() if name not in (*_UNSET, variable)}
    environment |= {CACHE_VARIABLE: cache, "CUPY_CACHE_DIR": f"{cache}/cupy", _NO_OTHER_CACHE: "1"}
    environment |= {} if tunes else {variable: off}
    return last_line([sys.executable, "-m", "benchmarks.processes", *task], environment)


def pairs(task: str, count: int) -> list[tuple[Found, Found]]:
    """Runs `pair` several times, after a process that only reads all files and whose times are dropped."""
    with _folder() as cache:
        child([task], cache)
    return [pair(task) for _ in range(count)]


def pair(task: str) -> tuple[Found, Found]:
    """Times one process with empty caches, and then one with the caches that the first has filled."""
    with _folder() as cache:
        return child([task], cache), child([task], cache)


def measuring(model: str) -> tuple[Found, Found]:
    """Two processes that train a model from empty caches: the first measures its layers, the second does not."""
    with _folder() as tuned, _folder() as untuned:
        return child(["trained", model], tuned, tunes=True), child(["trained", model], untuned)


def row_of_imports(found: Sequence[Found]) -> Row:
    """Measures the import of the package alone, and the import of all modules that its public names need."""
    alone = summarise([each["us"]["import"] for each in found])
    whole = summarise([each["us"]["import"] + each["us"]["names"] for each in found])
    setting = {"processes": len(found), "loads_driver": any(each["loads_driver"] for each in found)}
    return Row(IMPORT, {"lt": alone, "lt_all_names": whole}, setting=setting)


def row_of_firsts(task: str, found: Sequence[tuple[Found, Found]]) -> Row:
    """The first call with filled and with empty caches, the second call, and the time before the first call."""
    empty, filled = ([each["us"] for each in one] for one in zip(*found, strict=True))
    times = {"lt": (filled, "first"), "lt_empty_cache": (empty, "first"), "lt_second": (filled, "second")}
    timings = {name: summarise([us[stage] for us in some]) for name, (some, stage) in times.items()}
    before = {name: round(summarise([us[name] for us in filled]).median, 1) for name in ("import", "operands")}
    return Row(NAMES[task], timings, setting={"processes": 2 * len(found), "before_us": before, "cupy_cache": "empty"})


def row_of_measuring(model: str, found: Sequence[tuple[Found, Found]]) -> Row:
    """Measures the first training step with and without tuning, and a later step of either.

    The row also tells after how many steps the time for tuning has paid off.
    """
    tuned, untuned = ([each["us"] for each in one] for one in zip(*found, strict=True))
    timings = {"lt": summarise([us["first"] for us in tuned]), "lt_untuned": summarise([us["first"] for us in untuned])}
    step, other = (summarise([us["step"] for us in each]).median for each in (tuned, untuned))
    more = timings["lt"].median - timings["lt_untuned"].median
    setting = {"processes": 2 * len(found), "step_us": round(step, 2), "untuned_step_us": round(other, 2)}
    setting |= {"pays_after_steps": round(more / (other - step)) if other > step else None}
    return Row(_MEASURING[model], timings, setting=setting)


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
SUITE: Final = Suite(rounds=4, order=_ORDER, jobs=_jobs, has_context=False)
