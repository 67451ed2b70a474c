"""The path that every call of an operation takes: its arrays are read and checked, its problem planned, its plan run.

A call whose arrays differ from an earlier call's in nothing but their addresses, equally aligned, finds that call's
`PreparedCall`, and its arrays are not checked again except for overlap. The third call with the same addresses is
captured into a graph, and each later one is the launch of that graph.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from lt_runtime import ranges
from lt_runtime.arrays.checks import check_device, check_no_overlap
from lt_runtime.arrays.libraries import Signature, current_streams, signature_of
from lt_runtime.arrays.operand import HOST, Operand, read_call
from lt_runtime.errors import ArgumentError, CaptureError, GpuError, OperandError, OverlapError
from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import is_current
from lt_runtime.gpu.memory import StreamMemory, memories, stream_memory
from lt_runtime.gpu.streams import is_captured, stream_handle
from lt_runtime.kernels.call import Call
from lt_runtime.layout import overlaps_itself
from lt_runtime.ops.first_use import asked_for
from lt_runtime.ops.operation import Operation, Request
from lt_runtime.plans import cache
from lt_runtime.products.plan import Plan

_MOST_CALLS: Final = 1024
_MOST_REPEATS: Final = 1024
_UNTIL_RETRY: Final = 1000  # calls
_ONCE: Final = False
"""Value in `cache.repeats` of a call that was made once with its arrays, and has no launch yet."""
_OWN_THREADS: Final = "lt_runtime "
"""The names of the threads that the package starts begin with this."""


@dataclass(slots=True, eq=False)
class PreparedCall:
    """A call whose operands have been checked, with its plan.

    Attributes:
        device: ordinal of the GPU, or `HOST`.
        plan: None on the host.
        sizes: bytes from each operand's first element to its last; 0 for an absent one.
        generation: `cache.generation` before the plan was looked up. Once plans are forgotten the generation is
            another, and the prepared call is not used any more.
        makers: one for each of the request's new arrays, see `Library.maker`.
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
        """Notes for each written operand the distances to every other operand at which the two overlap."""
        present = [(place, size) for place, size in enumerate(self.sizes) if size]
        self._overlaps = [
            (i, [(j, -other, size) for j, other in present if j != i])
            for i, size in present
            if i in self.request.written
        ]

    def is_sound(self, addresses: Sequence[int]) -> bool:
        """Whether no written operand overlaps another; only where operands begin and end is compared."""
        for i, others in self._overlaps:
            start = addresses[i]
            for j, above, below in others:
                if above < addresses[j] - start < below:
                    return False
        return True

    def make(
        self, arrays: Sequence[Any], given: tuple[int, ...], stream: int | None
    ) -> tuple[Sequence[Any], tuple[int, ...]]:
        """Makes the request's new arrays; returns all arrays, and the addresses of all of them.

        Args:
            given: addresses of `arrays`, 0 for an absent one.
            stream: the stream that the new arrays' memory is ordered with; None if that stream, and the device, are
                the current ones of the arrays' library.
        """
        filled, addresses = list(arrays), list(given)
        for (place, each), maker in zip(self.request.new.items(), self.makers, strict=True):
            library = each.library
            array = maker() if stream is None else library.empty(each.shape, each.dtype, self.device, stream)
            addresses[place] = library.address(array)
            filled[place] = array if each.view is None else each.view(array)
        return filled, tuple(addresses)

    def put(self, call: Call) -> None:
        """Puts the plan's launches on the call's stream."""
        memory = memories.get((self.device, call.stream)) or stream_memory(self.device, call.stream)
        with memory.lock:
            self.plan.put(call, memory)

    def finish(self, arrays: Sequence[Any], scalars: Any, stream: int) -> Any:
        """Returns the caller's result, once the work is on the stream."""
        new = self.request.new
        if new:
            exported = list(arrays)
            for place, each in new.items():
                exported[place] = each.library.export(arrays[place], stream)
            arrays = exported
        return self.operation.result(self, arrays, scalars)


@dataclass(frozen=True, slots=True)
class Binding:
    """Passed as the stream of a call that is to be bound to its buffers instead of made; see `lt.bind`."""

    stream: Any


def perform(operation: Operation, arrays: tuple[Any, ...], options: Hashable, scalars: Any, stream: Any) -> Any:
    """Makes a call, and returns the caller's result.

    Args:
        arrays: in the order of `operation.names`; None where one is absent.
        options, scalars: see `Operation.read`.
        stream: as the caller gave it; with a `Binding` the result is a callable that makes the call.

    Raises:
        LtError: the call is not accepted, or failed; outputs, caches and the stream stay usable.
    """
    if not ranges.is_heard:
        return _perform(operation, arrays, options, scalars, stream)
    with ranges.range_of(operation.range_name):
        return _perform(operation, arrays, options, scalars, stream)


def _perform(operation: Operation, arrays: tuple[Any, ...], options: Hashable, scalars: Any, stream: Any) -> Any:
    signature = signature_of(arrays)
    if signature is not None and stream.__class__ is not Binding and not asked_for.get():
        forms, addresses = signature
        device = forms[0][0]
        # Without a signature, a tensor on the CPU is refused below, with or without a driver.
        if device >= 0 and is_current(device):
            current = current_streams[type(arrays[0])]
            handle = current(device) if stream is None else stream_handle(stream, device)
            try:
                prepared: PreparedCall | None = cache.calls.get((operation, options, forms))
            except TypeError:  # an option that cannot be hashed
                prepared = signature = None
            if prepared is not None and prepared.generation is cache.generation:
                filled: Sequence[Any] = arrays
                if prepared.makers:
                    filled, addresses = prepared.make(arrays, addresses, None if stream is None else handle)
                if _repeat(prepared, addresses, scalars, handle):
                    return operation.result(prepared, filled, scalars)
    return _cold_call(operation, arrays, options, scalars, stream, signature)


