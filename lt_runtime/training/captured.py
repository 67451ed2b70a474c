"""Training steps on a GPU: inputs in buffers that stay, and what is done with them captured in one graph."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
from cuda.bindings import driver

from lt_runtime.arrays import Operand, arena_size, arena_views
from lt_runtime.arrays.libraries import cupy, cupy_stream
from lt_runtime.errors import CaptureError, GpuError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.graphs import Graph, no_collection
from lt_runtime.gpu.streams import is_captured, order_after, private_stream, relaxed_captures, stream_handle
from lt_runtime.ops.tally import GpuTally
from lt_runtime.ranges import range_of
from lt_runtime.training.body import StepBody
from lt_runtime.training.inputs import RowCopy, row_copies

MAX_GRAPHS: Final = 8
"""That one training step keeps, one for each size of batch and type of labels; the least recently used goes first."""

_Key: TypeAlias = tuple[int, str]
Copies: TypeAlias = tuple[list[RowCopy], list[RowCopy]]


class Turn:
    """Whose turn it is with the memory that all graphs captured on one stream share, on whichever stream they run."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._event = call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self._last: int | None = None

    @contextlib.contextmanager
    def on(self, stream: int) -> Iterator[None]:
        """What the stream is given within comes after all that was given to any stream within another turn."""
        with self._lock:
            if self._last not in (None, stream):
                call("cuStreamWaitEvent", stream, self._event, 0)
            try:
                yield
            finally:
                call("cuEventRecord", self._event, stream)
                self._last = stream

    def wait(self) -> None:
        """Waits on the host until all of it is done."""
        call("cuEventSynchronize", self._event)


@functools.cache
def _turn(device: int) -> Turn:
    return Turn()


class Batches:
    """Buffers for the micro-batches of one size, filled with zeros, and the graph over them, if there is one."""

    def __init__(self, x: Operand, target: Operand, parts: int, stream: int) -> None:
        self._x, self._target = (_buffers(operand, parts, stream) for operand in (x, target))
        self.parts = [*zip(self._x, self._target, strict=True)]
        self.graph: Graph | None = None

    def copies(self, x: Operand, target: Operand) -> Copies:
        """How a batch comes here, row by row into one micro-batch after the other: of x, and of the targets."""
        return row_copies(x, self._x), row_copies(target, self._target)

    def fill(self, x: Operand, target: Operand, stream: int) -> None:
        """Puts these copies on a stream."""
        _put(self.copies(x, target), (x.address, target.address), stream)


