"""Entries and files of the plan cache as text: accepted forms, detected damage, and which of two entries is kept."""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest

from lt_runtime.errors import ArgumentError
from lt_runtime.store.document import Document, UnusableError
from lt_runtime.store.entries import (
    Alternative,
    LayerEntry,
    ProductEntry,
    RejectedAlgorithm,
    RejectedStrategy,
    better,
    entry_of,
    has_its_digest,
    now,
    signed,
)
from lt_runtime.store.keys import SCHEMA
from tests.support.plan_entries import H200, LATER, layer, product


@pytest.mark.parametrize("entry", [product(when=now()), layer(), product(rejected=(), barred="known to be wrong")])
def test_an_entry_is_read_back(entry: ProductEntry | LayerEntry) -> None:
    in_file = json.loads(json.dumps(signed("key", entry)))
    assert has_its_digest("key", in_file)
    assert entry_of(in_file) == entry


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (product, {"algorithm": b"short"}, "accepted are 0, 64 or 128 bytes"),
        (product, {"config": {"id": 1 << 64}}, "accepted are integers by name"),
        (product, {"us": 10**400}, "us is 1000.*; accepted are 0 µs or more"),
        (product, {"candidates": 10**400}, "accepted are integers of 1 or more"),
        (product, {"config": {"id": 1.5}}, "config is {'id': 1.5}; accepted are integers by name"),
        (product, {"config": {1: 1}}, "config is {1: 1}; accepted are integers by name"),
        (product, {"us": -1.0}, "us is -1.0"),
        (product, {"us": float("nan")}, "us is nan"),
        (product, {"first_us": float("inf")}, "first_us is inf"),
        (product, {"spread": True}, "spread is True"),
        (product, {"candidates": 0}, "candidates is 0"),
        (product, {"candidates": 1.0}, "candidates is 1.0"),
        (product, {"when": "yesterday"}, "when is 'yesterday'"),
        (product, {"when": "2026-1-31T12:00:00Z"}, "when is"),
        (product, {"when": "2026-02-30T12:00:00Z"}, "when is"),
        (product, {"barred": 1}, "barred is 1"),
        (layer, {"strategy": {"saved": 1.5}}, "strategy is {'saved': 1.5}; accepted are texts"),
        (layer, {"strategy": ["none"]}, r"strategy is \['none'\]; accepted"),
        (layer, {"us": "fast"}, "us is 'fast'"),
        (RejectedAlgorithm, {"algorithm": b"short", "config": {}, "reason": "slow"}, "algorithm"),
        (RejectedStrategy, {"strategy": {}, "reason": None}, "reason"),
        (Alternative, {"strategy": {}, "us": -1.0}, "us is"),
    ],
)
def test_values_that_are_not_accepted(make: Any, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make(**values)


@pytest.mark.parametrize("field", sorted(signed("key", product())))
def test_any_changed_field_is_noticed(field: str) -> None:
    changed = signed("key", product())
    changed[field] = "0" * 128 if field == "algorithm" else 1
    assert not has_its_digest("key", changed)
    assert not has_its_digest("other key", signed("key", product()))


def merged(*entries: ProductEntry) -> ProductEntry:
    """Stores several entries under one key and returns the one that remains; checks that the order does not matter."""
    results = []
    for order in itertools.permutations(entries):
        document = Document(H200)
        for entry in order:
            document.absorb(Document(H200, {"key": signed("key", entry)}))
        results.append(document.get("key"))
    assert all(result == results[0] for result in results)
    assert isinstance(results[0], ProductEntry)
    return results[0]


def test_a_barred_entry_stays_until_there_is_another_and_then_among_what_is_rejected() -> None:
    plain = product(when=LATER)
    barred, other = replace(plain, barred="known to be wrong"), product(rejected=())
    assert merged(plain, barred) == barred
    kept = merged(barred, other)
    assert kept == replace(other, rejected=(RejectedAlgorithm(plain.algorithm, plain.config, "known to be wrong"),))
    assert merged(barred, kept) == kept
    assert merged(kept, other) == kept


@dataclass(frozen=True)
class _Longer(ProductEntry):
    """An entry of a later version: it has a field that this version does not know."""

    note: str = ""


@pytest.mark.parametrize("kind", ["a bad value", "an unknown field"])
def test_an_entry_that_is_not_accepted_is_none_whatever_its_digest(kind: str) -> None:
    forged, good = product(), product()
    if kind == "a bad value":
        object.__setattr__(forged, "us", -1.0)
    else:
        forged = _Longer(**{each.name: getattr(forged, each.name) for each in fields(forged)})
    content = Document(H200, {"key": signed("key", forged)}).render()
    document = Document.parse(content)
    assert document.get("key") is None
    assert document.without_algorithms().raw == {}
    document.add("key", good)
    document.absorb(Document.parse(content))
    assert document.get("key") == good


def full_document() -> Document:
    document = Document(H200)
    for index in range(3):
        document.add(f"product {index}", product())
        document.add(f"layer {index}", layer(alternatives=()))
    return document


def test_a_file_is_read_back() -> None:
    document = full_document()
    again = Document.parse(document.render())
    assert again.raw == document.raw
    assert again.fingerprint == H200
    assert again.render() == document.render()
    assert Document.parse(Document(H200).render()).render() == Document(H200).render()


def test_a_file_can_be_read_by_people() -> None:
    text = full_document().render().decode()
    assert '  "candidates": 14,\n  "config": {"ID": 66, "SPLITK_NUM": 1, "TILE_ID": 20},\n' in text
    assert max(map(len, text.splitlines())) < 250
    assert text.isascii()


def test_a_file_cut_off_anywhere_and_any_changed_byte_are_noticed() -> None:
    document = full_document()
    content = document.render()
    for length in range(0, len(content) - 2, 7):
        with pytest.raises(UnusableError, match="is damaged"):
            Document.parse(content[:length])
    for index in range(0, len(content), 5):
        if not content[index : index + 1].isspace():
            changed = bytearray(content)
            changed[index] ^= 1
            with contextlib.suppress(UnusableError):
                found = Document.parse(bytes(changed))
                # The flipped bit may make an entry's key equal to another entry's key. The file then holds one entry
                # less, which does not count as damage if all remaining entries are intact.
                assert found.fingerprint != H200 or all(document.raw[key] == raw for key, raw in found.raw.items())


HEAD = {"schema": SCHEMA, "fingerprint": {}, "entries": {}}
FINGERPRINT = json.loads(Document(H200).render())["fingerprint"]


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"", "damaged"),
        (b"[]", "damaged"),
        (b'"text"', "damaged"),
        (b"{}", "damaged"),
        (json.dumps(HEAD).encode(), "damaged"),
        (json.dumps(HEAD | {"schema": True}).encode(), "damaged"),
        (json.dumps(HEAD | {"schema": "1"}).encode(), "damaged"),
        (json.dumps(HEAD | {"fingerprint": FINGERPRINT, "more": {}}).encode(), "damaged"),
        (json.dumps(HEAD | {"fingerprint": FINGERPRINT, "entries": []}).encode(), "damaged"),
        (json.dumps(HEAD | {"fingerprint": FINGERPRINT | {"capability": "90"}}).encode(), "damaged"),
        (json.dumps(HEAD | {"fingerprint": FINGERPRINT | {"gpu": None}}).encode(), "damaged"),
        (json.dumps({"schema": 0, "plans": []}).encode(), "schema-0"),
        (json.dumps(HEAD | {"schema": 99}).encode(), "schema-99"),
    ],
)
def test_what_is_no_file_of_ours(content: bytes, kind: str) -> None:
    with pytest.raises(UnusableError) as caught:
        Document.parse(content)
    assert caught.value.kind == kind


@pytest.mark.parametrize("make", [product, layer])
@pytest.mark.parametrize(("winner", "loser"), [({"when": LATER, "us": 90.0}, {"us": 1.0}), ({"us": 1.0}, {"us": 90.0})])
def test_which_of_two_measurements_is_kept(make: Any, winner: dict[str, Any], loser: dict[str, Any]) -> None:
    kept, other = make(**winner), make(**loser)
    assert better(kept, other) == better(other, kept) == kept
    barred = replace(kept, barred="wrong")
    for first, second in ((barred, other), (other, barred)):
        found = better(first, second)
        assert replace(found, rejected=()) == replace(other, rejected=())
        reasons = [each.reason for each in found.rejected if each not in other.rejected]
        assert reasons == ["wrong"]
    assert better(kept, barred) == better(barred, kept) == barred, "a bar holds for the same entry"
