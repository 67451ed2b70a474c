"""The memory of each stream, and calls that are bound to a stream and its memory.

A stream's memory is a workspace for cuBLASLt, and scratch buffers that the kernels of one operation share. A bound call
is captured once, so that each repetition is the launch of one small graph.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, Self, TypeAlias

from lt_runtime import ranges
from lt_runtime.arguments import Uncopied
from lt_runtime.errors import CaptureError
from lt_runtime.gpu.devices import activated, device_info
from lt_runtime.gpu.driver import call, check, function, is_capturing
from lt_runtime.gpu.graphs import Graph
from lt_runtime.gpu.streams import end_of, is_captured, order_after, private_stream, relaxed_captures
from lt_runtime.problem import ALIGNMENT

MAX_TICKETS: Final = 4096
_MIN_SCRATCH: Final = 1 << 20


def workspace_size(device: int) -> int:
    """Bytes of workspace that cuBLASLt may use: NVIDIA's recommendation, 32 MiB from Hopper on, 4 MiB before.

    The size does not depend on how much memory is free, because cuBLASLt's choice of algorithm depends on the size.
    """
    return 32 << 20 if device_info(device).capability >= 90 else 4 << 20


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class StreamMemory:
    """A workspace of fixed size and two growing buffers, which belong to one stream and are never shared by two.

    Memory is freed only by `release`, because a captured graph may hold the address. A buffer grows by at least half
    its size, so that its outgrown predecessors together are at most twice as large as the buffer itself. Graphs of
    training steps use such buffers only for their branches, see `scratch_from`.

    Attributes:
        stream: handle of the stream.
        lock: held while an operation that uses this memory puts its launches on the stream, so that the launches of two
            threads that share the stream do not interleave.
        workspace: address, 256-byte aligned.
        workspace_size: bytes of the workspace.
        zeros: address of `ALIGNMENT` zero bytes that nothing ever writes; used as a β of 0 in device memory.
        tickets: address of `MAX_TICKETS` uint32 counters that are zero between kernels: a kernel counts its blocks
            with them, and resets them to zero.
        defers: whether `deferred_joins` is open, so that the stream does not wait at the end of a branch.
    """

    def __init__(self, device: int, stream: int) -> None:
        self.stream, self._device = stream, device
        self._branch: StreamMemory | None = None
        self.defers = False
        # Address and size of each buffer; the objects that `on` returns share this dict.
        self._buffers: dict[str, tuple[int, int]] = {}
        self._allocated: list[int] = []
        self._allocate_scratch: Callable[[int], Any] | None = None
        # The memory and size that `_allocate_scratch` has given the latest operation, for each buffer.
        self._lent: dict[str, tuple[Any, int]] = {}
        self.lock = threading.RLock()
        self.workspace_size = workspace_size(device)
        with contextlib.ExitStack() as undo:
            undo.callback(self.free)
            self.workspace = self._allocate(self.workspace_size)
            self.zeros = self._allocate(ALIGNMENT + 4 * MAX_TICKETS)
            call("cuMemsetD8Async", self.zeros, 0, ALIGNMENT + 4 * MAX_TICKETS, stream)
            undo.pop_all()
        self.tickets = self.zeros + ALIGNMENT

    def on(self, stream: int) -> Self:
        """Returns this memory for captures from another stream, `stream`, whose graphs are launched on this stream."""
        view = copy.copy(self)
        view.stream, view.defers = stream, False
        return view

    def scratch(self, size: int) -> int:
        """Address of `size` bytes for an operation, 256-byte aligned. The stream's next operation may overwrite them.

        Raises:
            CaptureError: the buffer would have to grow while the stream is captured.
        """
        return self._at_least("scratch", size)

    def copies(self, size: int) -> int:
        """Like `scratch`, but a second buffer, for copies of a product's operands while `scratch` is in use."""
        return self._at_least("copies", size)

    @contextlib.contextmanager
    def scratch_from(self, allocate: Callable[[int], Any] | None) -> Iterator[None]:
        """Within a `with` block scratch memory comes from `allocate`, or from the stream's own buffers if it is None.

        The memory is freed when an operation needs another size, so that arrays of a training step may take its place.
        Its addresses must not be kept beyond the operation. What `allocate` returns must stay allocated as long as
        graphs that were captured in the block are used.
        """
        earlier = self._allocate_scratch, self._lent
        self._allocate_scratch, self._lent = allocate, {}
        try:
            yield
        finally:
            self._allocate_scratch, self._lent = earlier

    @property
    def lends_scratch(self) -> bool:
        """Whether addresses of scratch memory are valid for one operation only, see `scratch_from`."""
        return self._allocate_scratch is not None

    def _at_least(self, name: str, size: int) -> int:
        if self._allocate_scratch is not None:
            return self._lent_memory(name, size, self._allocate_scratch)
        address, available = self._buffers.get(name, (0, 0))
        if size > available:
            grown = max(aligned(size), aligned(available * 3 // 2), _MIN_SCRATCH)
            address = self._allocate(grown)
            self._buffers[name] = address, grown
        return address

    def _lent_memory(self, name: str, size: int, allocate: Callable[[int], Any]) -> int:
        """The address of the latest operation's memory if it has this size, otherwise of new memory; 0 for no bytes."""
        if not size:
            return 0
        if self._lent.get(name, (None, 0))[1] != size:
            self._lent.pop(name, None)  # first, so that the new memory may be the same
            self._lent[name] = allocate(size), size
        return int(self._lent[name][0].ptr)

    @property
    def branch(self) -> StreamMemory:
        """The memory of the private stream on which branches of this stream run. The first call allocates it.

        Raises:
            CaptureError: the first call comes while the stream is captured.
        """
        if self._branch is None:
            self._check_capture(self.workspace_size)
            own = stream_memory(self._device, private_stream(self._device, f"branch of {self.stream:#x}"))
            # this stream must wait until the counters of the new memory are zeroed on the branch's stream
            order_after(self.stream, own.stream)
            self._branch = own
        return self._branch

    @property
    def is_branched(self) -> bool:
        """Whether the stream is being captured, and has had a branch in this capture."""
        return self._branch is not None and is_captured(self._branch.stream)

    def free(self) -> None:
        """Frees all memory of the stream and of its branch, under the conditions of `release`."""
        while self._allocated:
            call("cuMemFree", self._allocated.pop())
        if self._branch is not None:
            release(self._device, self._branch.stream)

    def _check_capture(self, size: int) -> None:
        if is_capturing(self.stream):
            why = f"{size} bytes of scratch memory are needed while stream {self.stream:#x} is being captured"
            raise CaptureError(f"{why}; run the operation once on this stream before the capture")

    def _allocate(self, size: int) -> int:
        self._check_capture(size)
        address = int(call("cuMemAlloc", size))
        self._allocated.append(address)
        return address


OnMemory: TypeAlias = Callable[[StreamMemory], None]
"""A function that takes a `StreamMemory`, such as `Plan.reserve`."""

memories: dict[tuple[int, int], StreamMemory] = {}
"""All `StreamMemory` objects made so far, by device and stream; `stream_memory` makes them."""
_memories_lock = threading.Lock()


def stream_memory(device: int, stream: int) -> StreamMemory:
    """The memory that belongs to a stream of a device, which must be current."""
    known = memories.get((device, stream))
    if known is not None:
        return known
    with _memories_lock:
        if (device, stream) not in memories:
            memories[device, stream] = StreamMemory(device, stream)
        return memories[device, stream]


def release(device: int, stream: int) -> None:
    """Frees a stream's memory. The stream must have done its work, and graphs captured with this memory be freed."""
    with _memories_lock:
        memory = memories.pop((device, stream), None)
    if memory is not None:
        memory.free()


@contextlib.contextmanager
def branch(memory: StreamMemory, *, reads_scratch: bool = False) -> Iterator[StreamMemory]:
    """Opens a branch of the graph that is being captured, for work that runs concurrently with the rest.

    The branch starts after all work captured so far, and the stream waits for it at the end of the `with` block, or
    later (`deferred_joins`). If the stream is not being captured, the work goes to the stream itself, because the
    events of a branch would take longer than most work. The branch's memory is allocated even then, because that is
    impossible during a later capture.

    Args:
        memory: the memory of the stream that is being captured.
        reads_scratch: whether the branch reads scratch memory of the stream. If so, the stream waits at the end of the
            block in any case, because its next operation overwrites that memory.

    Returns:
        The memory of the stream on which the caller launches the branch's work.

    Raises:
        CaptureError: the stream is captured, and has never had a branch.
    """
    own = memory.branch
    if not is_captured(memory.stream):
        yield memory
        return
    order_after(own.stream, memory.stream)
    try:
        yield own
    finally:
        if reads_scratch or not memory.defers:
            order_after(memory.stream, own.stream)


@contextlib.contextmanager
def deferred_joins(memory: StreamMemory) -> Iterator[None]:
    """Within the `with` block the stream does not wait at the end of a branch, but goes on with its next operations.

    The stream waits for the branch when the next `deferred_joins` block ends, when `join` is called, or when a branch
    outside of such blocks ends. After the last block the caller must call `join` or open such a branch: otherwise a
    capture would end while the stream has not waited for all branches.
    """
    branched = memory.is_branched
    with end_of(memory.branch.stream) if branched else contextlib.nullcontext() as earlier:
        memory.defers = True
        try:
            yield
        finally:
            memory.defers = False
        if branched:
            call("cuStreamWaitEvent", memory.stream, earlier, 0)


def join(memory: StreamMemory) -> None:
    """Makes the stream wait for all branches that `deferred_joins` has left running."""
    if memory.is_branched:
        order_after(memory.stream, memory.branch.stream)


_ended: Final[list[tuple[Graph, int]]] = []
"""Graphs to be freed later, with their devices. The finaliser of a `BoundPlan` does not free its graph at once, because
the thread may be capturing, and freeing would invalidate the capture.
"""


class BoundPlan(Uncopied):
    """A callable that launches an operation on its stream, on its buffers, without any checks. The buffers must exist.

    Launching the whole graph costs the host no more than cuBLASLt's launch alone. In the graph the weight gradient runs
    concurrently with the input gradient if the plan says so. While the stream is being captured, a call launches the
    operation's kernels into that capture instead.

    The graph uses the workspace and the scratch memory of its stream, as an unbound call of the same operation does; in
    a training step an unbound call gets other scratch memory.

    Args:
        put: function that launches the operation on the stream of a `StreamMemory`. It must have run before, on any
            stream.
        device: ordinal of the GPU. It is current now, and must be current at each call.
        stream: handle of the stream that each call runs on.
        reserve: function that allocates the memory that `put` needs.

    Attributes:
        prepared: the `PreparedCall` that each call passes to `ranges.watchers`; None if the caller passes it to them.

    Raises:
        CaptureError: the stream is being captured.
    """

    __slots__ = ("__weakref__", "_executable", "_graph", "_launch", "_lock", "_memory", "_put", "_stream", "prepared")
    _instead = "call lt.bind again"

    def __init__(self, put: OnMemory, device: int, stream: int, reserve: OnMemory) -> None:
        if is_captured(stream):
            raise CaptureError(f"stream {stream:#x} is being captured; bind a call to it before the capture")
        self._put, self._stream = put, stream
        self.prepared: Any = None
        self._launch = function("cuGraphLaunch")
        with relaxed_captures():
            self._memory = memory = stream_memory(device, stream)
            self._lock = memory.lock
            with memory.lock, memory.scratch_from(None):  # a step's scratch memory is freed before the last launch
                _free_ended()
                reserve(memory)
                self._graph = Graph(lambda handle: put(memory.on(handle)), private_stream(device, f"bound to {stream}"))
                self._executable = self._graph.executable
                weakref.finalize(self, _ended.append, (self._graph, device)).atexit = False

    def __call__(self) -> None:
        """Launches the operation. Raises GpuError if the launch fails."""
        if ranges.watchers and self.prepared is not None:
            ranges.tell(self.prepared)
        stream = self._stream
        with self._lock:
            # the default stream (0) cannot be under capture
            if stream and is_capturing(stream):
                with self._memory.scratch_from(None):
                    self._put(self._memory)
            elif status := self._launch(self._executable, stream):
                check("cuGraphLaunch", status)


def _free_ended() -> None:
    """Frees the graphs of bound plans that have been finalised."""
    # The loop ends at the IndexError of an empty list: `while _ended` could race with threads that free graphs too.
    with contextlib.suppress(IndexError):
        while True:
            graph, device = _ended.pop()
            with activated(device):
                graph.close()
