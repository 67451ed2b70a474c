"""The commands `profile` and `check`, which run a script as `python SCRIPT` does.

`profile` runs the script in another process, by `python -m lt_runtime.cli.profile`: a script that ends its process then
does not end the command.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from lt_runtime.cli import INTERRUPTED
from lt_runtime.cli.output import print_lines, writable
from lt_runtime.errors import ArgumentError, DeviceError
from lt_runtime.gpu.devices import device_count
from lt_runtime.profiling.capture.check import check_capture
from lt_runtime.profiling.report import Report, check_format, load, plot
from lt_runtime.profiling.session import Profile, profiled_device

_TIMED, _TRACED = 10, 10
_OUTPUT: Final = "lt_runtime-profile"


def run(arguments: argparse.Namespace) -> int:
    """Runs the command `profile` or `check`.

    Returns:
        The script's exit status if it failed. Otherwise 1 if the profile is empty, or if a checked
        function makes calls that a capture forbids; else 0.
    """
    if not arguments.script.is_file():
        raise ArgumentError(f"SCRIPT is {arguments.script}, which is no file")
    return _check(arguments) if arguments.command == "check" else _profile(arguments)


def _check(arguments: argparse.Namespace) -> int:
    if not device_count():
        raise DeviceError("a capture needs a GPU, and there is no usable one here: see `python -m lt_runtime doctor`")
    defined, status = _run_script(str(arguments.script), arguments.arguments)
    if status:
        return status
    names = arguments.function or ["step"]
    for name in names:
        if not callable(defined.get(name)):
            raise ArgumentError(f"{arguments.script} defines no function {name}(); --function names the one to check")
    reports = {name: check_capture(defined[name]) for name in names}
    for name, report in reports.items():
        print(f"{name}: {report}")
    return 0 if all(report.ok for report in reports.values()) else 1


def _profile(arguments: argparse.Namespace) -> int:
    if arguments.range is not None and not arguments.print_ncu:
        raise ArgumentError("--range is for --print-ncu")
    if arguments.print_nsys or arguments.print_ncu:
        _print_commands(arguments)
        return 0
    named = {arguments.script.resolve(): "SCRIPT"}
    for name in ("json", "trace", "plot"):  # a path that cannot be written is refused before the script runs
        if (path := getattr(arguments, name)) is not None:
            setattr(arguments, name, writable(f"--{name}", path))
            if (other := named.setdefault(path.resolve(), f"--{name}")) != f"--{name}":
                raise ArgumentError(f"--{name} is {path}, which is the file of {other} too")
    if arguments.plot is not None:
        check_format(arguments.plot)
    if arguments.csv is not None:
        arguments.csv.mkdir(parents=True, exist_ok=True)
        writable("--csv", arguments.csv / "layers.csv")
    first, end = arguments.steps or (0, _TIMED + _TRACED)
    options = {"skip": first, "timed": (end - first + 1) // 2, "traced": (end - first) // 2}
    options["device"] = profiled_device(arguments.device)
    with tempfile.TemporaryDirectory(prefix="lt_runtime-") as directory:
        file = Path(directory) / "report.json"
        names = str(file), str(arguments.trace or ""), str(arguments.script)
        command = [sys.executable, "-m", "lt_runtime.cli.profile", json.dumps(options), *names, *arguments.arguments]
        status = _status_of(command)
        if not file.exists():
            died = f"by signal {-status} ({signal.strsignal(-status)})" if status < 0 else ""
            ended = died or f"at once, with status {status}"
            print(f"lt_runtime profile: the script was ended {ended}, and left no report", file=sys.stderr)
            return 128 - status if status < 0 else status or 1
        report = load(file)
    print_lines(report.lines())
    for name, write in {"json": Report.save, "csv": Report.to_csv, "plot": plot}.items():
        if (path := getattr(arguments, name)) is not None:
            write(report, path)
    return status or int(not report.layers and not report.kernels)


def _status_of(command: list[str]) -> int:
    """Runs a process, and returns its exit status. Ctrl-C reaches the process too, which then writes its report."""
    with subprocess.Popen(command) as child:
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                return child.wait()


def _run_profiled(options: str, report: str, trace: str, script: str, *arguments: str) -> int:
    """Runs a script under a profile in this process, and writes the report and, unless it is "", the trace."""
    with Profile(**json.loads(options)) as prof:
        _, status = _run_script(script, [*arguments])
    prof.save(report)
    if trace:
        prof.save_trace(trace)
    return status


def _run_script(script: str, arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Runs a script; returns its globals and the exit status of `python SCRIPT`. Prints tracebacks like Python."""
    sys.argv = [script, *arguments]
    if not sys.flags.safe_path:
        sys.path[0] = str(Path(script).resolve().parent)
    try:
        return runpy.run_path(script, run_name="__main__"), 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return {}, (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
    except BaseException as error:
        inner = error.__traceback__  # the traceback from the script's first frame on, without frames of runpy
        while inner is not None and inner.tb_frame.f_code.co_filename != script:
            inner = inner.tb_next
        inner = inner or error.__traceback__
        sys.excepthook(type(error), error.with_traceback(inner), inner)
        if isinstance(error, KeyboardInterrupt):
            return {}, INTERRUPTED
    return {}, 1


def _print_commands(arguments: argparse.Namespace) -> None:
    """Prints command lines of Nsight, which records the steps between the profile's `cuProfilerStart` and `Stop`."""
    first, end = arguments.steps or (_TIMED, _TIMED + _TRACED)
    options = ["--steps", f"{first}:{end}", *(["--device", arguments.device] if arguments.device != "auto" else [])]
    script = [sys.executable, "-m", "lt_runtime", "profile", *options, str(arguments.script)]
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


if __name__ == "__main__":
    sys.exit(_run_profiled(*sys.argv[1:]))
