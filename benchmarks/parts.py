"""What the parts of a block take: each pass by each strategy, untuned, and each product by each algorithm.

The suite `parts` measures that for fitting the priors: of the blocks of the suite `layers`, and of others that are
drawn as those of the suite `wide` are.

This module, `internals`, `judge`, `priors` and `splits` are the only ones that import what is inside lt_runtime.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final, NamedTuple

from benchmarks import layers, report, timing
from benchmarks.layers import Block
from benchmarks.report import Row
from benchmarks.splits import DEVICE, chain_of, roles, strategy_name
from benchmarks.suite import Job, Suite
from benchmarks.wide import FIT, blocks_to_fit
from lt_runtime.errors import PlanError
from lt_runtime.plans.decisions import LayerPlan, LayerProblem, plan_for, priors_of
from lt_runtime.problem import ForwardProblem, MatmulProblem
from lt_runtime.products.choose import Choose, configuration, heuristic_algorithm
from lt_runtime.products.matmul import MatmulPlan
from lt_runtime.products.padded import PaddedPlan, padded_problem
from lt_runtime.products.plan import AlgorithmPlan
from lt_runtime.tuner.chain import Layer, LayerChain
from lt_runtime.tuner.chain_operands import OperandSets
from lt_runtime.tuner.operands import ProductOperands, operand_sets
from lt_runtime.tuner.product_search import Candidates, launcher
from lt_runtime.tuner.timing import Bench, Timing, take_times, workbench

_BUDGET_S: Final = 0.2
_ROUNDS: Final = 3
_CONFIG: Final = ("ID", "TILE_ID", "STAGES_ID", "SPLITK_NUM", "CTA_SWIZZLING", "CLUSTER_SHAPE_ID")
"""The attributes of an algorithm's configuration that a row holds, in this order."""


def padded_algorithm(problem: MatmulProblem, device: int) -> AlgorithmPlan:
    """By the heuristic's first on padded copies, wherever there is something to pad."""
    with contextlib.suppress(PlanError):
        return PaddedPlan(problem, device)
    return heuristic_algorithm(problem, device)


def plain_algorithm(problem: MatmulProblem, device: int) -> AlgorithmPlan:
    """By the heuristic's first on the operands as they are, wherever the library takes them."""
    with contextlib.suppress(PlanError):
        return MatmulPlan(problem, device)
    return heuristic_algorithm(problem, device)


WAYS: Final[dict[str, Choose]] = {
    "heuristic": heuristic_algorithm,
    "padded": padded_algorithm,
    "plain": plain_algorithm,
}
"""How the algorithms of a pass's products may be chosen without a measurement; the first is what runs untuned."""


