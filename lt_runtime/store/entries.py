"""Entries of the plan cache (one for each measured problem), and the rule that decides which of two is kept.

The constructors of entries check the values. In a file each entry has a digest of its key and values, because cuBLASLt
may not detect a flipped bit in an algorithm.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from types import NoneType
from typing import Any, Final, TypeAlias, TypeVar, cast

from lt_runtime.errors import ArgumentError
from lt_runtime.store.keys import Json, field_types, from_json, to_json

Strategy: TypeAlias = Mapping[str, str | bool | int | None]
"""A layer's strategy: values of its fields, by name. `plans` defines which names exist; the store accepts any."""

_DATE: Final = "%Y-%m-%dT%H:%M:%SZ"
_DIGEST_DIGITS: Final = 16
_INTEGERS: Final = range(-(1 << 63), 1 << 64)


def now() -> str:
    """The date and time in UTC, such as 2026-01-31T23:59:59Z."""
    return datetime.now(UTC).strftime(_DATE)


def _is_date(value: Any) -> bool:
    try:
        return bool(datetime.fromisoformat(value).strftime(_DATE) == value)
    except (TypeError, ValueError):
        return False


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and type(value) is not bool and 0.0 <= value <= sys.float_info.max


def _is_by_name(value: Any, kinds: set[type]) -> bool:
    if not isinstance(value, Mapping) or not {*map(type, value)} <= {str} or not {*map(type, value.values())} <= kinds:
        return False
    return all(each in _INTEGERS for each in value.values() if type(each) is int)


_ACCEPTED: Final[dict[str, tuple[Callable[[Any], bool], str]]] = {
    # cuBLASLt's algorithm has 64 bytes. A plan on padded copies adds a mark in front of them (see products/methods.py).
    "algorithm": (lambda value: isinstance(value, bytes) and len(value) in (0, 64, 128), "0, 64 or 128 bytes"),
    "config": (lambda value: _is_by_name(value, {int}), "integers by name"),
    "strategy": (lambda value: _is_by_name(value, {str, bool, int, NoneType}), "texts, integers, True, False and None"),
    **dict.fromkeys(("us", "first_us", "spread"), (_is_time, "0 µs or more")),
    "candidates": (lambda value: type(value) is int and value >= 1 and value in _INTEGERS, "integers of 1 or more"),
    "reason": (lambda value: isinstance(value, str), "texts"),
    "barred": (lambda value: value is None or isinstance(value, str), "texts and None"),
    "when": (_is_date, "dates in UTC such as 2026-01-31T23:59:59Z"),
}
"""For each field: the check of its value, and a description of accepted values.

Fields with equal names have equal meanings in all classes below.
"""


class _Checked:
    """Base of the dataclasses below: checks the fields against `_ACCEPTED`."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in _ACCEPTED.keys() & field_types(cast(Any, type(self))):
            (accepts, words), value = _ACCEPTED[name], getattr(self, name)
            if not accepts(value):
                raise ArgumentError(f"{name} is {value!r:.200}; accepted are {words}")


class _Measured(_Checked):
    """Base of the plan cache's entries, which hold measurements."""

    __slots__ = ()

    @property
    def is_usable(self) -> bool:
        """Whether a plan can use the entry now: it is not barred, and its algorithm need not be rebuilt first."""
        entry: Any = self
        return entry.barred is None and getattr(entry, "algorithm", None) != b""


