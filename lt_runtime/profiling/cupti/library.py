"""CUPTI's activity interface through ctypes: CUPTI writes records of all work on the GPUs into our buffers."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.errors import CuptiError, LtError, MissingLibraryError
from lt_runtime.profiling.cupti.records import DRIVER, KINDS, OUR_IDS, RECORD_SIZES

_P, _U32, _U64, _SIZE, _INT = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_int
_SIGNATURES: Final[dict[str, tuple[Any, ...]]] = {
    "ActivityDisable ActivityEnable SetThreadIdType": (_INT,),
    "ActivityFlushAll": (_U32,),
    "ActivityGetNextRecord": (_P, _SIZE, _P),
    "ActivityGetNumDroppedRecords": (_P, _U32, _P),
    "ActivityGetStructSize GetCallbackName": (_INT, _U32, _P),
    "ActivityPopExternalCorrelationId GetResultString": (_INT, _P),
    "ActivityPushExternalCorrelationId": (_INT, _U64),
    "ActivityRegisterCallbacks GetGraphExecId GetGraphId GetGraphNodeId": (_P, _P),
    "EnableCallback": (_U32, _P, _INT, _U32),
    "GetTimestamp GetVersion Unsubscribe": (_P,),
    "Subscribe": (_P, _P, _P),
}
"""Maps names of the CUPTI functions in use to their argument types.

A key holds the names of all functions with the same types, without the prefix cupti and separated by spaces.
"""
_ARGUMENTS: Final = {f"cupti{name}": types for names, types in _SIGNATURES.items() for name in names.split()}
_MAX_LIMIT_REACHED: Final = 12
_REMEDIES: Final = {
    35: ["the driver lets only administrators profile: see NVIDIA's page on ERR_NVGPUCTRPERM"],
    39: ["another profiler is attached to this process; PyTorch's stays attached after it has been used once"],
}
_SYSTEM_THREAD_IDS: Final = 1
_FORCED: Final = 1
_DRIVER_API, _RUNTIME_API, _RESOURCE = 1, 2, 3
_GRAPH_CLONED, _GRAPH_EXEC_CREATED = 11, 18
_RESOURCE_DESCRIPTOR: Final = 16
_GRAPH, _ORIGINAL_GRAPH, _GRAPH_EXEC = 0, 8, 48

BUFFER_SIZE: Final = 8 << 20
MOST_BUFFERS: Final = 64
"""The largest number of buffers, of `BUFFER_SIZE` bytes each: enough for about two million kernels.

Records that do not fit are dropped and counted.
"""

_ON_REQUEST: Final = ctypes.CFUNCTYPE(None, _P, _P, _P)
_ON_COMPLETION: Final = ctypes.CFUNCTYPE(None, _P, _U32, _P, _SIZE, _SIZE)
_ON_EVENT: Final = ctypes.CFUNCTYPE(None, _P, _INT, _U32, _P)


@functools.cache
def _loaded() -> Any:
    from cuda import pathfinder

    try:
        return ctypes.CDLL(str(pathfinder.load_nvidia_dynamic_lib("cupti").abs_path))
    except (pathfinder.DynamicLibNotFoundError, OSError) as error:
        raise MissingLibraryError("CUPTI is not installed: pip install 'lt_runtime[cuda13]'") from error


@functools.cache
def function(name: str) -> Callable[..., int]:
    """Finds a CUPTI function by its name without the prefix cupti; the function returns a status.

    Raises:
        MissingLibraryError: CUPTI is not installed, or is too old to have the function.
    """
    try:
        found = _loaded()[name]
    except AttributeError:
        raise MissingLibraryError(f"{name} is not in the installed CUPTI; its 13.0 has it") from None
    found.argtypes, found.restype = _ARGUMENTS[name], _INT
    return found  # type: ignore[no-any-return]


def call(name: str, *arguments: Any) -> None:
    """Calls a function of CUPTI, and raises an exception if it fails.

    Raises:
        CuptiError: the function returned another status than success.
        MissingLibraryError: see `function`.
    """
    status = function(name)(*arguments)
    if status:
        text = _P()
        unknown = function("cuptiGetResultString")(status, ctypes.addressof(text)) or not text.value
        said = f"status {status}" if unknown else f"{_string(text.value)} ({status})"
        raise CuptiError(f"{name} failed with {': '.join([said, *_REMEDIES.get(status, ())])}")


def _string(address: int | None) -> str:
    return ctypes.string_at(address or 0).decode(errors="replace") if address else ""


def _number(kind: Any, name: str, *arguments: Any) -> int:
    """Calls a CUPTI function whose last argument is an address to which it writes a number; returns the number."""
    cell = kind()
    call(name, *arguments, ctypes.addressof(cell))
    return int(cell.value)


timestamp: Final = functools.partial(_number, _U64, "cuptiGetTimestamp")
"""Function without arguments that returns the present time on CUPTI's clock, in nanoseconds."""


