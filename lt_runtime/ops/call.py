"""The one way in which an operation runs: its arrays are read and checked, its problem planned, its plan run.

What was made of a call, its plan above all, holds for all calls that differ in nothing but the addresses of equally
aligned arrays: their operands are not looked at again. A call that comes with the same addresses a third time is bound,
and is the launch of one graph from then on.
"""

from __future__ import annotations

import functools
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from lt_runtime import ranges
from lt_runtime.arrays.checks import check_device, check_no_overlap
from lt_runtime.arrays.libraries import Library, Signature, current_streams, signature_of
from lt_runtime.arrays.operand import HOST, Operand, device_of, library_of, on_host, read
from lt_runtime.errors import ArgumentError, CaptureError, GpuError, OperandError, OverlapError
from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.direct import is_current
from lt_runtime.gpu.memory import memories, stream_memory
from lt_runtime.gpu.streams import is_captured, stream_handle
from lt_runtime.kernels.call import Call
from lt_runtime.layout import overlaps_itself
from lt_runtime.ops.first_use import asked_for, before_first_use
from lt_runtime.plans import cache
from lt_runtime.products.plan import Plan

_MOST_CALLS: Final = 1024
_MOST_REPEATS: Final = 1024
_MOST_BOUND: Final = 8  # graphs of a call with the same arrays: each takes memory


@dataclass(frozen=True, slots=True)
class New:
    """An array that a call makes for a result.

    Attributes:
        shape: of the memory, row-major.
        view: makes the array of the memory; None where the array is all of it.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    library: Library
    view: Callable[[Any], Any] | None = None


class Reading(NamedTuple):
    """What an operation makes of its operands.

    Attributes:
        problem: what is asked; None where nothing is to be planned.
        written: places of the operands that are written.
        new: results for which the caller gives no buffer, by their places among the arrays.
        detail: what the operation needs again, to run on the host or to make the caller's result.
        same: places of an operand and of the result that may be the same memory.
    """

    problem: Any
    written: tuple[int, ...]
    new: Mapping[int, New]
    detail: Any = None
    same: tuple[int, int] | None = None


class Operation(ABC):
    """What an operation such as `linear_fwd` adds to the driver; compared by identity.

    Attributes:
        names: of the arrays, in their order.
        required: how many of the first may not be absent.
        is_scaled: whether a call's extras are numbers that a bound call keeps, such as α and β.
        range_name: of the range around each call, such as "lt.linear_forward" for `LinearForward`.
    """

    names: ClassVar[tuple[str, ...]]
    required: ClassVar[int]
    is_scaled: ClassVar[bool] = False
    range_name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.range_name = f"lt.{re.sub(r'(?<!^)(?=[A-Z])', '_', cls.__name__).lower()}"

    @abstractmethod
    def read(self, operands: Sequence[Any], asked: Any, extras: Any) -> Reading:
        """Checks operands and options, and says what they ask for.

        Args:
            operands: an `Operand` for each of `names`; None where an array is absent.
            asked: the options that a call's course depends on.
            extras: arguments on which it does not: scalars, where random numbers come from.

        Raises:
            LtError: something is not accepted.
        """

    @abstractmethod
    def on_host(self, reading: Reading, arrays: Sequence[Any], extras: Any) -> None:
        """Writes the results into NumPy arrays."""

    @abstractmethod
    def result(self, known: Known, arrays: Sequence[Any], extras: Any) -> Any:
        """What the caller gets.

        Args:
            arrays: the caller's, with those that were made in their places, as their library exports them.
        """

    def plan(self, reading: Reading, device: int, stream: int) -> Plan:
        """The plan for the problem, from the plan cache; an operation with nothing to decide makes its plan itself."""
        return cache.plan_of(reading.problem, device, stream, before_first_use, anew=asked_for.get() is not None)

    def settle(self, reading: Reading, plan: Any, operands: Sequence[Any]) -> Reading:
        """The reading with what only the plan decides, such as what forward keeps; there is no plan on the host."""
        return reading

    def is_bindable(self, reading: Reading) -> bool:
        """Whether a call that repeats does the same each time, so that it may be bound."""
        return True

    def call(self, known: Known, addresses: tuple[int, ...], extras: Any, stream: int) -> Call:
        """The plan's call; `addresses` are in the order of `names`."""
        return Call(addresses, stream)


