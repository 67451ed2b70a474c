"""Memory that belongs to a stream: cuBLASLt's workspace, and scratch space between the kernels of one operation."""

from __future__ import annotations

import copy
import threading
from typing import Final, Self

from lt_runtime.errors import CaptureError
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.direct import is_capturing
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import order_after, private_stream

ALIGNMENT: Final = 256
MAX_TICKETS: Final = 4096
_MIN_SCRATCH: Final = 1 << 20


def workspace_size(device: int) -> int:
    """Bytes of workspace that cuBLASLt may use: NVIDIA's recommendation, 32 MiB from Hopper on, 4 MiB before.

    It is never derived from what memory is free: the choice of algorithm would change with it.
    """
    return 32 << 20 if device_info(device).capability >= 90 else 4 << 20


def aligned(size: int) -> int:
    """`size` rounded up to a multiple of `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class StreamMemory:
    """A workspace of fixed size and a scratch buffer that grows; two streams never share either.

    Nothing is ever freed: a captured graph may hold the address. Since the scratch buffer at least doubles when it
    grows, what it has outgrown is at most as much again.

    Attributes:
        stream: its handle.
        lock: held while the launches of one operation that uses this memory are put on the stream, so that two threads
            sharing the stream do not interleave theirs.
        workspace: address, 256-byte aligned.
        workspace_size: its bytes.
        zeros: address of a few zero bytes, which nothing ever writes: a β on the device.
        tickets: address of `MAX_TICKETS` uint32 counters that are zero between kernels: a kernel counts its blocks
            with them, and leaves them zero.
    """

    def __init__(self, device: int, stream: int) -> None:
        self.stream = stream
        self._device = device
        self._branch: StreamMemory | None = None
        self._scratch, self._scratch_size = 0, 0
        self.lock = threading.RLock()
        self.workspace_size = workspace_size(device)
        self.workspace = self._allocate(self.workspace_size)
        self.zeros = self._allocate(ALIGNMENT + 4 * MAX_TICKETS)
        self.tickets = self.zeros + ALIGNMENT
        call("cuMemsetD8Async", self.zeros, 0, ALIGNMENT + 4 * MAX_TICKETS, stream)

    def on(self, stream: int) -> Self:
        """The same memory for work that is captured from another stream, to be launched on this memory's stream."""
        view = copy.copy(self)
        view.stream = stream
        return view

    def scratch(self, size: int) -> int:
        """Address of `size` bytes, 256-byte aligned, good until the next call.

        Raises:
            CaptureError: the buffer would have to grow while the stream is captured.
        """
        if size > self._scratch_size:
            grown = max(aligned(size), 2 * self._scratch_size, _MIN_SCRATCH)
            self._scratch, self._scratch_size = self._allocate(grown), grown
        return self._scratch

    @property
    def branch(self) -> StreamMemory:
        """The memory of a stream that is used for nothing but branches off this one, made at the first call.

        Raises:
            CaptureError: that call comes while the stream is captured.
        """
        if self._branch is None:
            self._check_capture(self.workspace_size)
            self._branch = StreamMemory(self._device, private_stream(self._device, f"branch of {self.stream:#x}"))
            order_after(self.stream, self._branch.stream)  # which zeroes its memory
        return self._branch

    def _check_capture(self, size: int) -> None:
        if is_capturing(self.stream):
            raise CaptureError(
                f"{size} bytes of scratch memory are needed while stream {self.stream:#x} is being captured; "
                "run the operation once on this stream before the capture"
            )

    def _allocate(self, size: int) -> int:
        self._check_capture(size)
        return int(call("cuMemAlloc", size))


_memories: dict[tuple[int, int], StreamMemory] = {}
_memories_lock = threading.Lock()


def stream_memory(device: int, stream: int) -> StreamMemory:
    """The memory that belongs to a stream of a device, which must be current."""
    known = _memories.get((device, stream))
    if known is not None:
        return known
    with _memories_lock:
        if (device, stream) not in _memories:
            _memories[device, stream] = StreamMemory(device, stream)
        return _memories[device, stream]
