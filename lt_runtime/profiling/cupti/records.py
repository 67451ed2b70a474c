"""Reads CUPTI's activity records from the bytes of its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

from lt_runtime.profiling.records import Activity

MEMCPY: Final = 1
MEMSET: Final = 2
DRIVER: Final = 4
RUNTIME: Final = 5
KERNEL: Final = 10
SYNCHRONIZATION: Final = 38
EXTERNAL_CORRELATION: Final = 39
MEMORY: Final = 49
KINDS: Final = (EXTERNAL_CORRELATION, DRIVER, RUNTIME, MEMCPY, MEMSET, KERNEL, SYNCHRONIZATION, MEMORY)
"""`CUpti_ActivityKind`s to record. CUPTI writes external correlations only if DRIVER and RUNTIME are on."""

OUR_IDS: Final = 5
"""`CUpti_ExternalCorrelationKind` CUSTOM2, for the ids that this package pushes."""

_COMMON: Final = {DRIVER: 40, RUNTIME: 40, SYNCHRONIZATION: 56, EXTERNAL_CORRELATION: 24, MEMORY: 128}


def _sizes(kernel: int, memcpy: int, memset: int) -> Mapping[int, int]:
    return {**_COMMON, KERNEL: kernel, MEMCPY: memcpy, MEMSET: memset}


RECORD_SIZES: Final[Mapping[int, Mapping[int, int]]] = {
    1300: _sizes(216, 96, 88),
    1301: _sizes(224, 96, 88),
    1302: _sizes(224, 96, 88),
    1303: _sizes(232, 96, 88),
    1304: _sizes(248, 112, 104),
    1305: _sizes(248, 112, 104),
}
"""Bytes of a record of each kind, by CUPTI's version without its update: 1305 is 13.5.

In all of these versions the fields that are read here have the same offsets; newer records are only longer.
"""

_KERNEL: Final = Struct("<16xQQ8xI4xI40xI8xQ32xQ4xI")
_MEMCPY: Final = Struct("<4xB3xQQQI4xII16xQI")
_MEMSET: Final = Struct("<8xQQQI4xII16xQI")
_CALL: Final = Struct("<4xIQQ4xII")
_SYNCHRONIZATION: Final = Struct("<4xIQQI4xI")
_EXTERNAL: Final = Struct("<4xIQI")
_MEMORY: Final = Struct("<4xIII8xQQ12xI4xI")
_KIND: Final = Struct("<I")

_COPIES: Final = ("copy", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP")
_WAITS: Final = ("wait", "event synchronize", "stream wait event", "stream synchronize", "context synchronize")
_ALLOCATIONS: Final = ("memory", "allocate", "free")
_MEMORIES: Final = ("", "pageable", "pinned", "device", "array", "managed", "device static", "managed static")
_NO_STREAM: Final = 0xFFFFFFFF


class Link(NamedTuple):
    """Links a call to the innermost id that its thread had pushed.

    Attributes:
        external: the id.
        correlation: the call's correlation number.
    """

    external: int
    correlation: int


KernelName: TypeAlias = Callable[[int], str]
"""Returns the demangled name at an address."""
CallName: TypeAlias = Callable[[int, int], str]
"""Returns the name of a call from the kind of its record and its number."""


def read_records(
    buffer: memoryview, offsets: Iterable[int], kernel_name: KernelName, call_name: CallName
) -> Iterator[Activity | Link]:
    """The records that start at the offsets of a buffer, with CUPTI's times; records of unknown kinds are left out."""
    for offset in offsets:
        (kind,) = _KIND.unpack_from(buffer, offset)
        if kind in (DRIVER, RUNTIME):
            number, start, end, thread, correlation = _CALL.unpack_from(buffer, offset)
            yield Activity("call", call_name(kind, number), start, end, correlation=correlation, thread=thread)
        elif kind == EXTERNAL_CORRELATION:
            whose, external, correlation = _EXTERNAL.unpack_from(buffer, offset)
            if whose == OUR_IDS:
                yield Link(external, correlation)
        elif kind == KERNEL:
            start, end, device, stream, correlation, name, node, graph = _KERNEL.unpack_from(buffer, offset)
            yield Activity("kernel", kernel_name(name), start, end, device, stream, correlation, graph, node)
        elif kind == MEMCPY:
            direction, size, start, end, device, stream, correlation, node, graph = _MEMCPY.unpack_from(buffer, offset)
            name = _named(_COPIES, direction)
            yield Activity("memcpy", name, start, end, device, stream, correlation, graph, node, size)
        elif kind == MEMSET:
            size, start, end, device, stream, correlation, node, graph = _MEMSET.unpack_from(buffer, offset)
            yield Activity("memset", "memset", start, end, device, stream, correlation, graph, node, size)
        elif kind == SYNCHRONIZATION:
            way, start, end, correlation, stream = _SYNCHRONIZATION.unpack_from(buffer, offset)
            stream = -1 if stream == _NO_STREAM else stream
            name = _named(_WAITS, way)
            yield Activity("synchronization", name, start, end, stream=stream, correlation=correlation)
        elif kind == MEMORY:
            what, memory, correlation, size, time, device, stream = _MEMORY.unpack_from(buffer, offset)
            stream = -1 if stream == _NO_STREAM else stream
            name = f"{_named(_ALLOCATIONS, what)} {_named(_MEMORIES, memory)}".rstrip()
            yield Activity("allocation", name, time, time, device, stream, correlation, size=size)


def _named(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else names[0]
