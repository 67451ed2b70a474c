"""The command line: `python -m lt_runtime cache|demo|doctor`."""

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
    _add_cache(commands.add_parser("cache", help="look into the cache of measured plans, and carry it elsewhere"))
    _add_demo(commands.add_parser("demo", help="train a classifier of handwritten digits"))
    _add_doctor(commands.add_parser("doctor", help="say what is installed, what is missing, and how to mend it"))
    return parser


def _add_cache(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="the files, and which of them fit this machine")
    show = actions.add_parser("show", help="what was decided for problems, and what was rejected")
    show.add_argument("pattern", metavar="KEY-OR-PATTERN", help="such as 8192x3072x768, or '*bfloat16 gelu*'")
    actions.add_parser("verify", help="check every file; exits with 1 if one is damaged")
    merge = actions.add_parser("merge", help="add the plans of files from equal machines")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE")
    export = actions.add_parser("export", help="write this machine's plans to a file")
    export.add_argument("target", type=Path, metavar="FILE")
    export.add_argument("--file", metavar="NAME", help="another file of the cache, as `cache list` names it")
    prune = actions.add_parser("prune", help="remove what this installation will never read again")
    prune.add_argument("--yes", action="store_true", help="do it; without this it only says what it would remove")
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_cache)


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


def _cache(arguments: argparse.Namespace) -> int:
    from lt_runtime.cli import cache

    return cache.run(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from lt_runtime.cli import demo

    settings = demo.Settings(arguments.device, arguments.dtype, arguments.epochs, arguments.dropout, arguments.seed)
    return demo.run(settings, arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from lt_runtime.cli import doctor

    return doctor.run(as_json=arguments.json)
