"""Finds and launches kernels on the CPU, in place of `lt_runtime.kernels.kernel`, which does so on a GPU."""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import Any

from lt_runtime.gpu.compiler import Macros
from lt_runtime.kernels.kernel import Entry
from tests.host_kernels.build import Builder, Variant

FORWARD, REVERSE, SHUFFLED = 0, 1, 2
"""Orders in which blocks, warps and lanes run on the CPU, as numbers; larger numbers are seeds of random orders."""

Pair = tuple[int, int]


class HostKernelError(Exception):
    """Raised when a kernel breaks a rule of CUDA's."""


class HostKernel:
    """A kernel built for the CPU; its blocks have at most `max_threads` threads, which run in the given order."""

    def __init__(self, library: ctypes.CDLL, entry: str, max_threads: int, order: int = FORWARD) -> None:
        self._max_threads, self._order = max_threads, order
        self._run = library[f"run_{entry}"]
        self._run.argtypes = (ctypes.c_void_p, *(ctypes.c_uint,) * 7)
        self._run.restype = ctypes.c_char_p

    def launch(
        self,
        grid: Pair,
        block: Pair,
        params: ctypes.Structure,
        stream: int = 0,
        batch: int = 1,
        shared: int = 0,
        *,
        order: int | None = None,
    ) -> None:
        """Runs the kernel to its end. `batch` is the grid's size in z, `shared` a block's dynamic bytes, and `order`
        replaces the kernel's order.

        Raises:
            HostKernelError: threads of a block wait at different barriers, or threads of a warp for different shuffles,
                or an address is misaligned, or the launch is too large.
        """
        if block[0] * block[1] > self._max_threads:
            raise HostKernelError(f"a block of {block} exceeds the {self._max_threads} threads that the kernel allows")
        error = self._run(
            ctypes.addressof(params), *grid, batch, *block, shared, self._order if order is None else order
        )
        if error is not None:
            raise HostKernelError(error.decode())

    def prepare(self, *arguments: Any, **more: Any) -> Callable[[], None]:
        """Returns a function that makes this launch each time it is called."""
        return functools.partial(self.launch, *arguments, **more)


class HostKernels:
    """Shared libraries of kernels. Each is built when a test first needs it; several processes build in parallel."""

    def __init__(self, builder: Builder) -> None:
        self._builder, self._order = builder, FORWARD
        self._libraries: dict[Variant, ctypes.CDLL] = {}

    def library(self, variant: Variant) -> ctypes.CDLL:
        """A file's kernels under the given definitions."""
        if variant not in self._libraries:
            self._libraries[variant] = ctypes.CDLL(str(self._builder.library(variant)))
        return self._libraries[variant]

    def get(self, entry: Entry, macros: Macros = (), device: int = 0) -> HostKernel:
        """Stands in for `lt_runtime.kernels.kernel.get_kernel`."""
        return self.kernel(Variant(entry.source, macros), entry.name)

    def kernel(self, variant: Variant, entry: str) -> HostKernel:
        """Finds a kernel of a file in `cuda_src` or in the tests."""
        return HostKernel(self.library(variant), entry, variant.max_threads[entry], self._order)

    @contextlib.contextmanager
    def in_order(self, order: int) -> Iterator[None]:
        """Within a `with` block, `get_kernel` returns kernels whose threads run in the given order."""
        before, self._order = self._order, order
        try:
            yield
        finally:
            self._order = before
