"""Runs GPU tests of our kernels under compute-sanitizer: `python3 -m tests.sanitize [--tool NAME] [PYTEST
ARGUMENT]...`.

With `--soak MINUTES` memcheck watches the soak (tests/soak.py) instead, on one thread.

All tools run at the same time, each in a process of its own. Each must first find the fault of a kernel made for it
(tests/support/faulty_kernels.py). Property tests run a few examples; tests marked `large` are left out. Every report
about one of our kernels is a failure; reports about other libraries' kernels are counted apart.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.kernel_families import ENTRIES

ROOT: Final = Path(__file__).parents[1]
TOOLS: Final = ("memcheck", "racecheck", "initcheck")
WITH_PRODUCTS: Final = ("linear", "matmul", "padded", "relu_masks")
ALONE: Final = (
    "adamw",
    "add",
    "dropout",
    "fp8",
    "gated",
    "loss",
    "narrow_mlp",
    "norm",
    "own_products",
    "passes",
    "resize",
)
SANITIZER: Final = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
KERNELS: Final = frozenset(ENTRIES)
FAULTY: Final = "faulty_kernel"

_SUMMARY: Final = re.compile(
    r"^=+ (?:ERROR|RACECHECK) SUMMARY: (?:\d+ hazards? displayed \()?(\d+) error", re.MULTILINE
)
_PLACE: Final = re.compile(r"\bat (?:0x[0-9a-f]+ in )?(?:\S+:\d+:)?(?:void )?(\w+)")


@dataclass(frozen=True)
class Verdict:
    """Result of running one tool on one process.

    Attributes:
        status: the process's exit status.
        errors: the tool's count of errors; None if it printed no summary.
        places: names of kernels in reports, with the number of reports.
    """

    tool: str
    status: int
    errors: int | None
    places: Counter[str]

    @property
    def ours(self) -> int:
        """The number of reports that name one of our kernels."""
        return sum(count for kernel, count in self.places.items() if kernel in KERNELS)

    @property
    def clean(self) -> bool:
        """Whether the process succeeded without a report about our kernels. A report without a kernel's name counts
        against them.
        """
        foreign = sum(self.places.values()) - self.ours
        return self.status == 0 and self.errors is not None and not self.ours and (not self.errors or foreign > 0)


def read(tool: str, status: int, output: str) -> Verdict:
    """Parses a tool's output."""
    found = _SUMMARY.search(output)
    return Verdict(tool, status, int(found[1]) if found else None, Counter(_PLACE.findall(_reports(output))))


def _reports(output: str) -> str:
    """Finds the lines that name the kernel with the fault: the second line of each report, but the first of
    racecheck's.
    """
    lines = (line for line in output.splitlines() if line.startswith("="))
    return "\n".join(line for line in lines if re.match(r"=+ +(at |and \w+ access at |(Error|Warning): Race )", line))


def command(tool: str, log: Path) -> list[str]:
    """The command line of a tool.

    Memcheck and racecheck watch our kernels alone. Initcheck watches all kernels, because it must know every write.
    """
    names = () if tool == "initcheck" else (*sorted(KERNELS), FAULTY)
    only = [argument for name in names for argument in ("--kernel-regex", f"kns={name}")]
    # Tests make driver calls fail on purpose, and backtraces of the Python interpreter do not help.
    quiet = ["--report-api-errors", "no", "--show-backtrace", "no", "--print-limit", "10000", "--log-file", str(log)]
    return [SANITIZER, "--tool", tool, "--target-processes", "application-only", *quiet, *only, sys.executable]


def selection(tool: str) -> list[str]:
    """The tests for a tool, as arguments of pytest.

    Only memcheck gets tests with matrix products: initcheck cannot see the writes of some of cuBLASLt's kernels, and
    racecheck ends with a hardware exception in them (13.0).
    """
    names = (*ALONE, *WITH_PRODUCTS) if tool == "memcheck" else ALONE
    left_out = [
        "pytorch",
        "thread",
        "allocated",
        "candidate",
    ]  # these tests concern other libraries, the host, memory, or cuBLASLt alone, and no kernel of ours
    if tool != "memcheck":
        left_out += ["layer_s", "linear"]
    expression = " and ".join(f"not {word}" for word in left_out)
    return ["-m", "not large", "-k", expression, *(f"tests/gpu/test_{name}.py" for name in names)]


def supervise(tool: str, arguments: Sequence[str], examples: int, directory: Path) -> tuple[Verdict, str]:
    """Runs Python under a tool; returns the verdict, and the program's output followed by the tool's."""
    log = directory / f"{tool}-{len(list(directory.iterdir()))}.log"
    environment = os.environ | {"LT_REQUIRE_GPU": "1", "LT_TEST_EXAMPLES": str(examples)}
    done = subprocess.run([*command(tool, log), *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    said = log.read_text() if log.exists() else ""
    return read(tool, done.returncode, said), done.stdout + done.stderr + said


def tests(arguments: Sequence[str]) -> list[str]:
    """Python's arguments that run pytest in the one process that a tool watches."""
    return ["-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]


def soak(minutes: float) -> list[str]:
    """Python's arguments that run the soak."""
    return ["-m", "tests.soak", "--minutes", str(minutes), "--threads", "1"]


def examine(tool: str, program: Sequence[str], examples: int, directory: Path) -> tuple[Verdict | None, str]:
    """Runs the tool on a kernel with a planted fault.

    Returns a verdict if the tool did not find the fault, otherwise None.
    """
    probe, output = supervise(tool, ["-m", "tests.support.faulty_kernels", tool], examples, directory)
    if not probe.places[FAULTY]:
        return None, output
    return supervise(tool, program, examples, directory)


def line(tool: str, verdict: Verdict | None) -> str:
    """Formats a line of the table of results."""
    if verdict is None:
        return f"{tool:10} FAILED   does not find the fault that was made for it"
    others = sum(verdict.places.values()) - verdict.ours
    found = "no summary" if verdict.errors is None else f"{verdict.errors} errors"
    word = "clean " if verdict.clean else "FAILED"
    return (
        f"{tool:10} {word}   the program ended with {verdict.status}, {found}: "
        f"{verdict.ours} reports of our kernels, {others} of others'"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table of results, and all output of tools that failed; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.sanitize", description=__doc__)
    parser.add_argument("--tool", action="append", choices=TOOLS, help="default: all of them")
    parser.add_argument("--examples", type=int, default=8, metavar="N", help="of a property test; default: %(default)s")
    parser.add_argument("--soak", type=float, metavar="MINUTES", help="the soak under memcheck, and no tests")
    options, rest = parser.parse_known_args(argv)
    tools = ["memcheck"] if options.soak else options.tool or TOOLS
    if not Path(SANITIZER).exists():
        sys.exit("compute-sanitizer is not installed; it is part of the CUDA toolkit")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(len(tools)) as pool:
        places = {tool: Path(scratch, tool) for tool in tools}
        for place in places.values():
            place.mkdir()
        programs = {tool: soak(options.soak) if options.soak else tests(rest or selection(tool)) for tool in tools}
        jobs = {tool: pool.submit(examine, tool, programs[tool], options.examples, places[tool]) for tool in tools}
        results = {tool: job.result() for tool, job in jobs.items()}
    failed = [tool for tool, (verdict, _) in results.items() if verdict is None or not verdict.clean]
    for tool in failed:
        print(f"=== {tool}\n{results[tool][1]}")
    for tool, (verdict, _) in results.items():
        print(line(tool, verdict))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
