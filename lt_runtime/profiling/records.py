"""The data type of everything that a profile records: kernels, copies, calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Activity:
    """One kernel, copy, memset, synchronisation, allocation, or call of the driver or the CUDA runtime.

    Attributes:
        kind: which of them.
        name: a kernel's demangled name, the direction of a copy such as "HtoD", or the name of a call.
        start_ns, end_ns: on the host's monotonic clock, in nanoseconds.
        device, stream: the GPU's ordinal, and CUPTI's number of the stream; -1 for a call.
        correlation: the same number for a call and for the work that it started.
        graph, node: ids of the launched graph and of the node in it; 0 for work outside of graphs.
        size: bytes copied, set, or allocated.
        range: the path of ranges that it belongs to, outermost first; () if it belongs to none.
        thread: id of the thread that made a call; 0 for the other kinds.
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
