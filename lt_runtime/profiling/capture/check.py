"""`check_capture`: checks whether a function can be captured into a CUDA graph, and names the lines that prevent it."""

from __future__ import annotations

import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import numpy as np
from cuda.bindings import driver

from lt_runtime.arguments import shown
from lt_runtime.arrays.libraries import cupy_stream
from lt_runtime.arrays.operand import HOST, Operand, read
from lt_runtime.errors import DriverError, KindError, LtError
from lt_runtime.gpu.devices import activated, current_device
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.graphs import differ, exchange_values, host_values, no_collection, node_type, pageable_ends
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.profiling.capture.watch import Place, Watch
from lt_runtime.profiling.collector import Collector

_Arrays: TypeAlias = dict[str, Operand]
_NODES: Final = {"HOST": "a call of a host function", "MEM_ALLOC": "an allocation", "MEM_FREE": "a free"}
_UNSAFE: Final = {
    "allocates memory": r"(cudaMalloc|cudaHostAlloc|cudaHostRegister|cuMemAlloc|cuMemHostAlloc|cuMemHostRegister).*",
    "frees memory": r"(cudaFree|cuMemFree).*",
    "copies synchronously": r"cu(da)?Memcpy.*",
    "fills memory synchronously": r"cu(da)?Memset.*",
    "synchronises": r"cu(da)?(Stream|Device|Ctx|Event|Thread)Synchronize.*",
}
"""Maps each effect of CUDA calls that a capture forbids to a pattern of the calls' names.

Names that end in Async are allowed.
"""


@dataclass(frozen=True, slots=True)
class Fault:
    """A call or node that a graph must not have, or a result that differs between the function and its graph.

    Attributes:
        what: a sentence that names the call, the node or the result, and its fault.
        range: the path of ranges around the call or node, outermost first.
        where: file, number and text of the line of Python; "" if the line is not known.
    """

    what: str
    range: tuple[str, ...] = ()
    where: str = ""

    def __str__(self) -> str:
        text = f"{' > '.join(self.range) or 'outside of all ranges'}: {self.what}"
        return f"{text}\n    {self.where}" if self.where else text


