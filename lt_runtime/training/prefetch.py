"""Reads batches ahead on a thread, and copies them to a GPU through page-locked memory into reused buffers."""

from __future__ import annotations

import collections
import contextlib
import itertools
import queue
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from lt_runtime.arguments import Uncopied, integer, shown
from lt_runtime.arrays.libraries import TorchLibrary, cupy, cupy_stream, is_from
from lt_runtime.arrays.operand import HOST, check_plain
from lt_runtime.errors import ArgumentError, DriverError, KindError, OperandError
from lt_runtime.gpu.devices import activated, parse_device
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import aligned
from lt_runtime.gpu.streams import cupy_current, order_after, private_stream, stream_handle
from lt_runtime.nn.device import ComputeDevice

Batch: TypeAlias = Any
"""A NumPy array or a PyTorch tensor on the CPU, or a tuple, list or dict of batches."""

_MEMORY_TYPE: Final = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_NO_TIMING: Final = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
_HOST_MEMORY: Final = int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)


def map_arrays(batch: Batch, function: Callable[[Any], Any], where: str = "the batch") -> Batch:
    """A batch with the same structure, in which each array or tensor is replaced by `function(array)`.

    Args:
        where: the name of the batch in errors.

    Raises:
        OperandError: an item of the batch is no NumPy array and no dense tensor on the CPU, or is a masked array or a
            `numpy.matrix`.
    """
    if is_from(batch, "torch"):
        _check_tensor(where, batch)
        return function(batch)
    if isinstance(batch, np.ndarray):
        check_plain(where, batch)
        if batch.dtype.hasobject:
            raise OperandError(f"{where} holds Python objects; accepted are arrays of numbers")
        return function(batch)
    if isinstance(batch, dict):
        return {key: map_arrays(part, function, f"{where}[{key!r}]") for key, part in batch.items()}
    if not isinstance(batch, (tuple, list)):
        name = f"{type(batch).__module__}.{type(batch).__name__}".removeprefix("builtins.")
        also = "PyTorch tensors on the CPU, and tuples, lists and dicts of them"
        raise OperandError(f"{where} is a {name}; accepted are NumPy arrays, {also}")
    parts = [map_arrays(part, function, f"{where}[{i}]") for i, part in enumerate(batch)]
    if isinstance(batch, list):
        return parts
    return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)


def _check_tensor(where: str, tensor: Any) -> None:
    if tensor.device.type != "cpu":
        raise OperandError(f"{where} is a tensor on {tensor.device}; accepted are tensors on the CPU: {where}.cpu()")
    if str(tensor.layout) != "torch.strided" or tensor.is_quantized:
        kind = "quantised" if tensor.is_quantized else f"of layout {tensor.layout}"
        raise OperandError(f"{where} is a tensor {kind}; accepted are dense tensors")


def _copied(array: Any) -> Any:
    return np.array(array) if isinstance(array, np.ndarray) else array.detach().clone()


def _memory_of(array: Any) -> NDArray[Any]:
    """Returns a NumPy array itself, and a tensor as row-major bytes, because NumPy may lack its type."""
    if isinstance(array, np.ndarray):
        return array
    memory: NDArray[Any] = array.detach().contiguous().reshape(-1).view(sys.modules["torch"].uint8).numpy()
    return memory


def is_pinned(array: NDArray[Any]) -> bool:
    """Whether an array lies in page-locked memory, from which a GPU can copy while the host continues."""
    try:
        return int(call("cuPointerGetAttribute", _MEMORY_TYPE, array.ctypes.data)) == _HOST_MEMORY
    except DriverError:  # the driver knows no address in pageable memory
        return False


@dataclass(eq=False)
class Slot:
    """Memory for one batch on the host and on the device. It is reused, and grows with the largest batch.

    Attributes:
        ready: an event, recorded after the copies of the batch.
        released: an event, which the user records after all work that reads the batch.
        staging: page-locked memory.
        buffer: a CuPy array of as many bytes; None before the first batch.
    """

    ready: int
    released: int
    staging: NDArray[Any] = field(default_factory=lambda: np.empty(0, np.uint8))
    buffer: Any = None


