"""The path that every call of an operation takes: its arrays are read and checked, its problem planned, its plan run.

The parts in which operations differ are an `Operation`. A call whose arrays differ from an earlier call's only in their
equally aligned addresses reuses the `PreparedCall` of the earlier call: its arrays are checked for overlap alone. The
third call with the same addresses is captured into a graph, and each later call with these addresses launches the
graph.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import numpy as np

from lt_runtime import ranges
from lt_runtime.arrays.checks import check_device, check_no_overlap, check_same, check_shape, check_type
from lt_runtime.arrays.libraries import Library, Signature, current_streams, signature_of
from lt_runtime.arrays.operand import HOST, Operand, read_call
from lt_runtime.errors import ArgumentError, CaptureError, GpuError, OperandError, OverlapError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import is_current
from lt_runtime.gpu.memory import BoundPlan, StreamMemory, memories, stream_memory
from lt_runtime.gpu.streams import is_captured, stream_handle
from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.layout import overlaps_itself, packed
from lt_runtime.ops.first_use import asked_for, before_first_use
from lt_runtime.plans import cache
from lt_runtime.problem import DType, Philox, Spec, check_dropout
from lt_runtime.products.plan import Pass, PassPlan, Plan

_MOST_CALLS: Final = 1024
_MOST_REPEATS: Final = 1024
_UNTIL_RETRY: Final = 1000  # calls
_CAPTURE_SHARE: Final = 0.03
_MOST_CAPTURE_S: Final = 0.05
_ONCE: Final = False
"""Value in `cache.repeats` for a call that was made once with its arrays: no graph has been captured for it yet."""
_OWN_THREADS: Final = "lt_runtime "
"""Prefix of the names of all threads that the package starts."""
AUTOGRAD_THREAD: Final = f"{_OWN_THREADS}autograd"
"""Name of each thread in which PyTorch has run a backward pass of the package."""


Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class New:
    """A result for which the caller gives no buffer: an array that the call makes.

    Attributes:
        shape: shape of the memory that is allocated, row-major.
        view: function that makes the array from the memory; None if the array is all of the memory.
    """

    shape: Shape
    dtype: np.dtype[Any]
    library: Library
    view: Callable[[Any], Any] | None = None


def result_spec(
    place: int, out: Operand | None, shape: Shape, like: Operand, new: dict[int, New], dtype: DType | None = None
) -> Spec:
    """The spec of a result: the spec of its buffer, which is checked, or the spec of a new packed array.

    Args:
        place: index of the result among the arrays.
        out: the result's buffer; if None, a new array is added to `new`.
        like: an operand with the result's device and, unless `dtype` is given, type.
    """
    kind = like.element_type() if dtype is None else dtype
    if out is None:
        new[place] = New(shape, kind.numpy, like.library)
        return Spec(packed(math.prod(shape[:-1]), shape[-1]) if len(shape) >= 2 else packed(1, math.prod(shape)))
    check_shape(out.name, out.shape, shape, "the result's shape")
    if dtype is None:
        check_same(like, out)
    else:
        check_type(out, dtype.value)
    return out.spec


def dropouts_of(p: float, rng: Philox | None) -> tuple[float, float] | None:
    """The `Request.dropouts` of a probability and a source, as the caller gave them; raises as `check_dropout`."""
    return None if check_dropout(p, rng) is None else (float(p), 0.0)


class Request(NamedTuple):
    """The checked description of a call: its problem, its outputs, and the operation's own data.

    Attributes:
        problem: the problem to plan; None if the call needs no plan.
        written: indices, among the arrays, of the operands that are written.
        new: results for which the caller gives no buffer, by their indices among the arrays.
        detail: data that only the operation itself reads, on the host or to build the caller's result.
        same: pairs of an operand and a result that may be the same memory, if their strides are equal; by indices.
        dropouts: probabilities of dropout, from which the plan's `Call.dropouts` are made; None without dropout. With
            dropout the call's scalars are the sources of the masks, and a repeated call is not captured, because its
            masks change.
    """

    problem: Any
    written: tuple[int, ...]
    new: Mapping[int, New]
    detail: Any = None
    same: tuple[tuple[int, int], ...] = ()
    dropouts: tuple[float, float] | None = None


@dataclass(slots=True, eq=False)
class PreparedCall:
    """A call whose operands have been checked, with its plan.

    Attributes:
        device: ordinal of the GPU, or `HOST`.
        plan: None on the host.
        sizes: bytes from each operand's first element to its last; 0 for an absent one.
        generation: `cache.generation` before the plan was looked up. Forgetting plans changes `cache.generation`; a
            prepared call of an earlier generation is not used again.
        makers: one for each of the request's new arrays, see `Library.maker`.
    """

    operation: Operation
    device: int
    request: Request
    plan: Any
    sizes: tuple[int, ...]
    generation: object
    makers: tuple[Callable[[], Any], ...] = ()
    _overlaps: list[tuple[int, list[tuple[int, int, int]]]] = field(init=False)

    def __post_init__(self) -> None:
        """Computes the distances between the addresses of a written operand and of any other at which they overlap."""
        present = [(place, size) for place, size in enumerate(self.sizes) if size]
        self._overlaps = []
        for i, size in [each for each in present if each[0] in self.request.written]:
            others = []
            for j, other in present:
                if (j, i) in self.request.same:  # `same`: the two may be one memory, but must not overlap in part
                    others += [(j, -other, 0), (j, 0, size)]
                elif j != i:
                    others.append((j, -other, size))
            self._overlaps.append((i, others))

    def is_sound(self, addresses: Sequence[int]) -> bool:
        """Whether no written operand overlaps another. Gaps between an operand's rows count as part of the operand."""
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
            stream: the stream in whose order the new arrays' memory is allocated; None if stream and device are
                current in the arrays' library, so that its own constructor does the same.
        """
        filled, addresses = list(arrays), list(given)
        for (place, each), maker in zip(self.request.new.items(), self.makers, strict=True):
            library = each.library
            array = maker() if stream is None else library.empty(each.shape, each.dtype, self.device, stream)
            addresses[place] = library.address(array)
            filled[place] = array if each.view is None else each.view(array)
        return filled, tuple(addresses)

    def put(self, call: Call) -> None:
        """Puts the plan's kernels for this call on the call's stream."""
        memory = memories.get((self.device, call.stream)) or stream_memory(self.device, call.stream)
        with memory.lock:
            self.plan.put(call, memory)


class Operation(ABC):
    """The operation-specific part of `perform`. Operations are compared by identity.

    Attributes:
        names: of the arrays, in their order.
        required: how many of the first arrays may not be None.
        is_scaled: whether a call's scalars are numbers that a bound call keeps, such as α and β.
        range_name: of the profiler's range around each call, such as "lt.linear_forward" for `LinearForward`.
    """

    names: ClassVar[tuple[str, ...]]
    required: ClassVar[int]
    is_scaled: ClassVar[bool] = False
    range_name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        cls.range_name = f"lt.{re.sub(r'(?<!^)(?=[A-Z])', '_', cls.__name__).lower()}"

    @abstractmethod
    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """Checks operands and options.

        Args:
            operands: an `Operand` for each of `names`; None for an absent array.
            options: arguments that a plan depends on.
            scalars: arguments that no plan depends on: factors, or the sources of dropout masks.

        Raises:
            LtError: something is not accepted.
        """

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """Writes the results into NumPy arrays; not implemented by operations that run only on GPUs."""
        raise NotImplementedError

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """The plan for the request's problem, from the plan cache; overridden by operations with only one plan."""
        return cache.plan_of(request.problem, device, stream, before_first_use, anew=asked_for.get())

    def with_saved(self, request: Request, plan: Any, operands: Sequence[Any]) -> Request:
        """Returns the request with the arrays added that the plan saves for backward; `plan` is None on the host."""
        return request

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """Makes the `Call` of the plan from addresses, which are in the order of `names`."""
        if prepared.request.dropouts is None:
            return Call(addresses, stream)
        masks = zip(prepared.request.dropouts, scalars, strict=True)
        first, second = [DropoutState.of(p, rng, prepared.device, stream) for p, rng in masks]
        return Call(addresses, stream, dropouts=(first, second))

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> Any:
        """Returns the caller's result: the last array that is written, unless an operation overrides this.

        Args:
            arrays: the caller's; in the places of results without a buffer, the arrays that the call has made.
        """
        return arrays[prepared.request.written[-1]]