def _buffers(operand: Operand, parts: int, stream: int) -> list[Any]:
    rows, *rest = operand.shape
    shapes, dtype = [(rows // parts, *rest)] * parts, np.dtype(operand.dtype)
    with cupy_stream(operand.device, stream) as module:
        return arena_views(module.zeros(arena_size(shapes, dtype.itemsize), dtype), shapes)


class GpuStep:
    """Runs steps on one GPU; frees its graphs at its end.

    Args:
        parts: micro-batches of a step.
        graph: whether a step is captured once, and then launched as one graph.
    """

    def __init__(self, body: StepBody, device: int, parts: int, *, graph: bool) -> None:
        self._body, self._device, self._parts, self._captures = body, device, parts, graph
        self._batches: OrderedDict[_Key, Batches] = OrderedDict()
        self._seen: dict[Hashable, tuple[_Key, Copies]] = {}
        with activated(device):
            stream = stream_handle(None, device)
            self.tally, self._spare = GpuTally(device, stream), GpuTally(device, stream)
            call("cuStreamSynchronize", stream)  # steps may come on any stream
        self._pool = cupy().cuda.MemoryPool(_device_memory)
        weakref.finalize(self, _close, device, self._batches)

    def run(self, x: Operand, target: Operand, stream: int, looks: Hashable = None) -> None:
        """Puts one step on a stream; the device is current.

        Args:
            looks: what such batches are to be known by for `repeat`; None if they are not.

        Raises:
            CaptureError: the stream is being captured: a graph cannot be captured in another.
            GpuError: no memory for another size of batch, or another failure; nothing has been updated.
        """
        if not self._captures:
            batches = self._find(x, target, stream)
            batches.fill(x, target, stream)
            self._body.run(batches.parts, self.tally, stream)
            return
        _check_capture(stream)
        with _turn(self._device).on(stream), range_of("step"):
            batches = self._find(x, target, stream)
            copies = batches.copies(x, target)
            self._launch(batches, copies, (x.address, target.address), stream)
            if looks is not None:
                self._seen[looks] = _key(x, target), copies

    def repeat(self, looks: Hashable, addresses: tuple[int, ...], stream: int) -> bool:
        """`run`, if a batch that looks the same has been before; says whether one has.

        Args:
            addresses: of x and of the targets.
        """
        if looks not in self._seen:
            return False
        _check_capture(stream)
        with _turn(self._device).on(stream), range_of("step"):
            seen = self._seen.get(looks)
            if seen is None:  # another thread's step has let go of it
                return False
            key, copies = seen
            self._batches.move_to_end(key)
            self._launch(self._batches[key], copies, addresses, stream)
        return True

    def _launch(self, batches: Batches, copies: Copies, addresses: tuple[int, ...], stream: int) -> None:
        _put(copies, addresses, stream)
        if batches.graph is not None:
            batches.graph.launch(stream)

    def _find(self, x: Operand, target: Operand, stream: int) -> Batches:
        key = _key(x, target)
        if key not in self._batches:
            while len(self._batches) >= MAX_GRAPHS:
                self._seen.clear()  # some of it may be of those that go
                _close(self._device, self._batches, 1)
            self._batches[key] = self._make(x, target, stream)
        self._batches.move_to_end(key)
        return self._batches[key]

    def _make(self, x: Operand, target: Operand, stream: int) -> Batches:
        out_of_memory = cupy().cuda.memory.OutOfMemoryError
        try:
            batches = Batches(x, target, self._parts, stream)
            if self._captures:
                batches.graph = self._capture(batches, stream)
        except BaseException as error:
            if not self._batches:  # no graph holds an address
                self._pool.free_all_blocks()
            if isinstance(error, out_of_memory):
                raise GpuError(f"no memory for batches of {x.shape[0]} rows: {error}") from error
            raise
        return batches

    def _capture(self, batches: Batches, stream: int) -> Graph:
        """The graph of a step. What it does is done twice before, but for the update.

        The first time makes the plans, and measures them where that is asked for, with memory that is then given back;
        the second, the memory that the graph keeps.
        """
        captured = private_stream(self._device, "training")
        order_after(captured, stream)
        try:
            self._rehearse(batches, captured, cupy().cuda.MemoryPool())
            self._rehearse(batches, captured, self._pool)
            with _memory_from(self._pool), no_collection():
                return Graph(lambda handle: self._body.run(batches.parts, self.tally, handle), captured)
        finally:
            order_after(stream, captured)

    def _rehearse(self, batches: Batches, stream: int, pool: Any) -> None:
        with _memory_from(pool):
            self._body.run(batches.parts, self._spare, stream, updates=False)


def _key(x: Operand, target: Operand) -> _Key:
    """What batches with buffers and a graph of their own are told apart by."""
    return x.shape[0], target.dtype


def _put(copies: Copies, addresses: tuple[int, ...], stream: int) -> None:
    for each, address in zip(copies, addresses, strict=True):
        for copy in each:
            copy.put(address, stream)


def _check_capture(stream: int) -> None:
    if is_captured(stream):
        raise CaptureError(f"stream {stream:#x} is being captured; a step to be captured needs graph=False")


@contextlib.contextmanager
def _memory_from(pool: Any) -> Iterator[None]:
    """Makes CuPy allocate from a pool of the graphs' own, during a capture too: they hold the addresses."""

    def allocate(size: int) -> Any:
        with relaxed_captures():
            return pool.malloc(size)

    with cupy().cuda.using_allocator(allocate):
        yield


def _device_memory(size: int) -> Any:
    """What the pool is made of. CuPy's own error would have the pool give up blocks that graphs use."""
    cuda = cupy().cuda
    try:
        return cuda.MemoryPointer(cuda.Memory(size), 0)
    except cuda.runtime.CUDARuntimeError as error:
        raise GpuError(f"{size} bytes of GPU memory could not be allocated: {error}") from error


def _close(device: int, batches: OrderedDict[_Key, Batches], count: int | None = None) -> None:
    """Drops those that have not been used for the longest time, or all, once they are done."""
    if not batches:
        return
    with activated(device):
        _turn(device).wait()
        for _ in range(count or len(batches)):
            _, dropped = batches.popitem(last=False)
            if dropped.graph is not None:
                dropped.graph.close()
