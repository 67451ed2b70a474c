"""The host's time of a call: `python3 -m benchmarks.host [--only PATTERN] [--profile]`.

Wall clock of calls back to back that nobody waits for: few enough, and on operands small enough, that the driver's
queue does not fill and only the host's own work counts. Contenders take turns in short rounds within one run; each
figure is a median over the rounds, its spread their interquartile range.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final

from benchmarks import report, resumable
from benchmarks.host_cases import HOST, HostCase
from benchmarks.report import Row
from lt_runtime.gpu.devices import device_count

RESULT: Final = report.RESULTS / "host.json"
ROUNDS: Final = 41
_PROFILED: Final = 2000  # calls


def measure(case: HostCase, rounds: int) -> Row:
    """One row; afterwards its memory is given back."""
    from benchmarks import host_builders
    from benchmarks.graphs import release

    try:
        return host_builders.measure(case, rounds)
    finally:
        release()


def profile(case: HostCase) -> str:
    """Where our call spends its time."""
    from benchmarks.host_builders import builders, synchronize
    from benchmarks.host_timing import profile, repeat

    call = builders(case)["lt"]()
    repeat(call, case.calls)
    return profile(call, case.calls, -(-_PROFILED // case.calls), synchronize)


def main(argv: Sequence[str] | None = None) -> None:
    """Without a GPU there is nothing to measure. Targets that are missed are printed, and no error."""
    arguments = parser().parse_args(argv)
    if device_count() == 0:
        sys.exit("benchmarks.host needs an NVIDIA GPU")
    cases = {case.name: case for case in HOST}
    if arguments.profile:
        for name in resumable.chosen([*cases], arguments.only):
            print(f"{name}: {profile(cases[name])}\n")
        return
    resumable.run({name: partial(measure, case, arguments.rounds) for name, case in cases.items()}, arguments, RESULT)


def parser() -> argparse.ArgumentParser:
    """What the command line accepts."""
    made = argparse.ArgumentParser(prog="benchmarks.host", description=__doc__)
    resumable.arguments_of(made, RESULT, ROUNDS)
    told = "print what Python spends its time on in our calls, and measure nothing"
    made.add_argument("--profile", action="store_true", help=told)
    return made


if __name__ == "__main__":
    main()
