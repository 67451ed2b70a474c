"""The command `check`: whether functions of a script may be captured into a CUDA graph."""

from __future__ import annotations

import argparse

from lt_runtime.cli.scripts import run_script
from lt_runtime.errors import ArgumentError
from lt_runtime.profiling.capture.check import check_capture


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if all functions may be captured, 1 if one may not, or else the script's own status."""
    if not arguments.script.is_file():
        raise ArgumentError(f"SCRIPT is {arguments.script}, which is no file")
    defined, status = run_script(str(arguments.script), arguments.arguments)
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
