"""What ran on a GPU while it was looked at, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Activity:
    """One kernel, copy, memset, synchronisation or call of an interface.

    Attributes:
        kind: what it is.
        name: a kernel's demangled name, the direction of a copy such as "HtoD", a call's name.
        start_ns, end_ns: on the clock of the profile, which is the host's monotonic clock in nanoseconds.
        device, stream: ordinal, and the tool's number of the stream; -1 for a call.
        correlation: joins a call to what it started.
        graph, node: ids of a graph launch and of the node within, 0 outside of graphs.
        size: bytes copied, set, or allocated.
        range: the path of ranges that it belongs to, outermost first, () if it could not be attributed.
        thread: of the host, for a call; 0 otherwise.
    """

    kind: Literal["kernel", "memcpy", "memset", "synchronization", "allocation", "call"]
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