class PassOperation(Operation):
    """An operation that one pass of ours computes.

    Attributes:
        make_pass: makes the pass; its arguments are the parts of the request's problem, then the device.
        empty: the pass if the request's problem is None, as for empty arrays; None if nothing is to be launched.
    """

    make_pass: ClassVar[Callable[..., Pass]]
    empty: ClassVar[Pass | None] = None

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """See `Operation`."""
        return PassPlan(self.empty if request.problem is None else self.make_pass(*request.problem, device), device)


@dataclass(frozen=True, slots=True)
class Binding:
    """Argument in the place of a stream: binds the call to its buffers instead of running it; see `lt.bind`."""

    stream: Any


def perform(
    operation: Operation, arrays: tuple[Any, ...], options: Any, scalars: Any, stream: Any, *, in_range: bool = False
) -> Any:
    """Makes a call, and returns the caller's result.

    Args:
        arrays: in the order of `operation.names`; None where one is absent.
        options, scalars: see `Operation.read`.
        stream: as the caller gave it; with a `Binding` the result is a callable that makes the call.
        in_range: whether the operation's range has already been opened. It is a parameter, because a separate
            function that opens the range would make every call slower.

    Raises:
        LtError: the call is not accepted, or failed; outputs, caches and the stream stay usable.
    """
    if ranges.is_heard and not in_range:
        with ranges.range_of(operation.range_name):
            return perform(operation, arrays, options, scalars, stream, in_range=True)
    signature = signature_of(arrays)
    if signature is not None and stream.__class__ is not Binding and not asked_for.get():
        forms, addresses = signature
        device = forms[0][0]
        # `device` is negative for a PyTorch tensor on the CPU, which `_cold_call` refuses, even on a machine without a
        # driver.
        if device >= 0 and is_current(device):
            current = current_streams[type(arrays[0])]
            handle = current(device) if stream is None else stream_handle(stream, device)
            try:
                prepared: PreparedCall | None = cache.calls.get((operation, options, forms))
            except TypeError:  # an option cannot be hashed, so that it is no accepted value: `_cold_call` refuses it
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
        elif allowance.is_left() and not is_captured(stream):
            cache.repeats[repeat] = allowance.spend(functools.partial(_launch_of, prepared, call))
    return True


