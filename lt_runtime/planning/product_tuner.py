"""Measures and verifies the algorithms of one matrix product, and picks one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from lt_runtime.arrays.libraries import cupy_stream
from lt_runtime.cublaslt import Algorithm
from lt_runtime.errors import ArgumentError, PlanError
from lt_runtime.gpu.clock import Clock
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import StreamMemory, stream_memory, workspace_size
from lt_runtime.planning.call import ProductCall
from lt_runtime.planning.candidates import configuration, deep_candidates, heuristic_candidates
from lt_runtime.planning.matmul import MatmulPlan
from lt_runtime.planning.product import library_may_fuse
from lt_runtime.planning.timing import Launch, Timing, buffer_sets, fastest, take_times, timing_session
from lt_runtime.planning.trial import NORMAL, Trial
from lt_runtime.planning.verification import verify
from lt_runtime.problem import MatmulProblem

BUDGET_S: Final = {"default": 2.0, "deep": 20.0}
"""Seconds after which nothing more is timed, by effort."""
_FIRST: Final = "first"


@dataclass(frozen=True, slots=True)
class Rejection:
    """An algorithm that is not to be used: its 64 bytes, its configuration by attribute's name, and why."""

    algorithm: bytes
    config: Mapping[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class ProductVerdict:
    """What the tuner found.

    Attributes:
        algorithm: 64 bytes, for `MatmulPlan(..., algorithm=...)`.
        config: its configuration by attribute's name.
        us: microseconds that it takes, median of the rounds. spread: their interquartile range.
        first_us: what the heuristic's first takes.
        candidates: how many were timed in full.
        rejected: those that cannot be launched, are far behind, wrong, or not twice the same.
        seconds: that it all took.
    """

    algorithm: bytes
    config: Mapping[str, int]
    us: float
    spread: float
    first_us: float
    candidates: int
    rejected: tuple[Rejection, ...]
    seconds: float


def tune_product(problem: MatmulProblem, device: int, *, effort: str = "default") -> ProductVerdict | None:
    """The fastest algorithm of cuBLASLt for a product whose results are right; None where nothing is to be multiplied.

    It works on a stream and in memory of its own, and frees all but that stream's workspace.

    Args:
        problem: with an epilogue that the library may be asked for, see `library_may_fuse`.
        device: ordinal of the GPU.
        effort: "default" measures what several queries of the heuristic offer, "deep" configurations of each of the
            library's algorithms as well.

    Raises:
        ArgumentError: the effort is neither.
        PlanError: the library has no algorithm for the problem, or none whose results are right.
        MissingLibraryError: CuPy is not installed.
        CaptureError: see `timing_session`.
        MemoryError: there is not enough of it on the GPU for the operands and for the reference in FP64.
    """
    if effort not in BUDGET_S:
        raise ArgumentError(f"effort is {effort!r}; accepted are {', '.join(map(repr, BUDGET_S))}")
    if 0 in (problem.batch, problem.m, problem.n, problem.k):
        return None
    if not library_may_fuse(problem):
        raise PlanError(f"cuBLASLt is not to be asked for {problem}")
    started = time.monotonic()
    with timing_session(device) as clock:
        field = Field(problem, device, effort)
        with _own_memory(device, clock) as xp:
            timings = _compete(xp, field, clock, BUDGET_S[effort])
    return _verdict(field, timings, time.monotonic() - started)


class Field:
    """The candidates for one problem.

    Attributes:
        plans: one for each that is still in it, by name; the heuristic's own choice is the first.
        rejected: those that are out.
    """

    def __init__(self, problem: MatmulProblem, device: int, effort: str) -> None:
        self.problem, self.device = problem, device
        self.plans: dict[str, MatmulPlan] = {}
        self.rejected: list[Rejection] = []
        own = MatmulPlan(problem, device)
        algorithms = heuristic_candidates(own, workspace_size(device))
        if effort == "deep":
            algorithms = deep_candidates(own, algorithms)
        for number, algorithm in enumerate(algorithms):
            self._admit(f"candidate {number}" if number else _FIRST, algorithm)

    def _admit(self, name: str, algorithm: Algorithm) -> None:
        try:
            plan = MatmulPlan(self.problem, self.device, algorithm=algorithm.blob)
        except PlanError as error:
            self._note(algorithm, str(error))
            return
        if plan.is_lean(plan.algorithm):
            self.plans[name] = plan
        else:
            self._note(algorithm, "cannot be launched as at most two kernels and nothing else")

    def reject(self, name: str, reason: str) -> None:
        """Takes a candidate out."""
        self._note(self.plans.pop(name).algorithm, reason)

    def _note(self, algorithm: Algorithm, reason: str) -> None:
        self.rejected.append(Rejection(algorithm.blob, configuration(algorithm), reason))


@contextlib.contextmanager
def _own_memory(device: int, clock: Clock) -> Iterator[Any]:
    """CuPy on the clock's stream, with a pool that is emptied in the end."""
    with cupy_stream(device, clock.stream) as xp:
        pool = xp.cuda.MemoryPool()
        with xp.cuda.using_allocator(pool.malloc):
            try:
                yield xp
            finally:
                clock.wait()
        pool.free_all_blocks()


def _compete(xp: Any, field: Field, clock: Clock, budget_s: float) -> dict[str, Timing]:
    """Times the candidates, verifies those that are not far behind, and rejects all others.

    Where one is wrong the rest compete again: they may have been far behind that one alone.
    """
    memory = stream_memory(field.device, clock.stream)
    first = Trial(xp, field.problem)
    trials = [first, *(Trial(xp, field.problem) for _ in range(1, buffer_sets(first.size, field.device)))]
    calls = [trial.call(clock.stream) for trial in trials]
    launches = {name: launcher(plan, calls, memory) for name, plan in field.plans.items()}
    timings: dict[str, Timing] = {}
    while field.plans:
        for seed, trial in enumerate(trials):
            trial.fill(NORMAL, np.random.default_rng(seed))
        contenders = {name: launches[name] for name in field.plans}
        timings |= take_times(contenders, clock, len(trials), time.monotonic() + budget_s)
        near = [name for name in contenders if name in timings and not timings[name].dropped]
        faults = verify({name: partial(_run_afresh, launches[name], memory, clock.stream) for name in near}, first)
        for name, reason in faults.items():
            field.reject(name, reason)
        if not faults:
            break
    _reject_slow(field, timings)
    return timings


def _reject_slow(field: Field, timings: Mapping[str, Timing]) -> None:
    for name in list(field.plans):
        if name not in timings:
            field.reject(name, "not measured: time was up")
        elif timings[name].dropped:
            field.reject(name, f"far behind: {timings[name].median_us:.1f} µs")


def launcher(plan: MatmulPlan, calls: Sequence[ProductCall], memory: StreamMemory) -> Launch:
    """A candidate as a contender; the calls' stream is the clock's."""
    return lambda number, _: plan.run(calls[number], memory)


def _run_afresh(launch: Launch, memory: StreamMemory, stream: int) -> None:
    """Launches with a workspace of NaN, so that nothing left there by an earlier launch is of use."""
    call("cuMemsetD8Async", memory.workspace, 0xFF, memory.workspace_size, stream)
    launch(0, stream)


def _verdict(field: Field, timings: Mapping[str, Timing], seconds: float) -> ProductVerdict:
    if not field.plans:
        reasons = "; ".join(f"{each.config}: {each.reason}" for each in field.rejected)
        raise PlanError(f"none of cuBLASLt's algorithms is of use for {field.problem}: {reasons}")
    chosen = fastest({name: timings[name] for name in field.plans}, _FIRST)
    algorithm, timing = field.plans[chosen].algorithm, timings[chosen]
    return ProductVerdict(
        algorithm=algorithm.blob,
        config=configuration(algorithm),
        us=timing.median_us,
        spread=timing.spread_us,
        first_us=timings.get(_FIRST, timing).median_us,
        candidates=sum(not each.dropped for each in timings.values()),
        rejected=tuple(field.rejected),
        seconds=seconds,
    )
