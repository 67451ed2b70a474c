"""The command `profile`: runs a script under a profile, or prints the commands of NVIDIA's profilers for it."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from lt_runtime.cli.output import print_lines, writable
from lt_runtime.errors import ArgumentError
from lt_runtime.profiling.plot import check_format, plot
from lt_runtime.profiling.report import load
from lt_runtime.profiling.session import profiled_device

_TIMED, _TRACED = 10, 10
_OUTPUT: Final = "lt_runtime-profile"


def run(arguments: argparse.Namespace) -> int:
    """Returns the script's exit status, or 1 if there is no report or an empty one."""
    script: Path = arguments.script
    if not script.is_file():
        raise ArgumentError(f"SCRIPT is {script}, which is no file")
    if arguments.range is not None and not arguments.print_ncu:
        raise ArgumentError("--range is for --print-ncu")
    if arguments.print_nsys or arguments.print_ncu:
        _print_commands(arguments)
        return 0
    _check_outputs(arguments)
    with tempfile.TemporaryDirectory(prefix="lt_runtime-") as directory:
        report = Path(directory) / "report.json"
        files = {"report": str(report), "trace": None if arguments.trace is None else str(arguments.trace)}
        options = {**_counts(arguments.steps), "device": profiled_device(arguments.device), **files}
        command = [sys.executable, "-m", "lt_runtime.cli.scripts", json.dumps(options), str(script)]
        status = subprocess.run([*command, *arguments.arguments], check=False).returncode
        if not report.exists():
            return _say_there_is_none(status)
        return _show(report, arguments, status)


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Checks that all results can be written, before the script runs, and resolves symbolic links."""
    for name in ("json", "trace", "plot"):
        path = getattr(arguments, name)
        if path is not None:
            setattr(arguments, name, writable(f"--{name}", path))
    if arguments.plot is not None:
        check_format(arguments.plot)
    if arguments.csv is not None:
        arguments.csv.mkdir(parents=True, exist_ok=True)
        writable("--csv", arguments.csv / "layers.csv")


def _counts(steps: tuple[int, int] | None) -> dict[str, int]:
    """How many steps to skip, time and trace. The first half of `--steps` is timed, the rest is traced."""
    if steps is None:
        return {"skip": 0, "timed": _TIMED, "traced": _TRACED}
    first, end = steps
    return {"skip": first, "timed": (end - first + 1) // 2, "traced": (end - first) // 2}


def _show(file: Path, arguments: argparse.Namespace, status: int) -> int:
    """Prints the report and writes the files; returns the script's status, or 1 if the report is empty."""
    report = load(file)
    print_lines(report.lines())
    if arguments.json is not None:
        report.save(arguments.json)
    if arguments.csv is not None:
        report.to_csv(arguments.csv)
    if arguments.plot is not None:
        plot(report, arguments.plot)
    return status or int(not report.layers and not report.kernels)


def _say_there_is_none(status: int) -> int:
    ended = f"by signal {-status} ({signal.strsignal(-status)})" if status < 0 else f"at once, with status {status}"
    print(f"lt_runtime profile: the script was ended {ended}, and left no report", file=sys.stderr)
    return 128 - status if status < 0 else status or 1


def _print_commands(arguments: argparse.Namespace) -> None:
    """Prints command lines of Nsight, which records the steps between the profile's `cuProfilerStart` and `Stop`."""
    first, end = arguments.steps or (_TIMED, _TIMED + _TRACED)
    script = [sys.executable, "-m", "lt_runtime", "profile", "--steps", f"{first}:{end}", str(arguments.script)]
    script += arguments.arguments
    if arguments.print_nsys:
        options = ["-t", "cuda,nvtx,cublas", "--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
        print(shlex.join(["nsys", "profile", *options, "-o", _OUTPUT, *script]))
        print(shlex.join(["nsys", "stats", "--report", "cuda_gpu_kern_sum,nvtx_gpu_proj_sum", f"{_OUTPUT}.nsys-rep"]))
    if arguments.print_ncu:
        options = ["--set", "full", "--target-processes", "all", "--profile-from-start", "off"]
        if arguments.range is not None:
            name = arguments.range.replace("/", r"\/")  # an unescaped slash would end the name of the range
            options += ["--nvtx", "--nvtx-include", f"lt_runtime@{name}/"]
        print(shlex.join(["ncu", *options, "-o", _OUTPUT, *script]))
        print("# Kernels of a captured step are in no range: a range needs TrainStep(..., graph=False).")
