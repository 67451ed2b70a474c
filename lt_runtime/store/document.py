"""The text of a plan cache's file, and what two of them make together.

Entries stay as they were read until they are asked for: a file is read fast however many it holds. Whoever asks for one
that is damaged is told so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final, Generic

from lt_runtime.store.entries import EFFORTS, Entry, LayerEntry, ProductEntry, signed, verified
from lt_runtime.store.fingerprint import Fingerprint
from lt_runtime.store.keys import SCHEMA
from lt_runtime.store.records import Json, from_json, to_json

_PARTS: Final = {"schema", "fingerprint", "products", "layers"}


class UnusableError(ValueError):
    """A file's content cannot be used.

    Attributes:
        kind: "damaged", "foreign" (of another fingerprint) or "schema-K" (of version K of the format).
    """

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class Section(Generic[Entry]):
    """Entries of one kind by key.

    Attributes:
        kind: class of the entries.
        raw: the entries as they stand in a file; not to be changed.
    """

    def __init__(self, kind: type[Entry], raw: Mapping[str, Json] | None = None) -> None:
        self.kind: type[Entry] = kind
        self.raw: dict[str, Json] = dict(raw or {})
        self._entries: dict[str, Entry] = {}

    def get(self, key: str) -> Entry | None:
        """The entry under a key; None if there is none.

        Raises:
            ValueError: it is damaged.
        """
        entry = self._entries.get(key)
        if entry is None and key in self.raw:
            entry = self._entries[key] = verified(self.kind, key, self.raw[key])
        return entry

    def add(self, key: str, entry: Entry) -> bool:
        """Adds an entry; whether anything changed by it (see `absorb`)."""
        return self.absorb(Section(self.kind, {key: signed(key, entry)})) > 0

    def absorb(self, other: Section[Entry]) -> int:
        """Adds another's entries; returns how many were new or took the place of ours.

        Of two under one key stays the one that was searched harder, else the later, else the faster; one that is barred
        only if there is no other. Which one stays does not depend on the order in which several are added.
        """
        changed = 0
        for key, theirs in other.raw.items():
            ours = self.raw.get(key)
            best = theirs if ours is None else self._better(key, ours, theirs)
            if best != ours:
                self.raw[key] = best
                self._entries.pop(key, None)
                changed += 1
        return changed

    def damaged(self) -> dict[str, str]:
        """What is wrong with the entries that are damaged, by key."""
        faults = {}
        for key in self.raw:
            try:
                self.get(key)
            except ValueError as error:
                faults[key] = str(error)
        return faults

    def drop_damaged(self) -> dict[str, str]:
        """Removes the entries that are damaged, and returns what was wrong with them, by key."""
        damaged = self.damaged()
        for key in damaged:
            del self.raw[key]
        return damaged

    def _better(self, key: str, ours: Json, theirs: Json) -> Json:
        if ours == theirs:
            return ours
        try:
            entry = verified(self.kind, key, theirs)
        except ValueError:
            return ours
        try:
            return signed(key, _better(verified(self.kind, key, ours), entry))
        except ValueError:
            return theirs


def _better(ours: Entry, theirs: Entry) -> Entry:
    """Of two entries under one key the one to keep; one that is barred lives on in what the other rejects."""
    if replace(ours, barred=None) == replace(theirs, barred=None):
        return theirs if ours.barred is None else ours
    if (ours.barred is None) is (theirs.barred is None):
        return max(ours, theirs, key=_rank)
    good, barred = (ours, theirs) if ours.barred is None else (theirs, ours)
    return _rejecting(good, barred)


def _rank(entry: ProductEntry | LayerEntry) -> tuple[int, bool, str, float, int, str]:
    return EFFORTS.index(entry.effort), entry.in_row, entry.when, -entry.us, len(entry.rejected), str(entry)


def _rejecting(good: Entry, barred: Entry) -> Entry:
    known = [replace(each, reason="") for each in good.rejected]
    if replace(barred.rejection, reason="") in known:
        return good
    return replace(good, rejected=(*good.rejected, barred.rejection))


class Document:
    """All that one file holds.

    Attributes:
        fingerprint: what its entries are good for.
        products, layers: its entries.
    """

    def __init__(
        self,
        fingerprint: Fingerprint,
        products: Mapping[str, Json] | None = None,
        layers: Mapping[str, Json] | None = None,
    ) -> None:
        self.fingerprint = fingerprint
        self.products = Section(ProductEntry, products)
        self.layers = Section(LayerEntry, layers)

    @classmethod
    def parse(cls, content: bytes) -> Document:
        """The document that a file's bytes are. Its entries are not looked at yet.

        Raises:
            UnusableError: "damaged" or "schema-K".
        """
        try:
            data = json.loads(content, object_pairs_hook=_named_once)
            _check_schema(data)
            products, layers = _sections(data)
            return cls(from_json(Fingerprint, data["fingerprint"]), products, layers)
        except UnusableError:
            raise
        except (ValueError, RecursionError) as error:
            raise UnusableError("damaged", f"is damaged ({error})") from None

    @classmethod
    def read(cls, path: Path) -> Document:
        """The document in a file.

        Raises:
            UnusableError: see `parse`.
            OSError: it cannot be read.
        """
        return cls.parse(path.read_bytes())

    def absorb(self, other: Document) -> int:
        """Adds another's entries; returns how many were new or took the place of ours, see `Section.absorb`."""
        return self.products.absorb(other.products) + self.layers.absorb(other.layers)

    def damaged(self) -> dict[str, str]:
        """What is wrong with the entries that are damaged, by key."""
        return self.products.damaged() | self.layers.damaged()

    def drop_damaged(self) -> dict[str, str]:
        """Removes the entries that are damaged, and returns what was wrong with them, by key."""
        return self.products.drop_damaged() | self.layers.drop_damaged()

    def render(self) -> bytes:
        """The file's bytes: JSON in lines, sorted, so that two files can be compared by eye."""
        head = {"schema": SCHEMA, "fingerprint": to_json(self.fingerprint)}
        parts = [f'"{name}": {_dump(part)}' for name, part in head.items()]
        parts += [_render("products", self.products.raw), _render("layers", self.layers.raw)]
        return ("{\n" + ",\n".join(parts) + "\n}\n").encode()