push_id: Final = functools.partial(call, "cuptiActivityPushExternalCorrelationId", OUR_IDS)
"""Function of an id: CUPTI links this thread's driver and runtime calls to the id, until `pop_id`."""


pop_id: Final = functools.partial(_number, _U64, "cuptiActivityPopExternalCorrelationId", OUR_IDS)
"""Function without arguments that ends the last `push_id` of this thread."""

node_id: Final = functools.partial(_number, _U64, "cuptiGetGraphNodeId")
"""Function that returns CUPTI's id of a graph node, given the node's address.

The upper 32 bits are the graph's id; the lower 32 bits identify the node within the graph.
"""

graph_id: Final = functools.partial(_number, _U32, "cuptiGetGraphId")
"""Function that returns CUPTI's id of a graph, given the graph's address."""

executable_id: Final = functools.partial(_number, _U32, "cuptiGetGraphExecId")
"""Function that returns CUPTI's id of an executable graph, given the graph's address.

A node's id has the same lower 32 bits in the executable graph as in the graph that it was made from.
"""


@functools.cache
def call_name(kind: int, number: int) -> str:
    """The name of a call of the driver or the runtime, given the kind of its record and its number."""
    domain = _DRIVER_API if kind == DRIVER else _RUNTIME_API
    try:
        return _string(_number(_P, "cuptiGetCallbackName", domain, number))
    except (CuptiError, TypeError):
        return f"call {number}"


def kernel_name(address: int) -> str:
    """The demangled name of a kernel whose C string is at an address."""
    return _demangled(_string(address))


