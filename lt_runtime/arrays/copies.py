"""Copies of arrays in another type, which have to follow their sources: code that writes a source renews its copies."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final, Protocol

from lt_runtime.arrays.operand import Operand


class Copy(Protocol):
    """A copy on a GPU, such as FP8 weights, that must follow the arrays from which it is made."""

    @property
    def sources(self) -> Sequence[Operand]:
        """The arrays from which the copy is made."""

    def renew(self, stream: int) -> None:
        """Launches the kernels that compute the copy anew from its sources, into the copy's present memory."""

    def drop(self) -> bool:
        """Ends the use of the copy, because its sources will be written without notice; False if graphs read it."""


_copies: Final[dict[int, weakref.ref[Copy]]] = {}
"""Maps the `id` of each copy to a weak reference to it. `list` of this dict is safe while threads add copies."""


def follow(copy: Copy) -> None:
    """Registers a copy, so that `copies_of` finds the copy as long as another reference keeps the copy alive."""
    key = id(copy)
    _copies[key] = weakref.ref(copy, lambda _: _copies.pop(key, None))


def copies_of(written: Operand) -> list[Copy]:
    """The copies that are made from memory of the given operand."""
    held = [reference() for reference in list(_copies.values())]
    return [each for each in held if each is not None and any(_share(source, written) for source in each.sources)]


def _share(one: Operand, other: Operand) -> bool:
    begin, end = max(one.address, other.address), min(_end(one), _end(other))
    return one.device == other.device and begin < end


def _end(operand: Operand) -> int:
    return operand.address + operand.extent * operand.itemsize
