"""Memory that belongs to a stream: cuBLASLt's workspace, and what kernels of one operation leave to each other."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Self

from lt_runtime.errors import CaptureError
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.direct import is_capturing
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import order_after, private_stream
from lt_runtime.problem import ALIGNMENT

MAX_TICKETS: Final = 4096
_MIN_SCRATCH: Final = 1 << 20


def workspace_size(device: int) -> int:
    """Bytes of workspace that cuBLASLt may use: NVIDIA's recommendation, 32 MiB from Hopper on, 4 MiB before.

    It does not depend on how much memory is free: the choice of algorithm would change with it.
    """
    return 32 << 20 if device_info(device).capability >= 90 else 4 << 20


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class _Buffer:
    """Bytes of a GPU's memory."""

    address: int = 0
    size: int = 0


class StreamMemory:
    """A workspace of fixed size and two buffers that grow; two streams never share any of them.

    Nothing is freed before `release`, because a captured graph may hold the address. A buffer at least doubles when it
    grows, so that those which it has outgrown take at most as much memory again.

    Attributes:
        stream: handle of the stream.
        lock: held while one operation that uses this memory puts its launches on the stream, so that two threads
            which share the stream do not interleave their launches.
        workspace: address, 256-byte aligned.
        workspace_size: bytes of the workspace.
        zeros: address of a few zero bytes, which nothing ever writes: they serve as a β on the device.
        tickets: address of `MAX_TICKETS` uint32 counters that are zero between kernels: a kernel counts its blocks
            with them, and leaves them zero.
    """

    def __init__(self, device: int, stream: int) -> None:
        self.stream = stream
        self._device = device
        self._branch: StreamMemory | None = None
        self._scratch, self._copies = _Buffer(), _Buffer()
        self._allocated: list[int] = []
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
        """The same memory for work that is captured from another stream, to be launched on this memory's stream."""
        view = copy.copy(self)
        view.stream = stream
        return view

    def scratch(self, size: int) -> int:
        """Address of `size` bytes for an operation, 256-byte aligned, valid until the next call.

        Raises:
            CaptureError: the buffer would have to grow while the stream is captured.
        """
        return self._at_least(self._scratch, size)

    def copies(self, size: int) -> int:
        """The same for the copies of a product's operands, which may be made while an operation uses `scratch`."""
        return self._at_least(self._copies, size)

    def _at_least(self, buffer: _Buffer, size: int) -> int:
        if size > buffer.size:
            grown = max(aligned(size), 2 * buffer.size, _MIN_SCRATCH)
            buffer.address, buffer.size = self._allocate(grown), grown
        return buffer.address

    @property
    def branch(self) -> StreamMemory:
        """The memory of a stream that is used only for branches off this stream; it is made at the first call.

        Raises:
            CaptureError: the first call comes while the stream is captured.
        """
        if self._branch is None:
            self._check_capture(self.workspace_size)
            own = stream_memory(self._device, private_stream(self._device, f"branch of {self.stream:#x}"))
            order_after(self.stream, own.stream)  # the branch's stream zeroes its counters
            self._branch = own
        return self._branch

    def free(self) -> None:
        """Frees everything, the branch's memory too. See `release`."""
        while self._allocated:
            call("cuMemFree", self._allocated.pop())
        if self._branch is not None:
            release(self._device, self._branch.stream)

    def _check_capture(self, size: int) -> None:
        if is_capturing(self.stream):
            raise CaptureError(
                f"{size} bytes of scratch memory are needed while stream {self.stream:#x} is being captured; "
                "run the operation once on this stream before the capture"
            )

    def _allocate(self, size: int) -> int:
        self._check_capture(size)
        address = int(call("cuMemAlloc", size))
        self._allocated.append(address)
        return address


memories: dict[tuple[int, int], StreamMemory] = {}
"""The memories made so far, by device and stream; `stream_memory` makes them."""
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
    """Frees the memory of a stream that has done its work, and of which no captured graph is left."""
    with _memories_lock:
        memory = memories.pop((device, stream), None)
    if memory is not None:
        memory.free()


@contextlib.contextmanager
def branch(memory: StreamMemory) -> Iterator[StreamMemory]:
    """A branch of a captured graph: gives the memory of a stream that starts after all that a stream was given so far.

    The stream goes on beside the branch, and waits for it at the end. While the stream is not being captured there is
    no branch, and the memory is the stream's own: the events would take longer than most work. The branch's memory is
    made even then, because it cannot be made during a capture.

    Args:
        memory: the stream's memory.

    Raises:
        CaptureError: the stream is captured, and has never had a branch.
    """
    own = memory.branch
    if not is_capturing(memory.stream):
        yield memory
        return
    order_after(own.stream, memory.stream)
    try:
        yield own
    finally:
        order_after(memory.stream, own.stream)
