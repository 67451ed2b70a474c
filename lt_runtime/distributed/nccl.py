"""NCCL's collective operations on the arrays of a group's GPUs, and the thread that ends a group that hangs."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Final

import numpy as np
from cuda.bindings import driver

from lt_runtime.arrays.operand import CUPY, library_of
from lt_runtime.distributed.protocols import Wire
from lt_runtime.errors import GroupError, MissingLibraryError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call, check, function
from lt_runtime.problem import type_name

MOST_BLOCKS: Final = 32
"""The largest number of thread blocks of a collective operation; each keeps a multiprocessor from the products.

On two H200s, steps took longer with fewer blocks, because sums did: 235 MB took 0.86 ms with 32, and 1.06 ms with 16.
"""
POLL_S: Final = 0.5


def nccl() -> tuple[ModuleType, ModuleType]:
    """The modules of nccl4py: its interface, and its bindings, which take addresses.

    The interface's own collectives take arrays, and import PyTorch to recognise them.

    Raises:
        MissingLibraryError: nccl4py or NCCL is not installed.
    """
    try:
        import nccl.core as core
        from nccl.bindings import nccl as bindings

        if core.get_version().libnccl is None:
            raise ImportError("libnccl.so is missing")
    except ImportError as error:
        raise MissingLibraryError(f"groups of GPUs need NCCL: pip install 'lt_runtime[nccl]' ({error})") from error
    return core, bindings


class NcclEngine:
    """A communicator over one GPU of each process, see `Engine`.

    Operations run on the stream that the caller gives; captured operations become nodes of the graph. A process alone
    copies the arrays of a sum into a spare buffer, so that its graph has a node for each, as in a larger group.

    Args:
        wire: exchanges values of the host between the processes.
        timeout: see `Watchdog`.

    Attributes:
        closes_first: functions that free graphs with operations of this engine, which `close` calls first.
    """

    def __init__(self, wire: Wire, device: int, timeout: float) -> None:
        # A step has one graph in flight at a time, and no other operations of the communicator beside it.
        os.environ.setdefault("NCCL_GRAPH_MIXING_SUPPORT", "0")
        # NCCL connects the processes now, and not in the first operation of each kind, which may be captured.
        os.environ.setdefault("NCCL_RUNTIME_CONNECT", "0")
        self._core, self._bindings = nccl()
        self._device, self._is_alone = device, wire.size == 1
        self.closes_first: list[Callable[[], object]] = []
        self._spare: list[Any] = []  # outputs of sums in a group of one process; graphs may hold their addresses
        with activated(device):
            _check_places(wire, device)
            first = bytes(self._core.get_unique_id()) if wire.rank == 0 else b""
            unique = self._core.UniqueId.from_bytes(wire.gather(first, "NCCL's unique id")[0])
            config = self._core.NCCLConfig(max_ctas=MOST_BLOCKS)
            self._communicator = self._core.Communicator.init(wire.size, wire.rank, unique, config)
        self._handle = self._bindings.Comm(self._communicator.ptr)
        self._watchdog = None if self._is_alone else Watchdog(wire, device, self._communicator, timeout)

    def sum(self, arrays: Sequence[Any], stream: int | None) -> None:
        """See `Engine.sum`."""
        targets = self._spares(arrays, stream or 0) if self._is_alone else _addresses(arrays)
        self._call("all_reduce", arrays, targets, stream, int(self._core.SUM))

    def maximum(self, arrays: Sequence[Any], stream: int | None) -> None:
        """See `Engine.maximum`."""
        self._call("all_reduce", arrays, _addresses(arrays), stream, int(self._core.MAX))

    def reduce(self, arrays: Sequence[Any], owner: int, stream: int | None) -> None:
        """See `Engine.reduce`."""
        self._call("reduce", arrays, _addresses(arrays), stream, int(self._core.SUM), owner)

    def broadcast(self, arrays: Sequence[Any], root: int, stream: int | None) -> None:
        """See `Engine.broadcast`."""
        self._call("broadcast", arrays, _addresses(arrays), stream, root)

    def launched(self, stream: int) -> None:
        """Tells the watchdog that a step with operations of this engine has been put on `stream`."""
        if self._watchdog is not None:
            self._watchdog.note(stream)

    def close(self) -> None:
        """See `Engine.close`."""
        if self._watchdog is not None:
            self._watchdog.stop()
        for each in self.closes_first:
            each()
        with activated(self._device):
            self._communicator.destroy()

    def _call(
        self, name: str, arrays: Sequence[Any], targets: Sequence[int], stream: int | None, *options: int
    ) -> None:
        """Calls a function of NCCL for each array, in one group call, which NCCL runs as one kernel."""
        run = getattr(self._bindings, name)
        with activated(self._device), self._core.group():
            for array, source, target in zip(arrays, _addresses(arrays), targets, strict=True):
                kind = int(getattr(self._core, type_name(array.dtype).upper()))
                run(source, target, math.prod(array.shape), kind, *options, self._handle, stream or 0)

    def _spares(self, arrays: Sequence[Any], stream: int) -> list[int]:
        """The address of a buffer that nothing reads, for each array; it is as large as the largest array."""
        size = max(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
        if not self._spare or self._spare[-1].nbytes < size:
            self._spare.append(CUPY.empty((size,), np.dtype(np.uint8), self._device, stream))
        return [self._spare[-1].data.ptr] * len(arrays)


def _addresses(arrays: Sequence[Any]) -> list[int]:
    return [library_of(array).address(array) for array in arrays]


def _check_places(wire: Wire, device: int) -> None:
    """Raises `GroupError` in all processes if two of them have the same GPU, which NCCL refuses."""
    own = bytes(call("cuDeviceGetUuid", call("cuDeviceGet", device)).bytes)
    places = wire.gather(own, "the GPUs of all processes")
    for rank, place in enumerate(places):
        if (first := places.index(place)) != rank:
            others = "start as many processes on a machine as it has GPUs, and give each model its own device"
            raise GroupError(f"ranks {first} and {rank} have the same GPU; {others}")


class Watchdog:
    """A thread that ends all processes if NCCL reports an error, or if a step waits too long for another process.

    A step waits too long if it has not ended although the process has launched no other step for `timeout` seconds.
    """

    def __init__(self, wire: Wire, device: int, communicator: Any, timeout: float) -> None:
        self._wire, self._device, self._communicator, self._timeout = wire, device, communicator, timeout
        self._steps, self._stopped = 0, threading.Event()
        with activated(device):
            self._event = int(call("cuEventCreate", driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
        self._record = function("cuEventRecord")
        self._thread = threading.Thread(target=self._watch, name="lt_runtime watchdog", daemon=True)
        self._thread.start()

    def note(self, stream: int) -> None:
        """Called after a step has been put on `stream`."""
        if status := self._record(self._event, stream):
            check("cuEventRecord", status)
        self._steps += 1

    def stop(self) -> None:
        """Ends the thread, and waits for its end."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _watch(self) -> None:
        seen, since = 0, time.monotonic()
        with activated(self._device):
            while not self._stopped.wait(POLL_S):
                steps, now = self._steps, time.monotonic()
                if error := int(self._communicator.get_async_error()):
                    self._end(f"NCCL reports {nccl()[0].get_error_string(error)}")
                elif steps != seen or driver.cuEventQuery(self._event)[0] != driver.CUresult.CUDA_ERROR_NOT_READY:
                    seen, since = steps, now
                elif now - since > self._timeout:
                    self._end(f"its step {steps} has not ended for {self._timeout:g} s: it waits for another rank")

    def _end(self, why: str) -> None:
        if not self._stopped.is_set():
            self._wire.abort(why)
