"""Algorithms that are known to give wrong results, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

_STAGE_K: Final[Mapping[int, int]] = {35: 64, 36: 128}
_MAX_INT32: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the conditions look at: the library's version, the GPU, the problem, the algorithm's configuration.

    Attributes:
        version: major·10000 + minor·100 + patch.
        capability: compute capability, major·10 + minor.
        largest_span: element size times leading dimension, the largest of the operands', in bytes.
    """

    version: int
    capability: int
    m: int
    n: int
    k: int
    has_bias: bool
    largest_span: int
    algo_id: int
    splitk: int
    stages: int


@dataclass(frozen=True, slots=True)
class KnownBad:
    """One fault: versions [first, last], the condition under which it strikes, and what happens."""

    first: int
    last: int
    condition: Callable[[Candidate], bool]
    effect: str


def _splitk_drops_tail(c: Candidate) -> bool:
    if c.algo_id != 66 or c.capability < 90 or c.splitk <= 1 or c.stages not in _STAGE_K:
        return False
    return c.k % c.splitk != 0 and (c.k // c.splitk) % _STAGE_K[c.stages] == 0


KNOWN_BAD: Final = (
    KnownBad(
        120603,
        130401,
        _splitk_drops_tail,
        "split-K drops the tail of K",
    ),
    KnownBad(
        0,
        130299,
        lambda c: c.algo_id == 66 and c.capability == 90 and c.largest_span > _MAX_INT32,
        "wrong results or a fault where a leading dimension spans more than 2**31 - 1 bytes",
    ),
    KnownBad(
        0,
        120800,
        lambda c: c.has_bias and (c.m == 1 or c.n == 1),
        "wrong bias where M or N is 1",
    ),
)


def is_known_bad(candidate: Candidate) -> str | None:
    """The effect of the first fault that `candidate` is hit by; None if it is hit by none."""
    for fault in KNOWN_BAD:
        if fault.first <= candidate.version <= fault.last and fault.condition(candidate):
            return fault.effect
    return None
