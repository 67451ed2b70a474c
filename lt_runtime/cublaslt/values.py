"""How an attribute is stored and what it may be. The library checks sizes only: this says no to everything else."""

from __future__ import annotations

import enum
import functools
import math
import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from lt_runtime.errors import AlignmentError, ArgumentError, LtError

_MAX_ADDRESS: Final = 2**64 - 1
_C_TYPES: Final = {
    "b": "int8_t",
    "H": "uint16_t",
    "i": "int32_t",
    "I": "uint32_t",
    "q": "int64_t",
    "Q": "uint64_t",
    "f": "float",
}


@dataclass(frozen=True, slots=True)
class Accepted:
    """A set of values.

    Attributes:
        allows: whether a number is one of them.
        described: which they are, for an error's message.
        kind: what to read a value back as.
        alignment: of the addresses; 0 where the values are no addresses.
    """

    allows: Callable[[Any], bool]
    described: str
    kind: type[enum.IntEnum | enum.IntFlag] | None = None
    alignment: int = 0


@dataclass(frozen=True)
class Attribute:
    """How one attribute is stored and what it may be.

    Attributes:
        code: its C type, as `struct` calls it.
        values: those it may be set to, or what tells them.
        since: the version that introduced it, major·10000 + minor·100 + patch; 0 where CUDA 12.0 had it.
    """

    code: str
    values: Accepted | Callable[[], Accepted]
    since: int = 0

    @functools.cached_property
    def accepted(self) -> Accepted:
        """The values it may be set to."""
        return self.values if isinstance(self.values, Accepted) else self.values()

    @functools.cached_property
    def packer(self) -> struct.Struct:
        """Turns a value into bytes and back; `=`, since native floats become infinite where they do not fit."""
        return struct.Struct(f"={self.code}")

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.packer.size

    def pack(self, attribute: Any, value: float) -> bytes:
        """The bytes to hand to the library.

        Raises:
            ArgumentError: the value is not accepted or does not fit the C type.
            AlignmentError: an address is not a multiple of what it must be.
        """
        try:
            number = value if self.code == "f" else operator.index(value)  # type: ignore[arg-type]
            if self.accepted.allows(number):
                return self.packer.pack(number)
        except (TypeError, struct.error, OverflowError):
            pass
        raise self._refusal(attribute, value)

    def unpack(self, data: bytes) -> Any:
        """The value that the library gave, as a member of its enum where it is one."""
        (number,) = self.packer.unpack(data)
        try:
            return self.accepted.kind(number) if self.accepted.kind else number
        except ValueError:  # -1 for "unset", or what a later version added
            return number

    def _refusal(self, attribute: Any, value: float) -> LtError:
        name, shown, kind = f"{type(attribute).__name__}.{attribute.name}", repr(value), ArgumentError
        accepted = f"{self.accepted.described} ({_C_TYPES[self.code]})"
        if self.accepted.alignment and isinstance(value, int):
            shown = hex(value)
            if 0 <= value <= _MAX_ADDRESS:
                return AlignmentError(f"{name} is {shown}; accepted: {accepted}")
        return kind(f"{name} is {shown}; accepted: {accepted}")


def member(kind: type[enum.IntEnum], *others: int) -> Accepted:
    """A member of an enum, or one of a few other numbers."""
    values = frozenset((*map(int, kind), *others))
    names = [f"{name} ({int(value)})" for name, value in kind.__members__.items()]
    listed = ", ".join((*names, *map(str, others))) if len(names) <= 40 else f"{names[0]} to {names[-1]}"
    return Accepted(values.__contains__, f"one of {kind.__name__}: {listed}", kind)


def mask(kind: type[enum.IntFlag]) -> Accepted:
    """Any combination of a flag's bits."""
    bits = 0
    for value in kind.__members__.values():
        bits |= int(value)
    names = ", ".join(f"{name} ({int(value)})" for name, value in kind.__members__.items())
    return Accepted(lambda value: not value & ~bits, f"a combination of {kind.__name__}: {names}", kind)


def at_least(least: int) -> Accepted:
    """A number from `least` on."""
    return Accepted(lambda value: bool(value >= least), f"{least} or more")


def between(least: int, most: int) -> Accepted:
    """A number from `least` to `most`, both included."""
    return Accepted(lambda value: least <= value <= most, f"{least} to {most}")


def one_of(*values: enum.IntEnum | enum.IntFlag) -> Accepted:
    """A few members of one enum."""
    listed = ", ".join(f"{value.name} ({int(value)})" for value in values)
    return Accepted(frozenset(values).__contains__, listed, type(values[0]))


def nothing(reason: str) -> Accepted:
    """No value at all: the attribute can only be read."""
    return Accepted(lambda _: False, f"nothing, {reason}")


def power_of_two() -> Accepted:
    """1, 2, 4, 8, ..."""
    return Accepted(lambda value: value > 0 and not value & (value - 1), "a power of two")


def fraction() -> Accepted:
    """A finite float, not negative."""
    return Accepted(lambda value: value >= 0 and math.isfinite(value), "a finite number, 0 or more")


def address(alignment: int) -> Accepted:
    """0, or an address that is a multiple of `alignment`."""
    return Accepted(
        lambda value: 0 <= value <= _MAX_ADDRESS and not value % alignment,
        f"0, or an address that is a multiple of {alignment}",
        alignment=alignment,
    )


def anything() -> Accepted:
    """Whatever the C type holds."""
    return Accepted(lambda _: True, "any number")
