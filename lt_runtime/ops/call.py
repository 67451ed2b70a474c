"""Runs every call of an operation: reads and checks its arrays, plans its problem, and runs the plan.

An `Operation` holds what differs between operations. A call whose arrays differ from an earlier call's only in
addresses, with equal alignments, reuses the `PreparedCall` of the earlier call, so that its arrays are only checked for
overlap. The second such call with the same addresses is captured into a graph, which each later call with these
addresses launches.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
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
"""Value in `cache.repeats` of a call that a `PreparedCall` has run once with these addresses. The next is captured."""
Launch: TypeAlias = Callable[[], object] | bool
"""A function that launches a repeated call, or `_ONCE`."""
_QUIET_THREADS: Final = re.compile(
    "lt_runtime .*|InductorSubproc|subproc_worker_timer|tqdm_monitor|QueueFeederThread|.*\\(_pin_memory_loop\\)"
)
"""Matches the names of threads that never synchronise with a GPU: the package's own, two of torch.compile, one of tqdm,
and two of a PyTorch DataLoader with workers, of which the last allocates pinned memory. The package's captures, in mode
THREAD_LOCAL, allow other threads to do so."""
AUTOGRAD_THREAD: Final = "lt_runtime autograd"
"""Name that the package gives to each PyTorch autograd thread that runs a backward pass of the package."""


Shape: TypeAlias = tuple[int, ...]
MadeCall: TypeAlias = tuple[Any, tuple[int, ...], Any, Sequence[Any]]
"""A call that ran by its `PreparedCall`: that object, the addresses of the arrays, the scalars, and the arrays."""
Record: TypeAlias = Callable[[MadeCall | None], object]
"""A function that gets the `MadeCall` after a call by a `PreparedCall`, and None before a call that must be planned."""
_recording: Final[ContextVar[Record | None]] = ContextVar("lt_runtime_recording", default=None)


@dataclass(frozen=True, slots=True)
class New:
    """A result without a buffer from the caller: describes the array that the call allocates.

    Attributes:
        shape: shape of the memory that is allocated, row-major.
        view: function that makes the result as a view of the memory; None if the result is all of the memory.
    """

    shape: Shape
    dtype: np.dtype[Any]
    library: Library
    view: Callable[[Any], Any] | None = None


def result_spec(
    place: int, out: Operand | None, shape: Shape, like: Operand, new: dict[int, New], dtype: DType | None = None
) -> Spec:
    """The spec of a result: of the caller's buffer, which is checked, or of a new packed array.

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
    """`Request.dropouts` for the caller's probability and source; raises as `check_dropout`."""
    return None if check_dropout(p, rng) is None else (float(p), 0.0)


class Request(NamedTuple):
    """The checked description of a call: its problem, its outputs, and the operation's own data.

    Attributes:
        problem: the problem to plan; None if the call needs no plan.
        written: indices, among the arrays, of the operands that are written.
        new: maps the index, among the arrays, of each result without a buffer from the caller to its `New`.
        detail: data that only the operation itself reads, on the host or to build the caller's result.
        same: pairs (operand, result) of indices of arrays that may be the same memory, if their strides are equal.
        dropouts: probabilities of dropout, from which the plan's `Call.dropouts` are made; None without dropout. With
            dropout the call's scalars are the sources of the masks. A repeated call is captured only if the steps of
            all masks are on the device, because a graph would draw the same mask each time for a step from the host.
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
        sizes: bytes from the first element of each operand to the end of its last; 0 for an absent operand.
        generation: `cache.generation` before the plan was looked up. Forgetting plans replaces `cache.generation`,
            which invalidates prepared calls of earlier generations.
        makers: for each of the request's new arrays, the function that `Library.maker` returned.
        makes_like_first: whether the new arrays are of the first operand's library, whose current stream a call without
            a stream runs on.
    """

    operation: Operation
    device: int
    request: Request
    plan: Any
    sizes: tuple[int, ...]
    generation: object
    makers: tuple[Callable[[], Any], ...] = ()
    makes_like_first: bool = True
    _overlaps: list[tuple[int, list[tuple[int, int, int]]]] = field(init=False)

    def __post_init__(self) -> None:
        """Computes for each written operand and every other one the differences of addresses at which they overlap."""
        present = [(place, size) for place, size in enumerate(self.sizes) if size]
        self._overlaps = []
        for i, size in [each for each in present if each[0] in self.request.written]:
            others = []
            for j, other in present:
                if (j, i) in self.request.same:  # the two arrays may be the same memory, but must not overlap in part
                    others += [(j, -other, 0), (j, 0, size)]
                elif j != i:
                    others.append((j, -other, size))
            self._overlaps.append((i, others))

    def is_sound(self, addresses: Sequence[int]) -> bool:
        """Whether no written operand overlaps another operand. Gaps between rows count as part of an operand."""
        for i, others in self._overlaps:
            start = addresses[i]
            for j, above, below in others:
                if above < addresses[j] - start < below:
                    return False
        return True

    def make(
        self, arrays: Sequence[Any], given: tuple[int, ...], stream: int | None
    ) -> tuple[Sequence[Any], tuple[int, ...]]:
        """Allocates the request's new arrays; returns all arrays and all addresses.

        Args:
            given: addresses of `arrays`, 0 for an absent one.
            stream: the stream in whose order new arrays are allocated; None if stream and device are current in the
                arrays' library, so that its ordinary constructor can be used.
        """
        filled, addresses = list(arrays), list(given)
        for (place, each), maker in zip(self.request.new.items(), self.makers, strict=True):
            library = each.library
            array = maker() if stream is None else library.empty(each.shape, each.dtype, self.device, stream)
            addresses[place] = library.address(array)
            filled[place] = array if each.view is None else each.view(array)
        return filled, tuple(addresses)

    def put(self, call: Call) -> None:
        """Launches the plan's kernels for this call on `call.stream`."""
        memory = memories.get((self.device, call.stream)) or stream_memory(self.device, call.stream)
        with memory.lock:
            self.plan.put(call, memory)


