"""Checks of operands, which every operation makes before it launches anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import itemgetter
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arrays.operand import Operand, read
from lt_runtime.errors import DeviceError, DTypeError, OverlapError, ShapeError

_WORK: Final = 10_000  # limit of steps in NumPy's search for a common element, beyond which overlap is assumed


def check_shape(name: str, shape: Iterable[int], expected: tuple[int, ...], why: str) -> None:
    """Raises `ShapeError` unless `shape` is `expected`; `why` is the reason for the expected shape."""
    if tuple(shape) != expected:
        raise ShapeError(f"{name} has shape {tuple(shape)}; it must be {expected}, {why}")


def check_type(operand: Operand, dtype: str) -> None:
    """Raises `DTypeError` unless the operand's elements have the given type."""
    if operand.dtype != dtype:
        raise DTypeError(f"{operand.name} is {operand.dtype}; it must be {dtype}")


def check_one_float32(operand: Operand, dtype: str = "float32") -> None:
    """Raises `DTypeError` or `ShapeError` unless the operand is one number of type FP32, or of the given type."""
    check_type(operand, dtype)
    if operand.shape not in ((), (1,)):
        raise ShapeError(f"{operand.name} has shape {operand.shape}; accepted are () and (1,)")


def check_weights(operand: Operand, shape: tuple[int, ...], why: str, dtype: str = "float32") -> None:
    """Raises `DTypeError`, `ShapeError` or `LayoutError` unless the operand has this type and shape, and no gaps."""
    check_type(operand, dtype)
    check_shape(operand.name, operand.shape, shape, why)
    operand.check_packed()


def check_same(first: Operand, *others: Operand) -> None:
    """Raises `DTypeError` or `DeviceError` unless all operands share the first one's type and device."""
    for other in others:
        if other.dtype != first.dtype:
            raise DTypeError(f"{other.name} is {other.dtype} but {first.name} is {first.dtype}; types must be equal")
    check_device(first, *others)


def check_device(first: Operand, *others: Operand) -> None:
    """Raises `DeviceError` unless all operands live on the first one's device."""
    for other in others:
        if other.device != first.device:
            places = f"{other.name} is {other.place} but {first.name} {first.place}"
            raise DeviceError(f"{places}; all must be on one device")


def is_same_matrix(x: Any, y: Any) -> bool:
    """Whether two arrays are the same matrix: equal types and addresses, and equal layouts as `layout_of` reads them.

    Raises:
        OperandError: one of the arrays cannot be read, see `read`, or has no layout.
    """
    if x is y:
        return True
    operands = read("x", x, 0), read("y", y, 0)
    places = [None if 0 in each.shape else each.address for each in operands]
    first, second = [(each.device, each.dtype, each.layout) for each in operands]
    return first == second and places[0] == places[1]


def check_no_overlap(out: Operand, *others: Operand) -> None:
    """Raises `OverlapError` if `out` shares memory with another operand.

    Operands with equal element sizes, such as two column slices of one array, overlap if they share an element; others
    if their address ranges overlap.
    """
    if 0 in out.shape:
        return
    memory = _memory(out)
    for other in others:
        # an empty array overlaps nothing; it may have address 0, from which NumPy 2.0 makes no array
        if 0 in other.shape:
            continue
        work: Any = _WORK if out.itemsize == other.itemsize else 0
        if np.may_share_memory(memory, _memory(other), max_work=work):
            raise OverlapError(f"{out.name} shares memory with {other.name}; it must not")


def check_disjoint(written: Sequence[Operand], read: Sequence[Operand]) -> None:
    """Raises `OverlapError` if a written operand shares memory with another operand, written or read.

    Address ranges are sorted and swept, because comparing all pairs of thousands of operands would be slow. No operand
    may have a negative stride, so that each range begins at its address.
    """
    spans = [(each.address, each.address + each.extent * each.itemsize, True, each) for each in written]
    spans += [(each.address, each.address + each.extent * each.itemsize, False, each) for each in read]
    # The ranges so far that end beyond `start`, the address at which the present range begins.
    reaching: list[tuple[int, int, bool, Operand]] = []
    for span in sorted(spans, key=itemgetter(0)):
        start, _, is_written, operand = span
        reaching = [each for each in reaching if each[1] > start]
        for _, _, other_is_written, other in reaching:
            if is_written or other_is_written:
                check_no_overlap(*((operand, other) if is_written else (other, operand)))
        reaching.append(span)


def _memory(operand: Operand) -> NDArray[Any]:
    """A NumPy array with the operand's address and strides, for comparisons only: it may point to GPU memory."""
    size, shape = operand.itemsize, operand.shape
    strides = tuple(stride * size for stride in operand.strides)
    interface = {"version": 3, "data": (operand.address, True), "typestr": f"|V{size}", "shape": shape}
    return np.asarray(SimpleNamespace(__array_interface__=interface | {"strides": strides}))
