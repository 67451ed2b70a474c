"""Formats tables as text for a terminal or a file. The package Rich is imported only when a table is made."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Final, TypeAlias

from lt_runtime.errors import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Line: TypeAlias = "str | Text | Table"

_WIDTH: Final = 160
"""Width of a table in characters if stdout is not a terminal."""


def table(title: str | None, headings: Sequence[str], lines: Sequence[Sequence[str]], texts: Set[str]) -> Table:
    """Makes a table, leaving out columns without any text; a table without a title has no frame either.

    Columns whose headings are in `texts` are aligned left, the others, which hold numbers, right.
    """
    from rich.box import HEAVY_HEAD, SIMPLE
    from rich.markup import escape
    from rich.table import Column, Table

    columns = [Column(each, justify="left" if each in texts else "right", overflow="fold") for each in headings]
    used = [place for place in range(len(headings)) if any(line[place] for line in lines)]
    box = SIMPLE if title is None else HEAVY_HEAD
    made = Table(*(columns[place] for place in used), title=title, title_justify="left", box=box)
    for line in lines:
        made.add_row(*(escape(printable(line[place])) for place in used))
    return made


def rendered(line: Line, *, styled: bool = False) -> str:
    """A line, or a table, as Rich formats it for this terminal; a plain string is returned without importing Rich.

    The text is bold or coloured only with `styled`, because the text may also be written to a file.

    Rich is used only to format, but it also flushes stdout, and ends the process if the pipe is closed. So stdout is
    flushed before Rich is used: with a closed pipe, the flush raises an exception instead of ending the process.
    """
    if isinstance(line, str):
        return printable(line)
    from rich.console import Console
    from rich.table import Table

    print(end="", flush=True)
    console = Console(color_system="auto" if styled else None)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = _WIDTH
    # Only tables are wrapped to the width: users copy names from other lines, which must stay whole.
    with console.capture() as captured:
        console.print(line, highlight=False, soft_wrap=not isinstance(line, Table))
    return captured.get().removesuffix("\n")
