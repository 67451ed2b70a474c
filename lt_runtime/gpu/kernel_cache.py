"""Compiled kernels on disk, one file each, shared by any number of processes.

The driver runs these files as machine code. So a file is used only if nobody but the user and root can have written it,
and if its header has the expected key and the SHA-256 digest of the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Final

from lt_runtime.files import remove_abandoned
from lt_runtime.private import UntrustedError, read_private, replace_private

_LIMIT: Final = 256 << 20  # bytes of all files
_LARGEST: Final = 16 << 20  # bytes of one; our kernels have some 100 kB
_SUFFIX: Final = ".kernel"
_SUFFIXES: Final = (_SUFFIX, ".cubin")  # earlier versions stored the machine code alone as .cubin


class KernelCache:
    """A directory of machine code by key; neither the directory nor a file in it need exist.

    A file's time of change is the time of its last use. When the files exceed the limit, the least recently used are
    deleted.

    Args:
        directory: a directory inside the cache directory; see `private`.
        limit: bytes of all files together.
    """

    def __init__(self, directory: Path, limit: int = _LIMIT) -> None:
        self._directory, self._limit = directory, limit

    def get(self, key: str) -> bytes | None:
        """The machine code stored under a key; None if there is none, or the file is unreadable or damaged.

        Raises:
            UntrustedError: another user could have written the file.
        """
        path = self._path(key)
        try:
            content = read_private(path, _LARGEST)
        except UntrustedError:
            raise
        except (OSError, ValueError):
            return None
        head, code = content[: len(_head(key, b""))], content[len(_head(key, b"")) :]
        if head != _head(key, code):
            return None
        with contextlib.suppress(OSError):  # the directory may belong to root, or be read-only
            os.utime(path)
        return code

    def put(self, key: str, code: bytes) -> None:
        """Stores machine code under a key, replacing any file there.

        Raises:
            UntrustedError: other users can write to the directory.
            OSError: the file cannot be written.
        """
        replace_private(self._path(key), _head(key, code) + code)
        remove_abandoned(self._directory, ".*")
        self._shrink()

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{_SUFFIX}"

    def _shrink(self) -> None:
        """Deletes the least recently used files until the rest is within the limit."""
        files = []
        for path in self._directory.iterdir():
            if path.suffix in _SUFFIXES:
                with contextlib.suppress(FileNotFoundError):  # another process may be deleting files too
                    status = path.lstat()
                    files.append((status.st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in files) - self._limit
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size


def _head(key: str, code: bytes) -> bytes:
    """The header of a file; its length depends only on the key's."""
    return f"lt_runtime kernel\n{key}\n{hashlib.sha256(code).hexdigest()}\n".encode()
