"""Training steps on a GPU: a graph copies each batch into fixed buffers and runs the step on them.

If fused kernels of a narrow MLP also compute the loss, the graph copies nothing: they read the batch in place.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from cuda.bindings import driver

from lt_runtime import ranges
from lt_runtime.arrays.libraries import cupy, current_streams, signature_of
from lt_runtime.arrays.operand import CUPY, Operand, library_of
from lt_runtime.arrays.transfer import arena_size, arena_views, writes
from lt_runtime.distributed.nccl import NcclEngine
from lt_runtime.errors import CaptureError, DriverError, GpuError
from lt_runtime.gpu import graphs
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call, check, function, is_capturing, is_current
from lt_runtime.gpu.graphs import Graph
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.gpu.streams import is_captured, order_after, private_stream, relaxed_captures, stream_handle
from lt_runtime.kernels.resize import TABLE_BYTES, Place, RowBuffers, RowsCopy, write_table
from lt_runtime.kernels.tiling import VECTOR_BYTES
from lt_runtime.nn.run import Met
from lt_runtime.ops.first_use import before_first_step, is_step_tuned, not_tuning
from lt_runtime.ops.optimizers.parameters import changes, check_masters
from lt_runtime.plans.cache import exchange_entries
from lt_runtime.ranges import range_of
from lt_runtime.store.plan_store import plan_store
from lt_runtime.training.arena import Arena, Block, Recorder
from lt_runtime.training.averages import GpuTally, Totals
from lt_runtime.training.body import Batch, StepBody

if TYPE_CHECKING:
    from lt_runtime.training.fp8_weights import Fp8Weights

MAX_GRAPHS: Final = 8
"""The largest number of graphs of a training step: one for each combination of shapes and types of a batch's arrays.
The least recently used graph is dropped first.
"""

_Key: TypeAlias = tuple[Hashable, ...]
"""Key of a graph: the shapes and types of the batch's arrays."""


