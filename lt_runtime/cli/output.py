"""What the commands print: one JSON object, or lines and tables for people."""

from __future__ import annotations

import json
from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lt_runtime.store.records import Json


def show(result: Json, lines: Iterable[str | Text | Table], *, as_json: bool) -> int:
    """Prints a command's result.

    Returns:
        The exit status: 0, or 1 if `result["ok"]` says that something is not as it should be.
    """
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        console = Console()
        for line in lines:  # a line must not be broken, because people copy names from it; a table must
            console.print(line, markup=False, highlight=False, soft_wrap=not isinstance(line, Table))
    return 0 if result["ok"] else 1
