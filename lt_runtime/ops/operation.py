"""The operation-specific part of `perform`, and a call whose operands have been checked."""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lt_runtime.arrays.checks import check_same, check_shape, check_type
from lt_runtime.arrays.libraries import Library
from lt_runtime.arrays.operand import Operand
from lt_runtime.gpu.memory import memories, stream_memory
from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.layout import packed
from lt_runtime.ops.first_use import asked_for, before_first_use
from lt_runtime.plans import cache
from lt_runtime.problem import DType, Spec
from lt_runtime.products.plan import Plan


@dataclass(frozen=True, slots=True)
class New:
    """A result for which the caller gives no buffer: an array that the call makes.

    Attributes:
        shape: of the memory, row-major.
        view: function that makes the array from the memory; None if the array is all of the memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    library: Library
    view: Callable[[Any], Any] | None = None


def result_spec(
    place: int,
    out: Operand | None,
    shape: tuple[int, ...],
    like: Operand,
    new: dict[int, New],
    dtype: DType | None = None,
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
        return Spec(packed(*shape) if len(shape) == 2 else packed(1, math.prod(shape)))
    check_shape(out.name, out.shape, shape, "the result's shape")
    if dtype is None:
        check_same(like, out)
    else:
        check_type(out, dtype.value)
    return out.spec


class Request(NamedTuple):
    """The checked description of a call: its problem, its outputs, and the operation's own data.

    Attributes:
        problem: the problem to plan; None if the call needs no plan.
        written: indices, among the arrays, of the operands that are written.
        new: results for which the caller gives no buffer, by their indices among the arrays.
        detail: data that only the operation itself reads, on the host or to build the caller's result.
        same: places of an operand and of a result that may be the same memory, if their strides are equal.
        dropouts: probabilities of dropout, from which the plan's `Call.dropouts` are made; None without dropout. With
            dropout the call's scalars are the sources of the masks, and a repeated call is not captured, because its
            masks change.
    """

    problem: Any
    written: tuple[int, ...]
    new: Mapping[int, New]
    detail: Any = None
    same: tuple[int, int] | None = None
    dropouts: tuple[float, float] | None = None


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
    generation: object
    makers: tuple[Callable[[], Any], ...] = ()
    _overlaps: list[tuple[int, list[tuple[int, int, int]]]] = field(init=False)

    def __post_init__(self) -> None:
        """Notes for each written operand the distances to every other operand at which the two overlap."""
        present = [(place, size) for place, size in enumerate(self.sizes) if size]
        self._overlaps = []
        for i, size in [each for each in present if each[0] in self.request.written]:
            others = []
            for j, other in present:
                if (j, i) == self.request.same:  # the two may coincide, but not overlap in part
                    others += [(j, -other, 0), (j, 0, size)]
                elif j != i:
                    others.append((j, -other, size))
            self._overlaps.append((i, others))

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
        """The request with the arrays that the plan saves for backward; `plan` is None on the host."""
        return request

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """The plan's call; `addresses` are in the order of `names`."""
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
