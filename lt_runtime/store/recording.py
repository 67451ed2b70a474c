"""The problems that a script meets, written to a file for the warm-up tool: a line of JSON each.

`LT_RUNTIME_RECORD` names the file. Any number of processes may append to the same one: each line is one write.
"""

from __future__ import annotations

import json
import os
import threading
import warnings
from pathlib import Path
from typing import Final

from lt_runtime.errors import ArgumentError
from lt_runtime.store.keys import SCHEMA, Problem, parse_key, problem_key

RECORD_VARIABLE: Final = "LT_RUNTIME_RECORD"
_COMMENT: Final = "#"
_HEADING: Final = f"{_COMMENT} lt_runtime: problems of schema {SCHEMA}, for `lt_runtime warmup --recorded`\n"

_recorded: set[tuple[str, str]] = set()
"""Files and the keys that this process has written to them, or tried to."""
_lock = threading.Lock()


def record(problem: Problem) -> None:
    """Appends a problem to the file that the environment names, if it does, once a process.

    A file that cannot be written costs a warning, the first time.
    """
    path = os.environ.get(RECORD_VARIABLE)
    if not path:
        return
    key = problem_key(problem)
    with _lock:
        if (path, key) in _recorded:
            return
        is_first = all(path != known for known, _ in _recorded)
        _recorded.add((path, key))
        try:
            _append(path, json.dumps({"problem": key}) + "\n")
        except OSError as error:
            if is_first:
                warnings.warn(f"{RECORD_VARIABLE} is {path}, which cannot be written ({error.strerror})", stacklevel=2)


def _append(path: str, line: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        heading = "" if os.fstat(descriptor).st_size else _HEADING
        os.write(descriptor, (heading + line).encode())
    finally:
        os.close(descriptor)


def read_recorded(path: Path) -> list[Problem]:
    """The problems in a file, none twice, in the order in which they were met.

    Raises:
        ArgumentError: the file cannot be read, or a line of it is not as `record` writes them.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line and not line.startswith(_COMMENT))
    return list(dict.fromkeys(_read_line(f"{path}, line {number}", line) for number, line in numbered))


def _read_line(place: str, line: str) -> Problem:
    try:
        return parse_key(json.loads(line)["problem"])
    except (KeyError, TypeError, json.JSONDecodeError):
        accepted = '{"problem": KEY}'
        raise ArgumentError(f"{place} is {line[:80]!r}; accepted are lines such as {accepted}") from None
    except ValueError as error:
        raise ArgumentError(f"{place}, problem: {error}; it may be of another version of lt_runtime") from None
