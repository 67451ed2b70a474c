"""Learning-rate schedules as data; the optimizer's kernel evaluates them from the step, which is on the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np

from lt_runtime.arguments import integer, not_negative, number, one_of, shown
from lt_runtime.errors import ArgumentError, KindError

__all__ = ["Schedule", "Table", "constant", "from_function", "table", "warmup", "warmup_cosine", "warmup_linear"]

Decay: TypeAlias = Literal["constant", "linear", "cosine"]
DECAYS: Final[tuple[Decay, ...]] = get_args(Decay)


def __dir__() -> list[str]:
    return __all__


@dataclass(frozen=True, slots=True)
class Schedule:
    """The factor of the learning rate: a linear warm-up, then a decay. Steps are updates, counted from 1.

    Attributes:
        decay: "constant", "linear" or "cosine".
        warmup_steps: the number of updates over which the factor rises linearly to 1.
        total_steps: the update at which the decay ends; without meaning for "constant".
        final_factor: the factor at and after `total_steps`.

    Raises:
        ArgumentError: the decay is unknown, steps are outside [0, 2**32), the decay ends before the warm-up, or the
            factor is outside [0, 1].
    """

    decay: Decay = "constant"
    warmup_steps: int = 0
    total_steps: int = 0
    final_factor: float = 0.0

    def __post_init__(self) -> None:
        one_of("decay", self.decay, DECAYS)
        for name in ("warmup_steps", "total_steps"):
            steps = integer(name, getattr(self, name))
            if not 0 <= steps < 1 << 32:  # steps must fit the 32 bits in which the optimizer counts them
                raise ArgumentError(f"{name} is {shown(steps)}; it must be in [0, 2**32)")
            object.__setattr__(self, name, steps)
        object.__setattr__(self, "final_factor", number("final_factor", self.final_factor))
        if self.decay != "constant" and self.total_steps <= self.warmup_steps:
            raise ArgumentError(f"total_steps is {self.total_steps}; it must exceed warmup_steps ({self.warmup_steps})")
        if not 0.0 <= self.final_factor <= 1.0:
            raise ArgumentError(f"final_factor is {self.final_factor}; it must be in [0, 1]")


@dataclass(frozen=True, slots=True, repr=False)
class Table:
    """The factor of the learning rate as a list with one value for each update; later updates keep the last value.

    Attributes:
        values: the factors of updates 1, 2 and so on, rounded to FP32.

    Raises:
        ArgumentError: the sequence is empty, or a value is negative, NaN or too large for FP32.
        KindError: the values are no sequence of numbers.
    """

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        try:
            given = enumerate(self.values)
        except TypeError:
            raise KindError(f"values is {shown(self.values)}; it must be a sequence of numbers") from None
        exact = [not_negative(f"values[{i}]", value) for i, value in given]
        if not exact:
            raise ArgumentError(f"values is {shown(self.values)}; it must have a factor for at least one update")
        with np.errstate(over="ignore"):
            rounded = np.array(exact, np.float32)
        if not np.isfinite(rounded).all():
            i = int(np.argmin(np.isfinite(rounded)))
            raise ArgumentError(f"values[{i}] is {exact[i]}; it must be a number that FP32 can hold")
        object.__setattr__(self, "values", tuple(rounded.tolist()))

    def __repr__(self) -> str:
        return f"Table({len(self.values)} factors, {self.values[0]} to {self.values[-1]})"


AnySchedule: TypeAlias = Schedule | Table


def table(values: Any) -> Table:
    """A schedule whose factor in update i, from 1 on, is `values[i - 1]`; later updates keep the last value.

    An optimizer on a GPU copies the values to the device once, as FP32, and a captured graph reads them there.

    Args:
        values: a sequence or a NumPy vector of finite numbers that are not negative.

    Raises:
        ArgumentError: as `Table`.
    """
    return Table(values)


def from_function(f: Callable[[int], float], steps: int) -> Table:
    """A schedule whose factor in update `i`, from 1 to `steps`, is `f(i)`; later updates keep the last value.

    This function calls `f` `steps` times; training does not call `f`.

    Args:
        f: returns a finite number that is not negative.

    Raises:
        ArgumentError: `steps` is not positive, or `f` returned another number.
        KindError: `f` cannot be called, or did not return a number.
    """
    if not callable(f):
        raise KindError(f"f is {shown(f)}; it must be a function from the number of an update to its factor")
    if (count := integer("steps", steps)) < 1:
        raise ArgumentError(f"steps is {shown(steps)}; it must be positive")
    return Table(tuple(not_negative(f"f({step})", f(step)) for step in range(1, count + 1)))


def constant() -> Schedule:
    """A schedule that keeps the learning rate constant: its factor is always 1."""
    return Schedule()


def warmup(warmup_steps: int) -> Schedule:
    """A schedule whose factor rises linearly to 1 over `warmup_steps` updates and stays 1. Raises as `Schedule`."""
    return Schedule(warmup_steps=warmup_steps)


def warmup_linear(warmup_steps: int, total_steps: int, final_factor: float = 0.0) -> Schedule:
    """A schedule whose factor rises linearly to 1 over `warmup_steps` updates, then falls along a line.

    The factor reaches `final_factor` at update `total_steps`, and stays there. Raises as `Schedule`.
    """
    return Schedule("linear", warmup_steps, total_steps, final_factor)


def warmup_cosine(warmup_steps: int, total_steps: int, final_factor: float = 0.0) -> Schedule:
    """A schedule whose factor rises linearly to 1 over `warmup_steps` updates, then falls along half a cosine.

    The factor reaches `final_factor` at update `total_steps`, and stays there. Raises as `Schedule`.
    """
    return Schedule("cosine", warmup_steps, total_steps, final_factor)