class _Allowance:
    """The time for automatic captures: a share of the time that passes, of which some can be saved up.

    A capture takes longer than ten of the calls that it makes faster. Where the addresses of arrays go on changing, as
    those of PyTorch's tensors may for dozens of steps, most graphs would hardly be launched.
    """

    def __init__(self) -> None:
        self._seconds, self._checked = _MOST_CAPTURE_S, time.perf_counter()

    def is_left(self) -> bool:
        """Whether a capture may be made now."""
        now = time.perf_counter()
        self._seconds = min(_MOST_CAPTURE_S, self._seconds + _CAPTURE_SHARE * (now - self._checked))
        self._checked = now
        return self._seconds > 0

    def spend(self, capture: Callable[[], Callable[[], object]]) -> Callable[[], object]:
        """Makes a capture, and takes the time that it took."""
        start = time.perf_counter()
        made = capture()
        self._seconds -= time.perf_counter() - start
        return made


allowance = _Allowance()


def _launch_of(prepared: PreparedCall, call: Call) -> Callable[[], object]:
    """Captures a repeated call into a graph, if the capture can disturb no other thread; returns the call's launch.

    If a call cannot be captured, for example because memory is short, a warning is given and the call is launched
    kernel by kernel.
    """
    if not _is_alone():
        return _uncaptured(prepared.plan, call, stream_memory(prepared.device, call.stream))
    try:
        launch: Callable[[], object] = prepared.plan.bind(call)
    except (GpuError, CaptureError) as error:  # another thread may have begun a capture since `is_captured` was asked
        warnings.warn(f"a call that repeats could not be bound and stays as it was ({error})", stacklevel=2)
        return functools.partial(prepared.put, call)
    return launch


def _is_alone() -> bool:
    """Whether no other living Python thread may synchronise: each is the package's own, or waits for this one.

    While a stream is being captured, cuCtxSynchronize fails in every thread, whatever mode the capture has. So no call
    is captured automatically while another thread exists that may synchronise, for example by
    `torch.cuda.synchronize()`. While a thread of PyTorch's autograd runs, the thread that called `backward` waits for
    it; at other times the thread of autograd waits for work.
    """
    own, threads = threading.current_thread(), threading.enumerate()
    others = [each for each in threads if each is not own and not each.name.startswith(_OWN_THREADS)]
    return len(others) <= (own.name == AUTOGRAD_THREAD)


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

    If most calls have a launch, dropping the others would free little: then all calls are dropped.
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
    strides = [each and each.strides for each in operands]
    same = tuple((i, j) for i, j in request.same if strides[i] is not None and strides[i] == strides[j])
    request = request._replace(same=same)
    _check_written(operands, request)
    plan = None if device == HOST else operation.plan(request, device, stream)
    request = operation.with_saved(request, plan, operands)
    sizes = tuple([0 if operand is None else operand.extent * operand.itemsize for operand in operands])
    makers = tuple([each.library.maker(each.shape, each.dtype, device) for each in request.new.values()])
    return PreparedCall(operation, device, request, plan, sizes, generation, makers)


def addresses_of(operands: Sequence[Operand | None]) -> tuple[int, ...]:
    """The addresses of the operands; 0 for an absent operand."""
    return tuple([0 if operand is None else operand.address for operand in operands])


def _run_on_host(prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> None:
    ranges.tell(prepared)
    with np.errstate(all="ignore"):  # overflow and NaN give no warnings, as on a GPU
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
        same = [operands[i] for i, j in request.same if j == place]
        check_no_overlap(out, *(each for each in others if each not in same or each.address != out.address))
