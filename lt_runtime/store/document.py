"""`Document`, the content of a plan file: the fingerprint of a machine, and entries by key; reading, merging, writing.

Measured plans hold for one GPU model with one version of cuBLASLt, driver and our kernels.

A file is used as a whole or not at all: if the digest of one entry does not match, the file counts as damaged. An entry
is converted from JSON only at its first use, because converting takes four times as long as comparing the digest.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from lt_runtime import cublaslt
from lt_runtime.errors import ArgumentError, LtError, printable
from lt_runtime.files import digest_of, parse_json, read_private, read_regular
from lt_runtime.gpu.devices import device_count, device_info, kernel_driver_version
from lt_runtime.gpu.driver import call
from lt_runtime.paths import kernel_sources
from lt_runtime.problem import MatmulProblem
from lt_runtime.store.entries import Entry, ProductEntry, better, entry_of, has_its_digest, recency, signed
from lt_runtime.store.keys import SCHEMA, Json, from_json, parse_key, to_json

LARGEST: Final = 8 << 20
"""Largest size of a plan file in bytes. Reading so much takes about a second at worst.

An entry has about 1,000 bytes.
"""
_NEWEST_SCHEMA: Final = 1_000_000
_PARTS: Final = {"schema", "fingerprint", "entries"}
_LARGEST_ENTRY: Final = 100_000
"""Largest number of characters of an entry that is merged from another machine."""
_LINE_DEPTH: Final = 3
"""Depth of nesting from which each object of a plan file's JSON is written on one line, such as an algorithm's
configuration.
"""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The properties of a machine on which measurements depend. Equal machines have equal fingerprints.

    Attributes:
        gpu: name of the GPU, as the driver gives it.
        capability: compute capability, major·10 + minor.
        multiprocessors: number of multiprocessors; a partition of a GPU (MIG) has fewer than the whole.
        cublaslt: version, major·10000 + minor·100 + patch.
        driver: version, such as "580.95.05", or "CUDA 13.0" if the driver does not report its own version.
        kernels: digest of the sources of our kernels, because the choice depends on their speed.
    """

    gpu: str
    capability: int
    multiprocessors: int
    cublaslt: int
    driver: str
    kernels: str

    @property
    def file_name(self) -> str:
        """Name of the file that holds the plans, such as nvidia-h200-sm90-132-cublaslt130100-0123abcd.json."""
        gpu = re.sub(r"[^a-z0-9]+", "-", self.gpu.lower()).strip("-")
        digest = hashlib.sha256(json.dumps([SCHEMA, asdict(self)], sort_keys=True).encode()).hexdigest()
        return f"{gpu}-sm{self.capability}-{self.multiprocessors}-cublaslt{self.cublaslt}-{digest[:8]}.json"

    def differences(self, other: Fingerprint) -> list[str]:
        """Says how `other` differs, as in "driver 570.86 instead of 580.95.05"; an empty list if it is equal."""
        ours, theirs = asdict(self), asdict(other)
        return [f"{name} {theirs[name]} instead of {ours[name]}" for name in ours if ours[name] != theirs[name]]


def fingerprint(device: int) -> Fingerprint:
    """The fingerprint of one of this machine's GPUs, by its ordinal.

    Raises:
        MissingLibraryError: there is no driver or no cuBLASLt.
        DriverError: there is no such GPU.
    """
    info = device_info(device)
    gpu = info.name, info.capability, info.multiprocessors
    return Fingerprint(*gpu, cublaslt.get_version(), driver_version(), kernels_digest())


@functools.cache
def machine() -> tuple[Fingerprint, ...]:
    """The distinct fingerprints of this machine's GPUs; an empty tuple without a usable GPU or without cuBLASLt."""
    try:
        return tuple(dict.fromkeys(fingerprint(device) for device in range(device_count())))
    except LtError:
        return ()


@functools.cache
def driver_version() -> str:
    """The driver's version; if the driver does not report it, the highest CUDA version that the driver supports."""
    known = kernel_driver_version()
    if known is not None:
        return known
    version = call("cuDriverGetVersion")
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


@functools.cache
def kernels_digest() -> str:
    """Sixteen hexadecimal digits that change when any file of `cuda_src` changes."""
    return digest_of(sorted(kernel_sources().glob("*.cu*"))).hex()[:16]


