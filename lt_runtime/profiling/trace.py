"""Writes traces in Kineto's form, which Perfetto and HTA open: events in Chrome's trace format, with times in µs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from lt_runtime.files import replace_file
from lt_runtime.profiling.cupti.records import Activity
from lt_runtime.profiling.timer import RANGES

_CATEGORIES: Final = {
    "memcpy": "gpu_memcpy", "memset": "gpu_memset", "call": "cuda_runtime", "synchronization": "cuda_runtime",
}  # fmt: skip
"""Kineto's names of kinds of activities, where they differ from ours."""


def write(file: Path, activities: Sequence[Activity], device: str) -> None:
    """Writes a trace whose times are relative to its first event."""
    content = {"schemaVersion": 1, "deviceProperties": [{"name": device}], "traceEvents": [*trace_events(activities)]}
    replace_file(file, json.dumps(content).encode())


def trace_events(activities: Sequence[Activity]) -> Iterator[dict[str, Any]]:
    """The trace's events: complete events (X), flows from calls to the work they started (s, f), thread names (M)."""
    base = min((each.start_ns for each in activities), default=0)
    started = {each.correlation for each in activities if each.device >= 0 and each.correlation}
    for device, stream in dict.fromkeys((each.device, each.stream) for each in activities if each.device >= 0):
        name = {"name": "ranges, by events" if stream == RANGES else f"stream {stream}"}
        yield {"ph": "M", "name": "thread_name", "pid": device, "tid": stream, "args": name}
    for each in activities:
        is_on_host, start = each.device < 0, round((each.start_ns - base) / 1e3, 3)
        place = {"pid": os.getpid(), "tid": each.thread} if is_on_host else {"pid": each.device, "tid": each.stream}
        args: dict[str, Any] = {"range": " > ".join(each.range)}
        if not each.kind.endswith("user_annotation"):
            args |= {"correlation": each.correlation, "bytes": each.size, "graph id": each.graph}
            args |= {} if is_on_host else {"device": each.device, "stream": each.stream, "graph node id": each.node}
        event = {"ph": "X", "cat": _CATEGORIES.get(each.kind, each.kind), "name": each.name or each.kind, **place}
        yield {**event, "ts": start, "dur": round(max(each.us, 0.0), 3), "args": args}
        if each.correlation in started:
            ends = {"ph": "s"} if is_on_host else {"ph": "f", "bp": "e"}
            yield {**ends, "cat": "ac2g", "name": "ac2g", "id": each.correlation, **place, "ts": start}