_dump = json.JSONEncoder(sort_keys=True).encode


def _render(name: str, raw: Mapping[str, Json]) -> str:
    """A section, with a line for each field of each entry: json's own indenting takes twice as long."""
    entries = [f" {_dump(key)}: {_render_entry(raw[key])}" for key in sorted(raw)]
    return f'"{name}": {{' + ("\n" + ",\n".join(entries) + "\n}" if entries else "}")


def _render_entry(raw: object) -> str:
    if not isinstance(raw, dict):  # damaged, and not noticed yet
        return _dump(raw)
    return "{\n" + ",\n".join(f"  {_dump(name)}: {_render_value(raw[name])}" for name in sorted(raw)) + "\n }"


def _render_value(value: object) -> str:
    if not isinstance(value, list) or not value:
        return _dump(value)
    return "[\n" + ",\n".join(f"   {_dump(each)}" for each in value) + "\n  ]"


def _named_once(pairs: list[tuple[str, object]]) -> Json:
    """An object of a file. Of two entries with one key, one has been another's."""
    named = dict(pairs)
    if len(named) < len(pairs):
        raise ValueError("it has a name twice in one place")
    return named


def _check_schema(data: object) -> None:
    schema = data.get("schema") if isinstance(data, dict) else None
    if type(schema) is not int:
        raise ValueError("it does not say its version")
    if schema != SCHEMA:
        raise UnusableError(f"schema-{schema}", f"is of version {schema} of the format, not {SCHEMA}")


def _sections(data: Json) -> tuple[dict[str, Json], dict[str, Json]]:
    if data.keys() != _PARTS:
        raise ValueError(f"it has the parts {', '.join(data)}")
    products, layers = data["products"], data["layers"]
    if not isinstance(products, dict) or not isinstance(layers, dict):
        raise ValueError("products or layers are no entries by key")
    return products, layers
