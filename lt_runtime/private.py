"""Files of the cache directory, which are used only if nobody but the user and root can have written them.

Three things are checked: the file, through the handle that reads it; its directory; and the directory above, which is
the cache directory. Higher directories need no check: a user who may rename entries there can replace our directory,
but cannot put a file into the replacement that belongs to us.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from lt_runtime.files import read_regular, replace_file
from lt_runtime.paths import CACHE_VARIABLE

_DIRECTORY_MODE: Final = 0o700
_FILE_MODE: Final = 0o600
_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class UntrustedError(PermissionError):
    """Another user could have written the file or directory; the message names its path and the remedy."""


def read_private(path: Path, limit: int) -> bytes:
    """The content of a file in a subdirectory of the cache directory.

    Raises:
        UntrustedError: another user could have written it.
        ValueError: it is no regular file, or has more than `limit` bytes.
        OSError: it cannot be read.
    """
    require_private_directory(path.parent)
    try:
        return read_regular(path, limit, flags=os.O_NOFOLLOW, check=lambda status: _require_private(path, status))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _untrusted(path, "is a symbolic link", f"rm {path}") from None
        raise


def replace_private(path: Path, content: bytes) -> None:
    """Replaces a file in a subdirectory of the cache directory, as `replace_file` does.

    A link, a pipe or a device in the file's place is replaced too.

    Raises:
        UntrustedError: other users can write to the directory.
        OSError: the file cannot be written; an older file at the path is unchanged.
    """
    make_private_directory(path.parent)
    replace_file(path, content, _FILE_MODE)


def make_private_directory(directory: Path) -> None:
    """Makes a subdirectory of the cache directory, and missing directories above it; no other user may enter them.

    Raises:
        UntrustedError: the directory exists, and other users can write to it.
        OSError: the directory cannot be made.
    """
    _make(directory)
    require_private_directory(directory)


def require_private_directory(directory: Path) -> None:
    """Checks a subdirectory of the cache directory, and the cache directory itself.

    Raises:
        UntrustedError: it belongs to another user, or other users can put files there.
        OSError: it is not there.
    """
    for each in (directory.parent, directory):
        for status in (each.lstat(), each.stat()):  # A link and its target may have different owners.
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
