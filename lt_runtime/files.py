"""Replaces files in one step, so that no reader sees half of one, and removes files that dead processes left."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeAlias

TEMPORARY: Final = ".tmp"
"""Suffix of files that are still being written."""

_MOST_SEARCHED: Final = 100_000
"""Most directory entries that are searched for abandoned files; searching more would delay a save."""

Signature: TypeAlias = tuple[int, int, int] | None
"""Inode, size and time of a file, which change whenever it is replaced; None if there is no file."""


def signature(path: Path) -> Signature:
    """The signature of the file at a path."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def read_regular(
    path: Path, limit: int, *, flags: int = 0, check: Callable[[os.stat_result], None] | None = None
) -> bytes:
    """The content of a regular file. The call does not block on a pipe or device in the file's place.

    Args:
        limit: the most bytes that are read.
        flags: more flags for `os.open`.
        check: gets the file's status before the file is read, and may raise.

    Raises:
        ValueError: the path is a pipe, a device or a directory, or the file has more than `limit` bytes.
        OSError: the file cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | flags)
    try:
        status = os.fstat(handle)
        if check is not None:
            check(status)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(limit + 1)
    finally:
        os.close(handle)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return content


@contextlib.contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Replaces a file in one step: the block writes a temporary file, which is then renamed to `path`.

    Temporary files of the same name that killed processes have left are removed.

    Args:
        mode: permissions of the file, which may then replace anything but a directory. Without it, a replaced file
            keeps its permissions, only regular files are replaced, and the umask decides for a new file.

    Raises:
        OSError: the file cannot be written; an older file at the path is unchanged.
    """
    mode = _mode(path) if mode is None else mode
    remove_abandoned(path.parent, re.escape(path.name))
    temporary, handle = _new_temporary(path, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(handle, "wb") as file:  # locked until it is closed
            yield file
            file.flush()
            if mode is not None:
                os.fchmod(handle, mode)
            os.fsync(handle)
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Writes a file as `replacing` does."""
    with replacing(path, mode) as file:
        file.write(content)


def _mode(path: Path) -> int | None:
    """The permissions of the file at a path; None if there is none, or a symbolic link."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        return None
    if not stat.S_ISREG(mode):  # renaming would replace even a device
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return stat.S_IMODE(mode)


def _new_temporary(path: Path, mode: int) -> tuple[Path, int]:
    """Makes a temporary file beside `path`; returns its path, and a handle that locks it until it is closed."""
    while True:
        temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}{TEMPORARY}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            if try_lock(handle) is not False and os.fstat(handle).st_nlink:
                return temporary, handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # another process found it unlocked, took it for abandoned, and removes it


def try_lock(handle: int) -> bool | None:
    """Locks a file without waiting; returns False if another process holds the lock, None without support for locks.

    The system frees the lock of a process that ends, even if it is killed. The package `filelock` is not used because
    it truncates the file.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def remove_abandoned(directory: Path, names: str) -> None:
    """Removes abandoned temporary files: no process is writing them, and the regular expression `names` matches."""
    pattern = re.compile(f"(?:{names})" + r"\.[0-9a-f]{8}" + re.escape(TEMPORARY))
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in itertools.islice(entries, _MOST_SEARCHED):
            if pattern.fullmatch(entry.name):
                _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    with contextlib.suppress(OSError):  # another process has removed it, or it belongs to another user
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if stat.S_ISREG(os.fstat(handle).st_mode) and try_lock(handle):
                Path(path).unlink()
        finally:
            os.close(handle)


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