_MOST_AHEAD: Final = 1 << 16


def prefetch(iterable: Iterable[Any], depth: int = 2, device: object = "auto", stream: Any = None) -> Prefetcher:
    """Reads the batches of an iterable ahead in a thread, and copies them to a GPU while earlier batches are used.

    For a GPU, a batch is copied through page-locked memory, on a separate stream, into buffers that are reused. A batch
    stays unchanged for all work that is put on `stream` before `depth` more batches have been taken; copy the arrays
    that you keep for longer. Only the reading thread waits for the GPU. Arrays that are page-locked already are copied
    directly, before the next batch is taken from the iterable. On the CPU each batch is copied into new arrays. In all
    cases the iterable may fill the same arrays again and again.

    Args:
        iterable: yields batches, as a `torch.utils.data.DataLoader` does. A batch is a NumPy array or a PyTorch tensor
            on the CPU, or a tuple, list or dict of batches.
        depth: the number of batches that are read ahead, from 1 to 65,536.
        device: as in `lt.MLP`, or a model's `device`.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, CuPy's current stream at each
            use, or PyTorch's if there are tensors. It is the stream of the work that reads the batches.

    Returns:
        An iterator; for a GPU its batches have CuPy arrays for NumPy's, and tensors for tensors. Several threads may
        take batches from it: each batch is given once, an error is raised in the thread that asked for the batch, and
        the iterator ends for all other threads. The reading thread ends when the iterable ends, at `close()`, at the
        end of a `with` block, or when the iterator is garbage-collected. It first completes a running `next`.

    Raises:
        KindError: `iterable` is no iterable, or `stream` no stream.
        ArgumentError: a depth outside its range, or a device that does not exist.
        DeviceError: `stream` is one of another device.
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


class Prefetcher(Uncopied, Iterator[Any], contextlib.AbstractContextManager["Prefetcher"]):
    """The iterator that `prefetch` returns, also a context manager. Any number of threads may take batches from it."""

    _instead = "call lt.prefetch again"

    def __init__(self, source: Iterator[Any], depth: int, device: int | None, stream: Any) -> None:
        lane = _HostLane() if device is None else _GpuLane(device, depth, stream)
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
    """A lane transfers batches from the reading thread to the user. The host's lane copies each batch once."""

    def working(self) -> contextlib.AbstractContextManager[None]:
        """Context manager around the reading thread's work."""
        return contextlib.nullcontext()

    def send(self, batch: Any) -> Any:
        """Starts a batch's copies; called by the reading thread."""
        return map_arrays(batch, _copied)

    def ask(self) -> None:
        """Prepares for one more `send`; called by the user before the reading thread may send."""

    def receive(self, batch: Any) -> Any:
        """Makes a sent batch ready for use; called by the user."""
        return batch

    def close(self) -> None:
        """Frees the lane's buffers; called once the reading thread has ended."""


