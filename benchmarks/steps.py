"""Whole training steps, each in one CUDA Graph, against PyTorch's: `python3 -m benchmarks.steps`.

Contenders take turns; a figure is the median over the rounds of a step's time within many replays in a row. Names that
end in `_call` are of calls as a script makes them, the host's time and the batch's copy included.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks import report, resumable, step_summary, summary
from benchmarks.layers import is_done
from benchmarks.report import Row
from benchmarks.resumable import Rows
from benchmarks.step_cases import StepCase, cases
from benchmarks.step_summary import PREFETCH, SOAK
from lt_runtime.gpu.devices import device_count

RESULT: Final = report.RESULTS / "steps.json"

Job = Callable[[Any], Row]
"""Measures a row; what it is given is a CuPy stream that can be captured."""


def jobs(arguments: argparse.Namespace) -> dict[str, Job]:
    """What the command line asks for, by the name of the row."""
    by_name = {case.name: case for case in cases()}
    made: dict[str, Job] = {name: partial(_step, case, arguments) for name, case in by_name.items()}
    if arguments.prefetch:
        made[PREFETCH] = partial(_prefetch, by_name[PREFETCH.removeprefix("prefetch ")], arguments)
    if arguments.soak:
        made[SOAK] = partial(_soak, by_name[SOAK.removeprefix("soak ")], arguments)
    return {name: job for name, job in made.items() if re.search(arguments.only or "", name, re.IGNORECASE)}


def _step(case: StepCase, arguments: argparse.Namespace, stream: Any) -> Row:
    from benchmarks.step_row import measure_case

    asked = {"torch_compile": arguments.torch_compile, "torch_max_autotune": arguments.max_autotune}
    compiled = [name for name, is_asked in asked.items() if is_asked]
    return measure_case(case, arguments.rounds, stream, compiled=compiled, compile_s=arguments.compile_seconds)


def _prefetch(case: StepCase, arguments: argparse.Namespace, stream: Any) -> Row:
    from benchmarks.step_runs import measure_prefetch

    return measure_prefetch(PREFETCH, case, arguments.rounds, stream)


def _soak(case: StepCase, arguments: argparse.Namespace, stream: Any) -> Row:
    from benchmarks.step_runs import measure_soak

    return measure_soak(SOAK, case, arguments.soak, stream)


def missing(wanted: Iterable[str], rows: Rows, *, max_autotune: bool) -> list[str]:
    """The names of those rows that do not hold all that they are to hold."""
    compiled = {case.name for case in cases()} if max_autotune else set()
    return [name for name in wanted if not is_done(rows.get(name), max_autotune=name in compiled)]


def _row(name: str, job: Job, stream: Any) -> dict[str, Any]:
    return resumable.row_or_reason(name, partial(job, stream))


def save(rows: Rows, file: Path | None) -> None:
    """Writes the rows in the order of the suite, and what they come to; nothing without a file."""
    order = [*(case.name for case in cases()), PREFETCH, SOAK]
    findings = step_summary.findings(resumable.in_order(rows, order))
    resumable.save(rows, order, file, summary=[each.as_json() for each in findings])


def main(argv: Sequence[str] | None = None) -> None:
    """Without a GPU there is nothing to measure. Targets that are missed are printed, and no error."""
    arguments = parser().parse_args(argv)
    if device_count() == 0:
        sys.exit("benchmarks.steps needs an NVIDIA GPU")
    file = arguments.out or (None if arguments.only and not arguments.resume else RESULT)
    rows = resumable.kept_rows(file) if arguments.resume else {}
    asked = jobs(arguments)
    names = missing(asked, rows, max_autotune=arguments.max_autotune)
    rows_of = {name: partial(_row, name, asked[name]) for name in names}
    resumable.run_with_bar(rows_of, rows, arguments.minutes, partial(save, rows, file))
    console = report.console()
    console.print(step_summary.rows_table([rows[name] for name in asked if name in rows]))
    console.print(summary.table(step_summary.findings(list(rows.values()))))
    if file is not None:
        console.print(f"written to {file}")


def parser() -> argparse.ArgumentParser:
    """What the command line accepts."""
    made = argparse.ArgumentParser(prog="benchmarks.steps", description=__doc__)
    made.add_argument("--max-autotune", action="store_true", help="torch.compile in this mode too, a minute each")
    made.add_argument("--torch-compile", action="store_true", help="and in its default mode")
    made.add_argument("--compile-seconds", type=float, default=90.0, metavar="N", help="for each; default: %(default)s")
    made.add_argument("--soak", type=int, default=0, metavar="N", help="that many steps of mnist, and what they leave")
    made.add_argument("--prefetch", action="store_true", help="training from batches of the host, of gpt2-mlp-x2")
    resumable.arguments_of(made, RESULT, 15)
    return made


if __name__ == "__main__":
    main()
