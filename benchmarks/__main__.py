"""The one entry: `python -m benchmarks SUITE... [options]`, or a command.

Commands are compare, report, derive-priors and judge-priors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Final

from benchmarks import report, suite

SUITES: Final = ("kernels", "layers", "wide", "parts", "untuned", "steps", "narrow", "host", "tuning", "cold")
_COMMANDS: Final = {"compare": "compare", "report": "readme", "derive-priors": "priors", "judge-priors": "judge"}
_SPECIAL: Final = {
    "dtype": ("layers", "wide", "parts", "untuned"),
    "activation": ("layers",),
    "max_autotune": ("layers", "wide", "steps", "narrow"),
    "torch_compile": ("kernels", "steps"),
    "jax": ("layers", "steps", "narrow"),
    "soak": ("steps",),
    "prefetch": ("steps",),
    "profile": ("host",),
    "ours": ("host", "kernels", "layers", "steps"),
    "keep_plans": ("layers", "wide", "steps"),
}
"""Options that mean nothing to the other suites."""


def parser() -> argparse.ArgumentParser:
    """The options of all suites."""
    made = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    made.add_argument("suites", nargs="+", choices=SUITES, metavar="SUITE", help=", ".join(SUITES))
    made.add_argument("--only", metavar="PATTERN", help="cases in whose name this regular expression is found")
    made.add_argument("--rounds", type=int, metavar="N", help="rounds that count; each suite has a default")
    made.add_argument("--minutes", type=float, default=float("inf"), metavar="N", help="begin no row after this time")
    made.add_argument("--resume", action="store_true", help="keep the file's rows, and measure those that it lacks")
    told = f"the folder for SUITE.json; for a whole suite and with --resume it is {report.RESULTS} by default"
    made.add_argument("--out", metavar="DIR", help=told)
    made.add_argument("--ours", action="store_true", help="host, kernels, layers, steps: only our own calls")
    told = "layers, wide, steps: tune in the plan cache of $LT_RUNTIME_CACHE_DIR, not in an empty one for each row"
    made.add_argument("--keep-plans", action="store_true", help=told)
    made.add_argument("--dtype", choices=("bf16", "tf32", "fp32"), help="layers, wide, parts, untuned: only this type")
    made.add_argument("--activation", choices=("gelu", "relu"), help="layers: only this activation")
    told = "layers, wide, steps, narrow: torch.compile in this mode too, a minute each; layers: six representative ones"
    made.add_argument("--max-autotune", action="store_true", help=told)
    made.add_argument(
        "--torch-compile", action="store_true", help="steps, kernels: torch.compile too, in steps by default"
    )
    told = "layers, steps, narrow: JAX too; layers: six representative ones"
    made.add_argument("--jax", action="store_true", help=told)
    made.add_argument(
        "--compile-seconds", type=float, default=150.0, metavar="N", help="for each; default: %(default)g"
    )
    made.add_argument("--soak", type=int, default=0, metavar="N", help="steps: N steps of mnist, and what they leave")
    made.add_argument("--prefetch", action="store_true", help="steps: training from batches on the host too")
    made.add_argument("--profile", action="store_true", help="host: print where our calls spend their time instead")
    return made


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line.

    Raises:
        SystemExit: it names no suite, or an option that none of its suites has.
    """
    made = parser()
    options = made.parse_args(argv)
    for name, suites in _SPECIAL.items():
        if getattr(options, name) and not set(suites) & set(options.suites):
            made.error(f"--{name.replace('_', '-')} is an option of {' and '.join(suites)}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the suites in the order given, or a command."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and arguments[0] in _COMMANDS:
        import_module(f"benchmarks.{_COMMANDS[arguments[0]]}").main(arguments[1:])
        return
    options = options_of(arguments)
    for name in options.suites:
        module = import_module(f"benchmarks.{name}")
        if options.profile and name == "host":
            module.print_profiles(options.only)
            continue
        of_suite = argparse.Namespace(**vars(options) | {"rounds": options.rounds or module.SUITE.rounds})
        suite.run(name, module.SUITE, of_suite)


if __name__ == "__main__":
    main()
