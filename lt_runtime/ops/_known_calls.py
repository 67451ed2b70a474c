"""Calls like one made before: their operands are not looked at again, and what repeats exactly is nothing but launches.

Calls with one signature differ in nothing but the addresses of their arrays. What an operation makes of a call, its
plan above all, holds for all with the same alignments; launches are bound to the addresses that they have come with
twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Generic, Protocol, TypeVar

import numpy as np

from lt_runtime.arrays import Library, Operand, Signature, alignments_of, are_apart
from lt_runtime.gpu.direct import is_current
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.planning import BoundCall, recall, remember

_MOST: Final = 256  # of addresses that are remembered


@dataclass(frozen=True, slots=True)
class New:
    """An array that a call makes for itself.

    Attributes:
        shape: of the memory, row-major.
        view: what of it is the array; None for all.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    library: Library
    device: int
    view: Callable[[Any], Any] | None = None

    def make(self, stream: int) -> tuple[Any, int]:
        """The array, its memory ordered with a stream, and its address."""
        array = self.library.empty(self.shape, self.dtype, self.device, stream)
        address = self.library.address(array)
        return (array if self.view is None else self.view(array)), address


class Call(Protocol):
    """What an operation makes of a call."""

    @property
    def device(self) -> int:
        """The ordinal of its GPU."""


_Call = TypeVar("_Call", bound=Call)


class KnownCall(Generic[_Call]):
    """A call whose operands have been found to be sound.

    Args:
        call: what the operation makes of it.
        operands: in the order in which the signature has the arrays.
        inputs: how many of these are only read.

    Attributes:
        spread: from the addresses of the operands that are present, and a 0, to those of all, 0 for the others.
    """

    def __init__(self, call: _Call, operands: Sequence[Operand | None], inputs: int) -> None:
        present = [operand for operand in operands if operand is not None]
        places = [-1 if operand is None else present.index(operand) for operand in operands]
        self.call = call
        self.spread: Callable[[tuple[int, ...]], tuple[int, ...]] = itemgetter(*places)
        self._sizes = [operand.extent * operand.itemsize for operand in present]
        self._inputs = sum(operand is not None for operand in operands[:inputs])

    def is_sound(self, addresses: Sequence[int]) -> bool:
        """Whether no output can share memory with another operand."""
        return are_apart(addresses, self._sizes, self._inputs)


class RepeatedCall(Generic[_Call]):
    """A call with the same arrays on the same stream as before.

    Attributes:
        call: what the operation makes of it.
        addresses: of all its operands, 0 where there is none.
        stream: its handle.
    """

    __slots__ = ("_bound", "addresses", "call", "stream")

    def __init__(self, call: _Call, addresses: tuple[int, ...], stream: int) -> None:
        self.call, self.addresses, self.stream = call, addresses, stream
        self._bound: dict[tuple[float, ...], BoundCall | None] = {}

    def bound(self, fresh: tuple[float, ...]) -> BoundCall | None:
        """The launches, if it has come twice with what may still differ: addresses of arrays that it makes, scalars."""
        return self._bound.get(fresh)

    def came_with(self, fresh: tuple[float, ...], bind: Callable[[], BoundCall]) -> None:
        """Notes that it has been made with these; the second time, binds its launches."""
        if fresh in self._bound:
            self._bound[fresh] = bind()
            return
        if len(self._bound) >= _MOST:
            self._bound.clear()
        self._bound[fresh] = None


class _AlikeCalls:
    """All calls with one signature."""

    __slots__ = ("device", "known", "repeated")

    def __init__(self, device: int) -> None:
        self.device = device
        self.known: dict[tuple[int, ...], KnownCall[Any]] = {}
        self.repeated: dict[tuple[tuple[int, ...], int], RepeatedCall[Any]] = {}

    def repeat(self, addresses: tuple[int, ...], stream: int) -> RepeatedCall[Any] | None:
        """The call with these addresses, if one with such alignments is known and no output meets another operand."""
        known = self.known.get(alignments_of(addresses))
        if known is None or not known.is_sound(addresses):
            return None
        if len(self.repeated) >= _MOST:
            self.repeated.clear()
        made = self.repeated[addresses, stream] = RepeatedCall(known.call, known.spread((*addresses, 0)), stream)
        return made


def note(signature: Signature, known: KnownCall[Any], since: int) -> None:
    """Remembers a call.

    Args:
        since: what `planning.age` was before its plan was asked for.
    """
    key, addresses = signature
    alike = recall(key) or _AlikeCalls(known.call.device)
    alike.known[alignments_of(addresses)] = known
    remember(key, alike, since)


def repeated(signature: Signature, stream: Any) -> RepeatedCall[Any] | None:
    """The call like one made before, on the stream that the caller asks for.

    None if there was none, if outputs may share memory with other operands, or if its device is not the thread's
    current one: it takes another look.
    """
    key, addresses = signature
    try:
        alike: _AlikeCalls | None = recall(key)
    except TypeError:  # an argument that is no value
        return None
    if alike is None or not is_current(alike.device):
        return None
    handle = stream_handle(stream, alike.device)
    return alike.repeated.get((addresses, handle)) or alike.repeat(addresses, handle)
