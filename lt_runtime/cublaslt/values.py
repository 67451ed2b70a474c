"""The base class of all attributes: how each is stored, and which values it accepts.

cuBLASLt checks only the size of a value. These bindings refuse every value that the header does not define.
"""

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

MAX_ADDRESS: Final = 2**64 - 1
# "=" rather than native: a native float turns a number that is too large into infinity.
_PACKERS: Final = {code: struct.Struct(f"={code}") for code in "bHiIqQf"}


@dataclass(frozen=True, slots=True)
class Accepted:
    """A set of values.

    Attributes:
        allows: tells whether a number is in the set.
        described: the set in words, for an error's message.
        kind: the enum whose members the values are, if any.
        alignment: what an address must be a multiple of; 0 where the values are not addresses.
    """

    allows: Callable[[Any], bool]
    described: str
    kind: type[enum.IntEnum | enum.IntFlag] | None = None
    alignment: int = 0


class Attribute(enum.IntEnum):
    """The number of an attribute in the header, together with its storage.

    A member is written as its number, its C type as a code of `struct`, the values that it accepts (or a function
    that returns them), and the version of cuBLASLt that introduced it. The version counts as
    major·10000 + minor·100 + patch, and is left out where CUDA 12.0 has the attribute.

    Attributes:
        code: the C type.
        size: its bytes.
        since: the first version; 0 for CUDA 12.0.
    """

    code: str
    size: int
    since: int
    packer: struct.Struct
    values: Accepted | Callable[[], Accepted]

    def __new__(cls, number: int, code: str, values: Accepted | Callable[[], Accepted], since: int = 0) -> Attribute:
        """Makes a member."""
        attribute = int.__new__(cls, number)
        attribute._value_ = number
        attribute.code, attribute.values, attribute.since = code, values, since
        attribute.packer, attribute.size = _PACKERS[code], _PACKERS[code].size
        return attribute

    def __str__(self) -> str:
        return f"{type(self).__name__}.{self.name}"

    @functools.cached_property
    def accepted(self) -> Accepted:
        """The values that it may be set to."""
        return self.values if isinstance(self.values, Accepted) else self.values()

    def pack(self, value: float) -> bytes:
        """The bytes to hand to the library.

        Raises:
            ArgumentError: the value is not accepted, or does not fit the C type.
            AlignmentError: an address is not a multiple of the required alignment.
        """
        try:
            number = value if self.code == "f" else operator.index(value)  # type: ignore[arg-type]
            if self.accepted.allows(number):
                return self.packer.pack(number)
        except (TypeError, struct.error, OverflowError):
            pass
        raise self._refusal(value)

    def unpack(self, data: bytes) -> Any:
        """The value that the library returned, as a member of its enum where it has one."""
        (number,) = self.packer.unpack(data)
        try:
            return self.accepted.kind(number) if self.accepted.kind else number
        except ValueError:  # -1, which means "unset", or a value that a later version added
            return number

    def _refusal(self, value: float) -> LtError:
        c_type = "float" if self.code == "f" else f"{'u' * self.code.isupper()}int{8 * self.size}_t"
        accepted = f"accepted: {self.accepted.described} ({c_type})"
        if not self.accepted.alignment or not isinstance(value, int):
            return ArgumentError(f"{self} is {value!r}; {accepted}")
        kind = AlignmentError if 0 <= value <= MAX_ADDRESS else ArgumentError
        return kind(f"{self} is {value:#x}; {accepted}")


def alike(numbers: range, *storage: Any) -> tuple[tuple[Any, ...], ...]:
    """Several members of an `Attribute`, with consecutive numbers and the same storage, as an assignment takes them."""
    return tuple((number, *storage) for number in numbers)


def member(kind: type[enum.IntEnum], *others: int) -> Accepted:
    """The members of an enum, and a few other numbers."""
    values = frozenset((*map(int, kind), *others))
    names = [f"{name} ({int(value)})" for name, value in kind.__members__.items()]
    listed = ", ".join((*names, *map(str, others))) if len(names) <= 40 else f"{names[0]} to {names[-1]}"
    return Accepted(values.__contains__, f"one of {kind.__name__}: {listed}", kind)


def mask(kind: type[enum.IntFlag]) -> Accepted:
    """Any combination of a flag's bits."""
    bits = functools.reduce(operator.or_, map(int, kind.__members__.values()))
    names = ", ".join(f"{name} ({int(value)})" for name, value in kind.__members__.items())
    return Accepted(lambda value: not value & ~bits, f"a combination of {kind.__name__}: {names}", kind)


def at_least(least: int) -> Accepted:
    """The numbers from `least` on."""
    return Accepted(lambda value: bool(value >= least), f"{least} or more")


def between(least: int, most: int) -> Accepted:
    """The numbers from `least` to `most`, both included."""
    return Accepted(lambda value: least <= value <= most, f"{least} to {most}")


def one_of(*values: enum.IntEnum | enum.IntFlag) -> Accepted:
    """A few members of one enum."""
    listed = ", ".join(f"{value.name} ({int(value)})" for value in values)
    return Accepted(frozenset(values).__contains__, listed, type(values[0]))


def nothing(reason: str) -> Accepted:
    """No value: the attribute can only be read."""
    return Accepted(lambda _: False, f"nothing, {reason}")


def address(alignment: int) -> Accepted:
    """The null pointer, and the addresses that are multiples of `alignment`."""
    return Accepted(
        lambda value: 0 <= value <= MAX_ADDRESS and not value % alignment,
        f"0, or an address that is a multiple of {alignment}",
        alignment=alignment,
    )


POWER_OF_TWO: Final = Accepted(lambda value: value > 0 and not value & (value - 1), "a power of two")
FRACTION: Final = Accepted(lambda value: value >= 0 and math.isfinite(value), "a finite number, 0 or more")
ANYTHING: Final = Accepted(lambda _: True, "any number")
"""Every value that the C type holds."""
