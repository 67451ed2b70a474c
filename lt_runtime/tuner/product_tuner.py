"""Measures and verifies the algorithms of one matrix product, and picks one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from lt_runtime.errors import ArgumentError, PlanError
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import StreamMemory, stream_memory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.narrow import takes
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.blobs import configuration, plan_by
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.narrow import NARROW
from lt_runtime.products.padded import K_MAJOR, PADDED, PaddedPlan, padded_problem, pays_untuned
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.products.product import library_may_fuse
from lt_runtime.store.entries import Effort, ProductEntry, RejectedAlgorithm
from lt_runtime.tuner.candidates import deep_candidates, heuristic_candidates
from lt_runtime.tuner.timing import Launch, Timing, buffer_sets, fastest, take_times
from lt_runtime.tuner.trial import NORMAL, Trial
from lt_runtime.tuner.verification import verify
from lt_runtime.tuner.workbench import Bench, workbench

BUDGET_S: Final = {"default": 2.0, "deep": 20.0}
"""Seconds of timing after which nothing more is timed, by effort; see `Stopwatch`."""
_FIRST: Final = "first"


@dataclass(frozen=True, slots=True)
class ProductVerdict:
    """What the tuner found.

    Attributes:
        algorithm: for `plan_by`.
        config: its configuration by attribute's name.
        us: microseconds that it takes, median of the rounds. spread: their interquartile range.
        first_us: what the heuristic's first takes, on padded copies if it runs so untuned.
        candidates: how many were timed in full.
        rejected: those that cannot be launched, are far behind, or would have won but are wrong or not twice the same.
        effort: how hard it was searched. seconds: that it all took.
    """

    algorithm: bytes
    config: Mapping[str, int]
    us: float
    spread: float
    first_us: float
    candidates: int
    rejected: tuple[RejectedAlgorithm, ...]
    effort: Effort
    seconds: float

    @property
    def entry(self) -> ProductEntry:
        """What the plan cache remembers of it."""
        return ProductEntry(
            self.algorithm,
            self.config,
            self.us,
            self.first_us,
            self.spread,
            self.candidates,
            self.rejected,
            effort=self.effort,
        )


def tune_product(problem: MatmulProblem, device: int, *, effort: str = "default") -> ProductVerdict | None:
    """The fastest algorithm for a product whose results are right; None where nothing is to be multiplied.

    It works on a stream and in memory of its own, and frees all but that stream's workspace.

    Args:
        problem: with an epilogue that the library may be asked for, see `library_may_fuse`.
        device: ordinal of the GPU.
        effort: "default" measures what several queries of the heuristic offer, "deep" configurations of each of the
            library's algorithms as well.

    Raises:
        ArgumentError: the effort is neither.
        PlanError: there is no algorithm for the problem, or none whose results are right.
        MissingLibraryError: CuPy is not installed.
        CaptureError: see `timing_session`.
        MemoryError: there is not enough of it on the GPU for the operands and for the reference in FP64.
    """
    if effort not in BUDGET_S:
        raise ArgumentError(f"effort is {effort!r}; accepted are {', '.join(map(repr, BUDGET_S))}")
    if problem.is_empty:
        return None
    if not library_may_fuse(problem):
        raise PlanError(f"cuBLASLt is not to be asked for {problem}")
    with workbench(device) as bench:
        return tune_on(bench, problem, cast(Effort, effort), BUDGET_S[effort])


def tune_on(bench: Bench, problem: MatmulProblem, effort: Effort, budget_s: float) -> ProductVerdict:
    """`tune_product` of a problem that is not empty, at a workbench that is set up already.

    Args:
        budget_s: seconds of timing after which nothing more is timed; see `Stopwatch`.
    """
    started = time.monotonic()
    field = Field(problem, bench.device, effort)
    timings = _compete(bench, field, budget_s)
    return _verdict(field, timings, effort, time.monotonic() - started)


class Field:
    """The candidates for one problem.

    Attributes:
        plans: one for each that is still in it, by name; what runs untuned is the first, if that is the library's.
        rejected: those that are out.
    """

    def __init__(self, problem: MatmulProblem, device: int, effort: str) -> None:
        self.problem, self.device = problem, device
        self.plans: dict[str, AlgorithmPlan] = {}
        self.rejected: list[RejectedAlgorithm] = []
        padded = self._padded(effort)
        plain = self._plain(effort, needed=not padded and not takes(problem))
        for number, blob in enumerate(padded + plain if pays_untuned(problem) else plain + padded):
            self._admit(f"candidate {number}" if number else _FIRST, blob)
        if takes(problem):
            self._admit("ours", NARROW.blob)

    def _plain(self, effort: str, *, needed: bool) -> list[bytes]:
        """The library's algorithms. If it offers none, copies or our kernel may remain; or else that is an error."""
        try:
            return _offered(MatmulPlan(self.problem, self.device), effort)
        except PlanError:
            if needed:
                raise
            return []

    def _padded(self, effort: str) -> list[bytes]:
        """The library's algorithms on copies."""
        found: list[bytes] = []
        for mark, k_major in ((PADDED, False), (K_MAJOR, True)):
            if padded_problem(self.problem, k_major=k_major) is None:
                continue
            with contextlib.suppress(PlanError):  # as where there is no room for them
                plan = PaddedPlan(self.problem, self.device, k_major=k_major).inner
                found += [mark + blob for blob in _offered(plan, effort)]
        return found

    def _admit(self, name: str, blob: bytes) -> None:
        try:
            plan = plan_by(self.problem, self.device, blob)
        except PlanError as error:
            self._note(blob, str(error))
            return
        if plan.is_lean:
            self.plans[name] = plan
        else:
            self._note(blob, "cannot be launched as at most two kernels and nothing else")

    def reject(self, name: str, reason: str) -> None:
        """Takes a candidate out."""
        self._note(self.plans.pop(name).blob, reason)

    def _note(self, blob: bytes, reason: str) -> None:
        self.rejected.append(RejectedAlgorithm(blob, configuration(blob), reason))


