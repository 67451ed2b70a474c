"""Places the memory of work that always makes the same allocations in one block of as few bytes as possible.

A memory pool does not know how long the memory that it gives will be in use, so that free memory lies between memory in
use, in parts that are too small for the next request. A run that records the lifetimes of all memory allows better
places for the runs after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lt_runtime.arrays.libraries import cupy
from lt_runtime.gpu.memory import aligned


class Lifetime:
    """The size of a piece of memory, and how long it is in use.

    Attributes:
        size: in bytes, a multiple of `ALIGNMENT`.
        begin, end: the number of allocations before it, and before its memory was freed; `end` is None until then.
    """

    __slots__ = ("begin", "end", "size")

    def __init__(self, size: int, begin: int) -> None:
        self.size, self.begin = aligned(size), begin
        self.end: int | None = None

    def meets(self, other: Lifetime) -> bool:
        """Whether both pieces of memory are in use at some time."""
        return (other.end is None or self.begin < other.end) and (self.end is None or other.begin < self.end)


class _Piece:
    """Memory in use; CuPy drops this object when the array that uses the memory is freed."""

    __slots__ = ("_freed", "_memory")

    def __init__(self, memory: Any, freed: Callable[[], object]) -> None:
        self._memory, self._freed = memory, freed

    def __del__(self) -> None:
        self._freed()


class Recorder:
    """Allocates memory, and records the lifetime of each piece.

    Args:
        allocate: a function that returns memory of a CuPy pool.

    Attributes:
        lifetimes: in the order of the allocations.
    """

    def __init__(self, allocate: Callable[[int], Any], device: int) -> None:
        self._allocate, self._device = allocate, device
        self.lifetimes = list[Lifetime]()

    def __call__(self, size: int) -> Any:
        """Allocates memory."""
        memory, made = self._allocate(size), Lifetime(size, len(self.lifetimes))
        if not size:
            return memory
        self.lifetimes.append(made)

        def freed() -> None:
            made.end = len(self.lifetimes)

        return _pointer(memory.ptr, size, _Piece(memory, freed), self._device)


class Arena:
    """One block of memory, from which a run that makes recorded allocations again gets its memory.

    The run may differ: an allocation that was not recorded, or whose place is still in use, is made by `otherwise`.

    Args:
        lifetimes: those of a `Recorder`.
        allocate: a function that returns memory of the device.
        otherwise: a function that returns memory of a CuPy pool.

    Attributes:
        size: in bytes.
        memory: the memory; None if the size is 0.
    """

    def __init__(
        self,
        lifetimes: Sequence[Lifetime],
        allocate: Callable[[int], Any],
        otherwise: Callable[[int], Any],
        device: int,
    ) -> None:
        self._sizes, self._offsets = [each.size for each in lifetimes], offsets_of(lifetimes)
        self.size = max(map(sum, zip(self._sizes, self._offsets, strict=True)), default=0)
        self.memory: Any = allocate(self.size) if self.size else None
        self._otherwise, self._device = otherwise, device
        self._next, self._used = 0, dict[int, int]()  # the end of each piece in use, by its offset

    @property
    def is_used(self) -> bool:
        """Whether an array of a run still exists."""
        return bool(self._used)

    def again(self) -> Callable[[int], Any]:
        """A function that allocates the memory of one run. Runs that are captured may share the memory."""
        self._next = 0
        return self._allocated

    def _allocated(self, size: int) -> Any:
        if not size:
            return self._otherwise(size)
        place, self._next = self._next, self._next + 1
        if place >= len(self._sizes) or self._sizes[place] != aligned(size):
            return self._otherwise(size)
        begin = self._offsets[place]
        end = begin + aligned(size)
        if any(begin < other_end and other < end for other, other_end in self._used.items()):
            return self._otherwise(size)
        self._used[begin] = end
        piece = _Piece(self.memory, lambda: self._used.pop(begin))
        return _pointer(self.memory.ptr + begin, size, piece, self._device)


def offsets_of(lifetimes: Sequence[Lifetime]) -> list[int]:
    """A place for each piece of memory, so that pieces in use at the same time do not overlap: "greedy by size".

    The largest pieces come first, each at the lowest free place. The source is Pisarchyk and Lee, "Efficient Memory
    Management for Deep Neural Net Inference" (2020), section 5.2.
    """
    offsets, placed = [0] * len(lifetimes), list[int]()
    for i in sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i].size):
        offset, piece = 0, lifetimes[i]
        for j in sorted((each for each in placed if piece.meets(lifetimes[each])), key=offsets.__getitem__):
            if offset + piece.size <= offsets[j]:
                break
            offset = max(offset, offsets[j] + lifetimes[j].size)
        offsets[i] = offset
        placed.append(i)
    return offsets


def _pointer(address: int, size: int, owner: object, device: int) -> Any:
    cuda = cupy().cuda
    return cuda.MemoryPointer(cuda.UnownedMemory(address, size, owner, device), 0)
