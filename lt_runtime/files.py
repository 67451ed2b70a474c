"""Replaces files in one step, so that no reader sees half a file; reads files that no other user can have written.

A file of the cache directory is used only if nobody but the user and root can have written it. Three things are
checked: the file, through the handle that reads it; its directory; and the directory above, which is the cache
directory. Higher directories need no check: a user who may rename entries there can replace our directory, but cannot
put a file into the replacement that belongs to us.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeAlias

from lt_runtime.errors import FileError
from lt_runtime.paths import CACHE_VARIABLE

TEMPORARY: Final = ".tmp"
"""Suffix of the names of files that are still being written."""

_MOST_SEARCHED: Final = 100_000
"""Number of directory entries that a save searches for abandoned files; searching more would delay the save."""

_HALF_A_CHARACTER: Final = re.compile(rb"\\u[dD][89a-fA-F]")

_DIRECTORY_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH

AnyPath: TypeAlias = str | os.PathLike[str]
"""A file's path in the forms that public functions accept."""

Signature: TypeAlias = tuple[int, int, int] | None
"""Inode, size and time of a file, which change whenever it is replaced; None if there is no file."""


def signature(path: Path) -> Signature:
    """The signature of the file at a path."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def file_path(path: AnyPath) -> Path:
    """Converts a path that a caller has given to a `Path`.

    Raises:
        FileError: the path has a NUL, or characters that the file system's encoding lacks.
    """
    with contextlib.suppress(UnicodeEncodeError):
        if b"\0" not in os.fsencode(path):
            return Path(path)
    raise FileError(errno.EINVAL, "a path has no NUL and no half of a character", os.fspath(path))


@contextlib.contextmanager
def opened(path: AnyPath, flags: int = 0) -> Iterator[int]:
    """Yields a handle that reads a file or directory. Opening a pipe or a device does not block.

    Args:
        flags: more flags for `os.open`.

    Raises:
        OSError: the file cannot be opened.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | flags)
    try:
        yield handle
    finally:
        os.close(handle)


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a regular file.

    Args:
        limit: the most bytes that are read.

    Raises:
        ValueError: the path is a pipe, a device or a directory, or the file has more than `limit` bytes.
        OSError: the file cannot be read.
    """
    with opened(path) as handle:
        return _content(handle, limit)


def _content(handle: int, limit: int) -> bytes:
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        raise ValueError("it is no regular file")
    with open(handle, "rb", closefd=False) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return content


def digest_of(paths: Iterable[Path]) -> bytes:
    """SHA-256 of the names and the contents of files."""
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.digest()


def parse_json(content: bytes) -> Any:
    """Parses JSON in UTF-8, and returns the value that the JSON describes.

    Raises:
        ValueError: the content is no JSON, or is JSON that could not be written and read again: in another encoding,
            with halves of surrogate pairs, with NaN or infinity, with a repeated name in one object, or nested too
            deeply.
    """
    try:
        value = json.loads(content.decode(), object_pairs_hook=_distinct, parse_constant=_refuse_constant)
        if _HALF_A_CHARACTER.search(content):
            json.dumps(value, ensure_ascii=False).encode()  # raises if half a surrogate pair stands alone
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has one name twice")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


@contextlib.contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Replaces a file in one step: the block writes a temporary file, which is then renamed to `path`.

    Temporary files of the same name that killed processes have left are removed.

    Args:
        mode: permissions of the new file, which then replaces anything but a directory. If None, only a regular file is
            replaced, whose permissions are kept; if there is no old file, the umask decides the permissions.

    Raises:
        OSError: the file cannot be written; an older file at the path is unchanged.
    """
    mode = _mode(path) if mode is None else mode
    remove_abandoned(path.parent, re.escape(path.name))
    while True:
        temporary = path.with_name(f"{path.name}.{os.urandom(4).hex()}{TEMPORARY}")
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
        with os.fdopen(handle, "wb") as file:  # closing the file frees the lock that `try_lock` took
            if try_lock(handle) is False or not os.fstat(handle).st_nlink:
                continue  # before the lock was taken, another process removed the file as abandoned: try a new name
            try:
                yield file
                file.flush()
                if mode is not None:
                    os.fchmod(handle, mode)
                os.fsync(handle)
                temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
            return


