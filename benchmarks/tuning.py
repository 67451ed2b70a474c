"""What tuning takes, what more effort adds, and what a second process has of it: `python3 -m benchmarks.tuning`."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.console import Console
from rich.progress import track

from benchmarks import report, summary
from benchmarks.blocks import REPRESENTATIVE, Block, blocks
from benchmarks.report import Row
from benchmarks.summary import Finding
from lt_runtime.gpu.devices import device_count

RESULT: Final = report.RESULTS / "tuning.json"
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


def measure(block: Block, rounds: int, stream: Any) -> Row:
    """Tunes a block, and again with more effort where that is tried, and lets both plans take turns."""
    from benchmarks import block_lt, graphs
    from benchmarks.layer_row import as_json, contender, tune
    from lt_runtime.tuning.timing import buffer_sets

    stack, sets = block.stack, buffer_sets(block.bytes, block_lt.DEVICE)
    tuned = {"lt": tune(stack)}
    if is_searched_deeply(block):
        tuned["lt_deep"] = tune(stack, "deep")
    buffers = [block_lt.arrays(block) for _ in range(sets)]
    builders = {name: partial(contender, each.plans, buffers) for name, each in tuned.items()}
    measured = graphs.measure(builders, sets, block.repetitions(sets), rounds, stream)
    facts = block.as_json() | {"tuning_s": round(tuned["lt"].seconds, 3)}
    facts |= {"tuned": [as_json(each) for each in tuned["lt"].groups]}
    if "lt_deep" in tuned:
        facts |= {"deep_s": round(tuned["lt_deep"].seconds, 3)}
    return Row(block.name, measured.timings, "lt", setting=facts, left_out=measured.left_out)


def warm_start(names: Sequence[str]) -> dict[str, Any]:
    """What a second process reports that builds the plans of the blocks of those names."""
    command = [sys.executable, "-m", "benchmarks.warm_start", *names]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def findings(rows: Sequence[Mapping[str, Any]], warm: Mapping[str, Any]) -> list[Finding]:
    """Seconds of tuning, what depth adds and takes, and what plans from the cache cost."""
    groups = [group["seconds"] for row in rows for group in row["tuned"]]
    blocks_, deep = ([row[name] for row in rows if name in row] for name in ("tuning_s", "deep_s"))
    count = len(warm["us"])
    return [
        *quantiles("seconds of tuning problems that are decided together", groups, 2.0),
        *quantiles("seconds of tuning a block", blocks_),
        *quantiles("seconds of tuning a block deeply", deep),
        summary.mean("lt / lt_deep", summary.speedups(rows, "lt", "lt_deep"), None),
        Finding("measurements of a second process", warm["measurements"], 0, count, at_most=True),
        Finding("problems in it without a measured plan", count - warm["known"], 0, count, at_most=True),
        *quantiles("milliseconds of building a plan in it", [us / 1e3 for us in warm["us"]], 1.0),
    ]


def quantiles(what: str, values: Sequence[float], target: float | None = None) -> list[Finding]:
    """The median, which has the target, the ninth decile, and the greatest of some values."""
    if not values:
        return [Finding(f"{what}, median", None, target, 0, at_most=True)]
    tenth = np.quantile(values, (0.5, 0.9, 1.0)).tolist()
    names, targets = ("median", "90 %", "most"), (target, None, None)
    return [
        Finding(f"{what}, {name}", value, limit, len(values), at_most=True)
        for name, value, limit in zip(names, tenth, targets, strict=True)
    ]


def run(wanted: Sequence[Block], rounds: int, file: Path | None) -> None:
    """Measures, prints what it comes to, and writes the result if there is a file for it."""
    import cupy as cp

    from benchmarks.fresh import fresh_plans
    from benchmarks.graphs import release

    stream, rows = cp.cuda.Stream(non_blocking=True), []
    with fresh_plans():
        for block in track(wanted, "tuning", console=Console(stderr=True), transient=True):
            rows.append(measure(block, rounds, stream).as_json())
            release()
        warm = warm_start([block.name for block in wanted])
    made = findings(rows, warm)
    console = report.console()
    console.print(summary.table(made))
    if file is not None:
        report.write(file, rows, summary=[each.as_json() for each in made])
        console.print(f"written to {file}")


def main(argv: Sequence[str] | None = None) -> None:
    """Without a GPU there is nothing to measure. Targets that are missed are printed, and no error."""
    parser = argparse.ArgumentParser(prog="benchmarks.tuning", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", help="blocks whose name has this regular expression")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default, without --only: {RESULT}")
    arguments = parser.parse_args(argv)
    if device_count() == 0:
        sys.exit("benchmarks.tuning needs an NVIDIA GPU")
    wanted = [block for block in sample() if re.search(arguments.only or "", block.name, re.IGNORECASE)]
    run(wanted, arguments.rounds, arguments.out or (None if arguments.only else RESULT))


if __name__ == "__main__":
    main()
