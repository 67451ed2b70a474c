"""Batches fetched ahead of their use, by a thread that ends with it."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol, Self

from lt_runtime.errors import ArgumentError
from lt_runtime.gpu.devices import activated, parse_device
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import order_after, private_stream, stream_handle
from lt_runtime.training.staging import Slot, arrays_of

_END: Final = object()


def prefetch(iterable: Iterable[Any], depth: int = 2, device: object = "auto", stream: Any = None) -> Prefetcher:
    """The batches of an iterable, read ahead by a thread and, for a GPU, copied to it meanwhile.

    On a GPU a batch goes through page-locked memory, on a stream of its own, into buffers that are used again: what is
    put on `stream` before `depth` more batches have been asked for sees it as it is; copy what is to be kept for
    longer. Nothing waits on the host for a GPU but the thread. Arrays that are page-locked already are copied from
    where they lie, before the iterable is asked for more. An iterable may thus fill the same arrays again and again.
    On the CPU batches are handed on as they are, so there it may not.

    Args:
        iterable: of batches: NumPy arrays, or tuples, lists or dicts of them.
        depth: batches that are read ahead, at least 1.
        device: as in `lt.MLP`, or a model's `device`.
        stream: what reads the batches: an int handle, a stream object, or None for CuPy's current stream at each use.

    Returns:
        An iterator whose batches are of CuPy arrays on a GPU. Its `close()`, the end of a `with` block or of its last
        reference end the thread, once the iterable has given what it was asked for.

    Raises:
        ArgumentError: a depth below 1, or a device that is not there.
        Whatever the iterable raises, in the place of the batch that it raised it for; OperandError for a batch of
        something else. No batch comes after either.
    """
    if depth < 1:
        raise ArgumentError(f"depth is {depth}; it must be positive")
    return Prefetcher(iterable, depth, parse_device(device), stream)


class Prefetcher:
    """What `prefetch` returns: an iterator and a context manager."""

    def __init__(self, iterable: Iterable[Any], depth: int, device: int | None, stream: Any) -> None:
        source = iter(iterable)
        self._lane: _Lane = _HostLane() if device is None else _GpuLane(device, 2 * depth, depth, stream)
        self._work = _Work(source, self._lane, depth)
        self._finalizer = weakref.finalize(self, _Work.finish, self._work)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if not self._finalizer.alive:
            raise StopIteration
        try:
            self._lane.ask()
            item = self._work.take()
            if item is not _END:
                return self._lane.receive(item)
        except BaseException:
            self.close()
            raise
        self.close()
        raise StopIteration

    def close(self) -> None:
        """Ends the thread, once the iterable has given what it was asked for; there are no batches afterwards."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Lane(Protocol):
    """The way of the batches: what the thread does to each, and what whoever asks for it does."""

    def working(self) -> contextlib.AbstractContextManager[None]:
        """What the thread works within."""

    def send(self, batch: Any) -> Any:
        """In the thread: the batch, on its way."""

    def ask(self) -> None:
        """By the user, before a batch is taken, and before the thread may `send` one more."""

    def receive(self, batch: Any) -> Any:
        """By the user: the batch, for use."""

    def close(self) -> None:
        """After the thread has ended."""


class _HostLane:
    def working(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def send(self, batch: Any) -> Any:
        arrays_of(batch)  # refuses what a GPU would refuse
        return batch

    def ask(self) -> None:
        pass

    def receive(self, batch: Any) -> Any:
        return batch

    def close(self) -> None:
        pass


class _GpuLane:
    """Slots in a ring. The n-th batch is in the slot n modulo their number.

    Args:
        slots: at least `held` more than the batches that are read ahead.
        held: batches that the user is given before the first of them may be overwritten.
    """

    def __init__(self, device: int, slots: int, held: int, stream: Any) -> None:
        self._device, self._held, self._stream = device, held, stream
        self._sent = self._asked = 0
        with activated(device):
            self._copies = private_stream(device, "prefetch")
            # The copies' memory may have been somebody's who used it on that stream until now.
            order_after(self._copies, stream_handle(stream, device))
            self._slots = [Slot(device, self._copies) for _ in range(slots)]

    def working(self) -> contextlib.AbstractContextManager[None]:
        return activated(self._device)

    def send(self, batch: Any) -> Any:
        slot = self._slots[self._sent % len(self._slots)]
        self._sent += 1
        return slot, slot.fill(batch)

    def ask(self) -> None:
        if self._asked >= self._held:
            slot = self._slots[(self._asked - self._held) % len(self._slots)]
            with activated(self._device):
                call("cuEventRecord", slot.released, stream_handle(self._stream, self._device))
        self._asked += 1

    def receive(self, batch: Any) -> Any:
        slot, arrays = batch
        with activated(self._device):
            call("cuStreamWaitEvent", stream_handle(self._stream, self._device), slot.ready, 0)
        return arrays

    def close(self) -> None:
        with activated(self._device):
            order_after(self._copies, stream_handle(self._stream, self._device))
            for slot in self._slots:
                slot.close()


class _Failure:
    """What the thread met instead of a batch."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Work:
    """The thread and its queue; it knows nothing of the `Prefetcher`, whose end is its own."""

    def __init__(self, source: Iterator[Any], lane: _Lane, depth: int) -> None:
        self._lane = lane
        self._permits, self._stopped = threading.Semaphore(depth), threading.Event()
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_left_alone = False
        self._thread = threading.Thread(target=self._run, args=(source,), name="lt_runtime prefetch", daemon=True)
        self._thread.start()

    def take(self) -> Any:
        """The next batch, or `_END`; raises what came in its place."""
        self._permits.release()
        item = self._ready.get()
        if isinstance(item, _Failure):
            raise item.error
        return item

    def finish(self) -> None:
        """Ends the thread and frees what it used."""
        self._stopped.set()
        self._permits.release()
        if threading.current_thread() is self._thread:  # whose garbage collection may have found the `Prefetcher`
            self._is_left_alone = True
            return
        self._thread.join()
        self._lane.close()

    def _run(self, source: Iterator[Any]) -> None:
        try:
            with self._lane.working():
                while self._is_wanted():
                    self._ready.put(self._lane.send(next(source)))
        except StopIteration:
            self._ready.put(_END)
        except BaseException as error:
            self._ready.put(_Failure(error))
        if self._is_left_alone:
            self._lane.close()

    def _is_wanted(self) -> bool:
        self._permits.acquire()
        return not self._stopped.is_set()