@dataclass(slots=True, eq=False)
class Known:
    """A call whose operands have been found to be sound.

    Attributes:
        device: ordinal of the GPU, or `HOST`.
        plan: None on the host.
        sizes: bytes from each operand's first element to its last; 0 for an absent one.
        generation: `cache.generation` before the plan was asked for; a later one makes the call unknown.
        makers: of new arrays, see `Library.maker`.
    """

    operation: Operation
    device: int
    reading: Reading
    plan: Any
    sizes: tuple[int, ...]
    is_bindable: bool
    generation: object
    makers: tuple[Callable[[], Any], ...] = ()

    def is_sound(self, addresses: Sequence[int]) -> bool:
        """Whether no operand that is written shares an address with another, by where they begin and end."""
        sizes = self.sizes
        for i in self.reading.written:
            start = addresses[i]
            end = start + sizes[i]
            for j, other in enumerate(addresses):
                if start < other + sizes[j] and other < end and i != j:
                    return False
        return True

    def make(self, arrays: Sequence[Any], stream: int | None) -> tuple[Sequence[Any], tuple[int, ...]]:
        """The arrays with those that this call makes in their places, and the addresses of these, in their order.

        Args:
            stream: that the new arrays' memory is ordered with; None if it is the current one of their library, and the
                device is too.
        """
        new = self.reading.new
        if not new:
            return arrays, ()
        filled, fresh = list(arrays), []
        for (place, each), maker in zip(new.items(), self.makers, strict=True):
            library = each.library
            array = maker() if stream is None else library.empty(each.shape, each.dtype, self.device, stream)
            fresh.append(library.address(array))
            filled[place] = array if each.view is None else each.view(array)
        return filled, tuple(fresh)

    def addresses(self, given: tuple[int, ...], fresh: tuple[int, ...]) -> tuple[int, ...]:
        """The addresses of all operands, of the caller's and of new ones."""
        if not fresh:
            return given
        filled = list(given)
        for place, address in zip(self.reading.new, fresh, strict=True):
            filled[place] = address
        return tuple(filled)

    def put(self, call: Call) -> None:
        """Runs the plan."""
        memory = memories.get((self.device, call.stream)) or stream_memory(self.device, call.stream)
        with memory.lock:
            self.plan.put(call, memory)

    def finish(self, arrays: Sequence[Any], extras: Any, stream: int) -> Any:
        """What the caller gets, once the work is on the stream."""
        new = self.reading.new
        if new:
            exported = list(arrays)
            for place, each in new.items():
                exported[place] = each.library.export(arrays[place], stream)
            arrays = exported
        return self.operation.result(self, arrays, extras)


@dataclass(slots=True, eq=False)
class Repeat:
    """A call with the same arrays on the same stream as before.

    Attributes:
        given: addresses of the caller's arrays, 0 where there is none.
        bound: launches of it, by what may still differ: addresses of arrays that it makes, scalars. None after the
            first such call.
        is_bound: whether any of them has been bound.
    """

    known: Known
    given: tuple[int, ...]
    stream: int
    bound: dict[Any, BoundPlan | None] = field(default_factory=dict)
    is_bound: bool = False
    has_failed: bool = False

    def run(self, arrays: Sequence[Any], extras: Any, *, is_current: bool) -> Any:
        """Makes the call once more.

        Args:
            is_current: whether the stream is the current one of the arrays' library.
        """
        known, stream = self.known, self.stream
        fresh: tuple[int, ...] = ()
        if known.makers:
            arrays, fresh = known.make(arrays, None if is_current else stream)
        differing = (fresh, extras) if known.operation.is_scaled else fresh
        launch = self.bound.get(differing)
        if launch is not None:
            launch()
        else:
            call = known.operation.call(known, known.addresses(self.given, fresh), extras, stream)
            known.put(call)
            if known.is_bindable:
                self._note(differing, call)
        return known.operation.result(known, arrays, extras)

    def _note(self, differing: Any, call: Call) -> None:
        """Notes that the call was made; the second time, binds it.

        A call that cannot be bound, for want of memory perhaps, costs a warning: it has been made all the same.
        """
        if differing in self.bound:
            if self.has_failed or is_captured(self.stream):
                return
            try:
                self.bound[differing] = self.known.plan.bind(call)
                self.is_bound = True
            except (GpuError, CaptureError) as error:  # a capture may have begun in between
                self.has_failed = True
                warnings.warn(f"a call that repeats could not be bound and stays as it was ({error})", stacklevel=2)
            return
        if len(self.bound) >= _MOST_BOUND:
            self.bound.clear()
        self.bound[differing] = None