@functools.cache
def _demangled(name: str) -> str:
    """Demangles a C++ symbol; returns the name unchanged if it is no C++ symbol, or if libstdc++ is missing."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
    except OSError:
        return name
    library.__cxa_demangle.restype, library.free.argtypes = _P, (_P,)
    text = library.__cxa_demangle(name.encode(), None, None, ctypes.byref(_INT()))
    found = _string(text) or name
    library.free(text)
    return found


def check_layouts() -> None:
    """Raises `CuptiError` unless the loaded library's records have the sizes of `RECORD_SIZES`."""
    found = _number(_U32, "cuptiGetVersion")  # CUPTI's version is a number such as 130001, for CUDA 13.0 update 1
    sizes = RECORD_SIZES.get(found // 100)
    if sizes is None:
        known = ", ".join(f"{key // 100}.{key % 100}" for key in RECORD_SIZES)
        raise CuptiError(f"the installed CUPTI is of version {found}, whose records are not known; known are {known}")
    try:
        function("cuptiActivityGetStructSize")
    except MissingLibraryError:  # CUPTI before 13.2 lacks this function; the version was checked above.
        return
    for kind, size in sizes.items():
        written = _number(_SIZE, "cuptiActivityGetStructSize", kind, 0)
        if written != size:
            raise CuptiError(f"CUPTI {found} writes {written} bytes for records of kind {kind}, where {size} are known")


class Session:
    """CUPTI's recording from `start` to `stop`, for the whole process.

    CUPTI requests buffers for records and returns them filled, on any thread. It gets at most `MOST_BUFFERS` buffers.
    """

    def __init__(self) -> None:
        self._on_graph: Callable[[int, int], None] = lambda graph, source: None
        self._subscriber, self._enabled = 0, list[int]()
        self._lock = threading.Lock()
        self._lent: dict[int, NDArray[np.uint8]] = {}
        self._full: list[tuple[NDArray[np.uint8], int]] = []
        # The callbacks are kept alive as long as the process, because CUPTI may call them at any time.
        self._on_request, self._on_completion = _ON_REQUEST(self._lend), _ON_COMPLETION(self._take_back)
        self._on_event = _ON_EVENT(self._event)

    def start(self, on_graph: Callable[[int, int], None]) -> None:
        """Begins to record.

        Args:
            on_graph: called for every graph that is cloned or instantiated from now on, with its id and the id of the
                graph that it was made from.

        Raises:
            CuptiError: CUPTI cannot be used here, or is recording already; nothing is changed.
            MissingLibraryError: CUPTI is not installed.
        """
        check_layouts()
        subscriber = _P()
        call("cuptiSubscribe", ctypes.addressof(subscriber), self._on_event, None)
        self._subscriber, self._on_graph, self._full = subscriber.value or 0, on_graph, []
        try:
            for event in (_GRAPH_CLONED, _GRAPH_EXEC_CREATED):
                call("cuptiEnableCallback", 1, self._subscriber, _RESOURCE, event)
            call("cuptiSetThreadIdType", _SYSTEM_THREAD_IDS)
            call("cuptiActivityRegisterCallbacks", self._on_request, self._on_completion)
            for kind in KINDS:
                call("cuptiActivityEnable", kind)
                self._enabled.append(kind)
        except LtError:
            self._end()
            raise

    def stop(self) -> tuple[list[tuple[memoryview, list[int]]], int]:
        """Ends the recording. The caller must have waited for all work that is to be recorded.

        Returns:
            The filled buffers with the offsets of their records, in order, and the number of lost records.
        """
        try:
            call("cuptiActivityFlushAll", _FORCED)
            dropped = _number(_SIZE, "cuptiActivityGetNumDroppedRecords", None, 0)
        finally:
            self._end()
        with self._lock:
            full, self._full = self._full, []
        filled, step, record = [], function("cuptiActivityGetNextRecord"), _P()
        for memory, valid in full:
            base, offsets, record.value = memory.ctypes.data, list[int](), None
            while not (status := step(base, valid, ctypes.addressof(record))):
                offsets.append((record.value or 0) - base)
            filled.append((memory.data[:valid], offsets))
            # CUPTI reports a damaged record; the records after it cannot be read
            dropped += status != _MAX_LIMIT_REACHED
        return filled, dropped

    def _end(self) -> None:
        """Disables all enabled kinds of records and callbacks; ignores failures, because there is no remedy."""
        while self._enabled:
            function("cuptiActivityDisable")(self._enabled.pop())
        function("cuptiUnsubscribe")(self._subscriber)

    def _event(self, _: int, domain: int, number: int, data: int) -> None:
        graphs = _P.from_address(data + _RESOURCE_DESCRIPTOR).value or 0
        graph = _P.from_address(graphs + _GRAPH).value or 0
        with contextlib.suppress(CuptiError):  # a graph may have no id: CUPTI then writes no records of it
            if number == _GRAPH_CLONED:
                self._on_graph(graph_id(graph), graph_id(_P.from_address(graphs + _ORIGINAL_GRAPH).value or 0))
            elif number == _GRAPH_EXEC_CREATED:
                self._on_graph(executable_id(_P.from_address(graphs + _GRAPH_EXEC).value or 0), graph_id(graph))

    def _lend(self, buffer: int, size: int, most: int) -> None:
        _SIZE.from_address(most).value = 0  # the limit of records of a buffer is 0, which means: as many as fit
        with self._lock:
            has_room = len(self._lent) + len(self._full) < MOST_BUFFERS
            memory = np.empty(BUFFER_SIZE if has_room else 0, np.uint8)
            if has_room:
                self._lent[memory.ctypes.data] = memory
        _P.from_address(buffer).value = memory.ctypes.data if has_room else None
        _SIZE.from_address(size).value = memory.size

    def _take_back(self, context: int, stream: int, buffer: int, size: int, valid: int) -> None:
        with self._lock:
            self._full.append((self._lent.pop(buffer), valid))


session: Final = Session()
