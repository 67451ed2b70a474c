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
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from cuda.bindings import driver

from lt_runtime import ranges
from lt_runtime.arrays.arena import arena_size, arena_views
from lt_runtime.arrays.libraries import cupy, cupy_stream, current_streams, signature_of
from lt_runtime.arrays.operand import CUPY, Operand, library_of
from lt_runtime.errors import CaptureError, GpuError
from lt_runtime.gpu import graphs
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call, check, function, is_capturing, is_current
from lt_runtime.gpu.graphs import Graph
from lt_runtime.gpu.streams import is_captured, order_after, private_stream, relaxed_captures, stream_handle
from lt_runtime.kernels.resize import TABLE_BYTES, Place, RowBuffers, RowsCopy, write_table
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

    Attributes:
        lock: held during a turn, which ends with `end`.
        stream: the one that was given the last turn; None before the first.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stream: int | None = None
        self._event = int(call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._record = function("cuEventRecord")

    def give(self, stream: int) -> None:
        """Gives this turn to a stream, which waits for everything that earlier turns put on other streams."""
        if self.stream not in (None, stream):
            call("cuStreamWaitEvent", stream, self._event, 0)
        self.stream = stream

    def end(self) -> None:
        """Notes what was put on the stream."""
        if self._record(self._event, self.stream):
            # The work is on the stream, and no later turn could wait for it there.
            call("cuStreamSynchronize", self.stream)

    def wait(self) -> None:
        """Waits on the host until everything that was put on a stream within a turn is done."""
        call("cuEventSynchronize", self._event)


@functools.cache
def _turn(device: int) -> Turn:
    return Turn()


class Batches:
    """Buffers for the micro-batches of one size, filled with zeros, and the graph that runs over them, if there is one.

    The graph begins with the copy of a batch, which it finds by a table on the device: where the arrays are is written
    there before a launch if it is not where those of the launch before were.

    Attributes:
        parts: inputs, targets and, if there are any, row weights of each micro-batch.
    """

    def __init__(self, batch: Batch, parts: int, stream: int) -> None:
        self._buffers = [_zeros(operand, parts, stream) for operand in batch]
        self.parts = [*zip(*self._buffers, strict=True)]
        self.graph: Graph | None = None
        device = batch[0].device
        with cupy_stream(device, stream) as module:
            self._table = module.zeros(TABLE_BYTES, np.uint8)
        self._copy = RowsCopy([_targets(*each) for each in zip(batch, self._buffers, strict=True)], parts, device)
        self._there: tuple[Any, ...] | None = None
        self._range = range_of("input")

    def fill(self, places: Sequence[Place], stream: int) -> None:
        """Copies the arrays of a batch into the buffers."""
        with self._range:
            self._copy.run(places, stream)

    def fill_by_table(self, stream: int) -> None:
        """Copies the arrays that the table names when the copy runs."""
        with self._range:
            self._copy.run_by_table(self._table.data.ptr, stream)

    def find(self, addresses: tuple[int, ...], pitches: tuple[int, ...], stream: int) -> None:
        """Has the next launch of the graph, on this stream, copy the arrays at these addresses."""
        wanted = addresses, pitches
        if wanted != self._there:
            self._there = None  # what the table holds after a write that fails is unknown
            with self._range:
                write_table(self._table.data.ptr, [*zip(addresses, pitches, strict=True)], stream)
            self._there = wanted


def _pitch(array: Operand) -> int:
    """Bytes from row to row; of a single row, its own."""
    return array.itemsize * (array.strides[0] if array.shape[0] > 1 else math.prod(array.shape[1:]))


def _targets(array: Operand, buffers: Sequence[Any]) -> RowBuffers:
    width, first, last = array.itemsize * math.prod(array.shape[1:]), buffers[0], buffers[-1]
    stride = (last.data.ptr - first.data.ptr) // max(len(buffers) - 1, 1)
    return RowBuffers(first.data.ptr, first.shape[0], width, stride)


def _zeros(operand: Operand, parts: int, stream: int) -> list[Any]:
    rows, *rest = operand.shape
    shapes, dtype = [(rows // parts, *rest)] * parts, np.dtype(operand.dtype)
    with cupy_stream(operand.device, stream) as module:
        return arena_views(module.zeros(arena_size(shapes, dtype.itemsize), dtype), shapes)


class Replay(NamedTuple):
    """All that is needed to run a batch that looks like one before."""

    key: _Key
    pitches: tuple[int, ...]
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
        self._latest: Batches | None = None
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
        signature = signature_of(batch)
        if signature is None:
            return False
        forms, addresses = signature
        replay, device = self._replays.get(forms), self._device
        if replay is None or not is_current(device):
            return False
        handle = current_streams[type(batch[0])](device) if stream is None else stream_handle(stream, device)
        if handle and is_capturing(handle):
            return False
        if ranges.is_heard:
            with _heard_step(handle):
                return self._take_turn(replay, addresses, handle)
        return self._take_turn(replay, addresses, handle)

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
                    replay.batches.fill([*zip(addresses, replay.pitches, strict=True)], handle)
                    with self._own_tuning():
                        self._body.run(replay.batches.parts, self.tally, handle)
                return
            _refuse_capture(handle)
            with self._turn.lock, _step(handle):
                try:
                    self._turn.give(handle)
                    self._apply_settings(handle)
                    replay = self._prepared(operands, handle)
                finally:
                    self._turn.end()
                self._take_turn(replay, addresses, handle)
                signature = signature_of(batch)
                if signature is not None:
                    self._replays[signature[0]] = replay

    def _take_turn(self, replay: Replay, addresses: tuple[int, ...], stream: int) -> bool:
        """Puts a step's graph on a stream; False if another thread's batch has just taken the graph's place."""
        turn, batches = self._turn, replay.batches
        with turn.lock:
            try:
                if turn.stream != stream:
                    turn.give(stream)
                if changes.latest is not self._seen:
                    self._apply_settings(stream)
                graph = batches.graph
                if graph is None:
                    return False
                if batches is not self._latest:
                    self._batches.move_to_end(replay.key)
                    self._latest = batches
                batches.find(addresses, replay.pitches, stream)
                if graphs.stand_in is not None:
                    graph = graphs.stand_in(graph, lambda: self._record(batches))
                if status := self._launch_graph(graph.executable, stream):
                    check("cuGraphLaunch", status)
                return True
            finally:
                turn.end()

    def _apply_settings(self, stream: int) -> None:
        """Brings to the device what was changed of the optimizer's settings; a graph only reads them there."""
        latest = changes.latest
        self._body.optimizer.apply_settings(stream=stream)
        self._seen = latest

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
        self._latest = self._batches[key]
        self._batches.move_to_end(key)
        return Replay(key, tuple(map(_pitch, batch)), self._latest)

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
            self._rehearse(batches, cupy().cuda.MemoryPool(), captured)
            self._rehearse(batches, self._pool, captured)
        finally:
            order_after(stream, captured)
        return self._record(batches)

    def _rehearse(self, batches: Batches, pool: Any, stream: int) -> None:
        with self._own_tuning(), _memory_from(pool):
            self._body.run(batches.parts, self._spare, stream, updates=False)

    def _record(self, batches: Batches) -> Graph:
        captured = private_stream(self._device, "training")
        with _memory_from(self._pool), ranges.on(captured):

            def run(handle: int) -> None:
                batches.fill_by_table(handle)
                self._body.run(batches.parts, self.tally, handle)

            return Graph(run, captured)


def _step(stream: int) -> AbstractContextManager[Any]:
    """The range of a step, and for those who hear it the stream that it is on."""
    return _heard_step(stream) if ranges.is_heard else range_of(ranges.STEP)


@contextlib.contextmanager
def _heard_step(stream: int) -> Iterator[None]:
    with ranges.on(stream), range_of(ranges.STEP):
        yield


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
