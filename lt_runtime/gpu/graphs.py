"""CUDA graphs: work that is captured once and launched many times, and the nodes of captured graphs.

A node contains a kernel with its arguments, a memset with its value, or a copy with source and destination.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

from cuda.bindings import driver

from lt_runtime.errors import DriverError, GpuError
from lt_runtime.gpu.driver import call, check, function
from lt_runtime.gpu.streams import private_stream
from lt_runtime.ranges import listening

stand_in: Callable[[Graph, Callable[[], Graph]], Graph] | None = None
"""Hook by which a profile times training steps: it launches copies of their graphs that contain events. The hook takes
the graph to launch, and a function that captures the same work again; it returns the graph to launch instead.
"""

_lock = threading.Lock()
_with_ranges: weakref.WeakSet[Graph] = weakref.WeakSet()
_HOST: Final = driver.CUmemorytype.CU_MEMORYTYPE_HOST
_UNIFIED: Final = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
_PREFIX: Final = "CU_GRAPH_NODE_TYPE_"
_ATTEMPTS: Final = 3
_INVALIDATED: Final = int(driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)
_UNSUPPORTED: Final = int(driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED)
"""Status of a call that CUDA forbids during a capture, so that capturing again would fail in the same way."""
_ACTIVE: Final = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE


def rehearse(run: Callable[[int], object], device: int) -> list[str]:
    """Like `captured_nodes`, on a private stream of `device`, which must be current."""
    with _lock:
        return captured_nodes(run, private_stream(device, "rehearsal"))


def captured_nodes(run: Callable[[int], object], stream: int) -> list[str]:
    """Captures `run(stream)` and returns the types of the graph's nodes, such as "KERNEL"; nothing is executed.

    Args:
        run: see `Graph`.
        stream: see `Graph`.

    Raises:
        Whatever `run` raises; the capture is ended all the same.
    """
    graph = _capture(run, stream)
    try:
        return [node_type(node) for node in nodes_of(graph)]
    finally:
        call("cuGraphDestroy", graph)


def node_type(node: int) -> str:
    """A node's type, such as "KERNEL" or "MEM_ALLOC"."""
    return str(call("cuGraphNodeGetType", node).name.removeprefix(_PREFIX))


def nodes_of(graph: Any) -> list[int]:
    """The handles of a graph's nodes."""
    _, count = call("cuGraphGetNodes", graph, 0)
    nodes, _ = call("cuGraphGetNodes", graph, count)
    return [int(node) for node in nodes[:count]]


def host_values(node: int) -> tuple[bytes, ...]:
    """The values that a captured node keeps from the host: a kernel's arguments or a memset's value.

    The result is empty for a node that is neither a kernel nor a memset, and for a kernel whose arguments the driver
    does not reveal.
    """
    kind = node_type(node)
    if kind == "MEMSET":
        return (int(call("cuGraphMemsetNodeGetParams", node).value).to_bytes(4, "little"),)
    if kind != "KERNEL":
        return ()
    try:
        return tuple(_arguments(call("cuGraphKernelNodeGetParams", node)))
    except DriverError:
        return ()


def exchange_values(executable: Any, node: int, source: int) -> None:
    """Copies all parameters of a kernel node (arguments, grid) or of a memset node into a node of an executable graph.

    Args:
        executable: the executable graph.
        node: a node of the graph that `executable` was instantiated from.
        source: the node to copy from, of the same type, in any graph.

    Raises:
        DriverError: the driver cannot give `node` the parameters of `source`, for example because their kernels belong
            to different contexts.
    """
    if node_type(node) == "MEMSET":
        context = call("cuCtxGetCurrent")
        call("cuGraphExecMemsetNodeSetParams", executable, node, call("cuGraphMemsetNodeGetParams", source), context)
    else:
        call("cuGraphExecKernelNodeSetParams", executable, node, call("cuGraphKernelNodeGetParams", source))


def _arguments(params: Any) -> Iterator[bytes]:
    by_function = int(params.func)
    about = ("cuFuncGetParamInfo", params.func) if by_function else ("cuKernelGetParamInfo", params.kern)
    pointers = int(params.kernelParams)
    for index in itertools.count() if pointers else ():
        try:
            _, size = call(*about, index)
        except DriverError:  # the index is beyond the last argument: all arguments have been read
            return
        address = ctypes.c_void_p.from_address(pointers + index * ctypes.sizeof(ctypes.c_void_p)).value
        yield ctypes.string_at(address or 0, size)


def differ(first: bytes, second: bytes) -> bool:
    """Whether two arguments of equal size differ.

    Two words of 8 bytes that are both addresses known to CUDA count as equal.
    """
    words = ((first[start : start + 8], second[start : start + 8]) for start in range(0, len(first), 8))
    return any(one != other and not (_is_address(one) and _is_address(other)) for one, other in words)


def _is_address(word: bytes) -> bool:
    return len(word) == 8 and memory_type(int.from_bytes(word, "little")) is not None


def memory_type(address: int) -> Any:
    """The `CUmemorytype` of an address; None if CUDA does not know the address, as with pageable host memory."""
    try:
        kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
        return driver.CUmemorytype(call("cuPointerGetAttribute", kind, address))
    except DriverError:
        return None


def pageable_ends(node: int) -> list[str]:
    """Lists the ends of a copy node that are in pageable host memory: "from", "to", both or neither."""
    copy = call("cuGraphMemcpyNodeGetParams", node)
    ends = (copy.srcMemoryType, copy.srcHost, copy.srcDevice), (copy.dstMemoryType, copy.dstHost, copy.dstDevice)
    return [
        end
        for end, (kind, host, device) in zip(("from", "to"), ends, strict=True)
        if kind in (_HOST, _UNIFIED) and memory_type(int(host if kind == _HOST else device)) is None
    ]


