"""Runs scripts as `python SCRIPT` would; as a module, under a profile: `python -m lt_runtime.cli.scripts`."""

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
    """What the script defines, and the exit status that Python would end with; a traceback is printed, as by Python."""
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
    """A traceback from the first line of the script on; all of it if the script has not begun."""
    inner = traceback
    while inner is not None and inner.tb_frame.f_code.co_filename != script:
        inner = inner.tb_next
    return inner or traceback


def _main(options: str, script: str, *arguments: str) -> int:
    """Runs a script under a profile, and writes the report where `lt_runtime profile` reads it."""
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