class UnusableError(ArgumentError):
    """The content of a file cannot be used.

    Attributes:
        kind: "damaged", "foreign" (another machine's fingerprint) or "schema-K" (version K of the file format).
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Document:
    """The fingerprint and the entries of one plan file.

    Attributes:
        fingerprint: the machine for which the entries are valid.
        raw: the entries by key, as JSON values as in the file. Callers must not change them.
    """

    def __init__(self, fingerprint: Fingerprint, entries: Mapping[str, Json] | None = None) -> None:
        self.fingerprint = fingerprint
        self.raw: dict[str, Json] = dict(entries or {})
        self._made: dict[str, Entry] = {}

    @classmethod
    def read(cls, path: Path, *, is_own: bool = False) -> Document:
        """Reads a document from a file.

        Args:
            is_own: whether the file belongs to this cache; if so, it is refused if another user could have written it.

        Raises:
            UnusableError: the file is damaged ("damaged"), or has version K of the file format ("schema-K").
            UntrustedError: another user could have written the file.
            OSError: the file cannot be read.
        """
        try:
            content = (read_private if is_own else read_regular)(path, LARGEST)
        except ValueError as error:
            raise UnusableError("damaged", f"is damaged ({error})") from None
        return cls.parse(content)

    @classmethod
    def parse(cls, content: bytes) -> Document:
        """Reads a document from the bytes of a file.

        Raises:
            UnusableError: the file is damaged ("damaged"), or has version K of the file format ("schema-K").
        """
        try:
            data = parse_json(content)
            schema = data.get("schema") if isinstance(data, dict) else None
            if type(schema) is not int or not 0 <= schema <= _NEWEST_SCHEMA:
                raise ValueError("it does not say its version")
            if schema == SCHEMA:
                if data.keys() != _PARTS or not isinstance(data["entries"], dict):
                    raise ValueError(f"it has the parts {', '.join(data)[:80]}")
                for key, value in data["entries"].items():
                    if not has_its_digest(key, value):
                        raise ValueError(f"the digest does not fit of the entry {key}")
                return cls(from_json(Fingerprint, data["fingerprint"]), data["entries"])
        except (ValueError, RecursionError) as error:
            raise UnusableError("damaged", f"is damaged ({error!s:.200})") from None
        raise UnusableError(f"schema-{schema}", f"is of version {schema} of the format, not {SCHEMA}")

    def require(self, fingerprint: Fingerprint) -> None:
        """Checks that the entries are valid for the machine with this fingerprint.

        Raises:
            UnusableError: the entries are valid for another machine ("foreign").
        """
        differences = fingerprint.differences(self.fingerprint)
        if differences:
            raise UnusableError("foreign", f"was measured elsewhere ({', '.join(differences)})")

    def require_sound(self) -> None:
        """Checks every entry, as is required before entries of another machine are merged.

        Raises:
            UnusableError: an entry has a fault ("damaged"); the message describes the first one.
        """
        for fault in self.faults():
            raise UnusableError("damaged", f"is damaged ({fault})")

    def faults(self) -> Iterator[str]:
        """Faults of entries in words: a key that no problem has, values that are not accepted, too long an entry."""
        for key, raw in self.raw.items():
            try:
                if isinstance(parse_key(key), MatmulProblem) is not isinstance(entry_of(raw), ProductEntry):
                    raise ValueError("it is an entry of another kind of problem")
                if len(_dump(raw)) > _LARGEST_ENTRY:
                    raise ValueError(f"it has more than {_LARGEST_ENTRY} characters")
            except ValueError as error:
                yield f"the entry {printable(key, 100)} is damaged ({error!s:.200})"

    def get(self, key: str) -> Entry | None:
        """The entry under a key; None if there is none, or if its values are not accepted."""
        if key in self.raw and key not in self._made:
            with contextlib.suppress(ValueError):
                self._made[key] = entry_of(self.raw[key])
        return self._made.get(key)

    @property
    def counts(self) -> dict[str, int]:
        """The numbers of entries, under the names "products" and "layers"."""
        products = sum(isinstance(value, dict) and "algorithm" in value for value in self.raw.values())
        return {"products": products, "layers": len(self.raw) - products}

    def add(self, key: str, entry: Entry) -> None:
        """Adds an entry, unless the document has a better entry under its key."""
        self.absorb(Document(self.fingerprint, {key: signed(key, entry)}))

    def absorb(self, other: Document) -> int:
        """Adds another document's entries where it has new or better ones; returns their number."""
        changed = 0
        for key, raw in other.raw.items():
            if key not in self.raw:
                self.raw[key] = raw
                changed += 1
            elif raw != self.raw[key]:
                ours: Any = self.get(key)
                theirs: Any = other.get(key)
                best = better(ours, theirs) if ours and theirs else ours or theirs
                if best is not ours:
                    self.raw[key], self._made[key] = signed(key, best), best
                    changed += 1
        return changed

    def without_algorithms(self) -> Document:
        """A document with the same entries without algorithms, which readers rebuild from the configurations."""
        entries = {}
        for key in self.raw:
            entry = self.get(key)
            if entry is not None:
                bare = replace(entry, algorithm=b"") if isinstance(entry, ProductEntry) else entry
                entries[key] = signed(key, bare)
        return Document(self.fingerprint, entries)

    def render(self) -> bytes:
        """The bytes of the plan file: sorted JSON on many lines, so that people can read it and compare files.

        If the file would be larger than readers accept, the oldest entries are removed from the document first.
        """
        while len(content := self._content()) > LARGEST:
            oldest = sorted(self.raw, key=lambda key: recency(self.raw[key].get("when", "")))
            for key in oldest[: len(oldest) // 8 + 1]:
                del self.raw[key]
                self._made.pop(key, None)
        return content

    def _content(self) -> bytes:
        parts = {"schema": SCHEMA, "fingerprint": to_json(self.fingerprint), "entries": self.raw}
        lines = [f'"{name}": {_render(part, 1)}' for name, part in parts.items()]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


_dump = json.JSONEncoder(sort_keys=True).encode


def _render(value: Any, depth: int) -> str:
    """JSON text of a value at a depth of nesting, one line for each item.

    The lines are written here, because `json.dumps` with indents takes twice as long.
    """
    if not value or not isinstance(value, list if depth == _LINE_DEPTH else (dict, list)) or depth > _LINE_DEPTH:
        return _dump(value)
    if isinstance(value, dict):
        start, parts, end = "{", [f"{_dump(name)}: {_render(value[name], depth + 1)}" for name in sorted(value)], "}"
    else:
        start, parts, end = "[", [_dump(each) for each in value], "]"
    indent = "\n" + " " * depth
    return f"{start}{indent}{f',{indent}'.join(parts)}{indent[:-1]}{end}"
