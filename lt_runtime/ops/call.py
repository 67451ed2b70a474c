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
from lt_runtime.gpu.driver import is_current
from lt_runtime.gpu.memory import memories, stream_memory
from lt_runtime.gpu.streams import is_captured, stream_handle
from lt_runtime.kernels.call import Call
from lt_runtime.layout import overlaps_itself
from lt_runtime.ops.first_use import asked_for, before_first_use
from lt_runtime.plans import cache
from lt_runtime.products.plan import Plan

_MOST_CALLS: Final = 1024
_MOST_REPEATS: Final = 1024
_ONCE: Final = False  # stands for the launch of a call that was made once with these arrays


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


class Request(NamedTuple):
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
        is_scaled: whether a call's scalars are numbers that a bound call keeps, such as α and β.
        range_name: of the range around each call, such as "lt.linear_forward" for `LinearForward`.
    """

    names: ClassVar[tuple[str, ...]]
    required: ClassVar[int]
    is_scaled: ClassVar[bool] = False
    range_name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.range_name = f"lt.{re.sub(r'(?<!^)(?=[A-Z])', '_', cls.__name__).lower()}"

    @abstractmethod
    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """Checks operands and options, and says what they ask for.

        Args:
            operands: an `Operand` for each of `names`; None where an array is absent.
            asked: the options that a call's course depends on.
            extras: arguments on which it does not: scalars, where random numbers come from.

        Raises:
            LtError: something is not accepted.
        """

    @abstractmethod
    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """Writes the results into NumPy arrays."""

    @abstractmethod
    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> Any:
        """What the caller gets.

        Args:
            arrays: the caller's, with those that were made in their places, as their library exports them.
        """

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """The plan for the problem, from the plan cache; an operation with nothing to decide makes its plan itself."""
        return cache.plan_of(request.problem, device, stream, before_first_use, anew=asked_for.get() is not None)

    def with_saved(self, request: Request, plan: Any, operands: Sequence[Any]) -> Request:
        """The reading with what only the plan decides, such as what forward keeps; there is no plan on the host."""
        return request

    def is_bindable(self, request: Request) -> bool:
        """Whether a call that repeats does the same each time, so that it may be bound."""
        return True

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """The plan's call; `addresses` are in the order of `names`."""
        return Call(addresses, stream)


@dataclass(slots=True, eq=False)
class PreparedCall:
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
    request: Request
    plan: Any
    sizes: tuple[int, ...]
    is_bindable: bool
    generation: object
    makers: tuple[Callable[[], Any], ...] = ()
    _overlaps: list[tuple[int, list[tuple[int, int, int]]]] = field(init=False)

    def __post_init__(self) -> None:
        """Notes how far after each operand that is written another begins where the two overlap."""
        present = [(place, size) for place, size in enumerate(self.sizes) if size]
        self._overlaps = [
            (i, [(j, -other, size) for j, other in present if j != i])
            for i, size in present
            if i in self.request.written
        ]

    def is_sound(self, addresses: Sequence[int]) -> bool:
        """Whether no operand that is written shares an address with another, by where they begin and end."""
        for i, others in self._overlaps:
            start = addresses[i]
            for j, above, below in others:
                if above < addresses[j] - start < below:
                    return False
        return True

    def make(
        self, arrays: Sequence[Any], given: tuple[int, ...], stream: int | None
    ) -> tuple[Sequence[Any], tuple[int, ...]]:
        """The arrays with those that this call makes in their places, and the addresses of all of them.

        Args:
            given: addresses of `arrays`, 0 for an absent one.
            stream: that the new arrays' memory is ordered with; None if it is the current one of their library, and the
                device is too.
        """
        filled, addresses = list(arrays), list(given)
        for (place, each), maker in zip(self.request.new.items(), self.makers, strict=True):
            library = each.library
            array = maker() if stream is None else library.empty(each.shape, each.dtype, self.device, stream)
            addresses[place] = library.address(array)
            filled[place] = array if each.view is None else each.view(array)
        return filled, tuple(addresses)

    def put(self, call: Call) -> None:
        """Runs the plan."""
        memory = memories.get((self.device, call.stream)) or stream_memory(self.device, call.stream)
        with memory.lock:
            self.plan.put(call, memory)

    def finish(self, arrays: Sequence[Any], scalars: Any, stream: int) -> Any:
        """What the caller gets, once the work is on the stream."""
        new = self.request.new
        if new:
            exported = list(arrays)
            for place, each in new.items():
                exported[place] = each.library.export(arrays[place], stream)
            arrays = exported
        return self.operation.result(self, arrays, scalars)


