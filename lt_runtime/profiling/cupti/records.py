"""Reads CUPTI's activity records from the bytes of its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Any, Final, NamedTuple

MEMCPY: Final = 1
MEMSET: Final = 2
DRIVER: Final = 4
RUNTIME: Final = 5
KERNEL: Final = 10
SYNCHRONIZATION: Final = 38
EXTERNAL_CORRELATION: Final = 39
MEMORY: Final = 49
KINDS: Final = (EXTERNAL_CORRELATION, DRIVER, RUNTIME, MEMCPY, MEMSET, KERNEL, SYNCHRONIZATION, MEMORY)
"""The kinds of records, `CUpti_ActivityKind`, that CUPTI is asked to write. CUPTI writes external correlations only if
DRIVER and RUNTIME are on."""

OUR_IDS: Final = 5
"""`CUpti_ExternalCorrelationKind` CUSTOM2, for the ids that this package pushes."""

_SAME_SIZES: Final = {DRIVER: 40, RUNTIME: 40, SYNCHRONIZATION: 56, EXTERNAL_CORRELATION: 24, MEMORY: 128}
_SIZES: Final = {
    1300: (216, 96, 88),
    **dict.fromkeys((1301, 1302), (224, 96, 88)),
    1303: (232, 96, 88),
    **dict.fromkeys((1304, 1305), (248, 112, 104)),
}
RECORD_SIZES: Final[Mapping[int, Mapping[int, int]]] = {
    version: _SAME_SIZES | dict(zip((KERNEL, MEMCPY, MEMSET), sizes, strict=True)) for version, sizes in _SIZES.items()
}
"""Bytes of a record of each kind, by CUPTI's version without the update number: 1305 is 13.5.

In all versions of the table the fields that this module reads have the same offsets; newer records are only longer.
"""

_CALL: Final = "call", "4xIQQ4xII", "name start_ns end_ns thread correlation"
_LAYOUTS: Final = {
    kind: (of, Struct(f"<{layout}"), fields.split())
    for kind, (of, layout, fields) in {
        DRIVER: _CALL,
        RUNTIME: _CALL,
        KERNEL: (
            "kernel", "16xQQ8xI4xi40xI8xQ32xQ4xI", "start_ns end_ns device stream correlation name node graph",
        ),
        MEMCPY: (
            "memcpy", "4xB3xQQQI4xiI16xQI", "name size start_ns end_ns device stream correlation node graph",
        ),
        MEMSET: ("memset", "8xQQQI4xiI16xQI", "size start_ns end_ns device stream correlation node graph"),
        SYNCHRONIZATION: ("synchronization", "4xIQQI4xi", "name start_ns end_ns correlation stream"),
        MEMORY: ("allocation", "4xIII8xQQ12xI4xi", "name memory correlation size start_ns device stream"),
    }.items()
}  # fmt: skip
"""For each kind of record: the kind of the `Activity` made from it, the layout of its bytes, and its fields.

The stream is read as a signed number, so that CUPTI's number for "no stream" becomes -1.
"""
_EXTERNAL: Final = Struct("<4xIQI")
_KIND: Final = Struct("<I")

_NAMES: Final = {
    MEMCPY: ("copy", "HtoD", "DtoH", "HtoA", "AtoH", "AtoA", "AtoD", "DtoA", "DtoD", "HtoH", "PtoP"),
    MEMSET: ("memset",),
    SYNCHRONIZATION: ("wait", "event synchronize", "stream wait event", "stream synchronize", "context synchronize"),
    MEMORY: ("memory", "allocate", "free"),
}
"""Names of copies, waits and allocations by CUPTI's numbers; the first name is for all other numbers."""
_MEMORIES: Final = ("", "pageable", "pinned", "device", "array", "managed", "device static", "managed static")


@dataclass(slots=True)
class Activity:
    """One kernel, copy, memset, synchronisation, allocation, or call of the driver or the CUDA runtime.

    Attributes:
        kind: "kernel", "memcpy", "memset", "synchronization", "allocation" or "call".
        name: a kernel's demangled name, the direction of a copy such as "HtoD", or the name of a call.
        start_ns, end_ns: nanoseconds on CUPTI's clock, or on the host's monotonic clock if a `Collector` returns it.
        device, stream: the GPU's ordinal, and CUPTI's number of the stream; -1 for a call.
        correlation: a number that a call shares with the work that it started.
        graph, node: ids of the launched graph and of the node in it; 0 for work outside of graphs.
        size: bytes copied, set, or allocated.
        range: the path of ranges around the activity, outermost first; () outside of all ranges.
        thread: id of the thread that made a call; 0 for the other kinds.
    """

    kind: str
    name: str
    start_ns: int
    end_ns: int
    device: int = -1
    stream: int = -1
    correlation: int = 0
    graph: int = 0
    node: int = 0
    size: int = 0
    range: tuple[str, ...] = ()
    thread: int = 0

    @property
    def us(self) -> float:
        """The activity's duration in microseconds."""
        return (self.end_ns - self.start_ns) / 1e3

    @property
    def is_on_gpu(self) -> bool:
        """Whether the activity is a kernel, a copy or a memset."""
        return self.kind in ("kernel", "memcpy", "memset")


class Link(NamedTuple):
    """Links a call to the innermost id that its thread had pushed by `push_id`.

    Attributes:
        external: the id that `push_id` was given.
        correlation: the call's correlation number, which the work that it started has too.
    """

    external: int
    correlation: int


def read_records(
    buffer: memoryview, offsets: Iterable[int], kernel_name: Callable[[int], str], call_name: Callable[[int, int], str]
) -> Iterator[Activity | Link]:
    """Reads the records that start at given offsets of a buffer; skips records of unknown kinds.

    Args:
        kernel_name: returns the demangled name at an address.
        call_name: returns the name of a call from the kind of its record and its number.
    """
    for offset in offsets:
        (kind,) = _KIND.unpack_from(buffer, offset)
        if kind == EXTERNAL_CORRELATION:
            whose, external, correlation = _EXTERNAL.unpack_from(buffer, offset)
            if whose == OUR_IDS:
                yield Link(external, correlation)
        elif kind in _LAYOUTS:
            of, struct, fields = _LAYOUTS[kind]
            values: dict[str, Any] = dict(zip(fields, struct.unpack_from(buffer, offset), strict=True))
            number, memory = values.pop("name", 0), values.pop("memory", 0)
            if kind == KERNEL:
                name = kernel_name(number)
            elif kind in _NAMES:
                name = f"{_named(_NAMES[kind], number)} {_named(_MEMORIES, memory)}".rstrip()
            else:
                name = call_name(kind, number)
            values.setdefault("end_ns", values["start_ns"])
            yield Activity(of, name, **values)


def _named(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else names[0]
