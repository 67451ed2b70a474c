"""Measures and verifies the algorithms of one matrix product, and picks one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from lt_runtime.cublaslt import Algorithm, ReductionScheme
from lt_runtime.errors import PlanError
from lt_runtime.gpu.driver import call as driver_call
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.kernels.call import Call
from lt_runtime.problem import MatmulProblem
from lt_runtime.products import methods
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.padded import PaddedPlan
from lt_runtime.products.plan import AlgorithmPlan, Plan
from lt_runtime.store.entries import ProductEntry, RejectedAlgorithm, now
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import PlanStore
from lt_runtime.tuner.operands import NORMAL, operand_sets
from lt_runtime.tuner.roofline import floor_us
from lt_runtime.tuner.timing import Bench, Launch, Timing, race, take_times, workbench
from lt_runtime.tuner.verification import ProductOperands, verify

BUDGET_S: Final = 2.0
"""Seconds of timing after which no further candidate algorithm is timed, for a product that is tuned by itself."""
MOST: Final = 16
"""Largest number of cuBLASLt's algorithms that compete for a product on its operands, and on each kind of copies of
them. One query returns at most eight.
"""
_LEAST_S: Final = 0.05
_FIRST: Final = "first"
_NOT_LEAN: Final = "cannot be launched as at most two kernels and nothing else"


def find_algorithm(bench: Bench, problem: MatmulProblem, budget_s: float = BUDGET_S) -> ProductEntry:
    """Finds the fastest algorithm of a product that computes right results; returns its entry for the plan cache.

    The entry lists as rejected each algorithm that could not be launched, was not timed within the budget, was far
    slower than the fastest, or was fast but computed wrong results or different results in two runs.

    Args:
        problem: a product that is not empty, with an epilogue that `library_may_fuse` accepts.
        budget_s: seconds of timing after which no further candidate is timed; see `Stopwatch`.

    Raises:
        PlanError: there is no algorithm for the problem, or none whose results are right.
        MemoryError: the GPU has not enough memory for the operands and for the reference in FP64.
    """
    candidates = Candidates(problem, bench, budget_s)
    try:
        winner, timings = race(candidates)
    except PlanError as error:
        reasons = [*candidates.refusals, *(f"{each.config}: {each.reason}" for each in candidates.rejected)]
        raise PlanError(f"no algorithm is of use for {problem} ({error}): {'; '.join(reasons)}") from None
    candidates.reject_slow(timings)
    blob, timing = candidates.plans[winner].blob, timings[winner]
    first_us = timings.get(_FIRST, timing).median_us
    measured = sum(not each.dropped for each in timings.values())
    times, rejected = (timing.median_us, first_us, timing.spread_us), tuple(candidates.rejected)
    return ProductEntry(blob, methods.configuration(blob), *times, measured, rejected)


def heuristic_candidates(plan: MatmulPlan, workspace: int) -> list[Algorithm]:
    """The plan's own algorithm, then others that the heuristic offers; at most `MOST` in all.

    One query returns at most eight algorithms. Queries with a smaller workspace, or that exclude the reductions of
    split-K, return algorithms that were ranked below the first query's eight.

    Args:
        plan: the product's plan with its untuned algorithm.
        workspace: bytes that an algorithm may use.
    """
    schemes = dict.fromkeys((plan.reductions, ReductionScheme.NONE))
    limits = (workspace, workspace // 8, 0)
    queries = (plan.query(limit, scheme) for limit, scheme in itertools.product(limits, schemes))
    own = (plan.algorithm,) if plan.algorithm else ()
    distinct: dict[bytes, Algorithm] = {}
    for algorithm in itertools.chain(own, plan.candidates, itertools.chain.from_iterable(queries)):
        distinct.setdefault(algorithm.blob, algorithm)
        if len(distinct) == MOST:  # Leaving the loop early skips the remaining queries.
            break
    return list(distinct.values())


class Candidates:
    """The candidate algorithms of one product, as `Contenders` of a race.

    Attributes:
        plans: a plan for each candidate that is not rejected, by name. "first" is cuBLASLt's untuned choice, if
            cuBLASLt offers any algorithm.
        rejected: the rejected candidates, with reasons.
        refusals: reasons why cuBLASLt offers no algorithm for the product without padded copies.
    """

    def __init__(self, problem: MatmulProblem, bench: Bench, budget_s: float = BUDGET_S) -> None:
        self.problem, self._bench = problem, bench
        self.plans: dict[str, AlgorithmPlan] = {}
        self.rejected: list[RejectedAlgorithm] = []
        self.refusals: list[str] = []
        self._deadline = bench.clock.watch.seconds + budget_s
        self._least_us = floor_us([problem], bench.device)
        ranked = sorted(methods.METHODS, key=[*methods.fastest_first(problem), *methods.METHODS].index)
        blobs = [blob for method in ranked if not method.is_own for blob in self._offered(method)]
        self._blobs = {f"candidate {number}" if number else _FIRST: blob for number, blob in enumerate(blobs)}
        self._blobs |= {each.name: each.mark for each in methods.METHODS if each.is_own and each.supports(problem)}
        for name, blob in self._blobs.items():
            try:
                self.plans[name] = methods.plan_from_blob(problem, bench.device, blob)
            except PlanError as error:
                self.reject(name, str(error))
                continue
            if not self.plans[name].launches_at_most_two_kernels:
                self.reject(name, _NOT_LEAN)
        make = partial(ProductOperands, bench.memory, problem)
        self._operands = operand_sets(make, bench.device) if self.plans else []
        calls = [each.call(bench.clock.stream) for each in self._operands]
        self._launches = {name: launcher(plan, calls) for name, plan in self.plans.items()}

    def _offered(self, method: methods.Method) -> list[bytes]:
        """Algorithms that cuBLASLt offers, best first, for the product on its operands or on a method's copies."""
        try:
            built = method.build(self.problem, self._bench.device)
            plan = built.inner if isinstance(built, PaddedPlan) else built
            assert isinstance(plan, MatmulPlan), f"{method.name} is not cuBLASLt's"
            return [method.mark + each.blob for each in heuristic_candidates(plan, plan.workspace_size)]
        except PlanError as error:
            # Errors of the methods with padded copies are not reported, because they may only say that there is nothing
            # to copy.
            self.refusals += [] if method.mark else [str(error)]
            return []

    def names(self) -> list[str]:
        """See `Contenders`."""
        return [*self.plans]

    def take_times(self, names: Collection[str]) -> dict[str, Timing]:
        """See `Contenders`."""
        launches, clock = {name: self._launches[name] for name in names}, self._bench.clock
        left = max(self._deadline - clock.watch.seconds, _LEAST_S)
        return take_times(launches, clock, len(self._operands), left, least_us=self._least_us)

    def reject_wrong(self, names: Collection[str]) -> Collection[str]:
        """See `Contenders`."""
        found = verify({name: afresh(self._launches[name], self._bench) for name in names}, self._operands[0])
        for name, fault in found.items():
            self.reject(name, fault)
        if found:  # verification has overwritten the test data, on which further candidates are timed
            self._operands[0].fill(NORMAL, 0)
        return found

    def reject(self, name: str, reason: str) -> None:
        """Moves a candidate from `plans` to `rejected`."""
        self.plans.pop(name, None)
        blob = self._blobs[name]
        self.rejected.append(RejectedAlgorithm(blob, methods.configuration(blob), reason))

    def reject_slow(self, timings: Mapping[str, Timing]) -> None:
        """Rejects candidates that were not timed before the budget was spent, or were dropped after one slow launch."""
        for name in self.names():
            if name not in timings:
                self.reject(name, "not measured: time was up")
            elif timings[name].dropped:
                self.reject(name, f"far behind: {timings[name].median_us:.1f} µs")


