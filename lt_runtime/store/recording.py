"""The problems that a script meets, written to a file for the warm-up command, one line of JSON each.

`LT_RUNTIME_RECORD` names the file. Any number of processes may append to it, because each line is one write.
"""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import warnings
from pathlib import Path
from typing import Final

from lt_runtime.errors import ArgumentError
from lt_runtime.store.keys import SCHEMA, Problem, parse_key, problem_key

RECORD_VARIABLE: Final = "LT_RUNTIME_RECORD"
_COMMENT: Final = "#"
_ANOTHER_VERSION: Final = "it was recorded by another version of lt_runtime"
_HEADING: Final = f"{_COMMENT} lt_runtime: problems of schema {SCHEMA}, for `lt_runtime warmup --recorded`\n"

_recorded: set[tuple[str, str]] = set()
"""Files and the keys that this process has written to them, or tried to."""
_lock = threading.Lock()


def record(problem: Problem) -> None:
    """Appends a problem to the file that the environment names, if it names one. A process writes each problem once.

    A file that cannot be written costs one warning.
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
    with Path(path).open("a+b", buffering=0) as file:
        file.seek(0)
        head = file.read(len(_HEADING)).decode(errors="replace")
        if _is_of_another_version(head):
            raise OSError(errno.EEXIST, _ANOTHER_VERSION)
        file.write(((_HEADING if not head else "") + line).encode())


def _is_of_another_version(head: str) -> bool:
    found = re.match(r"# lt_runtime: problems of schema (\d+)", head)
    return found is not None and int(found[1]) != SCHEMA


def read_recorded(path: Path) -> list[Problem]:
    """The problems in a file, without repetitions, in the order in which they were met.

    Raises:
        ArgumentError: the file cannot be read, was written by another version, or has a line that `record` would not
            write.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if lines and _is_of_another_version(lines[0]):
        raise ArgumentError(f"{path} cannot be used ({_ANOTHER_VERSION})")
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line and not line.startswith(_COMMENT))
    return list(dict.fromkeys(_read_line(f"{path}, line {number}", line) for number, line in numbered))


def _read_line(place: str, line: str) -> Problem:
    try:
        return parse_key(json.loads(line)["problem"])
    except (KeyError, TypeError, ValueError) as error:
        accepted = 'lines such as {"problem": KEY} of this version of lt_runtime'
        raise ArgumentError(f"{place} is {line[:80]!r}; accepted are {accepted} ({error})") from None