def _offered(plan: MatmulPlan, effort: str) -> list[bytes]:
    """The library's algorithms for a product, the plan's own first."""
    algorithms = heuristic_candidates(plan, plan.workspace_size)
    return [each.blob for each in (deep_candidates(plan, algorithms) if effort == "deep" else algorithms)]


def _compete(bench: Bench, field: Field, budget_s: float) -> dict[str, Timing]:
    """Times the candidates and verifies the winner; all that is slower than a right one need not be looked at.

    What runs untuned is verified in any case. Where the winner is wrong the rest compete
    again: they may have been far behind that one alone.
    """
    clock, memory = bench.clock, stream_memory(field.device, bench.clock.stream)
    deadline = clock.watch.seconds + budget_s
    first = Trial(bench.xp, field.problem)
    trials = [first, *(Trial(bench.xp, field.problem) for _ in range(1, buffer_sets(first.size, field.device)))]
    calls = [trial.call(clock.stream) for trial in trials]
    launches = {name: launcher(plan, calls, memory) for name, plan in field.plans.items()}
    timings: dict[str, Timing] = {}
    while field.plans:
        for seed, trial in enumerate(trials):
            trial.fill(NORMAL, seed)
        left = deadline - clock.watch.seconds
        timings |= take_times({name: launches[name] for name in field.plans}, clock, len(trials), left)
        chosen = _fastest(field, timings)
        judged = [name for name in dict.fromkeys((chosen, _FIRST)) if name in field.plans]
        faults = verify({name: partial(_run_afresh, launches[name], memory, clock.stream) for name in judged}, first)
        for name, fault in faults.items():
            field.reject(name, fault)
        if chosen not in faults:
            break
    _reject_slow(field, timings)
    return timings


def _fastest(field: Field, timings: Mapping[str, Timing]) -> str:
    return fastest({name: timing for name, timing in timings.items() if name in field.plans}, _FIRST)


def _reject_slow(field: Field, timings: Mapping[str, Timing]) -> None:
    for name in list(field.plans):
        if name not in timings:
            field.reject(name, "not measured: time was up")
        elif timings[name].dropped:
            field.reject(name, f"far behind: {timings[name].median_us:.1f} µs")


def launcher(plan: AlgorithmPlan, calls: Sequence[Call], memory: StreamMemory) -> Launch:
    """A candidate as a contender; the calls' stream is the clock's."""

    def launch(number: int, _: int) -> None:
        with memory.lock:
            plan.put(calls[number], memory)

    return launch


def _run_afresh(launch: Launch, memory: StreamMemory, stream: int) -> None:
    """Launches with a workspace of NaN, so that nothing left there by an earlier launch is of use."""
    call("cuMemsetD8Async", memory.workspace, 0xFF, memory.workspace_size, stream)
    launch(0, stream)


def _verdict(field: Field, timings: Mapping[str, Timing], effort: Effort, seconds: float) -> ProductVerdict:
    if not field.plans:
        reasons = "; ".join(f"{each.config}: {each.reason}" for each in field.rejected)
        raise PlanError(f"no algorithm is of use for {field.problem}: {reasons}")
    chosen = _fastest(field, timings)
    blob, timing = field.plans[chosen].blob, timings[chosen]
    return ProductVerdict(
        algorithm=blob,
        config=configuration(blob),
        us=timing.median_us,
        spread=timing.spread_us,
        first_us=timings.get(_FIRST, timing).median_us,
        candidates=sum(not each.dropped for each in timings.values()),
        rejected=tuple(field.rejected),
        effort=effort,
        seconds=seconds,
    )
