"""Traces in Kineto's form, which Perfetto and HTA open: events in Chrome's format, times in µs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from lt_runtime.files import replace_file
from lt_runtime.profiling.records import Activity
from lt_runtime.profiling.timer import Span

_CATEGORIES: Final = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset", "call": "cuda_runtime"}
_RANGES: Final = 1_000_000
"""The thread id under which the trace shows ranges timed on the GPU."""


def write(file: Path, spans: Sequence[Span], activities: Sequence[Activity], device: str) -> None:
    """Writes a trace whose times are relative to its first event."""
    events = list(trace_events(spans, activities))
    content = {"schemaVersion": 1, "deviceProperties": [{"name": device}], "traceEvents": events}
    replace_file(file, json.dumps(content).encode())


def trace_events(spans: Sequence[Span], activities: Sequence[Activity]) -> Iterator[dict[str, Any]]:
    """Complete events (X), flows from calls to the work that they started (s and f), and thread names (M)."""
    process = os.getpid()
    starts = [*(span.start_ns for span in spans), *(activity.start_ns for activity in activities)]
    base = min(starts, default=0)
    started = {each.correlation for each in activities if each.device >= 0 and each.correlation}
    named = set[tuple[int, int]]()
    if any(span.gpu_us is not None for span in spans):
        yield _thread_name(0, _RANGES, "ranges, by events")
    for span in spans:
        name, path = span.path[-1], span.path
        if span.us:  # ranges in a graph take the host no time when the graph is launched
            yield _complete(name, "user_annotation", process, span.thread, (span.start_ns - base) / 1e3, span.us, path)
        if span.gpu_us is not None:
            start = (span.gpu_start_ns - base) / 1e3
            yield _complete(name, "gpu_user_annotation", 0, _RANGES, start, span.gpu_us, path)
    for each in activities:
        start, length = (each.start_ns - base) / 1e3, (each.end_ns - each.start_ns) / 1e3
        is_call = each.device < 0
        row = (process, each.thread) if is_call else (each.device, each.stream)
        if not is_call and row not in named:
            named.add(row)
            yield _thread_name(*row, f"stream {row[1]}")
        category = _CATEGORIES.get(each.kind, "cuda_runtime" if is_call else each.kind)
        event = _complete(each.name or each.kind, category, *row, start, length, each.range)
        event["args"] |= {"correlation": each.correlation, "bytes": each.size, "graph id": each.graph}
        if not is_call:
            event["args"] |= {"device": each.device, "stream": each.stream, "graph node id": each.node}
        yield event
        if each.correlation in started:
            flow = {"cat": "ac2g", "name": "ac2g", "id": each.correlation, "pid": row[0], "tid": row[1]}
            yield {"ph": "s", **flow, "ts": _us(start)} if is_call else {"ph": "f", "bp": "e", **flow, "ts": _us(start)}


def _thread_name(process: int, row: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": name}}


def _complete(
    name: str, category: str, process: int, row: int, start: float, length: float, path: Sequence[str]
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": process,
        "tid": row,
        "ts": _us(start),
        "dur": _us(max(length, 0.0)),
        "args": {"range": " > ".join(path)},
    }


def _us(value: float) -> float:
    return round(value, 3)