@dataclass(frozen=True, slots=True)
class Binding:
    """Stands for a stream where a call is to be bound to its buffers rather than made; see `lt.bind`."""

    stream: Any


def perform(operation: Operation, arrays: tuple[Any, ...], asked: Hashable, extras: Any, stream: Any) -> Any:
    """Makes a call; what the caller gets.

    Args:
        arrays: in the order of `operation.names`; None where one is absent.
        asked, extras: see `Operation.read`.
        stream: as the caller gave it; a `Binding` for a callable that makes the call.

    Raises:
        LtError: the call is not accepted, or failed; outputs, caches and the stream stay usable.
    """
    if not ranges.is_heard:
        return _perform(operation, arrays, asked, extras, stream)
    with ranges.range_of(operation.range_name):
        return _perform(operation, arrays, asked, extras, stream)


def _perform(operation: Operation, arrays: tuple[Any, ...], asked: Hashable, extras: Any, stream: Any) -> Any:
    signature = signature_of(arrays)
    if signature is not None and stream.__class__ is not Binding and asked_for.get() is None:
        forms, addresses = signature
        device = forms[0][0]
        if device >= 0 and is_current(device):  # a tensor on the CPU is refused below, with or without a driver
            current = current_streams[type(arrays[0])]
            handle = current(device) if stream is None else stream_handle(stream, device)
            try:
                known: Known | None = cache.calls.get((operation, asked, forms))
            except TypeError:  # an option that is no value
                known = signature = None
            if known is not None and known.generation is cache.generation:
                again = cache.repeats.get((known, handle, addresses)) or _first_repeat(known, handle, addresses)
                if again is not None:
                    if ranges.watchers:
                        ranges.tell(known)
                    return again.run(arrays, extras, is_current=stream is None)
    return _first(operation, arrays, asked, extras, stream, signature)


def _first_repeat(known: Known, stream: int, addresses: tuple[int, ...]) -> Repeat | None:
    """A known call with arrays that it has not been made with before; None if it takes another look."""
    if not known.is_sound(addresses):
        return None
    if len(cache.repeats) >= _MOST_REPEATS:
        _make_room()
    found = cache.repeats[known, stream, addresses] = Repeat(known, addresses, stream)
    return found


def _make_room() -> None:
    """Lets go of the repeated calls that are not bound; of all, if most of them are."""
    unbound = [key for key, repeat in list(cache.repeats.items()) if not repeat.is_bound]
    if 2 * len(unbound) < _MOST_REPEATS:
        cache.repeats.clear()
    for key in unbound:
        cache.repeats.pop(key, None)