@dataclass(frozen=True, slots=True)
class CaptureReport:
    """The result of `check_capture`.

    Attributes:
        faults: the faults in the order in which the check found them.
        nodes: the number of the graph's nodes; 0 if the capture failed.
        compared: names of the results that were compared between replays and eager runs.
    """

    faults: tuple[Fault, ...]
    nodes: int
    compared: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether the check found no fault."""
        return not self.faults

    def __str__(self) -> str:
        results = ", ".join(self.compared) or "no results, so that values baked into the graph were not looked for"
        graph = f"{self.nodes} nodes; compared: {results}" if self.nodes else "no graph"
        return "\n".join([f"{len(self.faults) or 'no'} faults; {graph}", *map(str, self.faults)])


def check_capture(fn: Callable[[], Any], *, stream: Any = None) -> CaptureReport:
    """Captures the work of a function into a graph, and reports what the graph would do wrong.

    The function is called without arguments: twice to warm up, then in a capture, where CUDA refuses every unsafe call,
    then twice more after two replays of the graph. Each fault is reported with its range and its line of Python. The
    first refused call ends the capture; a further run under CUPTI, if it is installed, finds the calls after it.

    A graph keeps the values that the host passed at its capture, such as a learning rate. To find them, the graph is
    replayed twice and the function is run twice, each time from the same contents of the arrays that it returns: a
    result that changes from run to run but not from replay to replay depends on such a value. Results are compared bit
    for bit.

    Args:
        fn: puts its work on the current stream of CuPy or PyTorch, or on `stream`. It returns the arrays to be
            compared: one, several, a mapping from names to arrays, or None. It should change no other arrays.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; by default a stream made for the check.

    Raises:
        KindError: `fn` cannot be called.
        Any exception that `fn` raises outside of the capture.
    """
    if not callable(fn):
        raise KindError(f"fn is {shown(fn)}; it must be a function without arguments")
    device = current_device()
    with activated(device):
        handle = _blocking_stream(device) if stream is None else stream_handle(stream, device)
        with _current(device, handle):
            fn()
        call("cuCtxSynchronize")
        # The stream is made current again for the libraries, because the first call may have imported CuPy or PyTorch.
        with _current(device, handle), contextlib.ExitStack() as graphs:
            return _Check(fn, handle, graphs).report()


class _Check:
    """One check on a stream, which is current, of a function that has been called once; `graphs` frees its graphs."""

    def __init__(self, fn: Callable[[], Any], stream: int, graphs: contextlib.ExitStack) -> None:
        self._fn, self._stream, self._graphs, self._faults = fn, stream, graphs, list[Fault]()

    def report(self) -> CaptureReport:
        addresses = {name: each.address for name, each in self._run().items()}
        watch, graph, captured = self._capture()
        if not graph:
            self._add_calls()
            return CaptureReport(tuple(self._faults), 0, ())
        self._faults += _node_faults(watch.nodes)
        if captured:
            kept = {name: each for name, each in captured.items() if addresses.get(name) == each.address}
            self._compare(watch, graph, captured, kept)
        return CaptureReport(tuple(self._faults), len(watch.nodes), tuple(captured))

    def _run(self) -> _Arrays:
        """Calls the function without a capture, and waits for its work."""
        results = _arrays_of(self._fn(), self._stream)
        call("cuStreamSynchronize", self._stream)
        return results

    def _capture(self) -> tuple[Watch, int, _Arrays]:
        """Captures the function; returns the `Watch`, the handle of the graph, and the function's results.

        The graph is 0, and a fault is added, if the capture fails.
        """
        watch, graph, results = Watch(self._stream), 0, _Arrays()
        failed: Fault | None = None
        call("cuStreamBeginCapture", self._stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
        with no_collection():
            try:
                with watch.watching():
                    results = _arrays_of(self._fn(), self._stream)
            except Exception as error:
                failed = _fault_of(error, watch)
            finally:
                try:
                    graph = int(call("cuStreamEndCapture", self._stream))
                except DriverError as error:
                    failed = failed or Fault(f"the capture is invalid: {error}", *(watch.broken or ()))
        if graph:
            self._graphs.callback(call, "cuGraphDestroy", graph)
        if failed is not None:
            self._faults.append(failed)
            graph = 0
        return watch, graph, results

    def _add_calls(self) -> None:
        """Adds a fault for each unsafe call in an uncaptured run, and names the call that ended the capture."""
        collector = Collector()
        # without CUPTI the name of the call that ended the capture is unknown
        with contextlib.suppress(LtError), collector:
            self._run()
        found: dict[tuple[tuple[str, ...], str], str] = {}
        for each in collector.activities:
            does = _unsafe(each.name) if each.kind == "call" else None
            if does:
                found.setdefault((each.range, does), each.name)
        first = self._faults[0]
        beside = [key for key in found if key[0] == first.range]
        if len(beside) == 1:  # a line with a single unsafe call: this call ended the capture
            name = found.pop(beside[0])
            self._faults[0] = replace(first, what=f"{name} {beside[0][1]}: {first.what}")
        self._faults += [Fault(f"{name} {does}", path) for (path, does), name in found.items()]

    def _compare(self, watch: Watch, graph: int, captured: _Arrays, kept: _Arrays) -> None:
        """Adds a fault for each result that differs between replays of the graph and uncaptured runs.

        Args:
            kept: the captured results whose memory the function did not allocate anew; they are reset before each run.
        """
        begin = _read_arrays(kept, self._stream)
        executable = call("cuGraphInstantiate", graph, 0)
        self._graphs.callback(call, "cuGraphExecDestroy", executable)

        def replay() -> _Arrays:
            call("cuGraphLaunch", executable, self._stream)
            return captured

        def contents(run: Callable[[], _Arrays]) -> Mapping[str, bytes]:
            found = _read_arrays(run(), self._stream)
            _write_arrays(kept, begin, self._stream)
            return found

        replays, runs = ([contents(run) for _ in range(2)] for run in (replay, self._run))
        wrong = [*_wrong_results(replays, runs)]
        if wrong:
            places = self._baked_places(watch, executable, lambda: contents(replay) != replays[0])
            self._faults += [Fault(what, *place) for place in places for what in wrong]

    def _baked_places(self, watch: Watch, executable: Any, changes: Callable[[], bool]) -> Sequence[Place]:
        """The places of nodes whose arguments or values differ in a second capture; an unknown place if none differs.

        If several nodes differ, the second capture's values are written into the graph one node at a time. `changes`
        tells whether this changes the results of a replay. If it does for some nodes, only these are reported. CuPy
        leaves a part of its kernel arguments uninitialised: that part differs between captures, but kernels never read
        it.
        """
        before = {node: host_values(node) for node in watch.nodes}
        again, graph, _ = self._capture()
        pairs = zip(before.items(), again.nodes if graph else (), strict=False)
        found = {node: other for (node, old), other in pairs if _is_other(old, host_values(other))}
        telling = [*found]
        if len(found) > 1:
            telling = [node for node in found if _with_values(executable, node, found[node], changes)] or telling
        return [*dict.fromkeys(watch.nodes[node] for node in telling)] or [Place()]


def _arrays_of(returned: Any, stream: int) -> _Arrays:
    """The arrays on a GPU that a function returned, by name; arrays on the host are left out.

    Args:
        returned: an array, several in a tuple or list, a mapping from names to arrays, or None. The names are the
            mapping's keys; otherwise "result", or "result[i]" if several arrays were returned.
        stream: handle of the stream that the arrays belong to.
    """
    named: Mapping[Any, Any] = {"result": returned}
    if isinstance(returned, Mapping):
        named = returned
    elif isinstance(returned, (tuple, list)):
        named = {f"result[{index}]": array for index, array in enumerate(returned)}
    operands = (read(str(name), array, stream) for name, array in named.items() if array is not None)
    return {each.name: each for each in operands if each.device != HOST}


def _read_arrays(arrays: _Arrays, stream: int) -> dict[str, bytes]:
    """Waits for the stream; returns the bytes of each array, including gaps between rows."""
    contents = {name: np.empty(each.extent * each.itemsize, np.uint8) for name, each in arrays.items()}
    for name, each in arrays.items():
        call("cuMemcpyDtoHAsync", contents[name].ctypes.data, each.address, contents[name].nbytes, stream)
    call("cuStreamSynchronize", stream)
    return {name: content.tobytes() for name, content in contents.items()}


def _write_arrays(arrays: _Arrays, contents: Mapping[str, bytes], stream: int) -> None:
    """Restores array contents that `_read_arrays` has returned, and waits for the stream."""
    for name, each in arrays.items():
        content = np.frombuffer(contents[name], np.uint8)
        call("cuMemcpyHtoDAsync", each.address, content.ctypes.data, content.nbytes, stream)
    call("cuStreamSynchronize", stream)


def _is_other(values: Sequence[bytes], others: Sequence[bytes]) -> bool:
    """Whether two captured nodes differ in the values that the host passed."""
    pairs = zip(values, others, strict=False)
    return any(len(one) != len(other) or differ(one, other) for one, other in pairs)


def _with_values(executable: Any, node: int, other: int, test: Callable[[], bool]) -> bool:
    """Runs a test while a node of an executable graph has the kernel arguments or memset value of another node.

    Returns the test's result; True if the values cannot be set.
    """
    try:
        exchange_values(executable, node, other)
    except DriverError:
        return True
    try:
        return test()
    finally:
        exchange_values(executable, node, node)


def _wrong_results(replays: Sequence[Mapping[str, bytes]], runs: Sequence[Mapping[str, bytes]]) -> Iterator[str]:
    """Yields a sentence for each result in which two replays differ from two uncaptured runs.

    All four started from equal array contents. A result that changes from run to run and from replay to replay is not
    reported.
    """
    for name in replays[0]:
        (first, second), (one, other) = ([each.get(name) for each in results] for results in (replays, runs))
        if one != other and first == second:
            yield f"a value of the host is baked into the graph: {name} changes from run to run, but not in replays"
        elif one == other and first != second:
            yield f"{name} changes from replay to replay, but not from run to run"
        elif one == other and first != one:
            yield f"{name} is not what the function gives when it is not captured"


def _fault_of(error: Exception, watch: Watch) -> Fault:
    place = watch.broken or Place()
    if watch.raised is not None and watch.raised[0] is error:
        place = Place(max(place.range, watch.raised[1].range, key=len), watch.raised[1].where or place.where)
    first_line = str(error).strip().partition("\n")[0]
    return Fault(f"{type(error).__name__}: {first_line}", *place)


def _node_faults(nodes: Mapping[int, Place]) -> Iterator[Fault]:
    for node, place in nodes.items():
        kind = node_type(node)
        if kind in _NODES:
            yield Fault(f"{_NODES[kind]} is part of the graph", *place)
        elif kind == "MEMCPY":
            for end in pageable_ends(node):
                yield Fault(f"a copy {end} pageable memory of the host is part of the graph", *place)


def _unsafe(name: str) -> str | None:
    """The effect of a call that a capture forbids, such as "allocates memory"; None for a call that it allows."""
    bare = re.sub(r"_(v\d+|ptsz|ptds)", "", name)
    if bare.endswith("Async"):
        return None
    return next((does for does, pattern in _UNSAFE.items() if re.fullmatch(pattern, bare)), None)


@functools.cache
def _blocking_stream(device: int) -> int:
    """A stream that synchronises with the default stream: work on the default stream invalidates its capture."""
    return int(call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_DEFAULT))


@contextlib.contextmanager
def _current(device: int, stream: int) -> Iterator[None]:
    """Within a `with` block, a stream is the current one of CuPy and PyTorch, if the process has imported these."""
    with contextlib.ExitStack() as stack:
        if "cupy" in sys.modules:
            stack.enter_context(cupy_stream(device, stream))
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            external = torch.cuda.ExternalStream(stream, device=f"cuda:{device}")
            stack.enter_context(torch.cuda.stream(external))
        yield