class Operation(ABC):
    """The operation-specific part of `perform`. Operations are compared by identity.

    Attributes:
        names: names of the arrays, in their order.
        required: number of leading arrays that must not be None.
        is_scaled: whether a call's scalars are numbers that its launches contain, such as α and β. False if there are
            none, or if they are sources of dropout masks.
        range_name: name of the profiler range around each call, such as "lt.linear_forward" for `LinearForward`.
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
            LtError: an operand or option is not accepted.
        """

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """Writes the results into NumPy arrays; not implemented by operations that run only on GPUs."""
        raise NotImplementedError

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """The plan for the request's problem, from the plan cache; overridden by operations with only one plan."""
        return cache.plan_of(request.problem, device, stream, before_first_use, anew=asked_for.get())

    def with_saved(self, request: Request, plan: Any, operands: Sequence[Any]) -> Request:
        """Returns the request with the arrays that the plan saves for backward added; `plan` is None on the host."""
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
            arrays: the caller's arrays; in place of results without a buffer, the arrays that the call has allocated.
        """
        return arrays[prepared.request.written[-1]]


class PassOperation(Operation):
    """An operation that a `Pass` (our own kernels) computes.

    Attributes:
        make_pass: function that makes the pass; its arguments are the items of the request's problem, then the device.
        empty: the pass for a request without a problem, as for empty arrays; None to launch nothing.
    """

    make_pass: ClassVar[Callable[..., Pass]]
    empty: ClassVar[Pass | None] = None

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """See `Operation`."""
        return PassPlan(self.empty if request.problem is None else self.make_pass(*request.problem, device), device)


@dataclass(frozen=True, slots=True)
class Binding:
    """Passed instead of a stream: binds the call to its buffers instead of running it; see `lt.bind`."""

    stream: Any


def perform(
    operation: Operation, arrays: tuple[Any, ...], options: Any, scalars: Any, stream: Any, *, in_range: bool = False
) -> Any:
    """Runs an operation and returns its result; for a `Binding`, returns a callable that runs it.

    Args:
        arrays: arrays in the order of `operation.names`; None for an absent one.
        options, scalars: see `Operation.read`.
        stream: the caller's stream, or a `Binding`.
        in_range: whether the operation's range is already open. It is a parameter because a separate function that
            opens the range would make every call slower.

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
        # A PyTorch tensor on the CPU gives a negative `device`; `_cold_call` then raises, even on a machine without a
        # driver.
        if device >= 0 and is_current(device):
            current = current_streams[type(arrays[0])]
            handle = current(device) if stream is None else stream_handle(stream, device)
            try:
                prepared: PreparedCall | None = cache.calls.get((operation, options, forms))
            except TypeError:  # an option is not hashable, and so not an accepted value: `_cold_call` raises for it
                prepared = signature = None
            if prepared is not None and prepared.generation is cache.generation:
                filled: Sequence[Any] = arrays
                if prepared.makers:
                    is_current_stream = stream is None and prepared.makes_like_first
                    filled, addresses = prepared.make(arrays, addresses, None if is_current_stream else handle)
                if repeat(prepared, addresses, scalars, handle):
                    if (record := _recording.get()) is not None:
                        record((prepared, addresses, scalars, filled))
                    return operation.result(prepared, filled, scalars)
    if (record := _recording.get()) is not None:
        record(None)
    return _cold_call(operation, arrays, options, scalars, stream, signature)


