"""Batches read ahead of their use by a thread."""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from lt_runtime.arguments import integer, shown
from lt_runtime.arrays.operand import HOST
from lt_runtime.errors import ArgumentError, KindError
from lt_runtime.gpu.devices import activated, parse_device
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import order_after, private_stream, stream_handle
from lt_runtime.training.device import ComputeDevice
from lt_runtime.training.staging import Slot, map_arrays

_MOST_AHEAD: Final = 1 << 16


def prefetch(iterable: Iterable[Any], depth: int = 2, device: object = "auto", stream: Any = None) -> Prefetcher:
    """Reads the batches of an iterable ahead in a thread, and copies them to a GPU while earlier batches are used.

    For a GPU, a batch is copied through page-locked memory, on a stream of its own, into buffers that are used again.
    A batch stays unchanged for all work that is put on `stream` before `depth` more batches have been taken; copy the
    arrays that you keep for longer. Only the thread waits for the GPU. Arrays that are page-locked already are copied
    directly, before the next batch is taken from the iterable. On the CPU each batch is copied into new arrays. So the
    iterable may fill the same arrays again and again.

    Args:
        iterable: of batches: NumPy arrays, or tuples, lists or dicts of them.
        depth: the number of batches that are read ahead, from 1 to 65,536.
        device: as in `lt.MLP`, or a model's `device`.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, CuPy's current stream at each
            use. It is the stream of the work that reads the batches.

    Returns:
        An iterator; for a GPU its batches consist of CuPy arrays. Several threads may take batches from it: each batch
        is given once, an error is raised in the thread that asked for the batch, and the iterator ends for all other
        threads. The reading thread ends with the iterable, with `close()`, with a `with` block or with the iterator's
        last reference, in each case after the iterable's `next` that it is in has returned.

    Raises:
        ArgumentError: a depth outside its range, or a device that does not exist.
        Whatever the iterable raises, in place of the batch; OperandError for a batch with something other than arrays.
        No batch follows either error.
    """
    count = integer("depth", depth)
    if not 1 <= count <= _MOST_AHEAD:
        raise ArgumentError(f"depth is {shown(count)}; it must be positive, and at most {_MOST_AHEAD}")
    try:
        source = iter(iterable)
    except TypeError as error:
        raise KindError(f"iterable is {shown(iterable)}; it must be an iterable of batches ({error})") from error
    ordinal = parse_device(device)
    if stream is not None:
        stream_handle(stream, HOST if ordinal is None else ordinal)
    return Prefetcher(source, count, ordinal, stream)


class Prefetcher(Iterator[Any], contextlib.AbstractContextManager["Prefetcher"]):
    """The iterator that `prefetch` returns, also a context manager. Any number of threads may take batches from it."""

    def __init__(self, source: Iterator[Any], depth: int, device: int | None, stream: Any) -> None:
        lane = _HostLane() if device is None else _GpuLane(device, 2 * depth, depth, stream)
        self._work = _Work(source, lane, depth)
        self._finalizer = weakref.finalize(self, _Work.finish, self._work)
        self._shown = f"depth={depth}, {ComputeDevice(device).name}"

    def __repr__(self) -> str:
        return f"Prefetcher({self._shown}, {'open' if self._finalizer.alive else 'closed'})"

    def __next__(self) -> Any:
        try:
            return self._work.take()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends the reading thread, after the iterable's `next` that it is in; there are no batches afterwards.

        For threads that wait for a batch the iterator ends at once.
        """
        self._finalizer()

    def __exit__(self, *_: object) -> None:
        self.close()


class _HostLane:
    """The way of the batches from the reading thread to the user, on the host: each batch is copied once."""

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Context manager around the reading thread's work."""
        return contextlib.nullcontext()

    def send(self, batch: Any) -> Any:
        """Starts a batch's copies; called by the reading thread."""
        return map_arrays(batch, np.array)

    def ask(self) -> None:
        """Prepares for one more `send`; called by the user before the reading thread may send."""

    def receive(self, batch: Any) -> Any:
        """Makes a batch that was sent ready for use; called by the user."""
        return batch

    def close(self) -> None:
        """Frees the lane's buffers; called once the reading thread has ended."""


class _GpuLane(_HostLane):
    """A ring of slots: each batch overwrites the oldest one.

    Args:
        slots: the number of slots, at least `held` more than the batches that are read ahead.
        held: the number of latest batches that the user may still read.
    """

    def __init__(self, device: int, slots: int, held: int, stream: Any) -> None:
        self._device, self._held, self._stream = device, held, stream
        self._given: collections.deque[Slot] = collections.deque()
        with activated(device), contextlib.ExitStack() as stack:
            self._copies = private_stream(device, "prefetch")
            # CuPy's pool may give the copies memory that was in use on that stream until now.
            order_after(self._copies, stream_handle(stream, device))
            made = [stack.enter_context(contextlib.closing(Slot(device, self._copies))) for _ in range(slots)]
            self._slots = stack.pop_all()
        self._turns = itertools.cycle(made)

    def working(self) -> contextlib.AbstractContextManager[None]:
        return activated(self._device)

    def send(self, batch: Any) -> Any:
        slot = next(self._turns)
        return slot, slot.fill(batch)

    def ask(self) -> None:
        if len(self._given) == self._held:
            with activated(self._device):
                call("cuEventRecord", self._given.popleft().released, stream_handle(self._stream, self._device))

    def receive(self, batch: Any) -> Any:
        slot, arrays = batch
        self._given.append(slot)
        with activated(self._device):
            call("cuStreamWaitEvent", stream_handle(self._stream, self._device), slot.ready, 0)
        return arrays

    def close(self) -> None:
        with activated(self._device), self._slots:
            order_after(self._copies, stream_handle(self._stream, self._device))


class _Work:
    """The reading thread and its queue. They do not refer to the `Prefetcher`, whose finalizer ends the thread.

    Of the threads that take batches, one waits for the queue and the others for `_turn`. A thread that gets no batch
    calls `finish`, which wakes the next one.
    """

    def __init__(self, source: Iterator[Any], lane: _HostLane, depth: int) -> None:
        self._lane = lane
        self._permits, self._stopped = threading.Semaphore(depth), threading.Event()
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._turn = threading.RLock()  # reentrant, because a signal's handler may close what its thread waits for
        self._is_left_alone = False
        self._thread = threading.Thread(target=self._run, args=(source,), name="lt_runtime prefetch", daemon=True)
        self._thread.start()

    def take(self) -> Any:
        """Returns the next batch, or raises the error that came instead of it; raises StopIteration after the last."""
        with self._turn:
            if self._stopped.is_set():
                raise StopIteration
            self._lane.ask()
            self._permits.release()
            batch, error = self._ready.get()
            if error is not None:
                raise error
            return self._lane.receive(batch)

    def finish(self) -> None:
        """Ends the thread and frees the lane's buffers."""
        self._stopped.set()
        self._permits.release()
        if threading.current_thread() is self._thread:  # a garbage collection in this thread ends the `Prefetcher`
            self._is_left_alone = True
            return
        self._ready.put((None, StopIteration()))  # wakes the thread that waits for a batch, if there is one
        self._thread.join()
        with self._turn:
            self._lane.close()

    def _run(self, source: Iterator[Any]) -> None:
        try:
            with self._lane.working():
                while self._permits.acquire() and not self._stopped.is_set():
                    self._ready.put((self._lane.send(next(source)), None))
        except BaseException as error:
            self._ready.put((None, error))
        if self._is_left_alone:
            self._lane.close()