class GraphOrder:
    """Makes the graphs of all training steps on a device run one after another, also if launched on different streams.

    They are all captured on one private stream, and so share its workspace. To launch a graph, a thread takes `lock`,
    calls `give`, launches the graph, and calls `end`.

    Attributes:
        lock: held by the thread that launches a graph.
        stream: the stream of the last launch; None before the first.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.stream: int | None = None
        self._event = int(call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._record = function("cuEventRecord")

    def give(self, stream: int) -> None:
        """Makes `stream` wait for all graphs that were launched on other streams."""
        if self.stream not in (None, stream):
            call("cuStreamWaitEvent", stream, self._event, 0)
        self.stream = stream

    def end(self) -> None:
        """Records the event for which the next launch on another stream waits."""
        if self._record(self._event, self.stream):
            # If the event cannot be recorded, no other stream can wait for this launch, so that the host waits instead.
            # An error of that wait is ignored, because it may come from earlier work; the next driver call reports it.
            with contextlib.suppress(DriverError):
                call("cuStreamSynchronize", self.stream)

    def wait(self) -> None:
        """Makes the host wait until all graphs have run."""
        call("cuEventSynchronize", self._event)


@functools.cache
def _order(device: int) -> GraphOrder:
    return GraphOrder()


class StepBuffers:
    """Buffers for the micro-batches of one batch size, and the graph that runs on them.

    The graph first copies a batch into the buffers, or reads it in place. It takes the addresses of the batch's arrays
    from a table on the device, which the host rewrites before a launch if they have changed since the last launch.

    Attributes:
        parts: inputs, targets and, if given, row weights of each micro-batch; zeros until the first batch.
        graph: the captured step; None before the capture, without graphs, and after the graph has been freed.
        arena: the memory of the graph's arrays and scratch buffers; None without a graph. Allocations that the
            rehearsal did not make, and the scratch buffers of branches, lie elsewhere.
        weights: the copies of weights in FP8 that the graph reads and updates; None if it does not.
        writer: the object in `writes.latest` after a launch of this graph. If another object is there, parameters or
            scales may have been written since, and copies of weights in FP8 may be stale.
        in_place: whether the graph reads batches in place. If a batch is not aligned as the kernel needs, it is copied
            into the buffers before the launch.
        table: device address of the table.
    """

    def __init__(self, batch: Batch, parts: int, stream: int) -> None:
        device, made, targets, whole = batch[0].device, list[list[Any]](), list[RowBuffers](), list[RowBuffers]()
        for rows, dtype, rest in ((each.shape[0] // parts, np.dtype(each.dtype), each.shape[1:]) for each in batch):
            shapes = [(rows, *rest)] * parts
            flat = CUPY.zeros((arena_size(shapes, dtype.itemsize),), dtype, device, stream)
            made.append(arena_views(flat, shapes))
            # `flat` holds the micro-batches of an array one after another, in parts of equal size.
            targets.append(RowBuffers(flat.data.ptr, rows, dtype.itemsize * math.prod(rest), flat.nbytes // parts))
            whole.append(RowBuffers(flat.data.ptr, rows * parts, targets[-1].width, flat.nbytes))
        self.parts = [*zip(*made, strict=True)]
        self.in_place = False
        self.graph: Graph | None = None
        self.arena: Arena | None = None
        self.weights: Fp8Weights | None = None
        self.writer = object()
        self._table = CUPY.zeros((TABLE_BYTES,), np.dtype(np.uint8), device, stream)
        self.table = int(self._table.data.ptr)
        self._copy = RowsCopy(targets, parts, device)
        # These three serve a graph that reads batches in place: the launch that copies a whole batch without gaps, the
        # addresses and pitches of that copy, and the alignment that inputs need to be read without a copy. The
        # alignment is 1 if rows are not whole vectors, because they are then read element by element.
        self._whole_copy = RowsCopy(whole, 1, device)
        self._places = tuple(each.data for each in whole), tuple(each.width for each in whole)
        self._alignment = 1 if whole[0].width % VECTOR_BYTES else VECTOR_BYTES
        self._written: tuple[Any, ...] | None = None
        self._range = range_of("input")

    def fill(self, places: Sequence[Place], stream: int) -> None:
        """Copies the arrays at `places` into the buffers; if it is empty, those at the addresses in the table."""
        with self._range:
            self._copy.launch(places, stream, 0 if places else self.table)

    def claim(self, stream: int) -> None:
        """Before a launch: renews the copies of weights in FP8 that other writes may have made stale."""
        if self.weights is not None:
            self.weights.remake(stream)
        writes.latest = self.writer

    def point_at(self, addresses: tuple[int, ...], pitches: tuple[int, ...], stream: int) -> None:
        """Writes the addresses of a batch's arrays into the table, if they have changed, in order on `stream`.

        A batch that the graph cannot read in place is copied first; the table then gets the addresses of the copy.
        """
        wanted = addresses, pitches
        if self.in_place and (addresses[0] | pitches[0]) % self._alignment:
            with self._range:
                self._whole_copy.launch([*zip(addresses, pitches, strict=True)], stream)
            wanted = self._places
        if wanted != self._written:
            self._written = None  # if the write fails, the contents of the table are unknown
            with self._range:
                write_table(self.table, [*zip(*wanted, strict=True)], stream)
            self._written = wanted


def _pitch(array: Operand) -> int:
    """Bytes from the start of one row to the next; for a single row its length."""
    return array.itemsize * (array.strides[0] if array.shape[0] > 1 else math.prod(array.shape[1:]))


class Replay(NamedTuple):
    """Result of a batch's checks, reused for later batches that differ only in addresses and values.

    Attributes:
        key: key of the batch's buffers.
        pitches: for each array of the batch, the bytes from the start of one row to the next.
    """

    key: _Key
    pitches: tuple[int, ...]
    buffers: StepBuffers


class GpuStep:
    """Runs steps on one GPU; frees its graphs when it is garbage-collected.

    Args:
        graph: whether a step is captured, and then launched as one graph.
        tune: see `TrainStep`.
    """

    def __init__(self, body: StepBody, device: int, *, graph: bool, tune: bool | None) -> None:
        self._body, self._device, self._captures, self._tune = body, device, graph, tune
        self._tuning_off = not_tuning if tune is False else contextlib.nullcontext
        self._buffers: OrderedDict[_Key, StepBuffers] = OrderedDict()
        self._latest: StepBuffers | None = None
        self._replays: dict[Hashable, Replay] = {}
        self._weights: Fp8Weights | None = None
        self._current_stream = CUPY.current_stream
        self._seen: object = None
        self._group = body.group
        body.expect_fp8_weights(graph=graph)
        engine = None if body.group is None else body.group.engine(device)
        self._note: Callable[[int], None] | None = engine.launched if isinstance(engine, NcclEngine) else None
        with activated(device):
            stream = stream_handle(None, device)
            self.tally, self._rehearsed_tally = GpuTally(device, stream), GpuTally(device, stream)
            call("cuStreamSynchronize", stream)  # later steps may use any stream, and need tallies of zero
            self._order, self._launch_graph = _order(device), function("cuGraphLaunch")
        self._pool = cupy().cuda.MemoryPool(_device_memory)
        closing = weakref.finalize(self, _close, device, self._buffers)
        if isinstance(engine, NcclEngine):
            engine.closes_first.append(closing)

    def totals(self, stream: Any) -> Totals:
        """Sums over the steps since the last call; waits for the stream.

        Args:
            stream: None for the current stream of the library that the batches come from.
        """
        return self.tally.read(stream_handle(stream, self._device, self._current_stream))

    def repeat(self, batch: tuple[Any, ...], stream: Any) -> bool:
        """Runs a step if an equivalent batch was run before, otherwise does nothing; returns whether the step was run.

        Batches are equivalent if they differ only in addresses and values, so that checks need not be repeated. This is
        the fast path: little happens between the call and the launch of the graph.
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
            with _step(handle):
                return self._launch(replay, addresses, handle)
        return self._launch(replay, addresses, handle)

    def run(self, batch: tuple[Any, ...], stream: Any) -> None:
        """Runs a step on a batch without an equivalent earlier one (see `repeat`).

        Raises:
            OperandError: an array of the batch cannot be copied into the buffers.
            CaptureError: the stream is being captured: a step cannot be captured within another capture.
            GpuError: GPU memory is exhausted by a further batch size, or the driver, compiler or cuBLASLt failed.
                Nothing has been updated.
        """
        with activated(self._device):
            self._current_stream = library_of(batch[0]).current_stream
            handle = stream_handle(stream, self._device, self._current_stream)
            operands = self._body.read(batch, handle)
            addresses = tuple(operand.address for operand in operands)
            if not self._captures:
                with _step(handle):
                    replay = self._prepared(operands, handle)
                    replay.buffers.fill([*zip(addresses, replay.pitches, strict=True)], handle)
                    with self._tuning_off():
                        self._body.run(replay.buffers.parts, self.tally, handle)
                    if self._note is not None:
                        self._note(handle)
                return
            if handle and is_capturing(handle):  # the default stream (0) cannot be under capture
                raise CaptureError(f"stream {handle:#x} is being captured; a step to be captured needs graph=False")
            with self._order.lock, _step(handle):
                try:
                    self._order.give(handle)
                    self._apply_settings(handle)
                    replay = self._prepared(operands, handle)
                finally:
                    self._order.end()
                self._launch(replay, addresses, handle)
                signature = signature_of(batch)
                if signature is not None:
                    self._replays[signature[0]] = replay

    def _launch(self, replay: Replay, addresses: tuple[int, ...], stream: int) -> bool:
        """Launches a step's graph; returns False if the graph has been freed because of another thread's batch."""
        order, buffers = self._order, replay.buffers
        with order.lock:
            try:
                if order.stream != stream:
                    order.give(stream)
                if changes.latest is not self._seen:
                    self._apply_settings(stream)
                if writes.latest is not buffers.writer:
                    buffers.claim(stream)
                graph = buffers.graph
                if graph is None:
                    return False
                if buffers is not self._latest:
                    self._buffers.move_to_end(replay.key)
                    self._latest = buffers
                buffers.point_at(addresses, replay.pitches, stream)
                if graphs.stand_in is not None:
                    graph = graphs.stand_in(graph, lambda: self._record(buffers))
                if status := self._launch_graph(graph.executable, stream):
                    check("cuGraphLaunch", status)
                if self._note is not None:
                    self._note(stream)
                return True
            finally:
                order.end()

    def _apply_settings(self, stream: int) -> None:
        """Writes changed settings of the optimizer to the device, where the graph reads them."""
        latest = changes.latest
        self._body.optimizer.apply_settings(stream=stream)
        self._seen = latest

    def _prepared(self, batch: Batch, stream: int) -> Replay:
        """Returns the `Replay` for a batch. The first batch of a key allocates buffers and captures their graph."""
        key = tuple((each.shape, each.dtype) for each in batch)
        if key not in self._buffers:
            while len(self._buffers) >= MAX_GRAPHS:
                self._replays.clear()  # some replays may refer to the graph that is dropped; so all replays are dropped
                _close(self._device, self._buffers, 1)
            self._buffers[key] = self._make(batch, stream)
        self._latest = self._buffers[key]
        self._buffers.move_to_end(key)
        return Replay(key, tuple(map(_pitch, batch)), self._latest)

    def _make(self, batch: Batch, stream: int) -> StepBuffers:
        out_of_memory = cupy().cuda.memory.OutOfMemoryError
        try:
            buffers = StepBuffers(batch, self._body.parts, stream)
            # The first rehearsal sets the scales of FP8 tensors, so that it needs the real batch, not zeros.
            if self._body.scales:
                buffers.fill([(each.address, _pitch(each)) for each in batch], stream)
            with self._together():
                self._plan(buffers, stream)
                if self._captures:
                    self._weights = self._weights or self._body.fp8_weights(self._device, stream)
                    if self._weights is not None and self._weights.are_read:
                        buffers.weights, buffers.writer = self._weights, self._weights.writer
                    buffers.claim(stream)
                    pool = cupy().cuda.MemoryPool()
                    recorder = Recorder(pool.malloc, self._device)
                    self._rehearse(buffers, recorder, stream, sums=True, otherwise=pool.malloc)
                    # Frees what is unused now. An array of the rehearsal that the model still holds returns to `pool`
                    # when the capture replaces it, so that no memory is freed while the stream is captured.
                    pool.free_all_blocks()
                    buffers.arena = Arena(recorder.lifetimes, self._block, self._pool.malloc, self._device)
                    self._body.split_update(stream)
                    buffers.in_place = self._body.reads_table(buffers.parts[0], stream)
                    buffers.graph = self._record(buffers)
        except BaseException as error:
            if not self._buffers:  # there is no graph, so that nothing uses the pool's memory
                self._pool.free_all_blocks()
            if isinstance(error, out_of_memory):
                raise GpuError(f"no memory for batches of {batch[0].shape[0]} rows: {error}") from error
            raise
        return buffers

    def _block(self, size: int) -> Block:
        """Memory for an arena. Graphs run one after another, so that their arenas share memory that is large enough."""
        blocks = [each.arena.block for each in self._buffers.values() if each.arena is not None]
        found = next((each for each in blocks if each.pointer.mem.size >= size), None)
        with relaxed_captures():
            return found or Block(_device_memory(max(size, 1)))

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Within a `with` block, waits for other processes have no time limit; at its end waits for all processes."""
        if self._group is None:
            yield
            return
        with self._group.patience():
            yield
            self._group.barrier("the first step")

    def _plan(self, buffers: StepBuffers, stream: int) -> None:
        """Makes the plans. In a group, process 0 tunes while the others wait, and all use its plan cache's entries."""
        tunes, group = is_step_tuned(self._tune) and not is_captured(stream), self._group
        if group is None or group.rank == 0:
            self._rehearse_first(buffers, stream, tunes=tunes)
        if group is not None:
            content = group.from_first(plan_store(self._device).content(), "the plan cache of process 0")
            if group.rank:
                exchange_entries(content, self._device)
                self._rehearse_first(buffers, stream, tunes=False)
            self._body.share_scales(stream)

    def _rehearse_first(self, buffers: StepBuffers, stream: int, *, tunes: bool) -> None:
        """Rehearses a step (runs it without the update), which makes the plans; then frees its arrays.

        If tuning is on, layers and products of the rehearsal that the plan cache does not know are then measured. A
        step that is neither captured nor tuned needs a rehearsal only in a group, to make the scales of FP8 tensors.
        """
        if not (tunes or self._captures or (self._group is not None and self._body.scales)):
            return
        if self._captures and not self._buffers:  # master copies are checked once, before the first graph
            check_masters(self._body.optimizer.parameters, stream)
        met = self._rehearse(buffers, cupy().cuda.MemoryPool().malloc, stream, by_layer=tunes)
        measured = tunes and before_first_step(met.to_tune(), self._device, stream)
        if measured and any(each.is_open for each in met.choices):
            # The layers may have got another precision, in which they run other problems.
            met = self._rehearse(buffers, cupy().cuda.MemoryPool().malloc, stream, by_layer=True)
            before_first_step(met.to_tune(), self._device, stream)
        self._body.model.met.append(met)
        if measured and self._captures:
            self._rehearse(buffers, cupy().cuda.MemoryPool().malloc, stream)

    def _rehearse(
        self,
        buffers: StepBuffers,
        allocate: Callable[[int], Any],
        stream: int,
        *,
        by_layer: bool = False,
        sums: bool = False,
        otherwise: Callable[[int], Any] | None = None,
    ) -> Met:
        """Runs a step without the update, on the stream of captures if the step is to be captured.

        Args:
            allocate: a function that returns memory of a CuPy pool.
            by_layer: whether a narrow MLP runs layer by layer.
            sums: whether the processes of a group sum their gradients.
            otherwise: see `memory_from`.

        Returns:
            The problems that have run.
        """
        body, tally = self._body, self._rehearsed_tally
        captured = private_stream(self._device, "training") if self._captures else stream
        order_after(captured, stream)
        try:
            memory = memory_from(allocate, self._device, captured if self._captures else None, otherwise)
            with not_tuning(), memory, Met() as met:
                options: dict[str, Any] = {"met": met if by_layer else None, "weights": buffers.weights}
                body.run(buffers.parts, tally, captured, updates=False, sums=sums, **options)
            return met
        finally:
            order_after(stream, captured)

    def _record(self, buffers: StepBuffers) -> Graph:
        captured, arena = private_stream(self._device, "training"), buffers.arena
        assert arena is not None

        def run(handle: int) -> None:
            with memory_from(arena.again(), self._device, captured, self._pool.malloc):
                if not buffers.in_place:
                    buffers.fill((), handle)
                table = buffers.table if buffers.in_place else 0
                self._body.run(buffers.parts, self.tally, handle, weights=buffers.weights, table=table)

        with ranges.on(captured):
            return Graph(run, captured)


