"""What is remembered of a problem once it has been measured, and how that stands in a file.

An entry is checked wherever it comes from. In a file it carries a digest of itself and its key, so that a changed bit
of an algorithm is noticed, which the library need not do.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias, TypeVar, get_args

from lt_runtime.errors import ArgumentError
from lt_runtime.store.records import Json, from_json, to_json

Effort: TypeAlias = Literal["default", "deep"]
Strategy: TypeAlias = Mapping[str, str | bool | int | None]
"""How a layer is split, by name: whatever the planner writes, it reads."""

EFFORTS: Final[tuple[str, ...]] = get_args(Effort)
"""How hard it was searched, the least first."""

_ALGORITHM_BYTES: Final = (64, 128)  # of the library's, and with the mark of padded copies before it
_DATE: Final = "%Y-%m-%dT%H:%M:%SZ"
_DIGEST_DIGITS: Final = 16


def now() -> str:
    """The date and time in UTC, such as 2026-01-31T23:59:59Z."""
    return datetime.now(UTC).strftime(_DATE)


@dataclass(frozen=True, slots=True)
class RejectedAlgorithm:
    """An algorithm that was measured or checked and is not to be used.

    Attributes:
        algorithm: as in `ProductEntry`.
        config: its configuration, by the names of the attributes.
        reason: such as "wrong: ...", "not deterministic", "slow: ...", "refused at the launch".
    """

    algorithm: bytes
    config: Mapping[str, int]
    reason: str

    def __post_init__(self) -> None:
        _check_algorithm(self.algorithm, self.config)
        _check_text("reason", self.reason)


@dataclass(frozen=True, slots=True)
class RejectedStrategy:
    """A strategy that was tried and is not to be used, and why."""

    strategy: Strategy
    reason: str

    def __post_init__(self) -> None:
        _check_strategy(self.strategy)
        _check_text("reason", self.reason)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A strategy that works as well and was slower, with its median time in µs."""

    strategy: Strategy
    us: float

    def __post_init__(self) -> None:
        _check_strategy(self.strategy)
        _check_time("us", self.us)


@dataclass(frozen=True, slots=True)
class ProductEntry:
    """The best algorithm found for one matrix product.

    Attributes:
        algorithm: what `plan_by` makes a plan of: the 64 opaque bytes of `cublasLtMatmulAlgo_t`, good for one version
            of the library, or what stands for more than that.
        config: its configuration, by the names of the attributes; for people, nothing is made from it.
        us: median time in µs. first_us: that of the first algorithm that the heuristic offers.
        spread: interquartile range of the times in µs.
        candidates: how many algorithms were measured.
        refused: what the library does not do for this problem, not to be asked again.
        in_row: whether it was chosen in a row of layers, which counts for more than by itself.
        barred: why it may not be used any more; None while it may.

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
    refused: tuple[str, ...] = ()
    in_row: bool = False
    effort: Effort = "default"
    when: str = field(default_factory=now)
    barred: str | None = None

    def __post_init__(self) -> None:
        _check_algorithm(self.algorithm, self.config)
        _check_time("us", self.us)
        _check_time("first_us", self.first_us)
        _check_time("spread", self.spread)
        if type(self.candidates) is not int or self.candidates < 1:
            raise ArgumentError(f"candidates is {self.candidates!r}; accepted: 1 or more")
        for text in self.refused:
            _check_text("refused", text)
        _check_record(self.effort, self.when, self.barred)

    @property
    def rejection(self) -> RejectedAlgorithm:
        """What remains of an entry that is barred."""
        return RejectedAlgorithm(self.algorithm, self.config, self.barred or "")


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """The best strategy found for one layer.

    Attributes:
        strategy: how the layer is split.
        us: median time in µs, end to end.
        alternatives: what else was measured.
        in_row: whether it was decided in a row of layers, which counts for more than by itself.
        barred: why it may not be used any more; None while it may.

    Raises:
        ArgumentError: a value is not one of those accepted.
    """

    strategy: Strategy
    us: float
    alternatives: tuple[Alternative, ...] = ()
    rejected: tuple[RejectedStrategy, ...] = ()
    in_row: bool = False
    effort: Effort = "default"
    when: str = field(default_factory=now)
    barred: str | None = None

    def __post_init__(self) -> None:
        _check_strategy(self.strategy)
        _check_time("us", self.us)
        _check_record(self.effort, self.when, self.barred)

    @property
    def rejection(self) -> RejectedStrategy:
        """What remains of an entry that is barred."""
        return RejectedStrategy(self.strategy, self.barred or "")


Entry = TypeVar("Entry", ProductEntry, LayerEntry)


def signed(key: str, entry: ProductEntry | LayerEntry) -> Json:
    """An entry as it stands in a file under its key."""
    plain = to_json(entry)
    return plain | {"digest": _digest(key, plain)}


def verified(kind: type[Entry], key: str, value: object) -> Entry:
    """The entry of which `signed` gave `value`.

    Raises:
        ValueError: there is none: the value is damaged.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is no entry")
    plain = {name: each for name, each in value.items() if name != "digest"}
    if value.get("digest") != _digest(key, plain):
        raise ValueError("its digest does not fit")
    return from_json(kind, plain)


def _digest(key: str, plain: Json) -> str:
    text = json.dumps([key, plain], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_DIGITS]


def _check_algorithm(algorithm: bytes, config: Mapping[str, int]) -> None:
    if not isinstance(algorithm, bytes) or len(algorithm) not in _ALGORITHM_BYTES:
        raise ArgumentError(f"algorithm is {algorithm!r}; accepted are {' or '.join(map(str, _ALGORITHM_BYTES))} bytes")
    if not isinstance(config, Mapping) or not all(isinstance(name, str) for name in config):
        raise ArgumentError(f"config is {config!r}; accepted are numbers by name")
    for name, value in config.items():
        if type(value) is not int:
            raise ArgumentError(f"{name} of the configuration is {value!r}; accepted are integers")


def _check_strategy(strategy: Strategy) -> None:
    accepted = (str, bool, int, type(None))
    if not isinstance(strategy, Mapping) or not all(isinstance(name, str) for name in strategy):
        raise ArgumentError(f"strategy is {strategy!r}; accepted are values by name")
    for name, value in strategy.items():
        if type(value) not in accepted:
            raise ArgumentError(f"{name} of the strategy is {value!r}; accepted are texts, booleans, integers and None")


def _check_time(name: str, us: float) -> None:
    if not isinstance(us, (int, float)) or isinstance(us, bool) or not 0.0 <= us < math.inf:
        raise ArgumentError(f"{name} is {us!r}; accepted: 0 µs or more")


def _check_text(name: str, text: str) -> None:
    if not isinstance(text, str):
        raise ArgumentError(f"{name} is {text!r}; accepted are texts")


def _check_record(effort: str, when: str, barred: str | None) -> None:
    if effort not in EFFORTS:
        raise ArgumentError(f"effort is {effort!r}; accepted are {', '.join(EFFORTS)}")
    if not _is_date(when):
        raise ArgumentError(f"when is {when!r}; accepted are dates in UTC such as 2026-01-31T23:59:59Z")
    if barred is not None:
        _check_text("barred", barred)


def _is_date(when: str) -> bool:
    try:
        return datetime.fromisoformat(when).strftime(_DATE) == when
    except (TypeError, ValueError):
        return False
