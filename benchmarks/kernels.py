"""Our kernels against the memory floor and PyTorch: `python3 -m benchmarks.kernels [--only PATTERN]`."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from benchmarks import report
from benchmarks.cases import KERNELS, Case
from benchmarks.report import Row
from benchmarks.timing import WARM_UP, buffer_sets, repetitions
from lt_runtime.gpu.devices import cache_size, device_count

RESULT: Final = report.RESULTS / "kernels.json"
_COPY_ROUNDS: Final = 11  # of fifty copies


def chosen(pattern: str) -> list[Case]:
    """The cases whose name has the pattern, a regular expression in any case of letters."""
    return [case for case in KERNELS if re.search(pattern, case.name, re.IGNORECASE)]


def run(cases: Sequence[Case], rounds: int, file: Path | None) -> None:
    """Measures the copy and every case, prints the table, and writes the result if there is a file for it."""
    import cupy as cp

    from benchmarks.copying import measure_copies
    from benchmarks.graphs import release

    stream = cp.cuda.Stream(non_blocking=True)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("copies", total=_COPY_ROUNDS + WARM_UP + len(cases) * (rounds + WARM_UP))
        advance = partial(progress.advance, task)
        ceiling = measure_copies(_COPY_ROUNDS, stream, advance)
        rows = []
        for case in cases:
            progress.update(task, description=case.name)
            rows.append(measure_case(case, rounds, ceiling.gb_s, stream, advance))
            release()
    console = report.console()
    console.print(report.table(rows))
    tried = len(ceiling.timings)
    console.print(
        f"copy: {ceiling.gb_s:.0f} GB/s, read + write, by the best of {tried}: {ceiling.best}", highlight=False
    )
    if file is not None:
        copies = Row("copy of 1 GiB", ceiling.timings, ours=ceiling.best)
        report.write(file, [*rows, copies], copy_gb_s=round(ceiling.gb_s, 1), copy=ceiling.best)
        console.print(f"written to {file}")


def measure_case(
    case: Case, rounds: int, copy_gb_s: float | None, stream: Any, advance: Callable[[], None] = lambda: None
) -> Row:
    """One row; `copy_gb_s` is the ceiling, if it is known."""
    from benchmarks import graphs, kernel_cases

    sets = buffer_sets(case.bytes, cache_size(0)) if case.rotated else 1
    count = repetitions(case.bytes, sets)
    measured = graphs.measure(kernel_cases.builders(case, sets), sets, count, rounds, stream, advance)
    setting = {"buffer_sets": sets, "repetitions": count, "rounds": rounds}
    return Row(case.name, measured.timings, "lt", case.bytes, copy_gb_s, case.target, setting, measured.left_out)


def main(argv: Sequence[str] | None = None) -> None:
    """Without a GPU there is nothing to measure. Targets that are missed are printed, and no error."""
    parser = argparse.ArgumentParser(prog="benchmarks.kernels", description=__doc__)
    parser.add_argument("--only", metavar="PATTERN", help="cases whose name has this regular expression")
    parser.add_argument("--rounds", type=int, default=21, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default, without --only: {RESULT}")
    arguments = parser.parse_args(argv)
    if device_count() == 0:
        sys.exit("benchmarks.kernels needs an NVIDIA GPU")
    file = arguments.out or (None if arguments.only else RESULT)
    run(chosen(arguments.only or ""), arguments.rounds, file)


if __name__ == "__main__":
    main()
