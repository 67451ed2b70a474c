"""Recordings: the problems that a script runs, written to a file for the command `warmup`, one JSON line for each.

`LT_RUNTIME_RECORD` names the file. Any number of processes may append to it, because each line is one write under a
lock. If the system writes only a part of a line, that part is removed again. A line that is incomplete because its
writer was killed is skipped when the file is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import threading
import time
import warnings
from pathlib import Path
from typing import Final

from lt_runtime.environment import RECORD_VARIABLE, setting
from lt_runtime.errors import ArgumentError
from lt_runtime.files import parse_json, read_regular, try_lock
from lt_runtime.store.keys import SCHEMA, Problem, parse_key, problem_key

_COMMENT: Final = "#"
_ANOTHER_VERSION: Final = "it was recorded by another version of lt_runtime"
_HEADING: Final = f"{_COMMENT} lt_runtime: problems of schema {SCHEMA}, for `lt_runtime warmup --recorded`\n"
_START, _END = '{"problem": "', '}"}'

_OF_D: Final = "d", "c", "aux", "y", "preactivation", "addend", "dy", "dz", "output_derivative"
_OF_A: Final = "a", "x", "dx", "input_derivative"
_AXES: Final = dict.fromkeys(_OF_D, "MN") | dict.fromkeys(_OF_A, "MK") | {"b": "KN", "w": "NK", "dw": "NK"}
"""The two axes of each matrix of a problem, by field name; for a derivative, the axes of its saved tensor."""

# Largest size of a recording in bytes.
_LARGEST: Final = 16 << 20
# Largest number of characters of a line; a problem's line has less than two thousand.
_LONGEST: Final = 10_000
_LOCK_SECONDS: Final = 1.0
_POLL_SECONDS: Final = 0.001

_recorded: set[tuple[str, str]] = set()
"""Pairs (file, key) that this process has written, or tried to write."""
_complained: set[str] = set()
"""Files that could not be written, for which this process has already given a warning."""
_lock = threading.Lock()


def record(problem: Problem) -> None:
    """Appends a problem to the file named by `LT_RUNTIME_RECORD`, if it is set. A process writes each problem once.

    If a file cannot be written, one warning is given.
    """
    path = setting(RECORD_VARIABLE)
    if not path:
        return
    key = problem_key(problem)
    with _lock:
        if (path, key) in _recorded:
            return
        _recorded.add((path, key))
        try:
            _append(path, f"{json.dumps({'problem': key})}\n")
        except OSError as error:
            if path not in _complained:
                _complained.add(path)
                warnings.warn(f"{RECORD_VARIABLE} is {path}, which cannot be written ({error.strerror})", stacklevel=2)


def _append(path: str, line: str) -> None:
    """Appends a whole line or nothing, under a lock that excludes other writers if the file system supports locks.

    Raises:
        BlockingIOError: another process holds the lock for longer than a write can take.
    """
    # O_NONBLOCK: opening must not block, even if the path is a FIFO without a reader.
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_NOCTTY, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        deadline = time.monotonic() + _LOCK_SECONDS
        while try_lock(handle) is False:
            if time.monotonic() > deadline:
                raise BlockingIOError(errno.EAGAIN, "another process has it locked")
            time.sleep(_POLL_SECONDS)
        if _is_of_another_version(os.pread(handle, len(_HEADING), 0).decode(errors="replace")):
            raise OSError(errno.EEXIST, _ANOTHER_VERSION)
        size = os.fstat(handle).st_size
        is_cut_off = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        text = ("\n" if is_cut_off else "" if size else _HEADING).encode() + line.encode()
        if os.write(handle, text) < len(text):
            os.ftruncate(handle, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        # Unlocks explicitly: a child process that was forked meanwhile also holds the handle, so that closing it would
        # not unlock.
        with contextlib.suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)


def _is_of_another_version(head: str) -> bool:
    found = re.match(r"# lt_runtime: problems of schema (\d+),", head)
    return found is not None and found[1] != str(SCHEMA)


def read_recorded(path: Path) -> list[Problem]:
    """The distinct problems in a recording, in the order in which they were recorded.

    Lines that were cut off because their writer was killed are skipped, with one warning.

    Raises:
        ArgumentError: the file cannot be read, was written by another version, or has a line that `record` would not
            write.
    """
    try:
        lines = read_regular(path, _LARGEST).decode().split("\n")
    except (OSError, ValueError) as error:
        raise ArgumentError(f"{path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    if _is_of_another_version(lines[0]):
        raise ArgumentError(f"{path} cannot be used ({_ANOTHER_VERSION})")
    whole = {number: line for number, line in enumerate(lines, 1) if line and not line.startswith(_COMMENT)}
    # A line counts as cut off if it begins like a line that `record` writes, but does not end like one.
    begun = [number for number, line in whole.items() if _START.startswith(line[: len(_START)])]
    cut_off = {number: whole.pop(number) for number in begun if not whole[number].rstrip().endswith(_END)}
    if cut_off:
        shown = ", ".join(map(str, [*cut_off][:3])) + (", ..." if len(cut_off) > 3 else "")
        warnings.warn(f"{path}: line {shown} is cut off and skipped", stacklevel=2)
    return list(dict.fromkeys(_read_line(f"{path}, line {number}", line) for number, line in whole.items()))


def _read_line(place: str, line: str) -> Problem:
    try:
        if len(line) > _LONGEST:
            raise ValueError(f"it has {len(line)} characters")
        problem = parse_key(parse_json(line.encode())["problem"])
        if not isinstance(problem, Problem):
            raise ValueError("it is no single problem")
        _check_shapes(problem)
        return problem
    except (ArithmeticError, KeyError, MemoryError, RecursionError, TypeError, ValueError) as error:
        accepted = 'lines such as {"problem": KEY} of this version of lt_runtime'
        raise ArgumentError(f"{place} is {line[:80]!r}; accepted are {accepted} ({error})") from None


def _check_shapes(problem: Problem) -> None:
    """Raises `ValueError` if an axis has different lengths in two matrices of a problem."""
    lengths = dict[str, int]()
    for name, axes in _AXES.items():
        operand = getattr(problem, name, None)
        spec = getattr(operand, "saved_spec", operand)
        for axis, length in zip(axes, spec.layout.shape, strict=True) if spec else ():
            if lengths.setdefault(axis, length) != length:
                raise ValueError(f"{name} has {length} elements along {axis}, and other matrices {lengths[axis]}")
