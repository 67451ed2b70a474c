"""One race for all that is tuned: algorithms of a product, splits of a layer, and the passes of a narrow MLP.

Contenders are timed in turns. The fastest takes the place of the present contender only if it is faster in a second
measurement beside it too, and if its results are right.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from lt_runtime.errors import PlanError
from lt_runtime.tuner.timing import Timing, fastest

Name = TypeVar("Name", bound=Hashable)


class Contenders(Protocol[Name]):
    """The contenders of a race."""

    def names(self) -> Sequence[Name]:
        """Names of the contenders that are not rejected; the first is the present one."""

    def take_times(self, names: Collection[Name]) -> Mapping[Name, Timing]:
        """Times contenders against each other; a contender that is not tried is left out."""

    def faults(self, names: Collection[Name]) -> Mapping[Name, str]:
        """Runs contenders and says what is wrong with the results of those that must not be used."""

    def reject(self, name: Name, reason: str) -> None:
        """Removes a contender, and all that share its fault, from `names`."""


class Outcome(NamedTuple, Generic[Name]):
    """The result of a race: the winner, and the latest times by name, also of contenders that were rejected."""

    winner: Name
    timings: Mapping[Name, Timing]


def race(contenders: Contenders[Name]) -> Outcome[Name]:
    """The fastest contender whose results are right.

    The present contender is verified too, and stays unless another is clearly faster (see `fastest`) in two
    measurements. Where the winner is wrong, all others are timed again: they may have been dropped for being far behind
    a contender that skips work.

    Raises:
        PlanError: no contender is left.
    """
    timings: dict[Name, Timing] = {}
    while names := [*contenders.names()]:
        present = names[0]
        timings |= contenders.take_times(names)
        winner = fastest({name: timings[name] for name in names if name in timings}, present)
        if winner != present:
            timings |= contenders.take_times([present, winner])
            winner = fastest({name: timings[name] for name in (present, winner)}, present)
        faults = contenders.faults(list(dict.fromkeys((winner, present))))
        for name, fault in faults.items():
            contenders.reject(name, fault)
        if winner not in faults:
            return Outcome(winner, timings)
    raise PlanError("every contender is rejected")
