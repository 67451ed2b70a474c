"""The memory of a pretended GPU: host memory filled with NaN, guarded at both ends, and found by address."""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Hashable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.support.races import Access, History, Touch

GUARD: Final = 512
"""Bytes before and after each allocation that no work may write. They are NaN in every type."""
_ALIGNMENT: Final = 512  # alignment in bytes, as of the driver's own allocations
_POISON: Final = 0xFF
# Larger allocations are filled with NaN at their ends only, because filling them whole takes too long.
_LARGE: Final = 1 << 20


class BadAddressError(AssertionError):
    """Raised for an address that belongs to no allocation, was freed, or is too close to the allocation's end."""


class FullError(Exception):
    """Raised for an allocation that a test makes fail. The driver and CuPy report it in their own ways."""


class DeviceMemory:
    """All allocations of a pretended GPU.

    Attributes:
        allocations: the number of allocations so far, with those that failed.
        fail_at: number of the allocation that is to fail; 0 if none is.
        retired: freed memory that work which has not run yet may still read.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._blocks: dict[int, tuple[NDArray[np.uint8], int]] = {}
        self.allocations = self.fail_at = 0
        self.retired: list[NDArray[np.uint8]] = []
        self._histories: dict[int, History] = {}
        # Histories of all addresses, also of freed memory: a captured graph keeps an address, which later memory may
        # have again.
        self._all_histories: weakref.WeakValueDictionary[int, History] = weakref.WeakValueDictionary()
        self._pools: dict[Hashable, list[list[Access]]] = {}
        self._parts: dict[int, int] = {}

    def allocate(self, size: int, pool: Hashable = None) -> int:
        """Allocates `size` new bytes, and returns their address.

        Args:
            pool: key of a pool, which may return any freed memory of the same key. The array's bytes are new all the
                same, but the history of accesses is that of the freed memory.

        Raises:
            FullError: this allocation is to fail.
        """
        self.allocations += 1
        if self.allocations == self.fail_at:
            raise FullError
        buffer = np.empty(size + 2 * GUARD + _ALIGNMENT, np.uint8)
        start = -(-(buffer.ctypes.data + GUARD) // _ALIGNMENT) * _ALIGNMENT
        offset = start - buffer.ctypes.data
        block = buffer[offset - GUARD : offset + size + GUARD]
        if size < _LARGE:
            block[...] = _POISON
        else:
            block[: 2 * GUARD] = block[-2 * GUARD :] = _POISON
        bisect.insort(self._starts, start)
        self._blocks[start] = block, size
        freed = self._pools.get(pool)
        history = self._histories[start] = self._all_histories.setdefault(start, History())
        history.accesses = freed.pop() if freed else []
        return start

    def free(self, address: int, pool: Hashable = None) -> None:
        """Frees an allocation, or returns it to a pool; its memory stays readable until `release`."""
        self._starts.remove(address)
        block, _ = self._blocks.pop(address)
        _check_guards(block, address)
        self.retired.append(block)
        accesses = self._histories.pop(address).accesses
        if pool is not None:
            self._pools.setdefault(pool, []).append(accesses)

    def divide(self, owner: object, address: int, size: int) -> None:
        """Notes that a part of an allocation is an allocation of its own as long as `owner` exists."""
        self._parts[address] = size
        weakref.finalize(owner, self._parts.pop, address, None).atexit = False

    @property
    def count(self) -> int:
        """The number of allocations."""
        return len(self._starts)

    @property
    def size(self) -> int:
        """Number of allocated bytes."""
        return sum(size for _, size in self._blocks.values())

    def release(self) -> None:
        """Gives retired memory back to the host, and forgets all accesses; called once all work has run."""
        self.retired.clear()
        self._pools.clear()
        for history in self._all_histories.values():
            history.accesses = []

    def touched(self, address: int, size: int | None, operand: str, *, writes: bool) -> list[Touch]:
        """Describes an access to `size` bytes, or to all bytes from an address to the end of its allocation or part.

        Returns:
            An empty list if there are no bytes, or if the address belongs to no allocation.
        """
        start = self._around(address)
        if start is None or (size is not None and size <= 0):
            return []
        ends = [begin + extent for begin, extent in self._parts.items() if begin <= address < begin + extent]
        limit = min(ends, default=start + self._blocks[start][1])
        first, end = address - start, (limit if size is None else min(limit, address + size)) - start
        return [Touch(self._histories[start], first, end, writes, operand)]

    def check_guards(self) -> None:
        """Fails if work wrote just outside an allocation."""
        for start, (block, _) in self._blocks.items():
            _check_guards(block, start)

    def block(self, address: int) -> NDArray[np.uint8] | None:
        """Returns the allocation that starts at an address, which identifies it; None if there is none."""
        found = self._blocks.get(address)
        return None if found is None else found[0]

    def holds(self, address: int) -> bool:
        """Whether an address belongs to an allocation."""
        return self._around(address) is not None

    def view(self, address: int, size: int, what: str) -> NDArray[np.uint8]:
        """Returns a view of the `size` bytes at an address.

        Args:
            what: the operand's name, for the error.

        Raises:
            BadAddressError: the bytes are not all within one allocation.
        """
        start = self._around(address)
        if start is None:
            raise BadAddressError(f"{what} is at {address:#x}, which belongs to no allocation")
        block, length = self._blocks[start]
        if address + size > start + length:
            raise BadAddressError(
                f"{what} takes {size} bytes from {address:#x}; the allocation ends after {start + length - address}"
            )
        first = GUARD + address - start
        return block[first : first + size]

    def touched_by(self, view: NDArray[Any], operand: str, *, writes: bool) -> list[Touch]:
        """Describes an access to the elements of an array in device memory, or to the gaps between them as well."""
        if not view.size:
            return []
        extent = sum((length - 1) * stride for length, stride in zip(view.shape, view.strides, strict=True))
        address = view.__array_interface__["data"][0]
        return self.touched(address, extent + view.itemsize, operand, writes=writes)

    def _around(self, address: int) -> int | None:
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        start = self._starts[index]
        return start if address < start + max(1, self._blocks[start][1]) else None


def _check_guards(block: NDArray[np.uint8], address: int) -> None:
    assert (block[:GUARD] == _POISON).all(), f"memory before the allocation at {address:#x} was written"
    assert (block[-GUARD:] == _POISON).all(), f"memory after the allocation at {address:#x} was written"


def matrix_at(
    memory: DeviceMemory,
    address: int,
    dtype: np.dtype[Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    what: str,
) -> NDArray[Any]:
    """Makes a NumPy view of an array in device memory; `strides` are in elements.

    Raises:
        BadAddressError: the array is not within one allocation, or not aligned to its element size.
    """
    if address % dtype.itemsize:
        raise BadAddressError(f"{what} is at {address:#x}, no multiple of {dtype.itemsize} bytes")
    if 0 in shape:
        return np.empty(shape, dtype)
    extent = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + 1
    memory_of_it = memory.view(address, extent * dtype.itemsize, what)
    return np.ndarray(shape, dtype, memory_of_it, strides=tuple(stride * dtype.itemsize for stride in strides))
