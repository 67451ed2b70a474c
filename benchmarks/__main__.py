"""Measures suites: `python -m benchmarks SUITE... [options]`; `--list` says what each suite measures.

Some words are commands instead of suites; `python -m benchmarks COMMAND --help` has their options:
    compare        compares old results with new ones
    report         writes the tables and plots of the pages, and tells which rows were measured with older code
    distances      measures how far losses of training are from those of a float64 run
    fp8-accuracy   compares losses of training in FP8 with those in BF16
    derive-priors  fits the table by which layers that were not measured choose their strategy

A name before a colon in the help of an option is the suite that has the option.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from benchmarks import report, runner


def pattern(text: str) -> str:
    """A regular expression, unchanged.

    Raises:
        ValueError: the text is no regular expression.
    """
    try:
        return re.compile(text).pattern
    except re.error as error:
        raise ValueError from error


def part(text: str) -> tuple[int, int]:
    """Parses I/N, the I-th of N parts.

    Raises:
        ValueError: the text has another form, or I is not from 1 to N.
    """
    number, parts = map(int, text.split("/"))
    if 1 <= number <= parts:
        return number, parts
    raise ValueError


SUITES: Final = (*"kernels layers wide untuned steps models torch narrow host growth tuning cold fp8 scaling".split(),)  # noqa: SIM905
_COMMANDS: Final = ("compare", "report", "distances", "fp8-accuracy", "derive-priors")
_MODULES: Final = {"report": "tables", "derive-priors": "priors"}
"""The modules of commands that have another name than their module."""
_FLAG: Final = {"action": "store_true"}
_SPECIAL: Final[dict[str, tuple[Sequence[str], str, dict[str, Any]]]] = {
    "ours": (("fp8", "host", "kernels", "layers", "models", "steps"), "measure only our public calls", _FLAG),
    "keep-plans": (
        ("layers", "wide", "steps", "models", "torch", "fp8"),
        "tune in the plan cache of $LT_RUNTIME_CACHE_DIR, and not in an empty one for each row",
        _FLAG,
    ),
    "dtype": (("layers", "wide", "untuned"), "measure only this type", {"choices": ("bf16", "tf32", "fp32")}),
    "activation": (("layers",), "measure only this activation", {"choices": ("gelu", "relu")}),
    "max-autotune": (
        ("layers", "wide", "steps", "models", "torch", "narrow", "fp8"),
        "add torch.compile at its greatest effort, up to a minute for each row; layers: to 24 blocks",
        _FLAG,
    ),
    "torch-compile": (
        ("kernels", "layers", "wide", "steps", "narrow"),
        "add torch.compile: kernels at its greatest effort, others in its default mode; layers: to 24 blocks",
        _FLAG,
    ),
    "no-compile": (("torch",), "leave out all that torch.compile compiles, up to a minute for each contender", _FLAG),
    "contenders": (
        ("torch",),
        "measure only contenders in whose name this regular expression is found",
        {"metavar": "PATTERN", "type": pattern},
    ),
    "jax": (("layers", "wide", "steps", "models", "narrow"), "add JAX; layers: to 24 blocks", _FLAG),
    "prefetch": (("steps",), "add training from batches on the host", _FLAG),
}
"""Options that only some suites have: for each, the suites, the help text, and the function that parses its value."""


def parser() -> argparse.ArgumentParser:
    """The options that every suite has."""
    made = report.command("", __doc__)
    made.add_argument("suites", nargs="*", metavar="SUITE", help=", ".join(SUITES))
    made.add_argument("--list", action="store_true", help="say what each suite measures")
    told = "measure only cases in whose name this regular expression is found"
    made.add_argument("--only", type=pattern, metavar="PATTERN", help=told)
    made.add_argument("--rounds", type=int, metavar="N", help="number of timed rounds; each suite has a default")
    told = "begin no further row of a suite after N minutes"
    made.add_argument("--minutes", type=float, default=float("inf"), metavar="N", help=told)
    told = "keep the rows of the result file, and measure those that are missing, of older code, or lack a contender"
    made.add_argument("--resume", action="store_true", help=told)
    told = "with --resume: measure only the I-th of N parts, so that N processes, each on its own GPU, share a suite"
    made.add_argument("--part", type=part, default=(1, 1), metavar="I/N", help=told)
    told = "measure nothing: list the cases that would be measured, with the seconds that each took the last time"
    made.add_argument("--dry-run", action="store_true", help=told)
    told = "the folder of the result files, SUITE.json; by default benchmarks/results/h200, for whole suites with all "
    told += "contenders, and with --resume; other runs write no file"
    made.add_argument("--out", metavar="DIR", help=told)
    for name, (suites, told, how) in _SPECIAL.items():
        made.add_argument(f"--{name}", help=f"{', '.join(suites)}: {told}", **how)
    return made


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line.

    Raises:
        SystemExit: the command line names no suite, or an option that none of its suites has.
    """
    made = parser()
    options = made.parse_args(argv)
    unknown = [name for name in options.suites if name not in SUITES]
    if unknown or not (options.suites or options.list):
        made.error(f"name a suite of {', '.join(SUITES)}" + (f", not {', '.join(unknown)}" if unknown else ""))
    if options.part[1] > 1 and not options.resume:
        made.error("--part needs --resume, because the other parts write into the same file")
    for name, (suites, _, _) in _SPECIAL.items():
        if getattr(options, name.replace("-", "_")) and not set(suites) & set(options.suites):
            made.error(f"--{name} is an option of {' and '.join(suites)}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the suites in the order in which the command line names them; or runs a command such as `compare`."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0] in _COMMANDS:
        module = _MODULES.get(arguments[0], arguments[0].replace("-", "_"))
        import_module(f"benchmarks.{module}").main(arguments[1:])
        return
    options = options_of(arguments)
    if options.list:
        for name in SUITES:
            print((import_module(f"benchmarks.{name}").__doc__ or "").partition("\n")[0])
        return
    for name in options.suites:
        made = import_module(f"benchmarks.{name}").SUITE
        foreign = {each.replace("-", "_"): None for each, (suites, _, _) in _SPECIAL.items() if name not in suites}
        of_suite = argparse.Namespace(**vars(options) | foreign | {"rounds": options.rounds or made.rounds})
        runner.run(name, made, of_suite)


if __name__ == "__main__":
    main()