@dataclass(frozen=True, slots=True)
class Binding:
    """Stands for a stream where a call is to be bound to its buffers rather than made; see `lt.bind`."""

    stream: Any


def perform(operation: Operation, arrays: tuple[Any, ...], options: Hashable, scalars: Any, stream: Any) -> Any:
    """Makes a call; what the caller gets.

    Args:
        arrays: in the order of `operation.names`; None where one is absent.
        asked, extras: see `Operation.read`.
        stream: as the caller gave it; a `Binding` for a callable that makes the call.

    Raises:
        LtError: the call is not accepted, or failed; outputs, caches and the stream stay usable.
    """
    if not ranges.is_heard:
        return _perform(operation, arrays, options, scalars, stream)
    with ranges.range_of(operation.range_name):
        return _perform(operation, arrays, options, scalars, stream)


def _perform(operation: Operation, arrays: tuple[Any, ...], options: Hashable, scalars: Any, stream: Any) -> Any:
    signature = signature_of(arrays)
    if signature is not None and stream.__class__ is not Binding and asked_for.get() is None:
        forms, addresses = signature
        device = forms[0][0]
        if device >= 0 and is_current(device):  # a tensor on the CPU is refused below, with or without a driver
            current = current_streams[type(arrays[0])]
            handle = current(device) if stream is None else stream_handle(stream, device)
            try:
                prepared: PreparedCall | None = cache.calls.get((operation, options, forms))
            except TypeError:  # an option that is no value
                prepared = signature = None
            if prepared is not None and prepared.generation is cache.generation:
                filled: Sequence[Any] = arrays
                if prepared.makers:
                    filled, addresses = prepared.make(arrays, addresses, None if stream is None else handle)
                if _repeat(prepared, addresses, scalars, handle):
                    return operation.result(prepared, filled, scalars)
    return _cold_call(operation, arrays, options, scalars, stream, signature)


