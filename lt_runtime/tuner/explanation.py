"""Explains plans in words and numbers: strategy, algorithms, time, and the alternatives that were measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from lt_runtime.fp8 import Fp8ChainProblem
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.peaks import hardware
from lt_runtime.plans.cache import FUSED_MLP, IN_FP8, known_layer, make_layer_plan
from lt_runtime.plans.fp8_rule import against_fp8
from lt_runtime.plans.mlp import is_fused
from lt_runtime.problem import MatmulProblem, MLPProblem
from lt_runtime.products.methods import configuration
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.products.product import ProductPlan
from lt_runtime.store.entries import ProductEntry
from lt_runtime.store.keys import Json, Remembered, problem_key, to_json
from lt_runtime.store.plan_store import PlanStore, plan_store
from lt_runtime.tuner import report
from lt_runtime.tuner.chain import LayerChain
from lt_runtime.tuner.roofline import least_us

_LABEL = 10  # columns


@dataclass(frozen=True, slots=True)
class ProductExplanation:
    """How one matrix product of a plan runs.

    Attributes:
        name: "product", or the result of a layer that the product computes: "y", "dx" or "dw".
        problem: the product's sizes, types and epilogue, in words.
        algorithm: the algorithm in words; "" if the product is empty.
        entry: the product's entry in the plan cache; None if the product was not measured.
    """

    name: str
    problem: str
    algorithm: str
    entry: ProductEntry | None

    def lines(self) -> Iterator[tuple[str, str]]:
        """The explanation as pairs of label and text."""
        yield self.name, self.problem
        if self.algorithm:
            yield "", self.algorithm
        if self.entry is None:
            yield "", "chosen without a measurement"
            return
        yield "", f"alone {report.time_in_words(self.entry)}"
        reasons = {each.reason.partition(":")[0]: report.rejection_in_words(each) for each in self.entry.rejected}
        for kind, count in Counter(each.reason.partition(":")[0] for each in self.entry.rejected).items():
            yield "", f"rejected: {reasons[kind] if count == 1 else f'{count} algorithms, {kind}'}"


@dataclass(frozen=True, slots=True)
class Explanation:
    """How one problem runs; `str` gives a text for people.

    Attributes:
        problem: the problem.
        strategy: how the problem is split, in words.
        products: its matrix products.
        us: measured time in microseconds; None if the problem was not measured.
        least_us: time in microseconds at the GPU's peak rates; None if the rates are not known.
        alternatives: measured strategies that are slower, in words, with their times in microseconds.
        rejected: strategies that must not be used, and why.
    """

    problem: Remembered
    strategy: str
    products: tuple[ProductExplanation, ...]
    us: float | None
    least_us: float | None
    alternatives: tuple[tuple[str, float], ...] = ()
    rejected: tuple[str, ...] = ()

    @property
    def roofline_fraction(self) -> float | None:
        """Least time divided by measured time, which caches can raise above 1.0; None if either time is not known."""
        return self.least_us / self.us if self.us and self.least_us else None

    def __str__(self) -> str:
        lines = (f"  {label:<{_LABEL}}{text}" for label, text in self._lines())
        return "\n".join([report.describe(self.problem), *lines])

    def _lines(self) -> Iterator[tuple[str, str]]:
        yield "strategy", self.strategy
        measured, least = "not measured" if self.us is None else f"{self.us:.2f} µs", "this GPU's peaks are not known"
        if self.least_us is not None:
            reached = "" if self.roofline_fraction is None else f"{self.roofline_fraction:.0%} of the roofline: "
            least = f"{reached}at its peaks the GPU needs {self.least_us:.2f} µs"
        yield "time", f"{measured}; {least}"
        for product in self.products:
            yield from product.lines()
        for words, us in self.alternatives:
            lost = f", {us / self.us - 1.0:.0%} slower" if self.us else ""
            yield "slower", f"{words}: {us:.2f} µs{lost}"
        yield from (("rejected", reason) for reason in self.rejected)


class Explanations(tuple[Explanation, ...]):
    """The explanations of several problems; `str` gives a text for people."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n\n".join(map(str, self))

    __str__ = __repr__


def explain_chain(chain: LayerChain, device: int) -> Explanations:
    """Explains a chain's problems in the order in which they run, with the saved tensors that the plans have chosen.

    Raises:
        PlanError: cuBLASLt has no algorithm for one of the products.
    """
    with activated(device):
        saved = {index: make_layer_plan(problem, device).strategy.saved for index, problem in chain.forwards.items()}
    problems = *chain.keeping(saved).problems, *chain.narrow(device)
    return Explanations(explain_problem(each, device) for each in problems)


def explain_problem(problem: Remembered, device: int) -> Explanation:
    """Explains how a problem would run now.

    Raises:
        PlanError: cuBLASLt has no algorithm for one of the problem's products.
    """
    least, store = least_us(problem, hardware(device)), plan_store(device)
    made: Mapping[str, AlgorithmPlan] = {}
    reason: str | None = None
    with activated(device):
        if isinstance(problem, MatmulProblem):
            return _explain_product(problem, device, least)
        if isinstance(problem, Fp8ChainProblem):
            reason = against_fp8(problem, device)
            chosen: Json = {IN_FP8: reason is None}
            reason = reason or ("by the rule over peak rates" if problem.is_open else "as asked for")
        elif isinstance(problem, MLPProblem):
            chosen = {FUSED_MLP: is_fused(problem, device)}
        else:
            plan = make_layer_plan(problem, device)
            made, chosen = plan.products, to_json(plan.strategy)
    products = tuple(_explained(name, each, store) for name, each in made.items())
    entry, strategy = known_layer(problem, store), report.strategy_in_words(chosen)
    if entry is None:
        return Explanation(problem, f"{strategy} ({reason or 'by the priors'})", products, None, least)
    slower = sorted(entry.alternatives, key=lambda each: each.us)
    alternatives = tuple((report.choice_in_words(each), each.us) for each in slower)
    rejected = tuple(map(report.rejection_in_words, entry.rejected))
    return Explanation(problem, strategy, products, entry.us, least, alternatives, rejected)


def _explain_product(problem: MatmulProblem, device: int, least: float | None) -> Explanation:
    product = ProductPlan(problem, device).product
    explained, fused = _explained("product", product, plan_store(device)), product.problem.epilogue is problem.epilogue
    strategy = "one product of cuBLASLt's" if fused else "a plain product, then our kernel"
    us = explained.entry.us if explained.entry and fused else None
    return Explanation(problem, strategy, (explained,), us, least)


def _explained(name: str, plan: AlgorithmPlan, store: PlanStore) -> ProductExplanation:
    problem = plan.problem
    algorithm = "" if problem.is_empty else report.algorithm_in_words(configuration(plan.blob))
    return ProductExplanation(name, report.describe(problem), algorithm, store.product(problem_key(problem)))
