"""The parser of the command line's arguments."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from lt_runtime import __version__

_LARGEST: Final = 2**63 - 1
_SHOWN: Final = 60
"""Limit of the characters of a refused value that an error shows."""


def parser(command: str | None) -> argparse.ArgumentParser:
    """The parser of the command line.

    Only the given command gets its arguments: other commands' arguments may need packages that are not installed.
    """
    top = argparse.ArgumentParser(prog="lt_runtime", description="Linear layers, run and trained fast.")
    top.add_argument("--version", action="version", version=f"lt_runtime {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (summary, add_arguments) in _COMMANDS.items():
        added = _add_parser(commands, name, summary)
        if name == command:
            add_arguments(added)
    return top


def _add_parser(parsers: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """Adds the parser of a command or action, whose own help begins with the summary as a sentence."""
    description = f"{summary[0].upper()}{summary[1:]}."
    added: argparse.ArgumentParser = parsers.add_parser(name, help=summary, description=description)
    return added


def _add_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_cache(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add = functools.partial(_add_parser, actions)
    add("list", "the files, and which of them fit this machine")
    show = add("show", "what was decided for problems, and what was rejected")
    show.add_argument("pattern", metavar="KEY-OR-PATTERN", help="such as 8192x3072x768, or '*bfloat16 gelu*'")
    add("verify", "check every file; exits with 1 if one is damaged, or if other users could have written it")
    merge = add("merge", "add the plans of files from equal machines")
    merge.add_argument("files", nargs="+", type=Path, metavar="FILE")
    export = add("export", "write this machine's plans to a file")
    export.add_argument("target", type=Path, metavar="FILE")
    export.add_argument("--file", metavar="NAME", help="another file of the cache, as `cache list` names it")
    prune = add("prune", "remove what this installation will never read again")
    prune.add_argument("--yes", action="store_true", help="remove them; without this option they are only listed")
    for action in actions.choices.values():
        action.add_argument("--json", action="store_true", help="print one JSON object")


def _add_demo(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--epochs", type=_positive, default=40, metavar="N")
    add("--dropout", type=float, default=0.1, metavar="P", help="after each hidden layer (default: 0.1)")
    add("--seed", type=_integer, default=0)
    add("--json", type=Path, metavar="FILE", help="write the results there as JSON")
    add("--profile", action="store_true", help="profile the last epoch, and print where its time went")


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        'A step is a call of lt.TrainStep, or a block of `with lt.range("step")`. Options stand before SCRIPT, its own '
        "arguments after it. The exit status is that of SCRIPT, or 1 if there was nothing to profile."
    )
    add = parser.add_argument
    add("--steps", type=_steps, metavar="A:B", help="steps A to B - 1: the first half is timed, the rest traced")
    add("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto")
    add("--csv", type=Path, metavar="DIR", help="write the tables there")
    add("--plot", type=Path, metavar="FILE", help="draw the roofline, and times beside bytes")
    add("--json", type=Path, metavar="FILE", help="write everything, for `compare`")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    add("--print-nsys", action="store_true", help="print commands for Nsight Systems instead")
    add("--print-ncu", action="store_true", help="print a command for Nsight Compute instead")
    add("--range", metavar="NAME", help="with --print-ncu: only that range, such as forward/layer0")
    _add_script(parser)


def _add_check(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "The exit status is 1 if a function may not be captured, and that of SCRIPT if SCRIPT fails."
    add = parser.add_argument
    add("--function", action="append", metavar="NAME", help="a function without arguments to check (default: step)")
    _add_script(parser)


def _add_script(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("script", type=Path, metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_warmup(parser: argparse.ArgumentParser) -> None:
    from lt_runtime.problem import ACTIVATIONS

    parser.epilog = (
        "Results are written to the plan cache. A layer (M, N, K) stands alone, with all its gradients; the layers of "
        "an MLP are tuned as a training step runs them, each backward pass through the layer below. An activation "
        "follows every layer of an MLP but the last, or the layer that stands alone."
    )
    add, types = parser.add_argument, ("float32", "float16", "bfloat16")
    add("--shapes", type=Path, metavar="FILE", help="layers and MLPs in JSON, or a layer M N K a line")
    add("--mlp", type=_sizes, action="append", metavar="DIMS", help="such as 768,3072,768; with --rows")
    add("--rows", type=_positive, metavar="M", help="the batch of --mlp")
    add("--preset", action="append", metavar="NAME", help="known shapes, such as gpt2-124m")
    add("--recorded", type=Path, metavar="FILE", help="the file of a script that ran with LT_RUNTIME_RECORD=FILE")
    help_dtype = f"of {', '.join(types)} (default: first)"
    add("--dtype", type=_names(*types), action="extend", metavar="TYPES", help=help_dtype)
    add("--compute", choices=("float32", "tf32"), default="float32", help="how FP32 is computed (default: float32)")
    help_activation = f"of {', '.join(ACTIVATIONS)} (default: relu in an MLP, none for a layer that stands alone)"
    add("--activation", type=_names(*ACTIVATIONS), action="extend", metavar="NAMES", help=help_activation)
    add("--device", help="the GPU: its ordinal, cuda or cuda:N (default: the current one)")
    add("--json", action="store_true", help="print one JSON object")


def _names(*accepted: str) -> Callable[[str], list[str]]:
    """Returns a function that reads names with commas between them."""

    def read(text: str) -> list[str]:
        for name in (names := text.split(",")):
            if name not in accepted:
                raise argparse.ArgumentTypeError(f"{_shown(name)} is unknown; accepted are {', '.join(accepted)}")
        return names

    return read


def _sizes(text: str) -> tuple[int, ...]:
    sizes = tuple(map(_positive, text.split(",")))
    if len(sizes) < 2:
        raise argparse.ArgumentTypeError(f"{text} is one size; accepted are two or more: inputs, then outputs")
    return sizes


def _steps(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    steps = (_integer(first), _integer(end)) if first and end else (0, 0)
    if not 0 <= steps[0] < steps[1]:
        raise argparse.ArgumentTypeError(f"{_shown(text)} are no steps; accepted are two numbers, such as 10:20")
    return steps


def _positive(text: str) -> int:
    value = _integer(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def _integer(text: str) -> int:
    try:
        value = int(text)
    except ValueError:  # Python raises this for a text that is no integer, and for thousands of digits
        raise argparse.ArgumentTypeError(f"{_shown(text)} is no integer that is accepted") from None
    if abs(value) > _LARGEST:
        raise argparse.ArgumentTypeError(f"{_shown(text)} is larger than {_LARGEST}")
    return value


def _shown(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}...")


_COMMANDS: Final = {
    "cache": ("look into the cache of measured plans, check it, and carry it elsewhere", _add_cache),
    "check": ("run a script, and say whether functions of it may be captured into a CUDA graph", _add_check),
    "compare": ("compare two profiles that were written by `profile --json` or prof.save", _add_compare),
    "demo": ("train a classifier of handwritten digits, and print its accuracy and speed", _add_demo),
    "doctor": ("say what is installed, what is missing, and how to mend it", _add_doctor),
    "profile": ("run a script, and say where the time of its steps went", _add_profile),
    "warmup": ("measure how layers run fastest, so that training need not", _add_warmup),
}
"""For each command, by name: a summary, and the function that adds its arguments to a parser."""
