"""The driver's functions on a pretended GPU, as `cuda.bindings.driver` and libcuda.so.1 have them."""

# ruff: noqa: N802  # the functions have the names that the driver gives them

from __future__ import annotations

import copy
import ctypes
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from cuda.bindings import driver

from tests.support.device_memory import DeviceMemory, FullError
from tests.support.fake_streams import KERNEL, MEMCPY, MEMSET, Capture, DriverStatusError, Event, Node, Status, Streams
from tests.support.races import Touch

_CONTEXT: Final = 1
_NEEDS_CONTEXT: Final = ("cuCtxSynchronize", "cuEvent", "cuGraph", "cuLaunch", "cuMem", "cuProfiler", "cuStream")
"""Prefixes of the names of driver functions that fail in a thread without a context."""
_MAX_GRID_YZ: Final = 65535
_ATTRIBUTE = driver.CUdevice_attribute
H200: Final[Mapping[Any, int]] = {
    _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: 9,
    _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: 0,
    _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: 132,
    _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: 232448,
    _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: 233472,
    # A small L2 cache, so that the tuner rotates through few buffers.
    _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: 64 << 10,
    _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_CLOCK_RATE: 1980000,
    _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: 3201000,
    _ATTRIBUTE.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: 6144,
}

Work = tuple[Callable[[], None], Callable[[], Iterable[Touch]], str]
"""A launch as work: a function that runs the kernel, one that returns the touched memory, and the kernel's name."""
Launcher = Callable[[int, int, tuple[int, int, int], tuple[int, int, int], int], Work]
"""Type of a function that turns a kernel's launch into `Work`.

The function's arguments are the kernel's handle, the address of the kernel's argument block, the grid, the block, and
the bytes of shared memory.
"""


