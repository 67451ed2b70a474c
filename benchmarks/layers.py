"""Blocks of two layers, forward and backward, against others and against all that could have been chosen.

`python3 -m benchmarks.layers [--only PATTERN] [--dtype bf16|tf32] [--activation gelu|relu] [--max-autotune]`

Contenders are CUDA Graphs of a whole block, over buffers more than the L2 cache holds or, where a block is so small
that its data will be there in earnest, over one set; they take turns, and a figure is the median over the rounds.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import report, resumable, summary
from benchmarks.blocks import ACTIVATIONS, REPRESENTATIVE, TYPES, Block, blocks
from benchmarks.resumable import Rows
from lt_runtime.gpu.devices import device_count

RESULT: Final = report.RESULTS / "layers.json"
MAX_AUTOTUNE: Final = "torch_max_autotune"


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


def _row(block: Block, arguments: argparse.Namespace, stream: Any) -> dict[str, Any]:
    from benchmarks.layer_row import measure_block

    measure = partial(measure_block, block, arguments.rounds, stream, max_autotune=arguments.max_autotune)
    return resumable.row_or_reason(block.name, measure, block.as_json())


def save(rows: Rows, file: Path | None) -> None:
    """Writes the rows in the order of the suite, and what they come to; nothing without a file."""
    order = [block.name for block in blocks()]
    findings = summary.findings(resumable.in_order(rows, order))
    resumable.save(rows, order, file, summary=[each.as_json() for each in findings])


def main(argv: Sequence[str] | None = None) -> None:
    """Without a GPU there is nothing to measure. Targets that are missed are printed, and no error."""
    arguments = parser().parse_args(argv)
    if device_count() == 0:
        sys.exit("benchmarks.layers needs an NVIDIA GPU")
    narrowed = arguments.only or arguments.dtype or arguments.activation
    file = arguments.out or (None if narrowed and not arguments.resume else RESULT)
    rows = resumable.kept_rows(file) if arguments.resume else {}
    wanted = [
        block
        for block in chosen_blocks(arguments)
        if not is_done(rows.get(block.name), max_autotune=arguments.max_autotune)
    ]
    jobs = {block.name: partial(_row, block, arguments) for block in wanted}
    resumable.run_with_bar(jobs, rows, arguments.minutes, partial(save, rows, file))
    console = report.console()
    console.print(summary.rows_table([rows[block.name] for block in wanted if block.name in rows]))
    console.print(summary.table(summary.findings(list(rows.values()))))
    if file is not None:
        console.print(f"written to {file}")


def parser() -> argparse.ArgumentParser:
    """What the command line accepts."""
    made = argparse.ArgumentParser(prog="benchmarks.layers", description=__doc__)
    made.add_argument("--dtype", choices=TYPES, help="default: all")
    made.add_argument("--activation", choices=ACTIVATIONS, help="default: both")
    made.add_argument(
        "--max-autotune", action="store_true", help="the representative layers, and torch.compile as well"
    )
    resumable.arguments_of(made, RESULT, 9)
    return made


if __name__ == "__main__":
    main()
