"""Compiled kernels on disk, one file each, shared by any number of processes.

What is read goes to the driver as machine code. So a file is used only if nobody but the user and root can have written
it, and if it says itself what it was compiled from and has the digest that it says.
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
_SUFFIXES: Final = (_SUFFIX, ".cubin")  # earlier versions kept the machine code alone, under the second


class KernelCache:
    """A directory of machine code by key; neither the directory nor a file in it need exist.

    A file's time is the time of its last use. When the files grow beyond the limit, the least recently used are
    deleted.

    Args:
        directory: lies in the cache directory; see `private`.
    """

    def __init__(self, directory: Path, limit: int = _LIMIT) -> None:
        self._directory, self._limit = directory, limit

    def get(self, key: str) -> bytes | None:
        """The machine code kept under a key; None if there is none, or it cannot be read, or is damaged.

        Raises:
            UntrustedError: another user could have written it.
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
        """Keeps machine code under a key, in the place of whatever is there.

        Raises:
            UntrustedError: other users can write to the directory.
            OSError: it cannot be written.
        """
        replace_private(self._path(key), _head(key, code) + code)
        remove_abandoned(self._directory, ".*")
        self._shrink()

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}{_SUFFIX}"

    def _shrink(self) -> None:
        files = [(status.st_mtime_ns, status.st_size, path) for path, status in self._files()]
        excess = sum(size for _, size, _ in files) - self._limit
        for _, size, path in sorted(files):
            if excess <= 0:
                return
            path.unlink(missing_ok=True)
            excess -= size

    def _files(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for path in self._directory.iterdir():
            if path.suffix in _SUFFIXES:
                with contextlib.suppress(FileNotFoundError):  # another process may be deleting files too
                    found.append((path, path.lstat()))
        return found


def _head(key: str, code: bytes) -> bytes:
    """What stands before the machine code: equally long for keys of equal length."""
    return f"lt_runtime kernel\n{key}\n{hashlib.sha256(code).hexdigest()}\n".encode()