def replace_file(path: Path, content: bytes, mode: int | None = None) -> None:
    """Replaces a file's content in one step; `mode` as in `replacing`."""
    with replacing(path, mode) as file:
        file.write(content)


def _mode(path: Path) -> int | None:
    """The permissions of the file at a path; None if the path is a symbolic link, or no file is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(mode):
        return None
    if not stat.S_ISREG(mode):  # renaming a file to this path would replace even a device
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return stat.S_IMODE(mode)


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
    """Removes temporary files whose name the regular expression `names` matches and that no process is writing."""
    pattern = re.compile(f"(?:{names})" + r"\.[0-9a-f]{8}" + re.escape(TEMPORARY))
    with contextlib.suppress(OSError), os.scandir(directory) as entries:
        for entry in itertools.islice(entries, _MOST_SEARCHED):
            if pattern.fullmatch(entry.name):
                _remove_if_abandoned(entry.path)


def _remove_if_abandoned(path: str) -> None:
    # An OSError says that another process has removed the file, or that it belongs to another user.
    with contextlib.suppress(OSError), opened(path, os.O_NOFOLLOW) as handle:
        if stat.S_ISREG(os.fstat(handle).st_mode) and try_lock(handle):
            Path(path).unlink()


def flush(path: Path) -> None:
    """Waits until a file or a directory is on the disk."""
    with opened(path) as handle:
        os.fsync(handle)


def free_name(path: Path, kind: str) -> Path:
    """An unused path in the same directory, named after the file and a kind, such as plans.json.damaged-1."""
    names = (path.with_name(f"{path.name}.{kind}-{number}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


class UntrustedError(PermissionError):
    """Another user could have written the file or directory; the message names its path and the remedy."""


def read_private(path: Path, limit: int) -> bytes:
    """Reads a file in a subdirectory of the cache directory, if no other user can have written the file.

    Raises:
        UntrustedError: another user could have written the file.
        ValueError: the path is no regular file, or the file has more than `limit` bytes.
        OSError: the file cannot be read.
    """
    require_private_directory(path.parent)
    try:
        with opened(path, os.O_NOFOLLOW) as handle:
            _require_private(path, os.fstat(handle))
            return _content(handle, limit)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _untrusted(path, "is a symbolic link", f"rm {path}") from None
        raise


def replace_private(path: Path, content: bytes) -> None:
    """Replaces a file in a subdirectory of the cache directory, as `replace_file` does.

    A link, a pipe or a device at the path is replaced too.

    Raises:
        UntrustedError: other users can write to the directory.
        OSError: the file cannot be written; an older file at the path is unchanged.
    """
    make_private_directory(path.parent)
    replace_file(path, content, _FILE_MODE)


def make_private_directory(directory: Path) -> None:
    """Makes a subdirectory of the cache directory and its missing parents, which no other user may enter.

    Raises:
        UntrustedError: the directory exists, and other users can write to it.
        OSError: the directory cannot be made.
    """
    _make(directory)
    require_private_directory(directory)


def require_private_directory(directory: Path) -> None:
    """Checks that other users cannot replace files in the cache directory, nor in the given subdirectory of it.

    Raises:
        UntrustedError: one of the two directories belongs to another user, or other users can put files there.
        OSError: one of the two directories does not exist.
    """
    for each in (directory.parent, directory):
        # Both a symbolic link and its target are checked, because they may have different owners.
        for status in (each.lstat(), each.stat()):
            _require_private(each, status)


def _make(directory: Path) -> None:
    try:
        directory.mkdir(_DIRECTORY_MODE)
    except FileNotFoundError:
        _make(directory.parent)
        directory.mkdir(_DIRECTORY_MODE, exist_ok=True)
    except FileExistsError:
        if not directory.is_dir():
            raise


def _require_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in (0, os.geteuid()):
        owner = f"belongs to user {status.st_uid}, who is neither you nor root"
        raise _untrusted(path, owner, f"chown {os.geteuid()} {path}")
    # In a sticky directory, such as /tmp, nobody can replace another user's file. Links have no mode of their own.
    is_safe = stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
    if status.st_mode & _OTHERS_WRITE and not is_safe:
        raise _untrusted(path, "can be written by other users", f"chmod go-w {path}")


def _untrusted(path: Path, fault: str, mend: str) -> UntrustedError:
    return UntrustedError(f"{path} {fault} and is not used: `{mend}`, or set {CACHE_VARIABLE} to a directory of yours")
