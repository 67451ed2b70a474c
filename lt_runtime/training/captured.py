"""Training steps on a GPU: each batch is copied into buffers that stay; one captured graph runs the step on them."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple, Self, TypeAlias

import numpy as np
from cuda.bindings import driver

from lt_runtime import ranges
from lt_runtime.arrays.arena import arena_size, arena_views
from lt_runtime.arrays.libraries import cupy, cupy_stream, current_streams, signature_of
from lt_runtime.arrays.operand import CUPY, Operand, library_of
from lt_runtime.errors import CaptureError, GpuError
from lt_runtime.gpu import graphs
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.direct import function, is_capturing, is_current
from lt_runtime.gpu.driver import call, check
from lt_runtime.gpu.graphs import Graph, no_collection
from lt_runtime.gpu.streams import is_captured, order_after, private_stream, relaxed_captures, stream_handle
from lt_runtime.ops._adamw_parameters import changes, check_masters
from lt_runtime.ops.first_use import before_first_step, effort_of_step, not_tuning
from lt_runtime.ranges import range_of
from lt_runtime.training.body import StepBody, chains_of
from lt_runtime.training.inputs import Batch, read_batch
from lt_runtime.training.tally import GpuTally, Totals

MAX_GRAPHS: Final = 8
"""Graphs that one training step keeps: one for each size of batch, type of targets, with and without row weights. The
least recently used is dropped first."""

_Key: TypeAlias = tuple[Hashable, ...]


class Turn:
    """Lets the graphs of a device run one after another, on whichever streams they are launched.

    They are captured on one stream and therefore share its scratch memory and workspace.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._event = int(call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._record = function("cuEventRecord")
        self._stream: int | None = None

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._record(self._event, self._stream):
                # The work is on the stream, and no later turn could wait for it there.
                call("cuStreamSynchronize", self._stream)
        finally:
            self._lock.release()

    def give(self, stream: int) -> None:
        """Gives this turn to a stream, which waits for everything that earlier turns put on other streams."""
        if self._stream not in (None, stream):
            call("cuStreamWaitEvent", stream, self._event, 0)
        self._stream = stream

    def wait(self) -> None:
        """Waits on the host until everything that was put on a stream within a turn is done."""
        call("cuEventSynchronize", self._event)


@functools.cache
def _turn(device: int) -> Turn:
    return Turn()


class RowCopy(NamedTuple):
    """The copy of a batch's rows into one of a step's buffers, which has no gaps between its rows.

    Attributes:
        operand: 0 for x, 1 for the targets, 2 for the weights of rows.
        offset: bytes from the start of that array to the first of these rows.
        buffer: address of the buffer.
        size: bytes of the buffer.
        strided: the driver's description of the copy if the rows have gaps between them; each copy sets its source.
    """

    operand: int
    offset: int
    buffer: int
    size: int
    strided: driver.CUDA_MEMCPY2D | None


def row_copies(operand: int, source: Operand, buffers: Sequence[Any]) -> Iterator[RowCopy]:
    """The copies that fill row-major buffers, one after another, with the rows of a source."""
    width = source.itemsize * math.prod(source.shape[1:])
    pitch = source.strides[0] * source.itemsize if source.shape[0] > 1 else width
    offset = 0
    for buffer in buffers:
        strided = None
        if pitch != width:
            strided = driver.CUDA_MEMCPY2D()
            strided.srcMemoryType = strided.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
            strided.srcPitch, strided.WidthInBytes, strided.Height = pitch, width, buffer.shape[0]
            strided.dstDevice, strided.dstPitch = buffer.data.ptr, width
        yield RowCopy(operand, offset, buffer.data.ptr, buffer.nbytes, strided)
        offset += buffer.shape[0] * pitch


class Batches:
    """Buffers for the micro-batches of one size, filled with zeros, and the graph that runs over them, if there is one.

    Attributes:
        parts: inputs, targets and, if there are any, row weights of each micro-batch.
    """

    def __init__(self, batch: Batch, parts: int, stream: int) -> None:
        self._buffers = [_zeros(operand, parts, stream) for operand in batch]
        self.parts = [*zip(*self._buffers, strict=True)]
        self.graph: Graph | None = None

    def copies(self, batch: Batch) -> tuple[RowCopy, ...]:
        """The copies that bring a batch into the buffers."""
        pairs = enumerate(zip(batch, self._buffers, strict=True))
        return tuple(copy for i, (source, buffers) in pairs for copy in row_copies(i, source, buffers))


def _zeros(operand: Operand, parts: int, stream: int) -> list[Any]:
    rows, *rest = operand.shape
    shapes, dtype = [(rows // parts, *rest)] * parts, np.dtype(operand.dtype)
    with cupy_stream(operand.device, stream) as module:
        return arena_views(module.zeros(arena_size(shapes, dtype.itemsize), dtype), shapes)


class Replay(NamedTuple):
    """All that is needed to run a batch that looks like one before."""

    key: _Key
    copies: tuple[RowCopy, ...]
    batches: Batches


class GpuStep:
    """Runs steps on one GPU; frees its graphs at its end.

    Args:
        parts: micro-batches of a step.
        graph: whether a step is captured once and then launched as one graph.
        tune: see `TrainStep`.
    """

    def __init__(self, body: StepBody, device: int, parts: int, *, graph: bool, tune: bool | None) -> None:
        self._body, self._device, self._parts, self._captures = body, device, parts, graph
        self._tune = tune
        self._batches: OrderedDict[_Key, Batches] = OrderedDict()
        self._replays: dict[Hashable, Replay] = {}
        self._current_stream = CUPY.current_stream
        self._seen: object = None
        with activated(device):
            stream = stream_handle(None, device)
            self.tally, self._spare = GpuTally(device, stream), GpuTally(device, stream)
            call("cuStreamSynchronize", stream)  # steps may come on any stream
            self._turn, self._launch_graph = _turn(device), function("cuGraphLaunch")
        self._pool = cupy().cuda.MemoryPool(_device_memory)
        weakref.finalize(self, _close, device, self._batches)

    def totals(self, stream: Any) -> Totals:
        """Sums over the steps since the last call; waits for the stream.

        Args:
            stream: None for the current stream of the library that the batches come from.
        """
        return self.tally.read(stream_handle(stream, self._device, self._current_stream))

    def repeat(self, batch: tuple[Any, ...], stream: Any) -> bool:
        """Runs a step if a batch that looks the same was run before; returns whether it did.

        Batches look the same if they differ in nothing but their addresses and values, so that nothing is to be
        checked. This is the shortest way from a call to the launch of the graph.
        """
        signature = signature_of(batch, ())
        if signature is None or batch[1] is None:
            return False
        _, x_looks, target_looks = signature[:3]
        addresses: tuple[int, ...] = x_looks[0], target_looks[0]
        looks: tuple[Any, ...] = x_looks[1:], target_looks[1:]
        for weights_looks in signature[3:]:
            addresses, looks = (*addresses, weights_looks[0]), (*looks, weights_looks[1:])
        replay = self._replays.get(looks)
        device = self._device
        if replay is None or not is_current(device):
            return False
        handle = current_streams[type(batch[0])](device) if stream is None else stream_handle(stream, device)
        if handle and is_capturing(handle):
            return False
        with self._turn as turn, _step(handle):
            turn.give(handle)
            if changes.latest is not self._seen:
                self._apply_settings(handle)
            return self._launch(replay, addresses, handle)

    def run(self, batch: tuple[Any, ...], stream: Any) -> None:
        """Runs a step on a batch that has not been seen before; its x has the right shape.

        Raises:
            OperandError: the batch cannot be copied as it is.
            CaptureError: the stream is being captured: a graph cannot be captured in another.
            GpuError: no memory for another size of batch, or another failure; nothing has been updated.
        """
        with activated(self._device):
            self._current_stream = library_of(batch[0]).current_stream
            handle = stream_handle(stream, self._device, self._current_stream)
            operands = read_batch(self._body.model, batch, self._body.loss, handle)
            addresses = tuple(operand.address for operand in operands)
            if not self._captures:
                with _step(handle):
                    replay = self._prepared(operands, handle)
                    _copy(replay.copies, addresses, handle)
                    with self._own_tuning():
                        self._body.run(replay.batches.parts, self.tally, handle)
                return
            _refuse_capture(handle)
            with self._turn as turn, _step(handle):
                turn.give(handle)
                self._apply_settings(handle)
                replay = self._prepared(operands, handle)
                self._launch(replay, addresses, handle)
                signature = signature_of(batch, ())
                if signature is not None:
                    self._replays[tuple(looks[1:] for looks in signature[1:])] = replay

    def _apply_settings(self, stream: int) -> None:
        """Brings to the device what was changed of the optimizer's settings; a graph only reads them there."""
        latest = changes.latest
        self._body.optimizer.apply_settings(stream=stream)
        self._seen = latest

    def _launch(self, replay: Replay, addresses: Sequence[int], stream: int) -> bool:
        """Puts copies and graph on a stream; False if another thread's batch has just taken the graph's place."""
        graph = replay.batches.graph
        if graph is None:
            return False
        self._batches.move_to_end(replay.key)
        _copy(replay.copies, addresses, stream)
        if graphs.stand_in is not None:
            graph = graphs.stand_in(graph, lambda: self._record(replay.batches))
        if status := self._launch_graph(graph.executable, stream):
            check("cuGraphLaunch", status)
        return True

    def _prepared(self, batch: Batch, stream: int) -> Replay:
        """What runs a batch of this size; its buffers and its graph are made at the first batch of the size."""
        _, target, *weights = batch
        key = (*target.shape, target.dtype, len(weights))
        if key not in self._batches:
            self._measure(batch, stream)
            while len(self._batches) >= MAX_GRAPHS:
                self._replays.clear()  # some of them may be of the graph that goes
                _close(self._device, self._batches, 1)
            self._batches[key] = self._make(batch, stream)
        self._batches.move_to_end(key)
        return Replay(key, self._batches[key].copies(batch), self._batches[key])

    def _measure(self, batch: Batch, stream: int) -> None:
        """Measures what is not known of the problems that a size of batch brings, if that is to be done."""
        effort = effort_of_step(self._tune)
        if effort is not None and not is_captured(stream):
            rows, several = batch[0].shape[0] // self._parts, self._parts > 1
            before_first_step(chains_of(self._body.model, rows, accumulates=several), self._device, stream, effort)

    def _own_tuning(self) -> AbstractContextManager[None]:
        """Keeps the operations of a step that is not to be tuned from being tuned as they are met."""
        return not_tuning() if self._tune is False else contextlib.nullcontext()

    def _make(self, batch: Batch, stream: int) -> Batches:
        out_of_memory = cupy().cuda.memory.OutOfMemoryError
        try:
            batches = Batches(batch, self._parts, stream)
            if self._captures:
                batches.graph = self._capture(batches, stream)
        except BaseException as error:
            if not self._batches:  # no graph holds an address
                self._pool.free_all_blocks()
            if isinstance(error, out_of_memory):
                raise GpuError(f"no memory for batches of {batch[0].shape[0]} rows: {error}") from error
            raise
        return batches

    def _capture(self, batches: Batches, stream: int) -> Graph:
        """The graph of a step, which is rehearsed twice before, without the update.

        The first rehearsal makes the plans; its memory is given back. The second allocates the memory that the graph
        keeps. Before the first graph, master copies are checked.
        """
        if not self._batches:
            check_masters(self._body.optimizer.parameters, stream)
        captured = private_stream(self._device, "training")
        order_after(captured, stream)
        try:
            for pool in (cupy().cuda.MemoryPool(), self._pool):
                with self._own_tuning(), _memory_from(pool):
                    self._body.run(batches.parts, self._spare, captured, updates=False)
        finally:
            order_after(stream, captured)
        return self._record(batches)

    def _record(self, batches: Batches) -> Graph:
        captured = private_stream(self._device, "training")
        with _memory_from(self._pool), no_collection(), ranges.on(captured):
            return Graph(lambda handle: self._body.run(batches.parts, self.tally, handle), captured)


def _step(stream: int) -> AbstractContextManager[Any]:
    """The range of a step, and for those who hear it the stream that it is on."""
    return _heard_step(stream) if ranges.is_heard else range_of(ranges.STEP)


@contextlib.contextmanager
def _heard_step(stream: int) -> Iterator[None]:
    with ranges.on(stream), range_of(ranges.STEP):
        yield


def _copy(copies: Sequence[RowCopy], addresses: Sequence[int], stream: int) -> None:
    """Puts a batch's copies on a stream.

    Args:
        addresses: of x, of the targets and, if there are any, of the row weights.
    """
    copy = function("cuMemcpyDtoDAsync_v2")
    with range_of("input"):
        for operand, offset, buffer, size, strided in copies:
            source = addresses[operand] + offset
            if strided is not None:
                strided.srcDevice = source
                call("cuMemcpy2DAsync", strided, stream)
            elif status := copy(buffer, source, size, stream):
                check("cuMemcpyDtoDAsync", status)


def _refuse_capture(stream: int) -> None:
    if stream and is_capturing(stream):  # the default stream cannot be captured
        raise CaptureError(f"stream {stream:#x} is being captured; a step to be captured needs graph=False")


@contextlib.contextmanager
def _memory_from(pool: Any) -> Iterator[None]:
    """Makes CuPy allocate from a pool of the graphs' own, during a capture too, because they keep the addresses."""

    def allocate(size: int) -> Any:
        with relaxed_captures():
            return pool.malloc(size)

    with cupy().cuda.using_allocator(allocate):
        yield


def _device_memory(size: int) -> Any:
    """Allocates for the pool. CuPy's own error would make the pool give up blocks that graphs use."""
    cuda = cupy().cuda
    try:
        return cuda.MemoryPointer(cuda.Memory(size), 0)
    except cuda.runtime.CUDARuntimeError as error:
        raise GpuError(f"{size} bytes of GPU memory could not be allocated: {error}") from error


def _close(device: int, batches: OrderedDict[_Key, Batches], count: int | None = None) -> None:
    """Frees the graphs that have not been used for the longest time, or all of them, once they are done."""
    if not batches:
        return
    with activated(device):
        _turn(device).wait()
        for _ in range(count or len(batches)):
            _, dropped = batches.popitem(last=False)
            graph, dropped.graph = dropped.graph, None
            if graph is not None:
                graph.close()