class PartTimes(NamedTuple):
    """The times of a block's passes and of their products.

    Attributes:
        passes: each pass by role, way and strategy, in the order of the priors.
        products: each product with the microseconds of its algorithms, as a row holds it.
    """

    passes: dict[str, dict[str, dict[str, Timing]]]
    products: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Both as a row holds them, in microseconds."""
        passes = {
            role: {way: {name: round(each.median_us, 3) for name, each in times.items()} for way, times in ways.items()}
            for role, ways in self.passes.items()
        }
        return {"strategies": passes, "products": self.products}


def times_of_parts(case: Any) -> PartTimes:
    """Measures each pass of a block untuned, and each of the products that they make."""
    products: dict[MatmulProblem, None] = {}
    with workbench(DEVICE) as bench:
        passes = {role: _by_strategies(bench, problem, products) for role, problem in roles(chain_of(case))}
        return PartTimes(passes, [_product(bench, each) for each in products])


def _by_strategies(
    bench: Bench, problem: LayerProblem, products: dict[MatmulProblem, None]
) -> dict[str, dict[str, Timing]]:
    """The times of a pass; the products of its plans are added to `products`."""
    plans = {(way, plan.strategy): plan for way, choose in WAYS.items() for plan in _plans(problem, choose)}
    products |= dict.fromkeys(each.problem for plan in plans.values() for each in plan.products.values())
    layer = Layer(problem) if isinstance(problem, ForwardProblem) else Layer(None, problem)
    operands = OperandSets(bench, LayerChain((layer,)))
    times = operands.take_times({key: [(0, plan)] for key, plan in plans.items()}, _BUDGET_S, _ROUNDS)
    found: dict[str, dict[str, Timing]] = {way: {} for way in WAYS}
    for (way, strategy), each in times.items():
        found[way][strategy_name(strategy)] = each
    return found


def _plans(problem: LayerProblem, choose: Choose) -> Iterator[LayerPlan]:
    choose = functools.cache(choose)
    for strategy in priors_of(problem, DEVICE):
        with contextlib.suppress(PlanError):
            yield plan_for(problem, DEVICE, strategy, choose)


def _product(bench: Bench, problem: MatmulProblem) -> dict[str, Any]:
    """What a product is, with the microseconds of each algorithm; and of the product of its padded copies alone."""
    plans = Candidates(problem, bench.device, "default").plans
    times = _times(bench, problem, plans)
    algorithms = [_described(plans[name], timing) for name, timing in times.items()]
    padded = padded_problem(problem)
    inner = {}
    if padded is not None:
        with contextlib.suppress(PlanError):
            inner = _times(bench, padded, {"inner": MatmulPlan(padded, bench.device)})
    specs = {name: getattr(problem, name).layout for name in ("a", "b", "d")}
    return {
        "shape": [problem.m, problem.n, problem.k],
        "epilogue": problem.epilogue.value,
        "types": [problem.dtype.value, problem.d_dtype.value, problem.compute.value],
        "layouts": {name: [each.order.value, each.leading_dimension] for name, each in specs.items()},
        "algorithms": algorithms,
    } | {name: round(timing.median_us, 3) for name, timing in inner.items()}


def _times(bench: Bench, problem: MatmulProblem, plans: dict[str, AlgorithmPlan]) -> dict[str, Timing]:
    operands = operand_sets(lambda: ProductOperands(bench.memory, problem), bench.device)
    calls = [each.call(bench.clock.stream) for each in operands]
    launches = {name: launcher(plan, calls) for name, plan in plans.items()}
    return take_times(launches, bench.clock, len(operands), _BUDGET_S, _ROUNDS) if launches else {}


def _described(plan: AlgorithmPlan, timing: Timing) -> list[Any]:
    """On which copies it works, or by which kernel of ours, its `_CONFIG`, its waves, and its microseconds.

    "ours" is the kernel for narrow products.
    """
    config, waves = configuration(plan.blob), plan.algorithm.waves_count if plan.algorithm else 0.0
    marks = (name for name in ("PADDED", "K_MAJOR", "TILE_MATMUL") if name in config)
    copies = "ours" if "NARROW_MATMUL" in config else next(marks, "plain")
    return [copies, *(config.get(name, 0) for name in _CONFIG), round(waves, 3), round(timing.median_us, 3)]


def _measured(block: Block, options: argparse.Namespace, stream: Any) -> Row:
    """A row: the passes as they run untuned, each by its first strategy, and in its setting all parts."""
    del options, stream  # the tuner's clock has a stream of its own
    stratum, half = block.group.split()
    found = times_of_parts(block)
    first = {role: next(iter(ways["heuristic"].values())) for role, ways in found.passes.items()}
    timings = {role: timing.Timing(each.median_us, each.spread_us) for role, each in first.items()}
    setting = block.as_json() | {"stratum": stratum, "half": half, "when": report.now()} | found.as_json()
    return Row(block.name, timings, setting=setting)


def blocks() -> dict[str, Block]:
    """The blocks of the suite, by name: no layer twice."""
    presets = [replace(each, group=f"preset {FIT}") for each in layers.blocks()]
    return {block.name: block for block in (*blocks_to_fit(), *presets)}


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    found = {name: block for name, block in blocks().items() if options.dtype in (None, block.kind)}
    return {name: functools.partial(_measured, block, options) for name, block in found.items()}


SUITE: Final = Suite(rounds=_ROUNDS, order=[*blocks()], jobs=_jobs)