def _repeat(prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> bool:
    """Makes a prepared call again, with the same addresses or others.

    Returns False without making the call if operands overlap.
    """
    repeat = prepared, stream, addresses, scalars if prepared.operation.is_scaled else None
    launch = cache.repeats.get(repeat)
    if not (launch or prepared.is_sound(addresses)):
        return False
    if ranges.watchers:
        ranges.tell(prepared)
    if launch:
        if launch():
            cache.repeats[repeat] = _ONCE
        return True
    call = prepared.operation.call(prepared, addresses, scalars, stream)
    prepared.put(call)
    if prepared.is_bindable:
        if launch is None:
            if len(cache.repeats) >= _MOST_REPEATS:
                _make_room()
            cache.repeats[repeat] = _ONCE
        elif not is_captured(stream):
            cache.repeats[repeat] = _launch_of(prepared, call)
    return True


def _launch_of(prepared: PreparedCall, call: Call) -> Callable[[], object]:
    """Captures a repeated call into a graph, if no other thread can be disturbed by that; returns the call's launch.

    If a call cannot be captured, for example because memory is short, a warning is given and the call is launched
    kernel by kernel.
    """
    if not _is_alone():
        return _Uncaptured(prepared.plan, call, stream_memory(prepared.device, call.stream))
    try:
        launch: Callable[[], object] = prepared.plan.bind(call)
    except (GpuError, CaptureError) as error:  # a capture may have begun in between
        warnings.warn(f"a call that repeats could not be bound and stays as it was ({error})", stacklevel=2)
        return functools.partial(prepared.put, call)
    return launch


def _is_alone() -> bool:
    """Whether every other living Python thread is the package's own.

    While a stream is being captured, cuCtxSynchronize fails in every thread, whatever mode the capture has. So no call
    is captured automatically while another thread exists that may synchronise, for example by
    `torch.cuda.synchronize()`.
    """
    own = threading.current_thread()
    return all(each is own or each.name.startswith(_OWN_THREADS) for each in threading.enumerate())


@dataclass(slots=True, eq=False)
class _Uncaptured:
    """The launches, kernel by kernel, of a repeated call that was not captured because of another thread."""

    plan: Plan
    call: Call
    memory: StreamMemory
    left: int = _UNTIL_RETRY

    def __call__(self) -> bool:
        """Puts the launches on the stream; returns whether a capture is to be tried again."""
        with self.memory.lock:
            self.plan.put(self.call, self.memory)
        self.left -= 1
        return self.left <= 0


def _make_room() -> None:
    """Forgets the calls that were made once; forgets all repeated calls if most of them have a launch."""
    bound = {repeat: launch for repeat, launch in list(cache.repeats.items()) if launch}
    cache.repeats.clear()
    if 2 * len(bound) <= _MOST_REPEATS:
        cache.repeats.update(bound)


def _cold_call(
    operation: Operation, arrays: tuple[Any, ...], options: Any, scalars: Any, stream: Any, signature: Signature | None
) -> Any:
    """Makes a call that has no `PreparedCall` yet, or binds it."""
    binds = isinstance(stream, Binding)
    read = read_call(operation.names, operation.required, arrays, stream.stream if binds else stream)
    operands, given, handle = read.operands, addresses_of(read.operands), read.stream
    if read.device == HOST:
        prepared = prepare(operation, operands, options, scalars, 0)
        if binds:
            _check_bindable(prepared)
            return functools.partial(_run_on_host, prepared, arrays, scalars)
        filled, _ = prepared.make(arrays, given, 0)
        _run_on_host(prepared, filled, scalars)
        return operation.result(prepared, filled, scalars)
    with activated(read.device):
        prepared = prepare(operation, operands, options, scalars, handle)
        if binds:
            _check_bindable(prepared)
            bound: BoundPlan = prepared.plan.bind(operation.call(prepared, given, scalars, handle))
            bound.prepared = prepared
            return bound
        if signature is not None:
            if len(cache.calls) >= _MOST_CALLS:
                cache.calls.clear()
            cache.calls[operation, options, signature[0]] = prepared
        ranges.tell(prepared)
        filled, addresses = prepared.make(arrays, given, handle)
        prepared.put(operation.call(prepared, addresses, scalars, handle))
        return prepared.finish(filled, scalars, handle)


def prepare(
    operation: Operation, operands: Sequence[Operand | None], options: Any, scalars: Any, stream: int
) -> PreparedCall:
    """Checks operands on the host, or on a GPU that is current, and plans the call.

    Raises:
        LtError: something is not accepted, or no plan can be made.
    """
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
    """The operands' addresses, 0 for an absent one."""
    return tuple([0 if operand is None else operand.address for operand in operands])


def _run_on_host(prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> None:
    ranges.tell(prepared)
    with np.errstate(all="ignore"):  # overflow and NaN are results here, as they are on a GPU
        prepared.operation.on_host(prepared.request, arrays, scalars)


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
