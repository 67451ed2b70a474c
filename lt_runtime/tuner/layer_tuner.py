"""Measures the splits of a layer's forward and backward pass against each other, and picks one.

Halves are timed first, by the heuristic's algorithms, and the products' algorithms tuned in those that are promising.
The best pairs are then timed end to end against what runs untuned; the winner must compute what plain products and our
kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from lt_runtime.errors import PlanError
from lt_runtime.kernels.narrow import takes
from lt_runtime.problem import MatmulProblem, Saved
from lt_runtime.products.blobs import plan_by
from lt_runtime.products.choose import Choose, heuristic_algorithm, known_algorithm
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.store.entries import EFFORTS, Effort, LayerEntry, ProductEntry, RejectedStrategy
from lt_runtime.store.keys import problem_key
from lt_runtime.store.plan_store import plan_store
from lt_runtime.tuner.alternatives import Alternatives, Half, products_of
from lt_runtime.tuner.candidates import with_algorithm
from lt_runtime.tuner.layer_finals import Finals, Table, sums_of
from lt_runtime.tuner.links import LayerProblem, Link
from lt_runtime.tuner.names import algorithm_in_words, describe
from lt_runtime.tuner.product_tuner import tune_on
from lt_runtime.tuner.timing import Timing
from lt_runtime.tuner.workbench import Bench


@dataclass(frozen=True, slots=True)
class Budget:
    """Seconds of timing after which a stage times nothing more; see `Stopwatch`."""

    screening: float
    products: float
    finals: float


BUDGETS: Final[Mapping[str, Budget]] = {"default": Budget(0.5, 2.0, 0.8), "deep": Budget(2.0, 120.0, 3.0)}
"""By effort."""
_LEAST_PRODUCT_S: Final = 0.05
_SCREENING_ROUNDS: Final = 3
_HALVES_ROUNDS: Final = 5
# Algorithms differ by 1 to 8 %, seldom by more: what is further behind with the heuristic's will not win with the best.
_PROMISING: Final = 1.4


@dataclass(frozen=True, slots=True)
class Decision:
    """What was found for a link.

    Attributes:
        products, layers: for the plan cache, by key.
        saved: what forward keeps; None without a forward problem.
        before_us: microseconds of both halves as they run untuned. after_us: as decided.
        strategy: in words. measured: strategies and algorithms timed. rejected: in words.
    """

    products: Mapping[str, ProductEntry]
    layers: Mapping[str, LayerEntry]
    saved: Saved | None
    before_us: float
    after_us: float
    strategy: str
    measured: int
    rejected: tuple[str, ...]


def decide(bench: Bench, link: Link, effort: Effort) -> Decision:
    """The fastest split of a link whose results are right.

    Args:
        link: none of its extents is 0.

    Raises:
        PlanError: the library has no algorithm even for its plain products.
        MemoryError: there is not enough of it on the GPU.
    """
    search = _Search(bench, link, effort)
    before = search.alternatives(heuristic_algorithm)
    search.time_halves(before, _SCREENING_ROUNDS, search.budget.screening)
    promising = search.promising(before)
    search.tune_products(before, promising)
    after = search.alternatives(search.algorithm, {*promising, *(before.plainest() or ())})
    search.time_halves(after, _HALVES_ROUNDS, search.budget.finals)
    return search.conclude(before, after)


class _Search:
    def __init__(self, bench: Bench, link: Link, effort: Effort) -> None:
        self.bench, self.link, self.effort = bench, link, effort
        self.budget = BUDGETS[effort]
        self._store = plan_store(bench.device)
        self._rejected = {each: self._known(each) for each in (link.forward, *link.variants) if each is not None}
        self._halves: dict[str, Timing] = {}
        self._products: dict[MatmulProblem, ProductEntry] = {}
        self._useless: dict[MatmulProblem, str] = {}
        self._measured = 0
        self._complaints: list[str] = []
        self._table = Table(bench, link)

    def _known(self, problem: LayerProblem) -> list[RejectedStrategy]:
        entry = self._store.layer(problem_key(problem))
        return [*entry.rejected] if entry is not None else []

    def alternatives(self, choose: Choose, only: Iterable[str] | None = None) -> Alternatives:
        """Plans of all halves, or of some; what is refused stays out.

        Raises:
            PlanError: a half has nothing left.
        """
        names = None if only is None else set(only)
        made = Alternatives(self.link, self.bench.device, choose, self._rejected, names)
        self._rejected = made.rejected
        if made.prior() is None:
            reasons = "; ".join(each.reason for rejected in made.rejected.values() for each in rejected)
            raise PlanError(f"no split is of use for {self.link.problems[0]}: {reasons}")
        return made

    def time_halves(self, alternatives: Alternatives, rounds: int, budget_s: float) -> None:
        """Times the halves of each direction against each other."""
        firsts = alternatives.prior() or ("", "")
        directions: tuple[Mapping[str, Half], ...] = (alternatives.forward, alternatives.backward)
        for first, halves in zip(firsts, directions, strict=True):
            if halves:
                ordered = sorted(halves, key=lambda name: name != first)
                timings = self._table.take_times({name: [halves[name]] for name in ordered}, rounds, budget_s)
                self._measured += len(timings)
                self._halves |= timings

    def promising(self, alternatives: Alternatives) -> set[str]:
        """Names of the priors' halves, and of those that are not far behind, alone and with what goes with them.

        With the heuristic's algorithms, that is, which says little where our kernel takes a product: all such are in.
        """
        halves, sums = alternatives.halves, sums_of(alternatives, self._halves)
        best: dict[LayerProblem, float] = {}
        for name, timing in self._halves.items():
            problem = halves[name].problem
            best[problem] = min(best.get(problem, math.inf), timing.median_us)
        limit = _PROMISING * min(sums.values())
        names = {name for pair, us in sums.items() if us <= limit for name in pair if name}
        near = {name for name in names if self._halves[name].median_us <= _PROMISING * best[halves[name].problem]}
        ours = {name for name, half in halves.items() if any(takes(each.problem) for each in products_of(half))}
        return near | ours | set(alternatives.prior() or ())

    def tune_products(self, alternatives: Alternatives, names: Iterable[str]) -> None:
        """Finds the algorithms of the products of some halves, those that are not known already."""
        products = [each.problem for name in names if name for each in products_of(alternatives.halves[name])]
        unknown = [each for each in dict.fromkeys(products) if not each.is_empty and not self._is_known(each)]
        watch = self.bench.clock.watch
        deadline = watch.seconds + self.budget.products
        for number, problem in enumerate(unknown):
            left = max(deadline - watch.seconds, 0.0) / (len(unknown) - number)
            self._tune_product(problem, max(left, _LEAST_PRODUCT_S))

    def _is_known(self, problem: MatmulProblem) -> bool:
        entry = self._stored(problem)
        return entry is not None and EFFORTS.index(entry.effort) >= EFFORTS.index(self.effort)

    def _tune_product(self, problem: MatmulProblem, budget_s: float) -> None:
        try:
            verdict = tune_on(self.bench, problem, self.effort, budget_s)
        except PlanError as error:
            self._useless[problem] = str(error)
            return
        self._products[problem] = verdict.entry
        self._measured += verdict.candidates
        self._complaints += [
            f"{describe(problem)} by {algorithm_in_words(each.config)}: {each.reason}" for each in verdict.rejected
        ]

    def algorithm(self, problem: MatmulProblem, device: int) -> AlgorithmPlan:
        """The plan of a product by what was found; see `Choose`."""
        if problem in self._useless:
            raise PlanError(self._useless[problem])
        entry = self._products.get(problem)
        if entry is None:
            return known_algorithm(problem, device)
        return plan_by(problem, device, entry.algorithm)

    def conclude(self, before: Alternatives, after: Alternatives) -> Decision:
        """What the finals say; what runs untuned stays where it is faster than the winner after all."""
        finals = Finals(self._table, before, after, self._halves, self._unsound(before), self.budget.finals)
        products = {} if finals.untuned_stays else {problem_key(key): each for key, each in self._products.items()}
        if finals.by_heuristic:
            products |= self._by_heuristic(before.plans(finals.pair))
        forward = after.forward.get(finals.pair[0])
        return Decision(
            products=products,
            layers={problem_key(key): each for key, each in finals.entries(self.effort).items()},
            saved=forward.strategy.saved if forward else None,
            before_us=finals.before.median_us,
            after_us=(finals.before if finals.untuned_stays else finals.after).median_us,
            strategy=after.describe(finals.pair),
            measured=self._measured + finals.measured,
            rejected=(*finals.rejections(), *self._complaints),
        )

    def _unsound(self, alternatives: Alternatives) -> set[str]:
        """Names of halves with an algorithm that was rejected."""
        return {name for name, half in alternatives.halves.items() if any(map(self._is_rejected, products_of(half)))}

    def _is_rejected(self, plan: AlgorithmPlan) -> bool:
        if plan.problem.is_empty:
            return False
        entry = self._products.get(plan.problem) or self._stored(plan.problem)
        return entry is not None and plan.blob in [each.algorithm for each in entry.rejected]

    def _by_heuristic(self, halves: Iterable[Half]) -> dict[str, ProductEntry]:
        """Entries of some halves' products with the heuristic's algorithms, which they were planned by."""
        plans = {plan.problem: plan for half in halves for plan in products_of(half) if not plan.problem.is_empty}
        entries = {problem: self._products.get(problem) or self._stored(problem) for problem in plans}
        return {
            problem_key(problem): with_algorithm(entry, plans[problem].blob)
            for problem, entry in entries.items()
            if entry is not None
        }

    def _stored(self, problem: MatmulProblem) -> ProductEntry | None:
        return self._store.product(problem_key(problem))