def repeat(prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> bool:
    """Runs a prepared call again, with the same or other addresses.

    Returns False, without running the call, if operands overlap.
    """
    # A graph contains these constants, so that only calls with equal ones may launch it.
    call, constants = None, scalars if prepared.operation.is_scaled else None
    if prepared.request.dropouts is not None:
        call = prepared.operation.call(prepared, addresses, scalars, stream)
        constants = call.dropouts
    repeat = prepared, stream, addresses, constants
    launch = cache.repeats.get(repeat)
    if not (launch or prepared.is_sound(addresses)):
        return False
    if ranges.watchers:
        ranges.tell(prepared)
    if launch:
        if launch():
            cache.repeats[repeat] = _ONCE
        return True
    if call is None:
        call = prepared.operation.call(prepared, addresses, scalars, stream)
    prepared.put(call)
    if call.has_all_steps_on_device:
        if launch is None:
            if len(cache.repeats) >= _MOST_REPEATS:
                _make_room()
            cache.repeats[repeat] = _ONCE
        elif allowance.is_left() and not is_captured(stream):
            cache.repeats[repeat] = allowance.spend(functools.partial(_launch_of, prepared, call))
    return True


@contextlib.contextmanager
def recorded_by(record: Record) -> Iterator[None]:
    """Within a `with` block, `perform` tells `record` of each call of this thread; see `Record`."""
    token = _recording.set(record)
    try:
        yield
    finally:
        _recording.reset(token)


class _Allowance:
    """Limits the time spent on automatic captures to a share of the elapsed time, plus a small reserve.

    A capture takes longer than ten ordinary calls, so that it pays only if its graph is launched often. If addresses of
    arrays keep changing, as in PyTorch they may for dozens of steps, most graphs would be launched only a few times.
    """

    def __init__(self) -> None:
        self._seconds, self._checked = _MOST_CAPTURE_S, time.perf_counter()

    def is_left(self) -> bool:
        """Whether a capture may be made now."""
        now = time.perf_counter()
        self._seconds = min(_MOST_CAPTURE_S, self._seconds + _CAPTURE_SHARE * (now - self._checked))
        self._checked = now
        return self._seconds > 0

    def spend(self, capture: Callable[[], Launch]) -> Launch:
        """Makes a capture, and subtracts its duration from the allowance."""
        start = time.perf_counter()
        made = capture()
        self._seconds -= time.perf_counter() - start
        return made


allowance = _Allowance()


def _launch_of(prepared: PreparedCall, call: Call) -> Launch:
    """Captures a repeated call into a graph if no other thread can be disturbed; returns a function that launches it.

    If a call cannot be captured, for example because memory is short, a warning is given and the call is launched
    kernel by kernel.
    """
    memory = stream_memory(prepared.device, call.stream)
    if memory.lends_scratch:  # A graph would keep the address of scratch memory that the rehearsal of a step frees.
        return _ONCE
    if not _is_alone():
        return _uncaptured(prepared.plan, call, memory)
    try:
        launch: Launch = prepared.plan.bind(call)
    # CaptureError: another thread may have begun a capture since `is_captured` was called.
    except (GpuError, CaptureError) as error:
        warnings.warn(f"a call that repeats could not be bound and stays as it was ({error})", stacklevel=2)
        return functools.partial(prepared.put, call)
    return launch


def _is_alone() -> bool:
    """Whether no other living Python thread may synchronise with a GPU now.

    While a stream is being captured, cuCtxSynchronize fails in every thread, whatever mode the capture has. So no call
    is captured automatically while another thread exists that may synchronise, for example by
    `torch.cuda.synchronize()`. While a thread of PyTorch's autograd runs, the thread that called `backward` waits for
    it; at other times the thread of autograd waits for work.
    """
    own, threads = threading.current_thread(), threading.enumerate()
    others = [each for each in threads if each is not own and not _QUIET_THREADS.fullmatch(each.name)]
    return len(others) <= (own.name == AUTOGRAD_THREAD)


def _uncaptured(plan: Plan, call: Call, memory: StreamMemory) -> Callable[[], bool]:
    """A function that launches a repeated call kernel by kernel, used while another thread prevents its capture.

    The function returns True when a capture should be tried again. A closure is used, because an object with
    `__call__` costs 60 ns more in each call.
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
    """Makes room in the full cache of repeated calls: drops the calls that are not captured yet.

    If most calls are captured, dropping the others would free little, so that all are dropped.
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
    makes_like_first = all(each.library is present[0].library for each in request.new.values())
    return PreparedCall(operation, device, request, plan, sizes, generation, makers, makes_like_first)


def addresses_of(operands: Sequence[Operand | None]) -> tuple[int, ...]:
    """The addresses of the operands; 0 for an absent operand."""
    return tuple([0 if operand is None else operand.address for operand in operands])


def _run_on_host(prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> None:
    ranges.tell(prepared)
    with np.errstate(all="ignore"):  # without NumPy's warnings of overflow and NaN: a GPU gives none
        prepared.operation.on_host(prepared.request, arrays, scalars)


def _check_written(operands: Sequence[Operand | None], request: Request) -> None:
    """Raises unless every written operand is writeable, and shares no memory with another operand."""
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
