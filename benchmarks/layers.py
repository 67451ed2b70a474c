"""Blocks of two layers, forward and backward, against others and against all that could have been chosen.

`python3 -m benchmarks.layers [--only PATTERN] [--dtype bf16|tf32] [--activation gelu|relu] [--max-autotune]`

Contenders are CUDA Graphs of a whole block, over buffers more than the L2 cache holds or, where a block is so small
that its data will be there in earnest, over one set; they take turns, and a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from benchmarks import report, summary
from benchmarks.blocks import ACTIVATIONS, REPRESENTATIVE, TYPES, Block, blocks
from lt_runtime.gpu.devices import device_count

RESULT: Final = report.RESULTS / "layers.json"
MAX_AUTOTUNE: Final = "torch_max_autotune"

Rows = dict[str, dict[str, Any]]
"""Rows as they stand in a file, by the block's name."""


def kept_rows(file: Path | None) -> Rows:
    """The rows that a file holds; none if there is no file."""
    if file is None or not file.exists():
        return {}
    return {row["case"]: row for row in json.loads(file.read_text())["rows"]}


def is_done(row: Mapping[str, Any] | None, *, max_autotune: bool) -> bool:
    """Whether a row holds all that it is to hold, or why not."""
    if row is None or "error" in row:
        return False
    return not max_autotune or MAX_AUTOTUNE in row["us"] or MAX_AUTOTUNE in row.get("left_out", {})


def chosen_blocks(arguments: argparse.Namespace) -> list[Block]:
    """The blocks that the command line asks for."""
    return [
        block
        for block in blocks()
        if re.search(arguments.only or "", block.name, re.IGNORECASE)
        and arguments.dtype in (None, block.kind)
        and arguments.activation in (None, block.activation)
        and (block.layer in REPRESENTATIVE or not arguments.max_autotune)
    ]


def run(wanted: Sequence[Block], rows: Rows, arguments: argparse.Namespace, file: Path | None) -> None:
    """Measures blocks until all are done or time is up; the file is written after each."""
    import cupy as cp

    from benchmarks.graphs import release

    stream, start = cp.cuda.Stream(non_blocking=True), time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=len(wanted))
        for block in wanted:
            if time.monotonic() - start > 60 * arguments.minutes:
                break
            progress.update(task, description=block.name)
            rows[block.name] = _row(block, arguments, stream)
            release()
            save(rows, file)
            progress.advance(task)


def _row(block: Block, arguments: argparse.Namespace, stream: Any) -> dict[str, Any]:
    """A block's row; what goes wrong with one does not end the run."""
    from benchmarks.layer_row import measure_block

    try:
        return measure_block(block, arguments.rounds, stream, max_autotune=arguments.max_autotune).as_json()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        Console(stderr=True).print(f"{block.name}: {reason}", markup=False)
        return {"case": block.name, **block.as_json(), "us": {}, "spread": {}, "error": reason}


def save(rows: Rows, file: Path | None) -> None:
    """Writes the rows in the order of the suite, and what they come to; nothing without a file."""
    if file is None:
        return
    places = {block.name: place for place, block in enumerate(blocks())}
    ordered = sorted(rows.values(), key=lambda row: places.get(row["case"], len(places)))
    report.write(file, ordered, summary=[each.as_json() for each in summary.findings(ordered)])


def main(argv: Sequence[str] | None = None) -> None:
    """Without a GPU there is nothing to measure. Targets that are missed are printed, and no error."""
    arguments = parser().parse_args(argv)
    if device_count() == 0:
        sys.exit("benchmarks.layers needs an NVIDIA GPU")
    narrowed = arguments.only or arguments.dtype or arguments.activation
    file = arguments.out or (None if narrowed and not arguments.resume else RESULT)
    rows = kept_rows(file) if arguments.resume else {}
    wanted = [
        block
        for block in chosen_blocks(arguments)
        if not is_done(rows.get(block.name), max_autotune=arguments.max_autotune)
    ]
    run(wanted, rows, arguments, file)
    console = report.console()
    console.print(summary.rows_table([rows[block.name] for block in wanted if block.name in rows]))
    console.print(summary.table(summary.findings(list(rows.values()))))
    if file is not None:
        console.print(f"written to {file}")


def parser() -> argparse.ArgumentParser:
    """What the command line accepts."""
    made = argparse.ArgumentParser(prog="benchmarks.layers", description=__doc__)
    made.add_argument("--only", metavar="PATTERN", help="blocks whose name has this regular expression")
    made.add_argument("--dtype", choices=TYPES, help="default: all")
    made.add_argument("--activation", choices=ACTIVATIONS, help="default: both")
    made.add_argument(
        "--max-autotune", action="store_true", help="the representative layers, and torch.compile as well"
    )
    made.add_argument("--rounds", type=int, default=9, metavar="N", help="default: %(default)s")
    made.add_argument("--minutes", type=float, default=float("inf"), metavar="N", help="begin no block after this time")
    made.add_argument("--resume", action="store_true", help="keep the file's rows, and measure those that it lacks")
    made.add_argument("--out", type=Path, metavar="FILE", help=f"default, for a whole suite or with --resume: {RESULT}")
    return made


if __name__ == "__main__":
    main()
