"""Files: replaced as a whole, so that no reader sees half of one, and renamed rather than deleted."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

TEMPORARY: Final = ".tmp"
"""Suffix of files that are still being written."""

Signature: TypeAlias = tuple[int, int, int] | None
"""Inode, size and time of a file, which change whenever it is replaced; None if there is no file."""


def signature(path: Path) -> Signature:
    """The signature of the file at a path."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Replaces a file in one step by what the block writes to the path that it is given; no reader sees half of it.

    Raises:
        OSError: the file cannot be written; what was there is unchanged.
    """
    temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}{TEMPORARY}")
    temporary.open("xb").close()  # an error here says what is wrong with the place
    try:
        yield temporary
        flush(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file as `replacing` does."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def flush(path: Path) -> None:
    """Waits until a file or a directory is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def free_name(path: Path, kind: str) -> Path:
    """An unused path beside another, such as plans.json.damaged-1."""
    names = (path.with_name(f"{path.name}.{kind}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())
