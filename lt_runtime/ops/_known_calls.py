"""Calls like one made before: their operands are not looked at again, and what repeats exactly is nothing but launches.

What an operation makes of a call, its plan above all, holds for all that differ in nothing but their arrays'
addresses, as long as these are aligned alike. Launches are bound to the addresses that they have come with twice.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Final, Generic, TypeVar

import numpy as np

from lt_runtime.arrays import Library, Operand, Signature, are_apart, device_in, without_addresses
from lt_runtime.errors import CaptureError, GpuError
from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.gpu.direct import is_current
from lt_runtime.gpu.streams import is_captured, stream_handle
from lt_runtime.plans.cache import age, recall, remember

_Call = TypeVar("_Call")
_MOST: Final = 8  # launches bound for a call with the same arrays: each is a graph, which takes memory


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

    def export(self, array: Any, stream: int) -> Any:
        """What `make` has made in the form that the caller gets."""
        return self.library.export(array, stream)


def address_of(operand: Operand | None) -> int:
    """Its address; 0 if there is none."""
    return 0 if operand is None else operand.address


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
        count = itertools.count()
        places = [-1 if operand is None else next(count) for operand in operands]
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

    __slots__ = ("_bound", "_has_failed", "addresses", "call", "stream")

    def __init__(self, call: _Call, addresses: tuple[int, ...], stream: int) -> None:
        self.call, self.addresses, self.stream = call, addresses, stream
        self._bound: dict[tuple[float, ...], BoundPlan | None] = {}
        self._has_failed = False

    def bound(self, differing: tuple[float, ...]) -> BoundPlan | None:
        """The launch, if it has come twice with what may still differ: addresses of arrays that it makes, scalars."""
        return self._bound.get(differing)

    def came_with(self, differing: tuple[float, ...], bind: Callable[[], BoundPlan]) -> None:
        """Notes that it has been made with these; the second time, binds its plan.

        What cannot be bound, for want of memory perhaps, costs a warning: the call itself has been made.
        """
        if is_captured(self.stream) or self._has_failed:
            return
        if differing in self._bound:
            try:
                self._bound[differing] = bind()
            except (GpuError, CaptureError) as error:  # a capture may have begun in between
                self._has_failed = True
                warnings.warn(f"a call that repeats could not be bound and stays as it was ({error})", stacklevel=2)
            return
        if len(self._bound) >= _MOST:
            self._bound.clear()
        self._bound[differing] = None


def note(signature: Signature, known: KnownCall[Any], since: int) -> None:
    """Remembers a call, unless one of its options is no value.

    Args:
        since: what `plans.cache.age` was before its plan was asked for.
    """
    with contextlib.suppress(TypeError):  # such an option cannot be looked up either
        remember(without_addresses(signature)[0], known, since)


def repeated(signature: Signature, stream: Any) -> RepeatedCall[Any] | None:
    """The call like one made before, on the stream that the caller asks for.

    None if there was none, if outputs may share memory with other operands, or if its device is not the thread's
    current one: it takes another look.
    """
    device = device_in(signature)
    if not is_current(device):
        return None
    handle = stream_handle(stream, device)
    try:
        found: RepeatedCall[Any] | None = recall((signature, handle))
    except TypeError:  # an argument that is no value
        return None
    return found or _first_repeat(signature, handle)


def _first_repeat(signature: Signature, stream: int) -> RepeatedCall[Any] | None:
    since, (key, addresses) = age(), without_addresses(signature)
    known: KnownCall[Any] | None = recall(key)
    if known is None or not known.is_sound(addresses):
        return None
    found = RepeatedCall(known.call, known.spread((*addresses, 0)), stream)
    remember((signature, stream), found, since)
    return found
