"""The plan cache: measured plans in memory and in one file for each fingerprint, shared by any number of processes.

A file is never changed, only replaced as a whole, under a lock, by what it held and what there is to add. So readers
need no lock, and writers lose nothing of each other's. Whatever is wrong with the file or its directory costs a
warning, and plans are then kept in memory alone.
"""

from __future__ import annotations

import functools
import os
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from lt_runtime.errors import ArgumentError
from lt_runtime.files import Signature, free_name, replace_file, signature
from lt_runtime.paths import cache_directory
from lt_runtime.store.document import Document, Section, UnusableError
from lt_runtime.store.entries import Entry, LayerEntry, ProductEntry
from lt_runtime.store.fingerprint import Fingerprint, fingerprint

Validate: TypeAlias = Callable[[str, Entry], str | None]
"""Says why an entry may not be used, given its key; None if it may."""

_LOCK_SECONDS: Final = 30.0  # eight writers on a busy machine wait for seconds; a lock of a process that died is free
_POLL_SECONDS: Final = 0.005


@dataclass(frozen=True, slots=True)
class Merged:
    """What merging a file did.

    Attributes:
        changed: entries that were new or took another's place.
        damaged: what was wrong with the entries left out, by key.
        saved: whether the result is on disk.
    """

    changed: int
    damaged: Mapping[str, str]
    saved: bool


def plans_directory() -> Path:
    """Where the files lie, in the cache directory."""
    return cache_directory() / "plans"


def plan_store(device: int) -> PlanStore:
    """The process's store for one of this machine's GPUs; GPUs of one fingerprint share it.

    Raises:
        MissingLibraryError, DriverError: see `fingerprint`.
    """
    known = fingerprint(device)
    return _opened(plans_directory() / known.file_name, known)


@functools.cache
def _opened(path: Path, fingerprint: Fingerprint) -> PlanStore:
    return PlanStore(path, fingerprint)


