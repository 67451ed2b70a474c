"""Kills writers of plans and of compiled kernels at random moments: no entry that was written completely may be lost.

Can be run as a program, with any number of rounds::

    python -m tests.support.killed_writers plans DIRECTORY 100
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import time
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Final

from lt_runtime.files import TEMPORARY
from lt_runtime.gpu.compiler import KernelCache
from lt_runtime.store.document import Document
from lt_runtime.store.entries import ProductEntry
from lt_runtime.store.plan_store import PlanStore
from tests.support.plan_entries import H200, product

_WRITERS: Final = 2
_KEYS: Final = 5  # number of writers of each kind
_LONGEST_S: Final = 0.03
_MOST: Final = 1e6


class Kept(ABC):
    """A store under test: numbers by key, each larger than the key's previous number."""

    directory: Path

    @abstractmethod
    def put(self, key: str, number: int) -> None:
        """Stores the number, and returns once it is stored."""

    @abstractmethod
    def numbers(self) -> dict[str, int]:
        """Reads all stored numbers as another process does; fails if an entry is damaged."""

    @property
    def temporaries(self) -> list[Path]:
        """Returns the temporary files that killed writers have left."""
        return [path for path in self.directory.iterdir() if path.name.endswith(TEMPORARY)]


class Plans(Kept):
    """A store of the plan cache's entries."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "plans"
        self._path = self.directory / H200.file_name
        self._store = PlanStore(self._path, H200)

    def put(self, key: str, number: int) -> None:
        """See `Kept`."""
        # The store keeps the faster of two entries, so that later numbers must be faster.
        assert self._store.put({key: product(us=_MOST - number)})

    def numbers(self) -> dict[str, int]:
        """See `Kept`."""
        document = Document.read(self._path, is_own=True)
        entries = {key: document.get(key) for key in document.raw}
        return {key: round(_MOST - entry.us) for key, entry in entries.items() if isinstance(entry, ProductEntry)}


class Kernels(Kept):
    """A store of compiled kernels."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "kernels"
        self._cache = KernelCache(self.directory)

    def put(self, key: str, number: int) -> None:
        """See `Kept`."""
        self._cache.put(key, f"{number} ".encode() * 50_000)

    def numbers(self) -> dict[str, int]:
        """See `Kept`."""
        codes = {path.stem: self._cache.get(path.stem) for path in self.directory.glob("*.kernel")}
        found = {key: set(code.split()) for key, code in codes.items() if code is not None}
        assert found.keys() == codes.keys(), "a file is damaged"
        return {key: int(number) for key, (number,) in found.items()}


def kill_writers(kept: Kept, rounds: int) -> int:
    """Kills writers in each round and checks the store; returns the number of rounds that left a temporary file."""
    acknowledged: dict[str, int] = {}
    left = 0
    for number in range(rounds):
        writers = [_Writer(kept, f"{writer}.", number * 1_001) for writer in range(_WRITERS)]
        time.sleep(random.uniform(0, _LONGEST_S))
        for writer in writers:
            acknowledged |= writer.kill()
        left += bool(kept.temporaries)
        found = kept.numbers()
        lost = {key: last for key, last in acknowledged.items() if found.get(key, -1) < last}
        assert not lost, f"round {number} lost {lost}; there are {found}"
        kept.put("own", number)
        assert kept.temporaries == []
    assert len(acknowledged) == _WRITERS * _KEYS
    return left


class _Writer:
    """A process that stores one number after the other, and reports each stored number through a pipe."""

    def __init__(self, kept: Kept, prefix: str, first: int) -> None:
        self._pipe, told = os.pipe()
        self._pid = os.fork()
        if not self._pid:
            _write(kept, prefix, first, told)
        os.close(told)
        self._first_line = os.read(self._pipe, 1 << 12)
        assert self._first_line, "the writer could not write"

    def kill(self) -> dict[str, int]:
        """Kills the process; returns the numbers that it reported."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        with os.fdopen(self._pipe, "rb") as pipe:
            lines = (self._first_line + pipe.read()).decode().splitlines()
        return {key: int(number) for key, number in map(str.split, lines)}


def _write(kept: Kept, prefix: str, first: int, told: int) -> None:
    try:
        for number in itertools.count(first):
            key = f"{prefix}{number % _KEYS}"
            kept.put(key, number)
            os.write(told, f"{key} {number}\n".encode())
    finally:
        os._exit(1)


if __name__ == "__main__":
    warnings.simplefilter("error")
    kind, directory, rounds = {"plans": Plans, "kernels": Kernels}[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3])
    print(kill_writers(kind(directory), rounds), "of", rounds, "rounds left half a file")