def _repeat(prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> bool:
    """Makes a known call once more, with the same arrays or others; False, and nothing is done, if operands overlap."""
    repeat = prepared, stream, addresses, scalars if prepared.operation.is_scaled else None
    launch = cache.repeats.get(repeat)
    if not (launch or prepared.is_sound(addresses)):
        return False
    if ranges.watchers:
        ranges.tell(prepared)
    if launch:
        launch()
        return True
    call = prepared.operation.call(prepared, addresses, scalars, stream)
    prepared.put(call)
    if prepared.is_bindable:
        if launch is None:
            if len(cache.repeats) >= _MOST_REPEATS:
                _make_room()
            cache.repeats[repeat] = _ONCE
        elif not is_captured(stream):
            cache.repeats[repeat] = _bound(prepared, call)
    return True


def _bound(prepared: PreparedCall, call: Call) -> Callable[[], None]:
    """The launch of a call that repeats.

    A call that cannot be bound, for want of memory perhaps, costs a warning, and stays as it was.
    """
    try:
        launch: Callable[[], None] = prepared.plan.bind(call)
    except (GpuError, CaptureError) as error:  # a capture may have begun in between
        warnings.warn(f"a call that repeats could not be bound and stays as it was ({error})", stacklevel=2)
        return functools.partial(prepared.put, call)
    return launch


def _make_room() -> None:
    """Lets go of the calls that were made once; of all calls, if most of them are bound."""
    bound = {repeat: launch for repeat, launch in list(cache.repeats.items()) if launch}
    cache.repeats.clear()
    if 2 * len(bound) <= _MOST_REPEATS:
        cache.repeats.update(bound)


def _cold_call(
    operation: Operation, arrays: tuple[Any, ...], options: Any, scalars: Any, stream: Any, signature: Signature | None
) -> Any:
    binds = isinstance(stream, Binding)
    device = _device_of(operation, arrays)
    handle = _handle(arrays[0], stream.stream if binds else stream, device)
    if device == HOST:
        operands = _read(operation, arrays, 0)
        prepared = prepare(operation, operands, options, scalars, 0)
        if binds:
            _check_bindable(prepared)
            return functools.partial(_run_on_host, prepared, arrays, scalars)
        filled, _ = prepared.make(arrays, addresses_of(operands), 0)
        _run_on_host(prepared, filled, scalars)
        return operation.result(prepared, filled, scalars)
    with activated(device):
        operands = _read(operation, arrays, handle)
        prepared = prepare(operation, operands, options, scalars, handle)
        if signature is not None and not binds:
            calls = cache.calls
            if len(calls) >= _MOST_CALLS:
                calls.clear()
            calls[operation, options, signature[0]] = prepared
        given = addresses_of(operands)
        if binds:
            _check_bindable(prepared)
            bound: BoundPlan = prepared.plan.bind(operation.call(prepared, given, scalars, handle))
            bound.prepared = prepared
            return bound
        ranges.tell(prepared)
        filled, addresses = prepared.make(arrays, given, handle)
        prepared.put(operation.call(prepared, addresses, scalars, handle))
        return prepared.finish(filled, scalars, handle)


def prepare(
    operation: Operation, operands: Sequence[Operand | None], options: Any, scalars: Any, stream: int
) -> PreparedCall:
    """What is made of a call whose operands live on a GPU, which is current, or on the host."""
    present = [operand for operand in operands if operand is not None]
    check_device(*present)
    device = present[0].device
    generation, request = cache.generation, operation.read(operands, options, scalars)
    _check_written(operands, request)
    plan = None if device == HOST else operation.plan(request, device, stream)
    request = operation.with_saved(request, plan, operands)
    sizes = tuple([0 if operand is None else operand.extent * operand.itemsize for operand in operands])
    makers = tuple([each.library.maker(each.shape, each.dtype, device) for each in request.new.values()])
    return PreparedCall(operation, device, request, plan, sizes, operation.is_bindable(request), generation, makers)


def addresses_of(operands: Sequence[Operand | None]) -> tuple[int, ...]:
    """Their addresses, 0 for absent ones."""
    return tuple([0 if operand is None else operand.address for operand in operands])


def _run_on_host(prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> None:
    ranges.tell(prepared)
    with np.errstate(all="ignore"):  # overflow and NaN are results here, as they are on a GPU
        prepared.operation.on_host(prepared.request, arrays, scalars)


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


def _check_written(operands: Sequence[Operand | None], request: Request) -> None:
    """Raises unless every operand that is written is writeable memory that no other operand shares."""
    for number, place in enumerate(request.written):
        out = operands[place]
        if out is None:
            continue
        if overlaps_itself(out.shape, out.strides):
            raise OverlapError(f"{out.name} has strides {out.strides}: its elements share memory; they must not")
        if isinstance(out.array, np.ndarray) and not out.array.flags.writeable:
            raise OperandError(f"{out.name} is read-only; it must be writeable")
        later = request.written[number:]
        others = [each for j, each in enumerate(operands) if each is not None and j not in later]
        same = operands[request.same[0]] if request.same is not None and request.same[1] == place else None
        if same is not None and same in others and (out.address, out.strides) == (same.address, same.strides):
            others.remove(same)
        check_no_overlap(out, *others)


def _check_bindable(prepared: PreparedCall) -> None:
    for place in prepared.request.new:
        name = prepared.operation.names[place]
        raise ArgumentError(f"{name} is None; a bound call makes no arrays: give it a buffer")
