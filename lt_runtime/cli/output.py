"""What the commands print: one JSON object, or lines and tables for people."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from lt_runtime.errors import ArgumentError
from lt_runtime.files import replacing
from lt_runtime.store.records import Json

_WIDTH: Final = 160
"""Columns of a table where no terminal says how many there are."""

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    Line: TypeAlias = str | Text | Table


def show(result: Json, lines: Iterable[Line], *, as_json: bool) -> int:
    """Prints a command's result.

    Returns:
        The exit status: 0, or 1 if `result["ok"]` says that something is not as it should be.
    """
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        print_lines(lines)
    return 0 if result["ok"] else 1


def print_lines(lines: Iterable[Line]) -> None:
    """Prints for people. Plain lines need no other package."""
    for line in lines:
        print(line if isinstance(line, str) else _rendered(line))


def _rendered(line: Text | Table) -> str:
    """The text that Rich makes for this terminal.

    Rich is given nothing to write, not even what was printed before, because it ends the process at a closed pipe.
    """
    from rich.console import Console
    from rich.table import Table

    print(end="", flush=True)
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    with console.capture() as captured:  # a line must not be broken, because people copy names from it; a table must
        console.print(line, highlight=False, soft_wrap=not isinstance(line, Table))
    return captured.get().removesuffix("\n")


def print_anything() -> None:
    """Lets a terminal that lacks a character, such as µ, show its number instead."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def writable(option: str, path: Path) -> Path:
    """The file that an option names, behind all symbolic links, for results that are written once they are known.

    Raises:
        ArgumentError: it cannot be written; what is there is left as it was.
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
    """Ends the attempt to write a file without replacing it."""


@contextlib.contextmanager
def warnings_on_one_line(name: str) -> Iterator[None]:
    """Warnings look like errors: neither shows a line of the code."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"{name}: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before
