"""GPU microseconds of a task, from CUDA Graphs that repeat it."""

from __future__ import annotations

import collections
import contextlib
import gc
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cupy as cp

from benchmarks.timing import Timing, take_turns

Run = Callable[[int, int], object]
"""Puts a task on a stream: (number of the buffer set, stream handle)."""
Replay = Callable[[], object]


class Contender(NamedTuple):
    """How one of those compared does the task, and how that is captured."""

    run: Run
    capture: Callable[[Run, int, int, Any], Replay]


class Measured(NamedTuple):
    """Times by contender, and why the others have none."""

    timings: dict[str, Timing]
    left_out: dict[str, str]


def measure(
    builders: Mapping[str, Callable[[], Contender]],
    sets: int,
    repetitions: int,
    rounds: int,
    stream: Any,
    advance: Callable[[], None] = lambda: None,
) -> Measured:
    """Captures every contender and lets them take turns.

    One that cannot be built or captured is left out and named, so that a missing peer costs no more than its figure.

    Args:
        sets: number of buffer sets that the repetitions go round.
        repetitions: of the task in one graph.
        stream: a CuPy stream that can be captured, on which everything runs.
    """
    turns, left_out = {}, {}
    for name, build in builders.items():
        try:
            contender = build()
            replay = contender.capture(contender.run, repetitions, sets, stream)
        except Exception as error:
            left_out[name] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            continue
        turns[name] = _timed(replay, repetitions, stream)
    return Measured(take_turns(turns, rounds, advance), left_out)


def _timed(replay: Replay, repetitions: int, stream: Any) -> Callable[[], float]:
    """A turn: microseconds a repetition.

    The replay before the timed one keeps the GPU busy until the host has queued that, and fills the caches with what
    the contender itself leaves there.
    """
    start, end = cp.cuda.Event(), cp.cuda.Event()

    def turn() -> float:
        replay()
        start.record(stream)
        replay()
        end.record(stream)
        end.synchronize()
        return float(cp.cuda.get_elapsed_time(start, end)) * 1e3 / repetitions

    return turn


def capture(run: Run, repetitions: int, sets: int, stream: Any) -> Replay:
    """A graph of what is launched on a stream by its handle."""
    with stream:
        _warm_up(run, sets, stream)
        stream.begin_capture()
        try:
            for i in range(repetitions):
                run(i % sets, stream.ptr)
        except BaseException:
            with contextlib.suppress(Exception):  # its status can only repeat what is being raised
                stream.end_capture()
            raise
        graph = stream.end_capture()
    graph.upload(stream)
    return lambda: graph.launch(stream)


def capture_torch(run: Run, repetitions: int, sets: int, stream: Any) -> Replay:
    """A graph of what PyTorch launches, in memory of the graph's own.

    What `run` returns is kept until its buffer set comes round again, so that results go round as inputs do.
    """
    import torch

    outside = torch.cuda.ExternalStream(stream.ptr)
    with torch.cuda.stream(outside):
        _warm_up(run, sets, stream)
    graph = torch.cuda.CUDAGraph()
    kept: collections.deque[object] = collections.deque(maxlen=sets)
    with torch.cuda.graph(graph, stream=outside):
        for i in range(repetitions):
            kept.append(run(i % sets, stream.ptr))

    def replay() -> None:
        with torch.cuda.stream(outside):
            graph.replay()

    return replay


def _warm_up(run: Run, sets: int, stream: Any) -> None:
    """Compiles, plans and allocates whatever the first runs do, once the buffers are filled, on whichever stream."""
    cp.cuda.Device().synchronize()
    for i in range(sets):
        run(i, stream.ptr)
    stream.synchronize()


def release() -> None:
    """Gives back the memory of what is no longer referenced, whichever library holds it."""
    gc.collect()
    cp.get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules:
        sys.modules["torch"].cuda.empty_cache()