class LaunchConfig(ctypes.Structure):
    """Stands in for `CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_memory", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    )


class FakeDriver:
    """The driver's functions, as methods of the same names. They return results, and raise `DriverStatusError` for an
    error status.

    Args:
        launcher: turns a kernel's launch into `Work`, with a copy of the argument block.
        functions: stand-ins for the driver's functions about modules and kernels.

    Attributes:
        elsewhere: the GPU that a stream belongs to, by handle, if it is another GPU.
        contexts: the stack of current contexts; a test empties it to begin as a process does.
        is_lost: whether work has accessed an illegal address.
        profiler_calls: the calls "start" and "stop" that external profilers would have got.
    """

    def __init__(
        self, memory: DeviceMemory, streams: Streams, launcher: Launcher, functions: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._memory, self._streams, self._launcher, self._more = memory, streams, launcher, functions
        self._events: dict[int, Event] = {}
        self._graphs: dict[int, Capture] = {}
        self._handles = itertools.count(0x1000, 0x10)
        self._pinned: dict[int, int] = {}
        self._kept: list[Any] = []
        self._mode = threading.local()
        self.elsewhere: dict[int, int] = {}
        self.contexts = [_CONTEXT]
        self.is_lost = False
        self.profiler_calls: list[str] = []

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """Returns all driver functions, by name."""
        own = {name: getattr(self, name) for name in dir(self) if name.startswith("cu")}
        return {**own, **self._more}

    def by_ctypes(self, name: str) -> Callable[..., int]:
        """Wraps a function as libcuda.so.1 exports it: it writes results to addresses and returns a status."""
        known = {
            "cuCtxGetDevice": self._store_device,
            "cuEventRecord": self.cuEventRecord,
            "cuGraphLaunch": self.cuGraphLaunch,
            "cuLaunchKernelEx": self._launch,
            "cuMemcpyHtoDAsync_v2": self._upload,
            "cuStreamIsCapturing": self._store_capturing,
        }[name]

        @functools.wraps(known)
        def run(*arguments: Any) -> int:
            status, _ = self._called(name, known, arguments)
            return int(status)

        return run

    def by_bindings(self, name: str) -> Callable[..., tuple[Any, ...]]:
        """Gives a pretended driver function the interface of `cuda.bindings`: it returns the status and the results."""
        known = self._more.get(name) or getattr(self, name)

        def run(*arguments: Any) -> tuple[Any, ...]:
            if not self.contexts and name.startswith(_NEEDS_CONTEXT):
                return (Status.CUDA_ERROR_INVALID_CONTEXT, None)
            status, result = self._called(name, known, arguments)
            if status != Status.CUDA_SUCCESS:
                return (status, None)
            results = result if isinstance(result, tuple) else () if result is None else (result,)
            return (status, *results)

        return run

    def _called(self, name: str, known: Callable[..., Any], arguments: Any) -> tuple[Any, Any]:
        """Calls a function; returns its status and its result.

        After an illegal access all calls that need a context fail.
        """
        if self.is_lost and name.startswith(_NEEDS_CONTEXT):
            return Status.CUDA_ERROR_ILLEGAL_ADDRESS, None
        try:
            return Status.CUDA_SUCCESS, known(*arguments)
        except DriverStatusError as fault:
            self.is_lost |= fault.status == Status.CUDA_ERROR_ILLEGAL_ADDRESS
            return fault.status, None

    def pin(self, address: int, size: int) -> None:
        """Makes memory of the host page-locked."""
        self._pinned[address] = size

    def cuGetErrorString(self, status: Any) -> bytes:
        return f"the pretended driver's {Status(status).name}".encode()

    # Functions of devices and contexts

    def cuInit(self, _: int) -> None:
        pass

    def cuDriverGetVersion(self) -> int:
        return 13000

    def cuProfilerStart(self) -> None:
        self.profiler_calls.append("start")

    def cuProfilerStop(self) -> None:
        self.profiler_calls.append("stop")

    def cuDeviceGetCount(self) -> int:
        return 1

    def cuDeviceGet(self, ordinal: int) -> int:
        return ordinal

    def cuDeviceGetName(self, length: int, _: int) -> bytes:
        return b"NVIDIA H200, pretended".ljust(length, b"\0")

    def cuDeviceGetUuid(self, ordinal: int) -> Any:
        return SimpleNamespace(bytes=bytes([ordinal] * 16))

    def cuDeviceGetAttribute(self, attribute: Any, _: int) -> int:
        return H200[attribute]

    def cuDeviceTotalMem(self, _: int) -> int:
        return 141 << 30

    def cuDevicePrimaryCtxRetain(self, _: int) -> int:
        return 1

    def cuDevicePrimaryCtxGetState(self, _: int) -> tuple[int, int]:
        return 0, 1

    def cuCtxSynchronize(self) -> None:
        if self._streams.captures:
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        self._streams.synchronize_all()

    def cuCtxGetCurrent(self) -> int:
        return _CONTEXT

    def cuCtxGetDevice(self) -> int:
        if not self.contexts:
            raise DriverStatusError(Status.CUDA_ERROR_INVALID_CONTEXT)
        return 0

    def cuCtxPushCurrent(self, context: int) -> None:
        self.contexts.append(context)

    def cuCtxPopCurrent(self) -> None:
        self.contexts.pop()

    def cuCtxSetCurrent(self, context: int) -> None:
        self.contexts[-1:] = [context]

    def _store_device(self, out: ctypes.c_int) -> None:
        out.value = self.cuCtxGetDevice()

    # Memory

    def cuMemAlloc(self, size: int) -> int:
        strict = [each for each in self._streams.captures.values() if each.is_strict]
        if strict and not getattr(self._mode, "relaxed", False):
            strict[0].is_broken = True
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        try:
            return self._memory.allocate(size)
        except FullError:
            raise DriverStatusError(Status.CUDA_ERROR_OUT_OF_MEMORY) from None

    def cuMemFree(self, address: int) -> None:
        self._memory.free(address)

    def cuPointerGetAttribute(self, attribute: Any, address: int) -> int:
        kinds = driver.CUpointer_attribute
        is_pinned = any(start <= address < start + size for start, size in self._pinned.items())
        if attribute == kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE and is_pinned:
            return int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
        if attribute == kinds.CU_POINTER_ATTRIBUTE_MEMORY_TYPE and self._memory.holds(address):
            return int(driver.CUmemorytype.CU_MEMORYTYPE_DEVICE)
        if attribute != kinds.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL or not self._memory.holds(address):
            raise DriverStatusError(Status.CUDA_ERROR_INVALID_VALUE)
        return 0

    def cuMemsetD8Async(self, address: int, value: int, count: int, stream: int) -> None:
        self._fill(np.uint8, address, value, (count,), (1,), stream)

    def cuMemsetD32Async(self, address: int, value: int, count: int, stream: int) -> None:
        self._fill(np.uint32, address, value, (count,), (1,), stream)

    def cuMemsetD2D8Async(self, address: int, pitch: int, value: int, width: int, height: int, stream: int) -> None:
        self._fill(np.uint8, address, value, (height, width), (pitch, 1), stream)

    def _fill(
        self, kind: Any, address: int, value: int, shape: tuple[int, ...], strides: tuple[int, ...], stream: int
    ) -> None:
        size = np.dtype(kind).itemsize
        extent = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True)) + 1
        flat = self._memory.view(address, extent * size, "a memset's target").view(kind)
        target = np.lib.stride_tricks.as_strided(flat, shape, tuple(size * stride for stride in strides))

        def run() -> None:
            target[...] = value

        touches = self._memory.touched(address, extent * size, "its target", writes=True)
        self._streams.put(stream, MEMSET, "memset", run, lambda: touches)
        if stream in self._streams.captures:
            self._streams.captures[stream].nodes[-1].value = value

    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        to, of = self._memory.view(target, size, "a copy's target"), self._memory.view(source, size, "a copy's source")
        self._copy(to, of, stream, (target, source))

    def cuMemcpyHtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        of = _host_bytes(source, size)
        is_pinned = any(start <= source < start + length for start, length in self._pinned.items())
        # As the real driver, a copy reads pageable host memory before the call returns, and page-locked memory when it
        # runs.
        to = self._memory.view(target, size, "a copy's target")
        self._copy(to, of if is_pinned else of.copy(), stream, (target, source))

    def _upload(self, target: int, source: bytes, size: int, stream: int) -> None:
        to = self._memory.view(target, size, "a copy's target")
        self._copy(to, np.frombuffer(source[:size], np.uint8), stream, (target, id(source)))

    def cuMemcpyDtoHAsync(self, target: int, source: int, size: int, stream: int) -> None:
        of = self._memory.view(source, size, "a copy's source")
        self._copy(_host_bytes(target, size), of, stream, (target, source))

    def _copy(self, target: Any, source: Any, stream: int, ends: tuple[int, int]) -> None:
        def run() -> None:
            target[...] = source

        touches = [
            *self._memory.touched(ends[0], target.size, "its target", writes=True),
            *self._memory.touched(ends[1], target.size, "its source", writes=False),
        ]
        self._streams.put(stream, MEMCPY, "copy", run, lambda: touches)
        if stream in self._streams.captures:
            self._streams.captures[stream].nodes[-1].ends = ends

    # Functions of streams and events

    def cuStreamGetDevice(self, stream: int) -> int:
        if stream in self._streams.captures:  # the real call fails and also invalidates the capture
            raise DriverStatusError(Status.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
        return self.elsewhere.get(stream, 0)

    def cuStreamCreate(self, _: Any) -> int:
        return next(self._handles)

    def cuStreamSynchronize(self, stream: int) -> None:
        self._streams.synchronize(stream)

    def cuStreamWaitEvent(self, stream: int, event: int, _: int) -> None:
        self._streams.wait_event(stream, self._events[event])

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> Any:
        modes = driver.CUstreamCaptureMode
        relaxed, other = modes.CU_STREAM_CAPTURE_MODE_RELAXED, modes.CU_STREAM_CAPTURE_MODE_GLOBAL
        previous = relaxed if getattr(self._mode, "relaxed", False) else other
        self._mode.relaxed = mode == relaxed
        return previous

    def _store_capturing(self, stream: int | None, out: int) -> None:
        ctypes.c_int.from_address(out).value = int((stream or 0) in self._streams.captures)

    def cuEventCreate(self, _: Any) -> int:
        handle = next(self._handles)
        self._events[handle] = Event()
        return handle

    def cuEventDestroy(self, event: int) -> None:
        del self._events[event]

    def cuEventRecord(self, event: int, stream: int) -> None:
        self._streams.record(self._events[event], stream)

    def cuEventRecordWithFlags(self, event: int, stream: int, flags: Any) -> None:
        assert flags == driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        self._streams.record_in_graph(self._events[event], stream)

    def cuEventQuery(self, event: int) -> None:
        if not self._streams.has_run(self._events[event]):
            raise DriverStatusError(Status.CUDA_ERROR_NOT_READY)

    def cuEventSynchronize(self, event: int) -> None:
        self._streams.wait_on_host(self._events[event])

    def cuEventElapsedTime(self, first: int, last: int) -> float:
        for event in (first, last):
            self._streams.wait_on_host(self._events[event])
        return (self._events[last].at_us - self._events[first].at_us) / 1e3

    # Functions of captures and graphs

    def cuStreamBeginCapture(self, stream: int, mode: Any) -> None:
        self._streams.begin_capture(stream)
        is_strict = mode == driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self._streams.captures[stream].is_strict = is_strict

    def cuStreamEndCapture(self, stream: int) -> int:
        captured = self._streams.end_capture(stream)
        return self._handle_of(captured)

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:
        status, capture = driver.CUstreamCaptureStatus, self._streams.captures.get(stream)
        if capture is None:
            return status.CU_STREAM_CAPTURE_STATUS_NONE, 0, 0, [], [], 0
        if capture.is_broken:
            return status.CU_STREAM_CAPTURE_STATUS_INVALIDATED, 0, 0, [], [], 0
        tails = [capture.nodes[index] for index in sorted(capture.tails[stream])]
        return status.CU_STREAM_CAPTURE_STATUS_ACTIVE, self._handle_of(capture), capture.handle, tails, [], len(tails)

    def _handle_of(self, capture: Capture) -> int:
        if not capture.handle:
            capture.handle = next(self._handles)
            self._graphs[capture.handle] = capture
        return capture.handle

    def cuGraphGetNodes(self, graph: int, count: int) -> tuple[list[Any], int]:
        nodes = self._graphs[graph].nodes
        return list(nodes[:count]), len(nodes)

    def cuGraphNodeGetType(self, node: int) -> Any:
        return self._node(node).kind

    def cuGraphKernelNodeGetParams(self, node: int) -> Any:
        arguments = self._node(node).arguments
        if arguments is None:  # the node is a kernel of cuBLASLt, whose arguments the driver does not reveal
            raise DriverStatusError(Status.CUDA_ERROR_INVALID_VALUE)
        function, block = arguments
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        self._kept.append(pointers)
        values = ctypes.addressof(pointers)
        return SimpleNamespace(func=function, kern=0, kernelParams=values, run=self._node(node).run)

    def cuGraphMemsetNodeGetParams(self, node: int) -> Any:
        return SimpleNamespace(value=self._node(node).value, run=self._node(node).run)

    def cuGraphExecKernelNodeSetParams(self, graph: int, node: int, params: Any) -> None:
        _, index = self.place_of(node)
        self._graphs[graph].nodes[index].run = params.run

    def cuGraphExecMemsetNodeSetParams(self, graph: int, node: int, params: Any, context: int) -> None:
        assert context == _CONTEXT
        self.cuGraphExecKernelNodeSetParams(graph, node, params)

    def cuGraphMemcpyNodeGetParams(self, node: int) -> Any:
        target, source = self._node(node).ends
        host, device = driver.CUmemorytype.CU_MEMORYTYPE_HOST, driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        kinds = [device if self._memory.holds(end) else host for end in (target, source)]
        return SimpleNamespace(
            dstMemoryType=kinds[0], dstHost=target, dstDevice=target,
            srcMemoryType=kinds[1], srcHost=source, srcDevice=source,
        )  # fmt: skip

    def _node(self, handle: int) -> Node:
        graph, index = self.place_of(handle)
        return graph.nodes[index]

    def place_of(self, node: int) -> tuple[Capture, int]:
        """Finds a node by its handle: returns its graph, and its index in the graph."""
        places = ((graph, index) for graph in self._graphs.values() for index, each in enumerate(graph.nodes))
        return next((graph, index) for graph, index in places if graph.nodes[index].handle == node)

    def cuGraphInstantiate(self, graph: int, _: int) -> int:
        handle = next(self._handles)
        nodes = [copy.copy(node) for node in self._graphs[graph].nodes]
        self._graphs[handle] = dataclasses.replace(self._graphs[graph], nodes=nodes)
        self._streams.observer.instantiated(self._graphs[graph].handle, handle)
        return handle

    def cuGraphLaunch(self, graph: int, stream: int | None) -> None:
        self._streams.launch_graph(self._graphs[graph], stream or 0, graph)

    def cuGraphDestroy(self, graph: int) -> None:
        del self._graphs[graph]

    def cuGraphExecDestroy(self, graph: int) -> None:
        del self._graphs[graph]

    # Kernels

    def _launch(self, config_address: int, function: int, arguments: int, _: Any) -> None:
        config = LaunchConfig.from_address(config_address)
        params = ctypes.c_void_p.from_address(arguments).value or 0
        grid, block = tuple(config.grid), tuple(config.block)
        if 0 in grid or max(grid[1:]) > _MAX_GRID_YZ:
            raise DriverStatusError(Status.CUDA_ERROR_INVALID_VALUE)
        self._streams.put(
            config.stream or 0, KERNEL, "kernel", *self._launcher(function, params, grid, block, config.shared_memory)
        )
        capture = self._streams.captures.get(config.stream or 0)
        if capture is not None:
            _, size = self._more["cuFuncGetParamInfo"](function, 0)
            capture.nodes[-1].arguments = function, ctypes.create_string_buffer(ctypes.string_at(params, size), size)


def _host_bytes(address: int, size: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address)) if size else np.empty(0, np.uint8)
