"""Prints a command's result, as one JSON object or as lines and tables."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lt_runtime.errors import ArgumentError, printable
from lt_runtime.files import replacing
from lt_runtime.tables import Line, rendered

if TYPE_CHECKING:
    from lt_runtime.store.keys import Json


def show(result: Json, lines: Iterable[Line], *, as_json: bool) -> int:
    """Prints a command's result.

    Returns:
        The exit status: 1 if `result["ok"]` is false, else 0.
    """
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_lines(lines)
    return 0 if result.get("ok", True) else 1


def print_lines(lines: Iterable[Line]) -> None:
    """Prints lines and tables. Plain lines need no package but Python's own."""
    for line in lines:
        print(rendered(line, styled=True))


def writable(option: str, path: Path) -> Path:
    """Checks that the file of an option can be written, before the results exist; resolves symbolic links.

    Raises:
        ArgumentError: the file cannot be written. An existing file is never changed.
    """
    if not path.parent.is_dir():
        raise ArgumentError(f"{option} is {path}, but {path.parent} is no directory")
    target = Path(os.path.realpath(path))
    try:
        with contextlib.suppress(_Probed), replacing(target):
            raise _Probed
    except OSError as error:
        raise ArgumentError(f"{option} is {path}, which cannot be written ({error.strerror})") from None
    return target


class _Probed(Exception):  # noqa: N818  # no error
    """Raised within `replacing`, so that `replacing` removes its temporary file and keeps the old file."""


@contextlib.contextmanager
def readable_output(name: str) -> Iterator[None]:
    """Prints warnings on one line, as errors are, and escapes characters that stdout's encoding lacks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{name}: {printable(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before
