"""Checks on operands that every operation makes before anything is launched."""

from __future__ import annotations

from collections.abc import Iterable

from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import DeviceError, DTypeError, OverlapError, ShapeError
from lt_runtime.layout import may_overlap


def check_shape(name: str, shape: Iterable[int], expected: tuple[int, ...], why: str) -> None:
    """Raises `ShapeError` unless `shape` is `expected`; `why` says where the expectation comes from."""
    if tuple(shape) != expected:
        raise ShapeError(f"{name} has shape {tuple(shape)}; it must be {expected}, {why}")


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
            raise DeviceError(
                f"{other.name} is {other.place} but {first.name} {first.place}; all must be on one device"
            )


def _meet(first: Operand, second: Operand) -> bool:
    if len(first.shape) == len(second.shape) == 2:
        return may_overlap(first.address, first.layout, second.address, second.layout, first.itemsize, second.itemsize)
    # Vectors and batches are judged by their address ranges.
    sizes = [operand.extent * operand.itemsize for operand in (first, second)]
    return 0 not in sizes and first.address < second.address + sizes[1] and second.address < first.address + sizes[0]


def check_no_overlap(out: Operand, *others: Operand) -> None:
    """Raises `OverlapError` if `out` shares memory with another operand."""
    for other in others:
        if _meet(out, other):
            raise OverlapError(f"{out.name} shares memory with {other.name}; it must not")
