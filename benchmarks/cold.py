"""How long a process takes until it has something: `python3 -m benchmarks.cold [--only PATTERN]`.

Each figure is the median over processes of their own: importing the package, the first call of a layer, the first
training step; the latter two with an empty cache of compiled kernels, and in a second process with what the first has
left there. Files are in the operating system's cache: a first process, which does not count, has read them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import report, resumable
from benchmarks.report import Row
from benchmarks.timing import summarise
from lt_runtime.gpu.devices import device_count
from lt_runtime.paths import CACHE_VARIABLE

RESULT: Final = report.RESULTS / "cold.json"
ROUNDS: Final = 4
IMPORT: Final = "import of lt_runtime"
NAMES: Final = {
    "linear": "first linear_fwd GELU BF16 256×512×784, out=",
    "step": "first TrainStep step, mnist MLP BF16, batch 256",
}
_ROOT: Final = Path(__file__).parents[1]
_IMPORT_MS: Final = 200.0  # "well under", the design says
_NO_OTHER_CACHE: Final = "CUDA_CACHE_DISABLE"
"""Keeps the driver, and NVRTC with it, from a cache of their own, which would not be empty when ours is."""
_OTHER_SETTINGS: Final = ("LT_RUNTIME_TUNE", "LT_RUNTIME_RECORD", "PYTHONDONTWRITEBYTECODE")
"""Without the last a first process leaves the package's bytecode for the others, as installing it would."""

Found = Mapping[str, Any]
"""What a process has printed."""


def child(task: str, cache: str) -> Found:
    """What a process does with a task, its cache directory being `cache`."""
    environment = {name: value for name, value in os.environ.items() if name not in _OTHER_SETTINGS}
    environment |= {CACHE_VARIABLE: cache, _NO_OTHER_CACHE: "1"}
    command = [sys.executable, "-m", "benchmarks.cold_child", task]
    done = subprocess.run(command, cwd=_ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def pairs(task: str, count: int) -> list[tuple[Found, Found]]:
    """Processes two by two: one with an empty cache, and one with what that has left there."""
    with tempfile.TemporaryDirectory(prefix="lt_runtime_cold_") as cache:
        child(task, cache)  # reads the files
    return [pair(task) for _ in range(count)]


def pair(task: str) -> tuple[Found, Found]:
    """A process with an empty cache, and one with what that has left there."""
    with tempfile.TemporaryDirectory(prefix="lt_runtime_cold_") as cache:
        return child(task, cache), child(task, cache)


def import_row(rounds: int) -> Row:
    """The package alone, and with all that its names stand for."""
    return row_of_imports([*itertools.chain(*pairs("import", rounds))])


def row_of_imports(found: Sequence[Found]) -> Row:
    """The row of what some processes have printed."""
    alone = summarise([each["us"]["import"] for each in found])
    whole = summarise([each["us"]["import"] + each["us"]["names"] for each in found])
    setting = {
        "processes": len(found),
        "loads_driver": any(each["loads_driver"] for each in found),
        "target_ms": _IMPORT_MS,
        "within_target": alone.median <= 1e3 * _IMPORT_MS,
    }
    return Row(IMPORT, {"lt": alone, "lt_all_names": whole}, "lt", setting=setting)


def first_row(task: str, rounds: int) -> Row:
    """The first call, with either cache; beside it the second call, and what comes before both."""
    return row_of_firsts(task, pairs(task, rounds))


def row_of_firsts(task: str, found: Sequence[tuple[Found, Found]]) -> Row:
    """The row of what some pairs of processes have printed."""
    empty, filled = ([each["us"] for each in one] for one in zip(*found, strict=True))
    timings = {
        "lt": summarise([us["first"] for us in filled]),
        "lt_empty_cache": summarise([us["first"] for us in empty]),
        "lt_second": summarise([us["second"] for us in filled]),
    }
    before = {name: round(summarise([us[name] for us in filled]).median, 1) for name in ("import", "operands")}
    return Row(NAMES[task], timings, "lt", setting={"processes": 2 * len(found), "before_us": before})


def measures(rounds: int) -> resumable.Measures:
    """What measures each row."""
    firsts = {name: partial(first_row, task, rounds) for task, name in NAMES.items()}
    return {IMPORT: partial(import_row, rounds), **firsts}


def main(argv: Sequence[str] | None = None) -> None:
    """Without a GPU there is nothing to measure."""
    parser = argparse.ArgumentParser(prog="benchmarks.cold", description=__doc__)
    resumable.arguments_of(parser, RESULT, ROUNDS)
    arguments = parser.parse_args(argv)
    if device_count() == 0:
        sys.exit("benchmarks.cold needs an NVIDIA GPU")
    rows = resumable.run(measures(arguments.rounds), arguments, RESULT)
    print(import_verdict(rows))


def import_verdict(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Whether the import is as short as it has to be, and touches no GPU."""
    row = rows.get(IMPORT)
    if row is None:
        return f"{IMPORT}: not measured"
    loads = ", and the CUDA driver was loaded" if row["loads_driver"] else ""
    met = row["within_target"] and not row["loads_driver"]
    return f"{IMPORT}: {'met' if met else 'MISSED'}: {row['us']['lt'] / 1e3:.0f} ms of {row['target_ms']:.0f}{loads}"


if __name__ == "__main__":
    main()
