"""The command line: `python -m lt_runtime demo|doctor`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from lt_runtime.errors import LtError


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except LtError as error:
        print(f"lt_runtime {arguments.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lt_runtime", description="Linear layers, run and trained fast.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands.add_parser("demo", help="train a classifier of handwritten digits"))
    _add_doctor(commands.add_parser("doctor", help="say what is installed, what is missing, and how to mend it"))
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--epochs", type=_positive, default=40, metavar="N")
    parser.add_argument(
        "--dropout", type=float, default=0.1, metavar="P", help="after each hidden layer (default: 0.1)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as JSON")
    parser.set_defaults(run=_demo)


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_doctor)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _demo(arguments: argparse.Namespace) -> int:
    from lt_runtime.cli import demo

    settings = demo.Settings(arguments.device, arguments.dtype, arguments.epochs, arguments.dropout, arguments.seed)
    return demo.run(settings, arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from lt_runtime.cli import doctor

    return doctor.run(as_json=arguments.json)
