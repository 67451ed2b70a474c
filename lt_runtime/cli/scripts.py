"""Runs scripts as `python SCRIPT` does. `python -m lt_runtime.cli.scripts` runs one under a profile."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from lt_runtime.profiling import Profile

_INTERRUPTED: Final = 130


def run_script(script: str, arguments: list[str]) -> tuple[dict[str, Any], int]:
    """Runs a script; returns its globals and the exit status of `python SCRIPT`. Prints tracebacks like Python."""
    sys.argv = [script, *arguments]
    sys.path[0] = str(Path(script).resolve().parent)
    try:
        return runpy.run_path(script, run_name="__main__"), 0
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return {}, (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
    except BaseException as error:
        outer = _within(error.__traceback__, script)
        sys.excepthook(type(error), error.with_traceback(outer), outer)
        if isinstance(error, KeyboardInterrupt):
            return {}, _INTERRUPTED
    return {}, 1


def _within(traceback: TracebackType | None, script: str) -> TracebackType | None:
    """The part of a traceback that begins in the script; all of it if the script is not in it."""
    inner = traceback
    while inner is not None and inner.tb_frame.f_code.co_filename != script:
        inner = inner.tb_next
    return inner or traceback


def _main(options: str, script: str, *arguments: str) -> int:
    """Runs a script under a profile, and writes the report to the file that `lt_runtime profile` reads."""
    asked = json.loads(options)
    report, trace = asked.pop("report"), asked.pop("trace")
    prof = Profile(**asked)
    with prof:
        _, status = run_script(script, [*arguments])
    prof.save(report)
    if trace is not None:
        prof.save_trace(trace)
    return status


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