@contextlib.contextmanager
def _step(stream: int) -> Iterator[None]:
    """Opens the profiler range of a step, and tells listeners its stream."""
    with ranges.on(stream), range_of(ranges.STEP):
        yield


@contextlib.contextmanager
def memory_from(
    allocate: Callable[[int], Any],
    device: int,
    captured: int | None,
    otherwise: Callable[[int], Any] | None = None,
) -> Iterator[None]:
    """Makes CuPy allocate by a function, and allows it to allocate during a capture.

    Args:
        captured: the stream of captures; its operations allocate their scratch memory by the function too. None if the
            step is not captured.
        otherwise: allocates arrays of other streams, such as those of a block of the caller's, which may run beside the
            captured stream; `allocate` if None.
    """

    def of_scratch(size: int) -> Any:
        with relaxed_captures():
            return allocate(size)

    def of_arrays(size: int) -> Any:
        is_other = otherwise is not None and cupy().cuda.get_current_stream().ptr != captured
        with relaxed_captures():
            return otherwise(size) if otherwise is not None and is_other else allocate(size)

    scratch = contextlib.nullcontext() if captured is None else stream_memory(device, captured).scratch_from(of_scratch)
    with cupy().cuda.using_allocator(of_arrays), scratch:
        yield


def _device_memory(size: int) -> Any:
    """Allocates memory for a CuPy memory pool.

    A failure raises `GpuError`: after an error of CuPy's own class the pool would free blocks that graphs still use.
    """
    cuda = cupy().cuda
    try:
        return cuda.MemoryPointer(cuda.Memory(size), 0)
    except cuda.runtime.CUDARuntimeError as error:
        raise GpuError(f"{size} bytes of GPU memory could not be allocated: {error}") from error


def _close(device: int, buffers: OrderedDict[_Key, StepBuffers], count: int | None = None) -> None:
    """Waits until graphs have run, then frees the `count` least recently used ones, or all if `count` is None."""
    if not buffers or GpuError.aftermath:  # if the CUDA context is lost, its graphs no longer exist
        return
    with activated(device):
        _order(device).wait()
        for _ in range(count or len(buffers)):
            _, dropped = buffers.popitem(last=False)
            graph, dropped.graph = dropped.graph, None
            if graph is not None:
                graph.close()
