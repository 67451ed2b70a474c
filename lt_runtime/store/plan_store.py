"""Stores measured plans in memory and in one file for each fingerprint, shared by any number of processes.

A file is never changed in place. A writer takes a lock, reads the file, and replaces it by a file with the old entries
and the new ones. So readers need no lock, and no writer loses another's entries. If the file or its directory cannot be
used, one warning is given, and plans are kept in memory only.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from lt_runtime.files import Signature, free_name, make_private_directory, read_regular, replace_private, signature
from lt_runtime.paths import cache_directory
from lt_runtime.store.document import LARGEST, Document, Fingerprint, UnusableError, fingerprint
from lt_runtime.store.entries import Entry, Kind, LayerEntry, ProductEntry
from lt_runtime.store.keys import SCHEMA

# Seconds to wait for the lock. Eight writers on a busy machine wait for a few seconds; processes that died hold no
# lock.
_LOCK_SECONDS: Final = 30.0
_POLL_SECONDS: Final = 0.005
_SLOW_SECONDS: Final = 1.0
"""Seconds that checking the file may take. If it takes longer, the disk is not used for `_PAUSE_SECONDS`, because
preparing a training step would check dozens of times.
"""
_PAUSE_SECONDS: Final = 60.0


def plans_directory() -> Path:
    """The directory of the plan files, within the cache directory."""
    return cache_directory() / "plans"


def plan_store(device: int) -> PlanStore:
    """The process's store for one of this machine's GPUs; GPUs with equal fingerprints share it.

    Raises:
        MissingLibraryError, DriverError: see `fingerprint`.
    """
    return _opened(plans_directory(), fingerprint(device))


@functools.cache
def _opened(directory: Path, known: Fingerprint) -> PlanStore:
    store = PlanStore(directory / known.file_name, known)
    others = directory.glob(f"{known.file_name.rpartition('-')[0]}-*.json") if store.is_missing() else []
    with contextlib.suppress(OSError, ValueError):
        for other in others:
            if f'"schema": {SCHEMA},'.encode() not in read_regular(other, LARGEST)[:40]:
                warnings.warn(f"{other} is of another version of lt_runtime: it stays and is not used", stacklevel=4)
                break
    return store


class PlanStore:
    """Entries by key (see `keys`), read from a file on first use. Any number of threads may share a store.

    Args:
        path: path of the file. Neither the file nor its directory need exist.
        fingerprint: the machine for which the file's entries must be valid.
    """

    def __init__(self, path: Path, fingerprint: Fingerprint) -> None:
        self.path, self.fingerprint = path, fingerprint
        self._document = Document(fingerprint)
        self._seen: Signature = None  # signature of the file when it was last read
        self._patience = _LOCK_SECONDS
        self._warned = False
        self._paused_until = 0.0
        self._lock = threading.RLock()

    def product(self, key: str) -> ProductEntry | None:
        """The usable entry of a matrix product; None if there is none."""
        return self._find(key, ProductEntry)

    def layer(self, key: str) -> LayerEntry | None:
        """The usable entry of a layer; None if there is none."""
        return self._find(key, LayerEntry)

    def choice(self, key: str) -> Entry | None:
        """The entry under a key, even if its algorithm is not yet verified; None if there is none or it is barred."""
        with self._lock:
            entry = self._document.get(key)
        return None if entry is None or entry.barred is not None else entry

    @property
    def keys(self) -> frozenset[str]:
        """The keys of all entries, usable or not."""
        with self._lock:
            self._reload()
            return frozenset(self._document.raw)

    def put(self, *parts: Mapping[str, Entry]) -> bool:
        """Adds entries by key, in memory and in the file; returns whether the file was written.

        An existing entry stays if it is better (see `entries.better`). If the file cannot be written, one warning is
        given, and the next `put` tries again to write all entries.
        """
        with self._lock:
            for part in parts:
                for key, entry in part.items():
                    self._document.add(key, entry)
            return self._save()

    def bar(self, key: str, entry: Entry, reason: str) -> None:
        """Bars an entry, in memory and in the file, so that no plan uses it. A later measurement replaces it."""
        self.put({key: replace(entry, barred=reason)})

    def merge(self, other: Document) -> tuple[int, bool]:
        """Adds entries of a machine with an equal fingerprint, for keys without a usable entry.

        The algorithms are left out, and are rebuilt and verified later; see `unproven`.

        Returns:
            The number of entries that were added or replaced, and whether the file was written.

        Raises:
            UnusableError: the fingerprints differ, or an entry is damaged.
        """
        other.require(self.fingerprint)
        other.require_sound()
        with self._lock:
            self._reload()
            entries = {key: self._document.get(key) for key in other.raw}
            wanted = {key: other.raw[key] for key, ours in entries.items() if ours is None or not ours.is_usable}
            return self._document.absorb(Document(other.fingerprint, wanted).without_algorithms()), self._save()

    def content(self) -> bytes:
        """All entries as the bytes of a plan file, see `take_over`."""
        with self._lock:
            self._reload()
            return self._document.render()

    def take_over(self, content: bytes) -> None:
        """Replaces all entries by the entries of another process's store, see `content`.

        From then on, this store does not read or write its file, which would bring back the replaced entries.

        Raises:
            UnusableError: the entries are valid for another machine, or the content is damaged.
        """
        theirs = Document.parse(content)
        theirs.require(self.fingerprint)
        with self._lock:
            self._document, self._paused_until = theirs, math.inf

    def unproven(self, key: str) -> ProductEntry | None:
        """The entry of a product if its algorithm must still be rebuilt and verified; None otherwise."""
        entry = self.choice(key)
        return entry if isinstance(entry, ProductEntry) and not entry.is_usable else None

    def is_missing(self) -> bool:
        """Whether the file does not exist; False while the disk is too slow to be used."""
        with self._lock:
            return self._reload() and self._seen is None

    @property
    def has_unproven(self) -> bool:
        """Whether the algorithm of any product must still be rebuilt and verified."""
        with self._lock:
            self._reload()
            return any(each.get("algorithm") == "" for each in self._document.raw.values())

    def _find(self, key: str, kind: type[Kind]) -> Kind | None:
        with self._lock:
            entry = self._document.get(key)
            # Reads the file again, since another process may have measured the problem.
            if entry is None or not entry.is_usable:
                self._reload()
                entry = self._document.get(key)
        return entry if isinstance(entry, kind) and entry.is_usable else None

    def _reload(self) -> bool:
        """Reads the file again if it has changed; returns whether the disk is fast enough to be used."""
        begun = time.monotonic()
        if begun < self._paused_until:
            return False
        current, ended = signature(self.path), time.monotonic()
        if ended - begun >= _SLOW_SECONDS:
            self._paused_until = ended + _PAUSE_SECONDS
            self._warn(f"{self.path} is on a slow disk ({ended - begun:.1f} s a call); plans are kept in memory alone")
            return False
        if current == self._seen:
            return True
        self._seen = current
        try:
            self._absorb_file()
        except UnusableError as error:
            self._locked(self._absorb_or_set_aside, f"{self.path} {error} and is not used")
        except OSError as error:
            self._warn(f"{self.path} cannot be read ({error})")
        return True

    def _absorb_file(self) -> None:
        """Adds the entries of the file, if the file exists."""
        if signature(self.path) is None:
            return
        document = Document.read(self.path, is_own=True)
        document.require(self.fingerprint)
        self._document.absorb(document)

    def _absorb_or_set_aside(self) -> None:
        """Adds the entries of the file, or renames the file if it cannot be used. The caller must hold the lock."""
        try:
            self._absorb_file()
        except UnusableError as error:
            aside = free_name(self.path, error.kind)
            self.path.rename(aside)
            warnings.warn(f"{self.path} {error}; it is kept as {aside.name} and not used", stacklevel=2)

    def _save(self) -> bool:
        """Writes all entries, from memory and from the file, to the file; returns whether that succeeded."""
        complaint = f"{self.path} cannot be written; plans are kept in memory alone"
        return self._reload() and self._locked(self._rewrite, complaint)

    def _rewrite(self) -> None:
        """Replaces the file by all known entries. The caller must hold the lock."""
        self._absorb_or_set_aside()
        replace_private(self.path, self._document.render())
        self._seen = signature(self.path)

    def _locked(self, work: Callable[[], None], complaint: str) -> bool:
        """Calls `work` while holding the writers' lock. If locking or `work` fails, gives a warning and returns False.

        After a timeout, later calls do not wait for the lock until it has been free once.
        """
        import filelock  # imported late: a process that only reads plans does not need filelock

        try:
            make_private_directory(self.path.parent)
            lock = filelock.FileLock(f"{self.path}.lock", mode=0o600)
            with lock.acquire(timeout=self._patience, poll_interval=_POLL_SECONDS):
                work()
        # filelock raises NotImplementedError if the file system has no locks
        except (OSError, NotImplementedError) as error:
            self._patience = 0.0 if isinstance(error, filelock.Timeout) else _LOCK_SECONDS
            self._warn(f"{complaint} ({error})")
            return False
        self._patience = _LOCK_SECONDS
        return True

    def _warn(self, complaint: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(complaint, stacklevel=2)
