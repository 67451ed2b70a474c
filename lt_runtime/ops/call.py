"""The path that every call of an operation takes: its arrays are read and checked, its problem planned, its plan run.

A call whose arrays differ from an earlier call's only in their equally aligned addresses reuses the `PreparedCall` of
the earlier call: its arrays are checked for overlap alone. The third call with the same addresses is captured into a
graph, and each later call with these addresses launches the graph.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
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
from lt_runtime.gpu.memory import StreamMemory, stream_memory
from lt_runtime.gpu.streams import is_captured, stream_handle
from lt_runtime.kernels.call import Call
from lt_runtime.layout import overlaps_itself
from lt_runtime.ops.first_use import asked_for
from lt_runtime.ops.operation import Operation, PreparedCall, Request
from lt_runtime.plans import cache
from lt_runtime.products.plan import Plan

_MOST_CALLS: Final = 1024
_MOST_REPEATS: Final = 1024
_UNTIL_RETRY: Final = 1000  # calls
_ONCE: Final = False
"""Value in `cache.repeats` of a call that was made once with its arrays, and has no launch yet."""
_OWN_THREADS: Final = "lt_runtime "
"""Prefix of the names of all threads that the package starts."""


@dataclass(frozen=True, slots=True)
class Binding:
    """Argument in the place of a stream: binds the call to its buffers instead of running it; see `lt.bind`."""

    stream: Any


def perform(
    operation: Operation,
    arrays: tuple[Any, ...],
    options: Hashable,
    scalars: Any,
    stream: Any,
    *,
    is_in_range: bool = False,
) -> Any:
    """Makes a call, and returns the caller's result.

    Args:
        arrays: in the order of `operation.names`; None where one is absent.
        options, scalars: see `Operation.read`.
        stream: as the caller gave it; with a `Binding` the result is a callable that makes the call.
        is_in_range: whether the operation's range has already been opened. It is a parameter, because a separate
            function for the range would make every call longer.

    Raises:
        LtError: the call is not accepted, or failed; outputs, caches and the stream stay usable.
    """
    if ranges.is_heard and not is_in_range:
        with ranges.range_of(operation.range_name):
            return perform(operation, arrays, options, scalars, stream, is_in_range=True)
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
    """Runs a prepared call again, with the same or other addresses.

    Returns False without running the call if operands overlap.
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
    if prepared.request.dropouts is None:
        if launch is None:
            if len(cache.repeats) >= _MOST_REPEATS:
                _make_room()
            cache.repeats[repeat] = _ONCE
        elif not is_captured(stream):
            cache.repeats[repeat] = _launch_of(prepared, call)
    return True


def _launch_of(prepared: PreparedCall, call: Call) -> Callable[[], object]:
    """Captures a repeated call into a graph, if the capture can disturb no other thread; returns the call's launch.

    If a call cannot be captured, for example because memory is short, a warning is given and the call is launched
    kernel by kernel.
    """
    if not _is_alone():
        return _uncaptured(prepared.plan, call, stream_memory(prepared.device, call.stream))
    try:
        launch: Callable[[], object] = prepared.plan.bind(call)
    except (GpuError, CaptureError) as error:  # another capture may have begun since the check
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


def _uncaptured(plan: Plan, call: Call, memory: StreamMemory) -> Callable[[], bool]:
    """The launches, kernel by kernel, of a repeated call that was not captured because of another thread.

    The returned function launches the call, and returns True when a capture should be tried again. It is a closure,
    because an object with `__call__` costs 60 ns more in each call.
    """
    left, lock, put = _UNTIL_RETRY, memory.lock, plan.put

    def launch() -> bool:
        nonlocal left
        with lock:
            put(call, memory)
        left -= 1
        return left <= 0

    return launch


def _make_room() -> None:
    """Makes room in the full cache of repeated calls: drops the calls that have no launch yet.

    If most calls have a launch, so that this frees little, all calls are dropped.
    """
    bound = {repeat: launch for repeat, launch in list(cache.repeats.items()) if launch}
    cache.repeats.clear()
    if 2 * len(bound) <= _MOST_REPEATS:
        cache.repeats.update(bound)


def _cold_call(
    operation: Operation, arrays: tuple[Any, ...], options: Any, scalars: Any, stream: Any, signature: Signature | None
) -> Any:
    """Runs or binds a call for which no `PreparedCall` was found: reads, checks and plans it first."""
    binds = isinstance(stream, Binding)
    given_stream = stream.stream if binds else stream
    operands, device, handle = read_call(operation.names, operation.required, arrays, given_stream)
    given, is_on_host = addresses_of(operands), device == HOST
    with contextlib.nullcontext() if is_on_host else activated(device):
        prepared = prepare(operation, operands, options, scalars, handle)
        if binds:
            return _bound(prepared, arrays, given, scalars, handle)
        if signature is not None:
            if len(cache.calls) >= _MOST_CALLS:
                cache.calls.clear()
            cache.calls[operation, options, signature[0]] = prepared
        filled, addresses = prepared.make(arrays, given, handle)
        if is_on_host:
            _run_on_host(prepared, filled, scalars)
        else:
            ranges.tell(prepared)
            prepared.put(operation.call(prepared, addresses, scalars, handle))
        exported = [*filled]
        for place, each in prepared.request.new.items():
            exported[place] = each.library.export(filled[place], handle)
        return operation.result(prepared, exported, scalars)


def _bound(
    prepared: PreparedCall, arrays: tuple[Any, ...], addresses: tuple[int, ...], scalars: Any, stream: int
) -> Callable[[], None]:
    """The callable of `lt.bind`; raises `ArgumentError` if a result has no buffer."""
    for place in prepared.request.new:
        name = prepared.operation.names[place]
        raise ArgumentError(f"{name} is None; a bound call makes no arrays: give it a buffer")
    if prepared.device == HOST:
        return functools.partial(_run_on_host, prepared, arrays, scalars)
    bound: BoundPlan = prepared.plan.bind(prepared.operation.call(prepared, addresses, scalars, stream))
    bound.prepared = prepared
    return bound


def prepare(
    operation: Operation, operands: Sequence[Operand | None], options: Any, scalars: Any, stream: int
) -> PreparedCall:
    """Checks operands on the host, or on a GPU that is current, and plans the call.

    Raises:
        LtError: an operand or option is not accepted, or no plan can be made.
    """
    present = [operand for operand in operands if operand is not None]
    check_device(*present)
    device = present[0].device
    generation, request = cache.generation, operation.read(operands, options, scalars)
    if request.same is not None:
        operand, result = (operands[place] for place in request.same)
        if operand is None or result is None or operand.strides != result.strides:
            request = request._replace(same=None)
    _check_written(operands, request)
    plan = None if device == HOST else operation.plan(request, device, stream)
    request = operation.with_saved(request, plan, operands)
    sizes = tuple([0 if operand is None else operand.extent * operand.itemsize for operand in operands])
    makers = tuple([each.library.maker(each.shape, each.dtype, device) for each in request.new.values()])
    return PreparedCall(operation, device, request, plan, sizes, generation, makers)


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
        if same is not None and same.address == out.address:
            others.remove(same)
        check_no_overlap(out, *others)
