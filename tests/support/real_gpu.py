"""A real GPU with the interface of `FakeGpu`, for checks that run on both."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RealGpu:
    """The current GPU, with the methods that checks use.

    Attributes:
        lt, cp: the package and CuPy.
        stream, other_stream: two streams besides the default stream.
        gelu_error: error of cuBLASLt's GELU, relative to its argument.
        directory: a folder for files.
    """

    gelu_error = 2e-5

    def __init__(self, directory: Path) -> None:
        import cupy as cp

        import lt_runtime as lt

        self.lt, self.cp, self.directory = lt, cp, directory
        self.stream, self.other_stream = (cp.cuda.Stream(non_blocking=True) for _ in range(2))

    def synchronize(self, stream: int = 0) -> None:
        """Waits for a stream."""
        self.cp.cuda.runtime.streamSynchronize(stream)

    def synchronize_all(self) -> None:
        """Waits for the default stream and this object's two streams; other threads may be capturing others."""
        for stream in (0, self.stream.ptr, self.other_stream.ptr):
            self.synchronize(stream)

    def host_of(self, array: Any) -> NDArray[Any]:
        """Returns an array's values, after the current stream's work."""
        return np.asarray(self.cp.asnumpy(self.cp.ascontiguousarray(array)))

    def pin(self, size: int) -> NDArray[np.uint8]:
        """Makes an array in page-locked memory that holds zeros."""
        memory: NDArray[np.uint8] = np.frombuffer(self.cp.cuda.alloc_pinned_memory(size), np.uint8, size)
        memory[...] = 0
        return memory

    @contextlib.contextmanager
    def others_package(self) -> Iterator[Any]:
        """Yields the package for calls on NumPy arrays: the same module. (A pretended GPU yields another copy.)"""
        yield self.lt

    def settle(self) -> None:
        """Waits for all work, and frees unused memory of CuPy's pool."""
        self.cp.cuda.Device().synchronize()
        self.cp.get_default_memory_pool().free_all_blocks()
        self.cp.get_default_pinned_memory_pool().free_all_blocks()

    def memory_used(self) -> int:
        """Bytes of the GPU's memory that this and other processes use."""
        free, total = self.cp.cuda.runtime.memGetInfo()
        return int(total - free)
