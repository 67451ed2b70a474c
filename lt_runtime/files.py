"""Files that are replaced as a whole, and kept under another name rather than lost."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Final, TypeAlias

TEMPORARY: Final = ".tmp"
"""How the names of files end that are being written."""

Signature: TypeAlias = tuple[int, int, int] | None
"""What changes whenever a file is replaced; None without a file."""


def signature(path: Path) -> Signature:
    """The signature of the file at a path."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def replace_file(path: Path, content: bytes) -> None:
    """Puts a file in the place of another, or of none, at once: no reader ever sees half of it.

    Raises:
        OSError: it cannot be written; what was there still is.
    """
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}{TEMPORARY}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def free_name(path: Path, kind: str) -> Path:
    """A path beside another that is not in use, such as plans.json.damaged-1."""
    names = (path.with_name(f"{path.name}.{kind}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())