def _first(
    operation: Operation, arrays: tuple[Any, ...], asked: Any, extras: Any, stream: Any, signature: Signature | None
) -> Any:
    binds = isinstance(stream, Binding)
    device = _device_of(operation, arrays)
    handle = _handle(arrays[0], stream.stream if binds else stream, device)
    if device == HOST:
        known = look(operation, _read(operation, arrays, 0), asked, extras, 0)
        if binds:
            _check_bindable(known)
            return functools.partial(_run_on_host, known, arrays, extras)
        filled, _ = known.make(arrays, 0)
        _run_on_host(known, filled, extras)
        return operation.result(known, filled, extras)
    with activated(device):
        operands = _read(operation, arrays, handle)
        known = look(operation, operands, asked, extras, handle)
        if signature is not None and not binds:
            calls = cache.calls
            if len(calls) >= _MOST_CALLS:
                calls.clear()
            calls[operation, asked, signature[0]] = known
        given = addresses_of(operands)
        if binds:
            _check_bindable(known)
            bound: BoundPlan = known.plan.bind(operation.call(known, given, extras, handle))
            bound.known = known
            return bound
        ranges.tell(known)
        filled, fresh = known.make(arrays, handle)
        known.put(operation.call(known, known.addresses(given, fresh), extras, handle))
        return known.finish(filled, extras, handle)


def look(operation: Operation, operands: Sequence[Operand | None], asked: Any, extras: Any, stream: int) -> Known:
    """What is made of a call whose operands live on a GPU, which is current, or on the host."""
    present = [operand for operand in operands if operand is not None]
    check_device(*present)
    device = present[0].device
    generation, reading = cache.generation, operation.read(operands, asked, extras)
    _check_written(operands, reading)
    plan = None if device == HOST else operation.plan(reading, device, stream)
    reading = operation.settle(reading, plan, operands)
    sizes = tuple([0 if operand is None else operand.extent * operand.itemsize for operand in operands])
    makers = tuple([each.library.maker(each.shape, each.dtype, device) for each in reading.new.values()])
    return Known(operation, device, reading, plan, sizes, operation.is_bindable(reading), generation, makers)


def addresses_of(operands: Sequence[Operand | None]) -> tuple[int, ...]:
    """Their addresses, 0 for absent ones."""
    return tuple([0 if operand is None else operand.address for operand in operands])


def _run_on_host(known: Known, arrays: Sequence[Any], extras: Any) -> None:
    ranges.tell(known)
    with np.errstate(all="ignore"):  # overflow and NaN are results here, as they are on a GPU
        known.operation.on_host(known.reading, arrays, extras)


def _device_of(operation: Operation, arrays: Sequence[Any]) -> int:
    """Where the arrays live; NumPy arrays and others at once are refused with all their names."""
    named = {name: array for name, array in zip(operation.names, arrays, strict=True) if array is not None}
    return HOST if on_host(named) else device_of(operation.names[0], arrays[0])


def _read(operation: Operation, arrays: tuple[Any, ...], stream: int) -> list[Operand | None]:
    return [
        None if array is None and place >= operation.required else read(operation.names[place], array, stream)
        for place, array in enumerate(arrays)
    ]


def _handle(array: Any, stream: Any, device: int) -> int:
    """The handle of the stream; on the host a stream is checked, and not used."""
    if device == HOST:
        return 0 if stream is None else stream_handle(stream, HOST)
    return stream_handle(stream, device, library_of(array).current_stream)


def _check_written(operands: Sequence[Operand | None], reading: Reading) -> None:
    """Raises unless every operand that is written is writeable memory that no other operand shares."""
    for number, place in enumerate(reading.written):
        out = operands[place]
        if out is None:
            continue
        if overlaps_itself(out.shape, out.strides):
            raise OverlapError(f"{out.name} has strides {out.strides}: its elements share memory; they must not")
        if isinstance(out.array, np.ndarray) and not out.array.flags.writeable:
            raise OperandError(f"{out.name} is read-only; it must be writeable")
        later = reading.written[number:]
        others = [each for j, each in enumerate(operands) if each is not None and j not in later]
        same = operands[reading.same[0]] if reading.same is not None and reading.same[1] == place else None
        if same is not None and same in others and (out.address, out.strides) == (same.address, same.strides):
            others.remove(same)
        check_no_overlap(out, *others)


def _check_bindable(known: Known) -> None:
    for place in known.reading.new:
        name = known.operation.names[place]
        raise ArgumentError(f"{name} is None; a bound call makes no arrays: give it a buffer")