class PlanStore:
    """Entries by key (see `keys`), read from a file when first asked for. Any number of threads may share it.

    Args:
        path: the file, which need not exist, nor its directory.
        fingerprint: what the entries must be good for.
    """

    def __init__(self, path: Path, fingerprint: Fingerprint) -> None:
        self.path, self.fingerprint = path, fingerprint
        self._document = Document(fingerprint)
        self._seen: Signature = None  # of the file that the document holds
        self._unusable: Signature = None  # of one that can be neither used nor set aside
        self._patience = _LOCK_SECONDS
        self._warned = False
        self._lock = threading.RLock()

    def product(self, key: str, validate: Validate[ProductEntry] | None = None) -> ProductEntry | None:
        """The entry of a matrix product; None if there is none that may be used.

        Args:
            validate: asked about the entry; one that it refuses is barred, here and in the file.
        """
        return self._get(self._document.products, key, validate)

    def layer(self, key: str, validate: Validate[LayerEntry] | None = None) -> LayerEntry | None:
        """As `product`, for a layer."""
        return self._get(self._document.layers, key, validate)

    def put(
        self,
        products: Mapping[str, ProductEntry] | None = None,
        layers: Mapping[str, LayerEntry] | None = None,
    ) -> bool:
        """Adds entries by key, in memory and in the file; whether they are in the file.

        What is known already stays if it was searched harder (see `Section.absorb`). If the file cannot be written,
        that is one warning, and the next `put` tries again to write all that is known.
        """
        with self._lock:
            for key, product in (products or {}).items():
                self._document.products.add(key, product)
            for key, layer in (layers or {}).items():
                self._document.layers.add(key, layer)
            return self._save()

    def merge(self, other: Path) -> Merged:
        """Adds the entries of another file, leaving damaged ones out.

        Raises:
            ArgumentError: it cannot be read, is damaged, or holds what is good for something else.
        """
        document = _read_other(other, self.fingerprint)
        damaged = document.drop_damaged()
        with self._lock:
            self._reload()
            changed = self._document.absorb(document)
            return Merged(changed, damaged, self._save())

    def _get(self, section: Section[Entry], key: str, validate: Validate[Entry] | None) -> Entry | None:
        with self._lock:
            entry = self._find(section, key)
        if entry is None or entry.barred is not None:
            return None
        # Without the lock: what is called may wait for a thread that waits for this store.
        reason = validate(key, entry) if validate is not None else None
        if reason is None:
            return entry
        with self._lock:
            section.add(key, replace(entry, barred=reason))
            self._save()
        return None

    def _find(self, section: Section[Entry], key: str) -> Entry | None:
        """The entry in memory; where that is none or barred, the file may have got another since."""
        entry = self._undamaged(section, key)
        if entry is None or entry.barred is not None:
            self._reload()
            entry = self._undamaged(section, key)
        return entry

    def _undamaged(self, section: Section[Entry], key: str) -> Entry | None:
        try:
            return section.get(key)
        except ValueError:
            self._drop_damaged()
            return section.get(key)

    def _reload(self) -> None:
        current = signature(self.path)
        if current in (self._seen, self._unusable):
            return
        try:
            self._absorb_file()
        except UnusableError as error:
            if not self._locked(self._absorb_or_set_aside, f"{self.path} {error} and is not used"):
                self._unusable = current
        except OSError as error:
            self._warn(f"{self.path} cannot be read ({error})")
            self._unusable = current

    def _absorb_file(self) -> None:
        """Adds what the file holds; nothing if there is none."""
        current = signature(self.path)
        if current is not None and current != self._seen:
            self._document.absorb(_read(self.path, self.fingerprint))
        self._seen = current

    def _absorb_or_set_aside(self) -> None:
        """The same, under the lock; a file that cannot be used is kept under another name."""
        try:
            self._absorb_file()
        except UnusableError as error:
            aside = free_name(self.path, error.kind)
            self.path.rename(aside)
            warnings.warn(f"{self.path} {error}; it is kept as {aside.name} and not used", stacklevel=2)

    def _drop_damaged(self) -> None:
        """Goes on without damaged entries; the file that had them is kept under another name."""
        count = len(self._document.drop_damaged())
        complaint = f"{self.path} has {count} damaged entries, which are not used"
        if self._locked(self._rewrite_undamaged, complaint):
            warnings.warn(f"{complaint}; as it was, it is kept beside", stacklevel=2)

    def _rewrite_undamaged(self) -> None:
        has_them = signature(self.path) == self._seen  # else another process was faster
        self._absorb_or_set_aside()
        if self._document.drop_damaged() or has_them:
            os.link(self.path, free_name(self.path, "damaged"))
        self._write()

    def _save(self) -> bool:
        """Writes all that is known, here and in the file; whether that succeeded."""
        return self._locked(self._rewrite, f"{self.path} cannot be written; plans are kept in memory alone")

    def _rewrite(self) -> None:
        self._absorb_or_set_aside()
        self._write()

    def _write(self) -> None:
        replace_file(self.path, self._document.render())
        self._seen = signature(self.path)

    def _locked(self, work: Callable[[], None], complaint: str) -> bool:
        """Does something with the file while no other process writes it; whether it succeeded, a complaint if not.

        A lock that could not be had in time is not waited for again until it is free.
        """
        import filelock  # here, because a process that only reads has no use for it

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = filelock.FileLock(f"{self.path}.lock")
            with lock.acquire(timeout=self._patience, poll_interval=_POLL_SECONDS):
                work()
        except (OSError, NotImplementedError) as error:  # the latter where the file system has no locks
            self._patience = 0.0 if isinstance(error, filelock.Timeout) else _LOCK_SECONDS
            self._warn(f"{complaint} ({error})")
            return False
        self._patience = _LOCK_SECONDS
        return True

    def _warn(self, complaint: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(complaint, stacklevel=2)


def _read(path: Path, fingerprint: Fingerprint) -> Document:
    document = Document.read(path)
    differences = fingerprint.differences(document.fingerprint)
    if differences:
        raise UnusableError("foreign", f"was measured elsewhere ({', '.join(differences)})")
    return document


def _read_other(path: Path, fingerprint: Fingerprint) -> Document:
    try:
        return _read(path, fingerprint)
    except UnusableError as error:
        raise ArgumentError(f"{path} {error}") from None
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read ({error})") from None
