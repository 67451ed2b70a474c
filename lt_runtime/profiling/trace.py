"""Traces in Kineto's form, which Perfetto and HTA open: events in Chrome's format, times in µs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lt_runtime.files import replace_file
from lt_runtime.profiling.cupti.records import Activity
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
    base = min([span.start_ns for span in spans] + [each.start_ns for each in activities], default=0)
    started = {each.correlation for each in activities if each.device >= 0 and each.correlation}
    streams = dict.fromkeys((each.device, each.stream) for each in activities if each.device >= 0)
    yield from (_thread_name(*stream, f"stream {stream[1]}") for stream in streams)
    if any(span.gpu_us is not None for span in spans):
        yield _thread_name(0, _RANGES, "ranges, by events")
    for span in spans:
        name, path, start = span.path[-1], span.path, span.start_ns - base
        if span.us:  # ranges in a graph take the host no time when the graph is launched
            yield _complete(name, "user_annotation", {"pid": process, "tid": span.thread}, start, 1e3 * span.us, path)
        if span.gpu_us is not None:
            start, place = span.gpu_start_ns - base, {"pid": 0, "tid": _RANGES}
            yield _complete(name, "gpu_user_annotation", place, start, 1e3 * span.gpu_us, path)
    for each in activities:
        start, is_call = each.start_ns - base, each.device < 0
        place = {"pid": process, "tid": each.thread} if is_call else {"pid": each.device, "tid": each.stream}
        category = _CATEGORIES.get(each.kind, "cuda_runtime" if is_call else each.kind)
        event = _complete(each.name or each.kind, category, place, start, each.end_ns - each.start_ns, each.range)
        event["args"] |= {"correlation": each.correlation, "bytes": each.size, "graph id": each.graph}
        if not is_call:
            event["args"] |= {"device": each.device, "stream": each.stream, "graph node id": each.node}
        yield event
        if each.correlation in started:
            ends = {"ph": "s"} if is_call else {"ph": "f", "bp": "e"}
            yield {**ends, "cat": "ac2g", "name": "ac2g", "id": each.correlation, **place, "ts": _us(start)}


def _thread_name(process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _complete(
    name: str, category: str, place: Mapping[str, int], start_ns: float, ns: float, path: Sequence[str]
) -> dict[str, Any]:
    times = {"ts": _us(start_ns), "dur": _us(max(ns, 0.0))}
    return {"ph": "X", "cat": category, "name": name, **place, **times, "args": {"range": " > ".join(path)}}


def _us(ns: float) -> float:
    return round(ns / 1e3, 3)
