"""Assigns offsets in one block of memory to the allocations of work that makes the same allocations in each run.

A memory pool does not know how long an allocation will live, so that its free memory becomes fragmented. One run
records the lifetimes of all allocations; from these, offsets with little fragmentation are computed for later runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from lt_runtime.arrays.libraries import cupy
from lt_runtime.gpu.memory import aligned

_AHEAD: Final = 16
"""The number of next recorded allocations in which a size is searched: a run may leave out 15 in a row."""
_NEVER: Final = 1 << 62


class Lifetime:
    """The size of a piece of memory, and how long it is in use.

    Attributes:
        size: in bytes, a multiple of `ALIGNMENT`.
        begin, end: the number of allocations before it, and before its memory was freed.
    """

    __slots__ = ("begin", "end", "size")

    def __init__(self, size: int, begin: int) -> None:
        self.size, self.begin, self.end = aligned(size), begin, _NEVER


class _Piece:
    """Memory in use. CuPy drops this object, which keeps the memory, when the array that uses the memory is freed."""

    __slots__ = ("_freed", "_memory")

    def __init__(self, memory: Any, freed: Callable[[], object]) -> None:
        self._memory, self._freed = memory, freed

    def __del__(self) -> None:
        self._freed()


class Recorder:
    """Allocates memory, and records the lifetime of each piece.

    Args:
        allocate: a function that returns memory of a CuPy pool, given its bytes.
        device: ordinal of the GPU.

    Attributes:
        lifetimes: in the order of the allocations.
    """

    def __init__(self, allocate: Callable[[int], Any], device: int) -> None:
        self._allocate, self._device = allocate, device
        self.lifetimes = list[Lifetime]()

    def __call__(self, size: int) -> Any:
        """Allocates so many bytes; returns CuPy's `MemoryPointer`."""
        memory, made = self._allocate(size), Lifetime(size, len(self.lifetimes))
        if not size:
            return memory
        self.lifetimes.append(made)

        def freed() -> None:
            made.end = len(self.lifetimes)

        return _pointer(memory.ptr, size, _Piece(memory, freed), self._device)


class Block:
    """Memory of one or several arenas.

    Args:
        pointer: the memory, as CuPy's `MemoryPointer`.

    Attributes:
        pointer: the argument.
        used: maps the byte offset at which each piece in use begins to the byte offset at which it ends.
    """

    def __init__(self, pointer: Any) -> None:
        self.pointer, self.used = pointer, dict[int, int]()


class Arena:
    """The places of memory in a block, for runs that make recorded allocations again.

    A run may leave out recorded allocations. `otherwise` serves an allocation whose size is not among the next recorded
    ones, or whose place is still in use, for example by an array that an earlier run gave to a caller.

    Args:
        lifetimes: those of a `Recorder`.
        find: a function that returns a block of at least so many bytes.
        otherwise: a function that returns memory of a CuPy pool, given its bytes.
        device: ordinal of the GPU.

    Attributes:
        size: in bytes.
        block: the memory.
    """

    def __init__(
        self,
        lifetimes: Sequence[Lifetime],
        find: Callable[[int], Block],
        otherwise: Callable[[int], Any],
        device: int,
    ) -> None:
        self._sizes, self._offsets = [each.size for each in lifetimes], offsets_of(lifetimes)
        self.size = max(map(sum, zip(self._sizes, self._offsets, strict=True)), default=0)
        self.block, self._otherwise, self._device, self._next = find(self.size), otherwise, device, 0

    def again(self) -> Callable[[int], Any]:
        """Begins a run, and returns the function that allocates its memory."""
        self._next = 0
        return self._allocate

    def _allocate(self, size: int) -> Any:
        wanted, ahead = aligned(size), range(self._next, min(self._next + _AHEAD, len(self._sizes)))
        place = next((each for each in ahead if size and self._sizes[each] == wanted), None)
        if place is None:
            return self._otherwise(size)
        self._next, begin, used = place + 1, self._offsets[place], self.block.used
        if any(begin < other_end and other < begin + wanted for other, other_end in [*used.items()]):
            return self._otherwise(size)
        used[begin] = begin + wanted
        piece = _Piece(self.block, lambda: used.pop(begin))
        return _pointer(self.block.pointer.ptr + begin, size, piece, self._device)


def offsets_of(lifetimes: Sequence[Lifetime]) -> list[int]:
    """The offset in bytes of each piece of memory; pieces in use at the same time do not overlap.

    This is "greedy by size": the largest pieces come first, each at the lowest free place. The source is Pisarchyk and
    Lee, "Efficient Memory Management for Deep Neural Net Inference" (2020), section 5.2.
    """
    begins, ends, sizes = (
        np.array([getattr(each, name) for each in lifetimes], np.int64) for name in ("begin", "end", "size")
    )
    offsets, order = np.zeros(len(lifetimes), np.int64), np.argsort(-sizes, kind="stable")
    for number, i in enumerate(order):
        placed = order[:number]
        met = placed[(begins[placed] < ends[i]) & (begins[i] < ends[placed])]
        offset = 0
        for j in met[np.argsort(offsets[met], kind="stable")]:
            if offset + sizes[i] <= offsets[j]:
                break
            offset = max(offset, int(offsets[j] + sizes[j]))
        offsets[i] = offset
    return [int(each) for each in offsets]


def _pointer(address: int, size: int, owner: object, device: int) -> Any:
    cuda = cupy().cuda
    return cuda.MemoryPointer(cuda.UnownedMemory(address, size, owner, device), 0)
