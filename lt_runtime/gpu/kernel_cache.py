"""Compiled kernels on disk, one file each, shared by any number of processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Final

from lt_runtime.files import replace_file

_LIMIT: Final = 256 << 20  # bytes of all files


class KernelCache:
    """A directory of cubins by key; neither the directory nor a file in it need exist.

    A file's time is the time of its last use. When the files grow beyond the limit, the least recently used are
    deleted.
    """

    def __init__(self, directory: Path, limit: int = _LIMIT) -> None:
        self._directory, self._limit = directory, limit

    def get(self, key: str) -> bytes | None:
        """The cubin kept under a key; None if there is none, or it cannot be read."""
        path = self._path(key)
        try:
            cubin = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):  # the directory may belong to another user, or be read-only
            os.utime(path)
        return cubin

    def put(self, key: str, cubin: bytes) -> None:
        """Keeps a cubin under a key.

        Raises:
            OSError: it cannot be written.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        replace_file(self._path(key), cubin)
        self._shrink()

    def _path(self, key: str) -> Path:
        return self._directory / f"{key}.cubin"

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
        for path in self._directory.glob("*.cubin"):
            with contextlib.suppress(FileNotFoundError):  # another process may be deleting files too
                found.append((path, path.stat()))
        return found