class _GpuLane(_HostLane):
    """Transfers batches to a GPU through a ring of slots: each new batch overwrites the oldest one.

    Args:
        depth: the number of batches that are read ahead, and of the latest batches that the user may still read.
    """

    def __init__(self, device: int, depth: int, stream: Any) -> None:
        self._device, self._depth, self._stream, self._current = device, depth, stream, cupy_current
        self._given: collections.deque[Slot] = collections.deque()
        with activated(device), contextlib.ExitStack() as stack:
            self._copies = private_stream(device, "prefetch")
            # Waits for earlier work on the user's stream, whose freed memory CuPy's pool may hand out for the buffers.
            order_after(self._copies, self._user_stream())
            events = list[int]()
            for _ in range(4 * depth):
                events.append(call("cuEventCreate", _NO_TIMING))
                stack.callback(call, "cuEventDestroy", events[-1])
            self._events = stack.pop_all()
        self._slots = [*map(Slot, events[::2], events[1::2])]
        self._turns = itertools.cycle(self._slots)

    def _user_stream(self) -> int:
        return stream_handle(self._stream, self._device, self._current)

    def working(self) -> contextlib.AbstractContextManager[None]:
        return activated(self._device)

    def send(self, batch: Any) -> Any:
        """See `_HostLane`. The caller may change the batch's arrays as soon as this method returns.

        The method first waits until the slot's previous batch has been copied from the slot's memory on the host.
        """
        slot, arrays, direct = next(self._turns), list[Any](), list[NDArray[Any]]()
        map_arrays(batch, arrays.append)
        sizes = [aligned(array.nbytes) for array in arrays]
        call("cuEventSynchronize", slot.ready)
        if sum(sizes) > slot.staging.size:
            with cupy_stream(self._device, self._copies) as module:
                buffer = module.empty(sum(sizes), np.uint8)
                slot.staging = np.frombuffer(module.cuda.alloc_pinned_memory(sum(sizes)), np.uint8, sum(sizes))
                slot.buffer = buffer
        call("cuStreamWaitEvent", self._copies, slot.released, 0)
        offsets = itertools.accumulate(sizes, initial=0)
        copied = map_arrays(batch, lambda array: self._copy(array, slot, next(offsets), direct))
        call("cuEventRecord", slot.ready, self._copies)
        if direct:
            call("cuEventSynchronize", slot.ready)
        return slot, copied

    def ask(self) -> None:
        if len(self._given) == self._depth:
            with activated(self._device):
                call("cuEventRecord", self._given.popleft().released, self._user_stream())

    def receive(self, batch: Any) -> Any:
        slot, arrays = batch
        self._given.append(slot)
        with activated(self._device):
            call("cuStreamWaitEvent", self._user_stream(), slot.ready, 0)
        return arrays

    def close(self) -> None:
        """See `_HostLane`; waits for the copies. CuPy arrays stay valid for as long as they are referenced."""
        with activated(self._device), self._events:
            for slot in self._slots:
                call("cuEventSynchronize", slot.ready)
            order_after(self._copies, self._user_stream())

    def _copy(self, given: Any, slot: Slot, offset: int, direct: list[NDArray[Any]]) -> Any:
        """Puts the copy of one array on the stream; adds a page-locked array, which is copied directly, to `direct`."""
        module, array = cupy(), _memory_of(given)
        is_tensor = array is not given
        if is_tensor:
            self._current = TorchLibrary().current_stream
        if not array.size:
            place = f"cuda:{self._device}"
            return given.new_empty(given.shape, device=place) if is_tensor else module.empty(array.shape, array.dtype)
        if array.flags.c_contiguous and is_pinned(array):
            source = array
            direct.append(array)
        else:
            source = slot.staging[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
            np.copyto(source, array)
        call("cuMemcpyHtoDAsync", slot.buffer.data.ptr + offset, source.ctypes.data, array.nbytes, self._copies)
        copied = module.ndarray(array.shape, array.dtype, slot.buffer.data + offset)
        return sys.modules["torch"].from_dlpack(copied).view(given.dtype).reshape(given.shape) if is_tensor else copied


class _Work:
    """The reading thread and its queue. They do not refer to the `Prefetcher`, whose finalizer ends the thread.

    Of the threads that take batches, one holds the lock `_turn` and waits for the queue; the others wait for the lock.
    A thread that gets no batch calls `finish`, which wakes the next waiting thread.
    """

    def __init__(self, source: Iterator[Any], lane: _HostLane, depth: int) -> None:
        self._lane = lane
        self._permits, self._stopped = threading.Semaphore(depth), threading.Event()
        self._ready: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._turn = threading.RLock()  # reentrant: a signal handler may call `close` in a thread that waits in `take`
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
        """Ends the reading thread and frees the lane's buffers."""
        self._stopped.set()
        self._permits.release()
        # the reading thread itself has collected the `Prefetcher`: it cannot wait for itself
        if threading.current_thread() is self._thread:
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