def launcher(plan: AlgorithmPlan, calls: Sequence[Call]) -> Launch:
    """A function for a race that launches a candidate's plan on the call of the given number, on the clock's stream."""
    return lambda number, _: plan.run(calls[number])


def afresh(launch: Launch, bench: Bench) -> Callable[[], object]:
    """Wraps a launch: fills the workspace with NaN before it, which reveals an algorithm that reads old contents."""
    stream = bench.clock.stream
    memory = stream_memory(bench.device, stream)

    def run() -> None:
        driver_call("cuMemsetD8Async", memory.workspace, 0xFF, memory.workspace_size, stream)
        launch(0, stream)

    return run


def proven(problem: MatmulProblem, device: int, entry: ProductEntry) -> ProductEntry:
    """Rebuilds an algorithm that another machine chose from the configuration in its entry, and verifies it.

    Returns the entry with this machine's algorithm. If this machine's library has no algorithm with the configuration,
    or if the algorithm computes wrong results, the returned entry is barred: no plan uses it.

    Args:
        problem: a product that is not empty.

    Raises:
        CublasLtError: cuBLASLt failed for a reason other than the algorithm.
        MissingLibraryError: CuPy is not installed.
        CaptureError: a stream is being captured that the verification would disturb.
        MemoryError: the GPU has not enough memory for the operands and for the reference in FP64.
    """
    try:
        plan = methods.plan_from_config(problem, device, entry.config)
        fault = _fault(plan, device) if plan.launches_at_most_two_kernels else _NOT_LEAN
    except PlanError as error:
        fault = str(error)
    if fault is not None:
        return replace(entry, barred=fault)
    return replace(entry, algorithm=plan.blob, config=methods.configuration(plan.blob))


