"""What an operation such as `linear_fwd` supplies to `perform`: how to read a call, run it, and make its results."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from lt_runtime.arrays.libraries import Library
from lt_runtime.kernels.call import Call
from lt_runtime.ops.first_use import asked_for, before_first_use
from lt_runtime.plans import cache
from lt_runtime.products.plan import Plan


@dataclass(frozen=True, slots=True)
class New:
    """A result for which the caller gives no buffer: an array that the call makes.

    Attributes:
        shape: of the memory, row-major.
        view: takes the memory to the array; None if the array is all of the memory.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    library: Library
    view: Callable[[Any], Any] | None = None


class Request(NamedTuple):
    """What a call asks for, once its operands are checked.

    Attributes:
        problem: what is to be planned; None if the call needs no plan.
        written: places among the arrays of the operands that are written.
        new: results for which the caller gives no buffer, by their places among the arrays.
        detail: what only the operation itself reads, on the host or when it makes the caller's result.
        same: places of an operand and of a result that may be the same memory.
    """

    problem: Any
    written: tuple[int, ...]
    new: Mapping[int, New]
    detail: Any = None
    same: tuple[int, int] | None = None


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
            scalars: arguments that no plan depends on: factors, or the source of a dropout mask.

        Raises:
            LtError: something is not accepted.
        """

    @abstractmethod
    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """Writes the results into NumPy arrays."""

    @abstractmethod
    def result(self, prepared: Any, arrays: Sequence[Any], scalars: Any) -> Any:
        """Returns the caller's result.

        Args:
            prepared: the `PreparedCall`.
            arrays: the caller's; in the places of results without a buffer, the arrays that the call has made.
        """

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """The plan for the request's problem, from the plan cache; overridden by operations with only one plan."""
        return cache.plan_of(request.problem, device, stream, before_first_use, anew=asked_for.get())

    def with_saved(self, request: Request, plan: Any, operands: Sequence[Any]) -> Request:
        """The request with the arrays that the plan saves for backward; `plan` is None on the host."""
        return request

    def is_bindable(self, request: Request) -> bool:
        """Whether equal calls have equal effects, so that a repeated call may be captured into a graph."""
        return True

    def call(self, prepared: Any, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """The plan's call; `addresses` are in the order of `names`."""
        return Call(addresses, stream)
