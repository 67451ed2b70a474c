"""A stand-in for CUPTI on the pretended GPU: writes records of the work that runs, and delivers them by callbacks."""

# ruff: noqa: N802  # the functions have the names that the library gives them

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Final

from lt_runtime.profiling.cupti import records as kinds
from tests.support.cupti_layout import record
from tests.support.fake_driver import FakeDriver
from tests.support.fake_streams import KERNEL, MEMSET, Observer, Streams

AHEAD_NS: Final = 10**17
"""Nanoseconds by which CUPTI's clock is ahead of the host's."""
_LAUNCH, _GRAPH_LAUNCH = 307, 514
_CALLS: Final = {_LAUNCH: b"cuLaunchKernel", _GRAPH_LAUNCH: b"cuGraphLaunch"}
_SUBSCRIBED, _LIMIT, _INVALID = 39, 12, 1


class FakeCupti(Observer):
    """Stands in for libcupti; the pretended GPU's `Streams` tell this object of all work.

    Attributes:
        version: the library's version.
        sizes: sizes of records by kind, where they differ from those of the version.
        fails: functions that fail, and the statuses that they return.
        name: the name of all kernels, instead of the names that the streams give them.
        enabled: kinds of records that are written.
    """

    def __init__(self, streams: Streams, driver: FakeDriver) -> None:
        self._streams, self._driver = streams, driver
        self.version, self.sizes = 130500, dict[int, int]()
        self.fails: dict[str, int] = {}
        self.enabled: set[int] = set()
        self.name = b""
        self._subscriber: Callable[..., None] | None = None
        self._requested: Callable[..., None]
        self._completed: Callable[..., None]
        self.records: list[bytes] = []
        self._kept: list[Any] = []
        self._ids = threading.local()
        self._correlations, self._dropped = itertools.count(1), 0
        self._calls = dict(_CALLS)
        self._node: tuple[int, int, int] | None = None

    def opened(self, real: ctypes.CDLL) -> Any:
        """The library as `ctypes.CDLL` would open it."""
        functions = {name: self._function(name) for name in dir(self) if name.startswith("cupti")}
        handle = real._handle
        return type("Library", (), {"_handle": handle, "__getitem__": lambda _, name: functions[name]})()

    def _function(self, name: str) -> Any:
        def run(*arguments: Any) -> int:
            if name in self.fails:
                return self.fails[name]
            return getattr(self, name)(*arguments) or 0

        return run

    @property
    def pushed(self) -> list[int]:
        """Returns the correlation ids that the calling thread has pushed and not popped."""
        if not hasattr(self._ids, "pushed"):
            self._ids.pushed = []
        return self._ids.pushed  # type: ignore[no-any-return]

    def tell(self, name: str) -> None:
        """Records a call of the driver that puts no work on a stream."""
        number = next((number for number, known in self._calls.items() if known == name.encode()), len(self._calls))
        self._calls[number] = name.encode()
        self._call(number)

    # Methods of `Observer`, which the streams call

    def given(self, kind: Any) -> int:
        return self._call(_GRAPH_LAUNCH if kind is None else _LAUNCH)

    def _call(self, number: int) -> int:
        correlation = next(self._correlations)
        now, thread = time.monotonic_ns() + AHEAD_NS, threading.get_native_id()
        self._write(kinds.DRIVER, cbid=number, start=now, end=now + 1, threadId=thread, correlationId=correlation)
        for whose, external in ((3, 99), (kinds.OUR_IDS, self.pushed[-1] if self.pushed else 0)):
            if external:
                self._write(
                    kinds.EXTERNAL_CORRELATION, externalKind=whose, externalId=external, correlationId=correlation
                )
        return correlation

    @contextlib.contextmanager
    def running(self, token: Any, kind: Any, name: str, stream: int) -> Iterator[None]:
        start = time.monotonic_ns() + AHEAD_NS
        yield
        correlation, executable, index = self._node or (token, 0, -1)
        fields = {
            "start": start, "end": time.monotonic_ns() + AHEAD_NS, "streamId": stream & 0xFFFF,
            "correlationId": correlation, "graphId": executable & 0xFFFFFFFF,
            "graphNodeId": _node_id(executable, index) if executable else 0,
        }  # fmt: skip
        if kind == KERNEL:
            text = ctypes.create_string_buffer(self.name or name.encode())
            self._kept.append(text)
            self._write(kinds.KERNEL, **fields, name=ctypes.addressof(text))
        elif kind == MEMSET:
            self._write(kinds.MEMSET, **fields, bytes=64)
        else:
            self._write(kinds.MEMCPY, **fields, bytes=32, copyKind=8)

    @contextlib.contextmanager
    def within_graph(self, token: Any, executable: int, index: int) -> Iterator[None]:
        self._node = token, executable, index
        try:
            yield
        finally:
            self._node = None

    def instantiated(self, graph: int, executable: int) -> None:
        """Reports a graph's clone and then its instantiation, in the driver's order."""
        if self._subscriber is not None:
            self._tell_of_graph(11, executable | 1, graph, 0)
            self._tell_of_graph(18, executable | 1, 0, executable)

    def _tell_of_graph(self, event: int, graph: int, original: int, executable: int) -> None:
        described = (ctypes.c_uint64 * 7)(graph, original, 0, 0, 0, 0, executable)
        data = (ctypes.c_uint64 * 3)(0, 0, ctypes.addressof(described))
        assert self._subscriber is not None
        self._subscriber(None, 3, event, ctypes.addressof(data))

    def _write(self, kind: int, **fields: int) -> None:
        if kind in self.enabled:
            self.records.append(record(kind, self.version // 100, **fields))

    # CUPTI's functions

    def cuptiGetVersion(self, out: int) -> None:
        ctypes.c_uint32.from_address(out).value = self.version

    def cuptiActivityGetStructSize(self, kind: int, _: int, out: int) -> None:
        known = kinds.RECORD_SIZES.get(self.version // 100, {})
        ctypes.c_size_t.from_address(out).value = self.sizes.get(kind, known.get(kind, 0))

    def cuptiGetResultString(self, status: int, out: int) -> None:
        text = ctypes.create_string_buffer(f"CUPTI_ERROR_{status}".encode())
        self._kept.append(text)
        ctypes.c_void_p.from_address(out).value = ctypes.addressof(text)

    def cuptiGetTimestamp(self, out: int) -> None:
        ctypes.c_uint64.from_address(out).value = time.monotonic_ns() + AHEAD_NS

    def cuptiGetCallbackName(self, domain: int, number: int, out: int) -> int:
        if domain != 1 or number not in self._calls:
            return _INVALID
        text = ctypes.create_string_buffer(self._calls[number])
        self._kept.append(text)
        ctypes.c_void_p.from_address(out).value = ctypes.addressof(text)
        return 0

    def cuptiSubscribe(self, out: int, callback: Any, _: Any) -> int:
        if self._subscriber is not None:
            return _SUBSCRIBED
        self._subscriber, self._streams.observer = callback, self
        ctypes.c_void_p.from_address(out).value = 0x5B
        return 0

    def cuptiUnsubscribe(self, subscriber: int) -> None:
        assert subscriber == 0x5B
        self._subscriber, self._streams.observer = None, Observer()

    def cuptiEnableCallback(self, enable: int, subscriber: int, domain: int, number: int) -> None:
        assert (enable, subscriber, domain) == (1, 0x5B, 3)
        assert number in (11, 18)

    def cuptiSetThreadIdType(self, kind: int) -> None:
        assert kind == 1

    def cuptiActivityRegisterCallbacks(self, requested: Any, completed: Any) -> None:
        self._requested, self._completed = requested, completed

    def cuptiActivityEnable(self, kind: int) -> None:
        self.enabled.add(kind)

    def cuptiActivityDisable(self, kind: int) -> None:
        self.enabled.discard(kind)

    def cuptiActivityPushExternalCorrelationId(self, kind: int, number: int) -> None:
        assert kind == kinds.OUR_IDS
        self.pushed.append(number)

    def cuptiActivityPopExternalCorrelationId(self, kind: int, out: int) -> None:
        ctypes.c_uint64.from_address(out).value = self.pushed.pop()

    def cuptiActivityFlushAll(self, _: int) -> None:
        """Delivers the records from a thread of its own, as the library does."""
        worker = threading.Thread(target=self._hand_over)
        worker.start()
        worker.join()

    def _hand_over(self) -> None:
        while self.records:
            cells = SimpleNamespace(buffer=ctypes.c_void_p(), size=ctypes.c_size_t(), most=ctypes.c_size_t(7))
            self._requested(*map(ctypes.addressof, (cells.buffer, cells.size, cells.most)))
            assert cells.most.value == 0
            if not cells.buffer.value:
                self._dropped += len(self.records)
                self.records.clear()
                return
            filled = b""
            while self.records and len(filled) + len(self.records[0]) <= cells.size.value:
                filled += self.records.pop(0)
            ctypes.memmove(cells.buffer.value, filled, len(filled))
            self._completed(None, 0, cells.buffer.value, cells.size.value, len(filled))

    def cuptiActivityGetNumDroppedRecords(self, _: Any, stream: int, out: int) -> None:
        ctypes.c_size_t.from_address(out).value, self._dropped = self._dropped, 0

    def cuptiActivityGetNextRecord(self, buffer: int, valid: int, out: int) -> int:
        cell = ctypes.c_void_p.from_address(out)
        offset = 0
        if cell.value:
            kind = ctypes.c_uint32.from_address(cell.value).value
            offset = cell.value - buffer + kinds.RECORD_SIZES[self.version // 100][kind]
        cell.value = buffer + offset
        return _LIMIT if offset >= valid else 0

    def cuptiGetGraphNodeId(self, node: int, out: int) -> None:
        graph, index = self._driver.place_of(node)
        ctypes.c_uint64.from_address(out).value = _node_id(graph.handle, index)

    def cuptiGetGraphId(self, graph: int, out: int) -> None:
        ctypes.c_uint32.from_address(out).value = graph & 0xFFFFFFFF

    def cuptiGetGraphExecId(self, executable: int, out: int) -> None:
        ctypes.c_uint32.from_address(out).value = executable & 0xFFFFFFFF


def _node_id(graph: int, index: int) -> int:
    return (graph & 0xFFFFFFFF) << 32 | index + 1
