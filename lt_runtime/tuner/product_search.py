"""Measures and verifies the algorithms of one matrix product, and picks one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from lt_runtime.errors import PlanError
from lt_runtime.gpu.driver import call as driver_call
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.kernels.call import Call
from lt_runtime.problem import MatmulProblem
from lt_runtime.products.choose import configuration, known_algorithm, plan_from_blob
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.methods import METHODS, Method, fastest_first
from lt_runtime.products.padded import PaddedPlan
from lt_runtime.products.plan import AlgorithmPlan, Plan
from lt_runtime.store.entries import Effort, ProductEntry, RejectedAlgorithm, now
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.tuner.candidates import deep_candidates, heuristic_candidates
from lt_runtime.tuner.operands import NORMAL, ProductOperands, operand_sets
from lt_runtime.tuner.timing import Bench, Launch, Timing, fastest, take_times
from lt_runtime.tuner.verification import verify

BUDGET_S: Final = {"default": 2.0, "deep": 20.0}
"""Seconds of timing after which nothing more is timed, by effort; see `Stopwatch`."""
_FIRST: Final = "first"


def find_algorithm(bench: Bench, problem: MatmulProblem, effort: Effort, budget_s: float) -> ProductEntry:
    """The fastest algorithm for a product whose results are right.

    Args:
        problem: not empty, with an epilogue that `library_may_fuse`.
        effort: "default" measures what several queries of the heuristic offer, "deep" configurations of each of the
            library's algorithms as well.
        budget_s: seconds of timing after which nothing more is timed; see `Stopwatch`.

    Returns:
        What the plan cache is to remember. The rejected algorithms are those that cannot be launched, are far behind,
        or would have won but are wrong or do not give the same result twice.

    Raises:
        PlanError: there is no algorithm for the problem, or none whose results are right.
        MemoryError: the GPU has not enough memory for the operands and for the reference in FP64.
    """
    candidates = Candidates(problem, bench.device, effort)
    timings = _compete(bench, candidates, budget_s)
    if not candidates.plans:
        reasons = [*candidates.refusals, *(f"{each.config}: {each.reason}" for each in candidates.rejected)]
        raise PlanError(f"no algorithm is of use for {problem}: {'; '.join(reasons)}")
    chosen = candidates.fastest(timings)
    blob, timing = candidates.plans[chosen].blob, timings[chosen]
    first_us, measured = timings.get(_FIRST, timing).median_us, sum(not each.dropped for each in timings.values())
    times, rejected = (timing.median_us, first_us, timing.spread_us), tuple(candidates.rejected)
    return ProductEntry(blob, configuration(blob), *times, measured, rejected, effort=effort)


class Candidates:
    """The algorithms that compete for one product.

    Attributes:
        plans: one for each candidate that is left, by name; "first" is the one that the library would run untuned, if
            it has any.
        rejected: the candidates that are out.
        refusals: why the library offers no algorithm for the product as it is.
    """

    def __init__(self, problem: MatmulProblem, device: int, effort: str) -> None:
        self.problem, self._device = problem, device
        self.plans: dict[str, AlgorithmPlan] = {}
        self.rejected: list[RejectedAlgorithm] = []
        self.refusals: list[str] = []
        methods = sorted(METHODS, key=[*fastest_first(problem), *METHODS].index)
        blobs = [blob for method in methods if not method.is_own for blob in self._offered(method, effort)]
        self._blobs = {f"candidate {number}" if number else _FIRST: blob for number, blob in enumerate(blobs)}
        self._blobs |= {each.name: each.mark for each in METHODS if each.is_own and each.supports(problem)}
        for name, blob in self._blobs.items():
            try:
                self.plans[name] = plan_from_blob(problem, device, blob)
            except PlanError as error:
                self.reject(name, str(error))
                continue
            if not self.plans[name].launches_at_most_two_kernels:
                self.reject(name, "cannot be launched as at most two kernels and nothing else")

    def _offered(self, method: Method, effort: str) -> list[bytes]:
        """cuBLASLt's algorithms for the product, on the operands or on the copies of a method, the best first."""
        try:
            built = method.build(self.problem, self._device)
            plan = built.inner if isinstance(built, PaddedPlan) else built
            assert isinstance(plan, MatmulPlan), f"{method.name} is not cuBLASLt's"
            offered = heuristic_candidates(plan, plan.workspace_size)
            return [
                method.mark + each.blob for each in (deep_candidates(plan, offered) if effort == "deep" else offered)
            ]
        except PlanError as error:
            self.refusals += [] if method.mark else [str(error)]  # Copies need not be possible.
            return []

    def fastest(self, timings: Mapping[str, Timing]) -> str:
        """The name of the candidate to take of those that are left."""
        return fastest({name: timing for name, timing in timings.items() if name in self.plans}, _FIRST)

    def reject(self, name: str, reason: str) -> None:
        """Takes a candidate out."""
        self.plans.pop(name, None)
        blob = self._blobs[name]
        self.rejected.append(RejectedAlgorithm(blob, configuration(blob), reason))


