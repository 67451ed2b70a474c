"""Training that goes on for a while: over batches that are fetched ahead, and for thousands of steps."""

from __future__ import annotations

import itertools
import resource
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import cupy as cp
import cupyx
import numpy as np

import lt_runtime as lt
from benchmarks import step_lt
from benchmarks.fresh import fresh_plans
from benchmarks.report import Row
from benchmarks.step_cases import StepCase
from benchmarks.step_lt import Setup
from benchmarks.step_row import timed_calls
from benchmarks.timing import Timing, take_turns
from lt_runtime.store.entries import now

_BATCHES: Final = 4  # different ones, which come again and again
_LEAST_STEPS: Final = 50  # in a turn
_WARM_UP: Final = 100

Pair = tuple[Any, Any]


def measure_prefetch(name: str, case: StepCase, rounds: int, stream: Any) -> Row:
    """A tuned step over batches in page-locked memory through `lt.prefetch`, and over batches on the GPU."""
    setup, count = Setup(case, stream), max(case.replays, _LEAST_STEPS)
    with fresh_plans():
        step_lt.forget_plans(case)
        step_lt.tune(case)
        step = setup.step()
        with stream:
            step(setup.x, setup.target)
    on_gpu = [step_lt.batch(case) for _ in range(_BATCHES)]
    on_host = [tuple(map(pinned, pair)) for pair in on_gpu]
    with lt.prefetch(itertools.cycle(on_host), device=setup.model.device, stream=stream) as ahead:
        sources: dict[str, Iterator[Pair]] = {"gpu_batches": itertools.cycle(on_gpu), "prefetch": ahead}
        turns = {each: timed_calls(_training(step, source, stream), count, stream) for each, source in sources.items()}
        timings = take_turns(turns, rounds)
    size = sum(array.nbytes for array in on_host[0])
    setting = case.as_json() | {"when": now(), "rounds": rounds, "steps": count, "batch_bytes": size}
    return Row(name, timings, "gpu_batches", setting=setting)


def pinned(array: Any) -> Any:
    """A GPU's array in page-locked memory of the host."""
    host = cupyx.empty_pinned((array.nbytes,), np.uint8).view(array.dtype).reshape(array.shape)
    host[...] = cp.asnumpy(array)
    return host


def _training(step: lt.TrainStep, source: Iterator[Pair], stream: Any) -> Callable[[int], None]:
    def train(count: int) -> None:
        with stream:
            for x, target in itertools.islice(source, count):
                step(x, target)

    return train


def measure_soak(name: str, case: StepCase, count: int, stream: Any) -> Row:
    """So many steps, as a script makes them: what they add to the memory in use, and the mean of their losses."""
    setup = Setup(case, stream)
    with fresh_plans(), stream:
        step_lt.forget_plans(case)
        step = setup.step()
        _repeat(step, setup, _WARM_UP)
        step.metrics()
        before, start = memory(), time.perf_counter()
        _repeat(step, setup, count)
        metrics = step.metrics()
        seconds, after = time.perf_counter() - start, memory()
    facts = {"when": now(), "replays": metrics.steps, "mean_loss": metrics.loss, "memory": before}
    facts |= {"gained": {kind: after[kind] - before[kind] for kind in before}}
    timing = Timing(seconds * 1e6 / count, 0.0)
    return Row(name, {"lt_call": timing}, "lt_call", setting=case.as_json() | facts)


def _repeat(step: lt.TrainStep, setup: Setup, count: int) -> None:
    for _ in range(count):
        step(setup.x, setup.target)


def memory() -> dict[str, int]:
    """Bytes: in use on the GPU by anyone, held by CuPy's pool, and the most that the process ever had on the host."""
    free, total = cp.cuda.runtime.memGetInfo()
    host = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"gpu": total - free, "pool": cp.get_default_memory_pool().total_bytes(), "host": host}