def graph_under_capture(stream: int) -> tuple[int, int]:
    """The graph that is being captured from a stream: its handle and the id of the capture.

    Handle and id are 0 if the stream is not being captured, or if its capture has been invalidated.
    """
    status, capture, graph, *_ = call("cuStreamGetCaptureInfo", stream)
    return (int(graph), int(capture)) if status == _ACTIVE else (0, 0)


class CapturedNodes:
    """A listener of `lt_runtime.ranges` that records in which ranges each node of a stream's capture was captured.

    The listener records only ranges of the thread that created it.

    Attributes:
        paths: maps the handle of a node to the names of the ranges around it, outermost first. Nodes outside all ranges
            are left out.
    """

    def __init__(self, stream: int) -> None:
        self._stream, self._thread = stream, threading.get_ident()
        self._open: list[str] = []
        self._capture, self._seen = 0, set[int]()
        self.paths: dict[int, tuple[str, ...]] = {}

    def enter(self, name: str) -> None:
        """Called when a range begins."""
        if threading.get_ident() == self._thread:
            self.note()
            self._open.append(name)

    def exit(self, name: str) -> None:
        """Called when the innermost range ends. Ranges that began before this object listened are ignored."""
        if threading.get_ident() == self._thread and self._open and self._open[-1] == name:
            self.note()
            self._open.pop()

    def note(self) -> None:
        """Assigns the nodes captured since the last call to the ranges that are open now."""
        graph, capture = graph_under_capture(self._stream)
        if not graph:
            return
        if capture != self._capture:  # the stream is captured anew: nodes of the abandoned capture do not count
            self._seen.clear()
            self.paths.clear()
            self._capture = capture
        new = [node for node in nodes_of(graph) if node not in self._seen]
        self._seen.update(new)
        if self._open:
            self.paths.update(dict.fromkeys(new, tuple(self._open)))


class Graph(contextlib.AbstractContextManager["Graph"]):
    """Captured work, to be launched any number of times. As a context manager it frees the graph at the end.

    The capture restricts only the calls of this thread (capture mode THREAD_LOCAL).

    Args:
        run: function that launches the work on the stream whose handle it gets. It is called again if another thread
            invalidates the capture.
        stream: handle of the stream to capture from; not the default stream, which cannot be captured.

    Attributes:
        executable: handle of the instantiated graph.
        template: handle of the captured graph, which is kept only if nodes were captured within ranges; otherwise 0.
        ranges: paths of ranges by the handles of the template's nodes, in the order of their capture; see
            `CapturedNodes.paths`.

    Raises:
        Whatever `run` raises; the capture is ended all the same.
    """

    def __init__(self, run: Callable[[int], object], stream: int) -> None:
        nodes = CapturedNodes(stream)
        with listening(nodes):
            graph = _capture(run, stream)
        self.ranges, self.template = nodes.paths, 0
        try:
            self.executable = int(call("cuGraphInstantiate", graph, 0))
            if self.ranges:
                self.template = int(graph)
                _with_ranges.add(self)
        finally:
            if not self.template:
                _destroy(graph)

    def launch(self, stream: int) -> None:
        """Puts the work on `stream`.

        Raises:
            DriverError: the driver refused.
        """
        if status := function("cuGraphLaunch")(self.executable, stream):
            check("cuGraphLaunch", status)

    def close(self) -> None:
        """Frees the graph. Launches that are still running are completed."""
        if self.template:
            _with_ranges.discard(self)
            _destroy(self.template)
            self.template = 0
        call("cuGraphExecDestroy", self.executable)

    def __exit__(self, *_: object) -> None:
        self.close()


def graphs_with_ranges() -> list[Graph]:
    """The open graphs of all devices that have nodes captured within ranges."""
    return [*_with_ranges]


def _destroy(graph: driver.CUgraph | int) -> None:
    # Errors are ignored, because they can only come from earlier work on the GPU.
    with contextlib.suppress(DriverError):
        call("cuGraphDestroy", graph)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Disables Python's garbage collector during a capture or a measurement.

    Finalisers of some objects synchronise with a GPU or free memory. The driver refuses both calls in a capturing
    thread, and invalidates the capture.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@no_collection()
def _capture(run: Callable[[int], object], stream: int) -> driver.CUgraph:
    """Captures the work that `run` puts on a stream, and tries again if another thread invalidates the capture.

    A thread that synchronises the whole device invalidates all captures on it. The driver then refuses the next launch
    into the capture; if cuBLASLt makes that launch, the error appears as a failure of cuBLASLt.
    """
    for attempt in range(_ATTEMPTS):
        call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            run(stream)
        except BaseException as error:
            was_ended = _abandon(stream) and isinstance(error, GpuError) and getattr(error, "status", 0) != _UNSUPPORTED
            if not was_ended or attempt == _ATTEMPTS - 1:
                raise
        else:
            try:
                return call("cuStreamEndCapture", stream)
            except DriverError as error:
                if error.status != _INVALIDATED or attempt == _ATTEMPTS - 1:
                    raise
    raise AssertionError("the last attempt returns or raises")


def _abandon(stream: int) -> bool:
    """Ends a capture and drops its graph; returns whether the capture had been invalidated."""
    try:
        call("cuGraphDestroy", call("cuStreamEndCapture", stream))
    except DriverError as error:
        return error.status == _INVALIDATED
    return False