def _compete(bench: Bench, candidates: Candidates, budget_s: float) -> dict[str, Timing]:
    """Times the candidates and verifies the winner. Candidates slower than a right one are not verified.

    What runs untuned is verified in any case. Where the winner is wrong, the rest compete again: they may have been far
    behind the winner alone.
    """
    clock = bench.clock
    deadline = clock.watch.seconds + budget_s
    operands = operand_sets(lambda: ProductOperands(bench.xp, candidates.problem), bench.device)
    calls = [each.call(clock.stream) for each in operands]
    launches = {name: launcher(plan, calls) for name, plan in candidates.plans.items()}
    timings: dict[str, Timing] = {}
    while candidates.plans:
        left = deadline - clock.watch.seconds
        timings |= take_times({name: launches[name] for name in candidates.plans}, clock, len(operands), left)
        chosen = candidates.fastest(timings)
        judged = [name for name in dict.fromkeys((chosen, _FIRST)) if name in candidates.plans]
        faults = verify({name: afresh(launches[name], bench) for name in judged}, operands[0])
        for name, fault in faults.items():
            candidates.reject(name, fault)
        if chosen not in faults:
            break
        operands[0].fill(NORMAL, 0)
    for name in list(candidates.plans):
        if name not in timings:
            candidates.reject(name, "not measured: time was up")
        elif timings[name].dropped:
            candidates.reject(name, f"far behind: {timings[name].median_us:.1f} µs")
    return timings


def launcher(plan: AlgorithmPlan, calls: Sequence[Call]) -> Launch:
    """A candidate as a contender; the calls are on the clock's stream."""
    return lambda number, _: plan.run(calls[number])


def afresh(launch: Launch, bench: Bench) -> Callable[[], object]:
    """A launch on a workspace full of NaN, so that nothing that an earlier launch left there is of use."""
    stream = bench.clock.stream
    memory = stream_memory(bench.device, stream)

    def run() -> None:
        driver_call("cuMemsetD8Async", memory.workspace, 0xFF, memory.workspace_size, stream)
        launch(0, stream)

    return run


class Products:
    """What is known of matrix products during a search: what it found, or else what the plan cache has.

    Attributes:
        found: what the search found.
    """

    def __init__(self, store: PlanStore) -> None:
        self._store = store
        self.found: dict[MatmulProblem, ProductEntry] = {}
        self._useless: dict[MatmulProblem, str] = {}

    def entry(self, problem: MatmulProblem) -> ProductEntry | None:
        """What is known of a product."""
        return self.found.get(problem) or self._store.product(problem_key(problem))

    def search(self, bench: Bench, problem: MatmulProblem, effort: Effort, budget_s: float) -> None:
        """See `find_algorithm`. That no algorithm is of use is remembered as well: `plan` says it."""
        try:
            self.found[problem] = find_algorithm(bench, problem, effort, budget_s)
        except PlanError as error:
            self._useless[problem] = str(error)

    def plan(self, problem: MatmulProblem, device: int) -> AlgorithmPlan:
        """By the algorithm that is known; see `Choose`."""
        if problem in self._useless:
            raise PlanError(self._useless[problem])
        entry = self.found.get(problem)
        return known_algorithm(problem, device) if entry is None else plan_from_blob(problem, device, entry.algorithm)

    def _known(self, plan: Plan) -> list[tuple[AlgorithmPlan, ProductEntry]]:
        """A layer's products of which something is known, each with that."""
        products = (each for each in plan.products.values() if not each.problem.is_empty)
        return [(each, entry) for each in products if (entry := self.entry(each.problem)) is not None]

    def is_unsound(self, plan: Plan) -> bool:
        """Whether one of a layer's products has an algorithm that was rejected."""
        return any(each.blob in [one.algorithm for one in entry.rejected] for each, entry in self._known(plan))

    def as_planned(self, plan: Plan) -> dict[MatmulProblem, ProductEntry]:
        """Entries with the heuristic's algorithms, for those products of a plan by these that are known otherwise."""
        return {
            each.problem: replace(
                entry, algorithm=each.blob, config=configuration(each.blob), us=entry.first_us, when=now()
            )
            for each, entry in self._known(plan)
            if entry.algorithm != each.blob
        }