def _fault(plan: AlgorithmPlan, device: int) -> str | None:
    """Error message if the results of a plan's algorithm are wrong; None if they are right."""
    with workbench(device) as bench:
        operands = ProductOperands(bench.memory, plan.problem)
        launch = launcher(plan, [operands.call(bench.clock.stream)])
        return verify({"it": afresh(launch, bench)}, operands).get("it")


class Products:
    """The algorithms of products during a search over layers: found by this search, or read from the plan cache.

    Attributes:
        found: the entries that the search found, by product.
    """

    def __init__(self, store: PlanStore) -> None:
        self._store = store
        self.found: dict[MatmulProblem, ProductEntry] = {}
        self._useless: dict[MatmulProblem, str] = {}

    def entry(self, problem: MatmulProblem) -> ProductEntry | None:
        """The entry of a product; None if the product was not measured."""
        return self.found.get(problem) or self._store.product(problem_key(problem))

    def search(self, bench: Bench, problem: MatmulProblem, budget_s: float) -> None:
        """Calls `find_algorithm` and keeps the entry. If none is found, a later call of `plan` raises the error."""
        try:
            self.found[problem] = find_algorithm(bench, problem, budget_s)
        except PlanError as error:
            self._useless[problem] = str(error)

    def plan(self, problem: MatmulProblem, device: int) -> AlgorithmPlan:
        """The plan of a product with the algorithm of its entry, or untuned without an entry. It is a `Choose`."""
        if problem in self._useless:
            raise PlanError(self._useless[problem])
        entry = self.found.get(problem)
        if entry is None:
            return methods.known_algorithm(problem, device)
        return methods.plan_from_blob(problem, device, entry.algorithm)

    def _known(self, plan: Plan) -> list[tuple[AlgorithmPlan, ProductEntry]]:
        """The product plans of a layer's plan whose products have an entry, each with the entry."""
        products = (each for each in plan.products.values() if not each.problem.is_empty)
        return [(each, entry) for each in products if (entry := self.entry(each.problem)) is not None]

    def is_unsound(self, plan: Plan) -> bool:
        """Whether a product of a layer's plan uses an algorithm that was rejected."""
        return any(each.blob in [one.algorithm for one in entry.rejected] for each, entry in self._known(plan))

    def as_planned(self, plan: Plan) -> dict[MatmulProblem, ProductEntry]:
        """New entries, with the plan's algorithms, for products of a layer's plan whose entry names another one."""
        others = {each.problem: (each.blob, entry) for each, entry in self._known(plan) if entry.algorithm != each.blob}
        return {
            problem: replace(entry, algorithm=blob, config=methods.configuration(blob), us=entry.first_us, when=now())
            for problem, (blob, entry) in others.items()
        }
