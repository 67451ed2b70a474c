"""Learning-rate schedules as data; the optimizer's kernel evaluates them from the step, which is on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from lt_runtime.arguments import integer, number, one_of, shown
from lt_runtime.errors import ArgumentError

__all__ = ["Schedule", "constant", "warmup", "warmup_cosine", "warmup_linear"]

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


def constant() -> Schedule:
    """The factor is always 1."""
    return Schedule()


def warmup(warmup_steps: int) -> Schedule:
    """The factor rises linearly to 1 over `warmup_steps` updates, and stays there. Raises as `Schedule`."""
    return Schedule(warmup_steps=warmup_steps)


def warmup_linear(warmup_steps: int, total_steps: int, final_factor: float = 0.0) -> Schedule:
    """The factor rises linearly to 1 over `warmup_steps` updates, then falls along a line.

    It reaches `final_factor` at update `total_steps`, and stays there. Raises as `Schedule`.
    """
    return Schedule("linear", warmup_steps, total_steps, final_factor)


def warmup_cosine(warmup_steps: int, total_steps: int, final_factor: float = 0.0) -> Schedule:
    """The factor rises linearly to 1 over `warmup_steps` updates, then falls along half a cosine.

    It reaches `final_factor` at update `total_steps`, and stays there. Raises as `Schedule`.
    """
    return Schedule("cosine", warmup_steps, total_steps, final_factor)