@dataclass(frozen=True, slots=True)
class RejectedAlgorithm(_Checked):
    """An algorithm that was tried and must not be used.

    Attributes:
        algorithm, config: as in `ProductEntry`.
        reason: why, such as "wrong: ...", "two runs differ, ...", "far behind: ..." or "not measured: time was up".
    """

    algorithm: bytes
    config: Mapping[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class RejectedStrategy(_Checked):
    """A strategy that was tried and must not be used, with the reason."""

    strategy: Strategy
    reason: str


@dataclass(frozen=True, slots=True)
class Alternative(_Checked):
    """A strategy with right results that was slower than the chosen one, and its median time in microseconds."""

    strategy: Strategy
    us: float


@dataclass(frozen=True, slots=True)
class ProductEntry(_Measured):
    """The best algorithm found for one matrix product.

    Attributes:
        algorithm: the bytes from which `plan_from_blob` makes a plan: the 64 opaque bytes of a `cublasLtMatmulAlgo_t`,
            which only one version of cuBLASLt understands, possibly after a mark; or the mark of our own kernel. Empty
            in an entry merged from another machine, whose algorithm is rebuilt from `config` and verified before its
            first use.
        config: the algorithm's configuration: values of its attributes, by name.
        us: median time in µs.
        first_us: median time in µs of the algorithm that runs untuned.
        spread: interquartile range of the times in µs.
        candidates: number of algorithms that were measured.
        rejected: algorithms that were tried and must not be used.
        when: date and time of the measurement, in UTC.
        barred: why the entry must not be used any more; None if it may be used.

    Raises:
        ArgumentError: a value is not one of those accepted.
    """

    algorithm: bytes
    config: Mapping[str, int]
    us: float
    first_us: float
    spread: float
    candidates: int
    rejected: tuple[RejectedAlgorithm, ...] = ()
    when: str = field(default_factory=now)
    barred: str | None = None


@dataclass(frozen=True, slots=True)
class LayerEntry(_Measured):
    """The best strategy found for one layer.

    Attributes:
        strategy: how the layer is split.
        us: median time in µs of the whole layer.
        alternatives: strategies that were measured and were slower.
        rejected: strategies that were tried and must not be used.
        when, barred: as in `ProductEntry`.

    Raises:
        ArgumentError: a value is not one of those accepted.
    """

    strategy: Strategy
    us: float
    alternatives: tuple[Alternative, ...] = ()
    rejected: tuple[RejectedStrategy, ...] = ()
    when: str = field(default_factory=now)
    barred: str | None = None


Entry: TypeAlias = ProductEntry | LayerEntry
Kind = TypeVar("Kind", ProductEntry, LayerEntry)


def better(ours: Kind, theirs: Kind) -> Kind:
    """The better of two entries for one problem, which is kept. The order of several merges does not change the result.

    The later entry is better, unless its date is in the future; of entries with equal dates the faster one; of equally
    fast entries the one with more rejected choices, and then the one that has an algorithm. A barred entry loses to an
    entry that is not barred, which then lists the barred choice among its rejected ones. Of two
    entries that differ in `barred` alone, the barred one is kept.
    """
    if replace(ours, barred=None) == replace(theirs, barred=None):
        return theirs if ours.barred is None else ours
    if (ours.barred is None) is (theirs.barred is None):
        return max(ours, theirs, key=_rank)
    if ours.barred is None:
        ours, theirs = theirs, ours
    choice = (ours.algorithm, ours.config) if isinstance(ours, ProductEntry) else (ours.strategy,)
    kind: Any = RejectedAlgorithm if isinstance(ours, ProductEntry) else RejectedStrategy
    known = kind(*choice, "") in [replace(each, reason="") for each in theirs.rejected]
    return theirs if known else replace(theirs, rejected=(*theirs.rejected, kind(*choice, ours.barred)))


def recency(when: object) -> tuple[bool, str]:
    """Sort key of a date. Dates in the future, which cannot be right, come before all others."""
    return str(when) <= now(), str(when)


def _rank(entry: Entry) -> tuple[tuple[bool, str], float, int, bool, str]:
    return recency(entry.when), -entry.us, len(entry.rejected), entry.is_usable, str(entry)


def signed(key: str, entry: Entry) -> Json:
    """The JSON of an entry for a file: its values, and a digest of its key and values."""
    plain = to_json(entry)
    return plain | {"digest": _digest(key, plain)}


def has_its_digest(key: str, value: object) -> bool:
    """Whether a JSON value in a file is undamaged: it has the digest of its key and its other values."""
    return isinstance(value, dict) and value.get("digest") == _digest(key, value)


def entry_of(value: Json) -> Entry:
    """Converts the JSON from `to_json` or `signed` back to an entry.

    Raises:
        ValueError: the JSON is not an entry.
    """
    kind: type[Entry] = ProductEntry if "algorithm" in value else LayerEntry
    return from_json(kind, _without_digest(value))


def _without_digest(value: Json) -> Json:
    return {name: each for name, each in value.items() if name != "digest"}


def _digest(key: str, value: Json) -> str:
    text = json.dumps([key, _without_digest(value)], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]
