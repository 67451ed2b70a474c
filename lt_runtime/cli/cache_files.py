"""The files of the plan cache as the commands see them. Looking changes nothing, and sets nothing aside."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lt_runtime import cublaslt
from lt_runtime.cublaslt.library import version_text
from lt_runtime.errors import ArgumentError, LtError
from lt_runtime.files import TEMPORARY
from lt_runtime.gpu.devices import device_count
from lt_runtime.store.document import Document, UnusableError
from lt_runtime.store.fingerprint import Fingerprint, fingerprint
from lt_runtime.store.keys import parse_key
from lt_runtime.store.plan_store import plans_directory

_SET_ASIDE: Final = ("damaged", "foreign", "schema")
_ABANDONED_SECONDS: Final = 3600.0
"""Age of a file still being written after which its writer must have died."""


@dataclass(frozen=True, slots=True)
class CacheFile:
    """A file of the cache.

    Attributes:
        document: what it holds, if that can be read.
        fault: why it is not used, whatever its entries are.
    """

    path: Path
    document: Document | None = None
    fault: str | None = None
    is_of_another_version: bool = False

    @classmethod
    def look(cls, path: Path) -> CacheFile:
        """Reads a file."""
        try:
            document = Document.read(path)
        except UnusableError as error:
            return cls(path, fault=str(error), is_of_another_version=error.kind != "damaged")
        except OSError as error:
            return cls(path, fault=f"cannot be read ({error.strerror})")
        expected = document.fingerprint.file_name
        fault = None if path.name == expected else f"is never read: its name should be {expected}"
        return cls(path, document, fault)

    def faults(self) -> Iterator[str]:
        """Everything that is wrong with it, entry by entry."""
        if self.fault is not None:
            yield self.fault
        if self.document is None:
            return
        for section in (self.document.products, self.document.layers):
            for key in section.raw:
                try:
                    section.get(key)
                    parse_key(key)
                except ValueError as error:
                    yield f"the entry {key} is damaged ({error})"


@functools.cache
def machine() -> tuple[Fingerprint, ...]:
    """The different fingerprints of this machine's GPUs; none where there is no GPU, or no cuBLASLt."""
    try:
        return tuple(dict.fromkeys(fingerprint(device) for device in range(device_count())))
    except LtError:
        return ()


def every_file() -> list[CacheFile]:
    """The files of the cache, by name."""
    return [CacheFile.look(path) for path in sorted(plans_directory().glob("*.json"))]


def set_aside() -> list[Path]:
    """Files that were found unusable, kept under another name."""
    return [path for kind in _SET_ASIDE for path in sorted(plans_directory().glob(f"*.json.{kind}-*"))]


def nearest(known: Sequence[Fingerprint], to: Fingerprint) -> Fingerprint:
    """The one of several fingerprints that differs least."""
    return min(known, key=lambda each: len(each.differences(to)))


def source(name: str | None) -> Path:
    """The file of that name in the cache, or this machine's.

    Raises:
        ArgumentError: there is no such file, or no way to tell which is this machine's.
    """
    directory = plans_directory()
    if name is not None:
        path = directory / name
        if not path.is_file():
            raise ArgumentError(f"--file is {name}, but {path} does not exist; see `cache list`")
        return path
    ours = machine()
    if len(ours) != 1:
        found = "GPUs of several kinds" if ours else "no usable GPU"
        raise ArgumentError(f"{found} here: name a file of the cache with --file, see `cache list`")
    path = directory / ours[0].file_name
    if not path.is_file():
        raise ArgumentError(f"nothing has been measured on this machine yet: {path} does not exist")
    return path


def removable() -> Iterator[tuple[Path, str]]:
    """Files that this installation will never read again, and why."""
    directory = plans_directory()
    yield from ((path, "set aside") for path in set_aside())
    for path in sorted(directory.glob(f"*.json.*{TEMPORARY}")):
        if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
            yield path, "never finished"
    for file in every_file():
        reason = _outdated(file)
        if reason is not None:
            yield file.path, reason


def _outdated(file: CacheFile) -> str | None:
    if file.is_of_another_version:
        return file.fault
    if file.document is None:
        return None
    version, ours = file.document.fingerprint.cublaslt, _installed_version()
    if ours is None or version == ours:
        return None
    return f"of cuBLASLt {version_text(version)}; {version_text(ours)} is installed"


def _installed_version() -> int | None:
    """The version of the cuBLASLt that is installed; None if none is."""
    try:
        return cublaslt.get_version()
    except LtError:
        return None
