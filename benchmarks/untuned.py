"""The suite `untuned`: blocks of every activation in BF16, TF32 and FP32, with untuned plans and with tuned plans.

A row times one block of two layers, of a random shape drawn as in the suite `wide`. The blocks form two sets of equal
size. The priors, which choose the strategies of layers that were not tuned, are fitted to the blocks of `FIT`; the rows
of these blocks also hold the untuned time of each forward and backward pass by each strategy that it can use. The
blocks of `JUDGE` are held out, and judge the fitted priors.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import random
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

from benchmarks import layers, report, timing
from benchmarks.layers import TYPES, Block
from benchmarks.report import Finding, Json, Row, speedups
from benchmarks.suite import Suite, plan_cache
from benchmarks.wide import FIT, JUDGE, STRATA, Shape

ACTIVATIONS: Final = ("none", "relu", "leaky_relu", "sigmoid", "tanh", "gelu", "gelu_erf", "silu")
_SEEDS: Final = {FIT: 3200, JUDGE: 3205}
"""Earlier fits have read the blocks that JUDGE drew when it was 3201, 3202 and 3204."""
_COUNT: Final = 200
"""Number of blocks in each of the two sets, `FIT` and `JUDGE`."""
_MOST_MULTIPLICATIONS: Final = 1 << 32
"""Upper limit of M·N·K of a block's shape, so that tuning the block takes about a second."""
_EXAMPLE: Final = Block(f"odd {JUDGE}", 777, 333, 555, "tf32", "silu")
"""The block that tuning sped up most, relative to its untuned time, while only ReLU and GELU had fitted trees."""
_BUDGET_S: Final = 0.2
_ROUNDS: Final = 3


def blocks() -> list[Block]:
    """Returns all blocks: those to which trees are fitted and those that judge the trees, alternately.

    Each set goes through all pairs of type and activation again and again, so that its first few blocks vary in both.
    """
    halves = [_drawn(half) for half in (FIT, JUDGE)]
    return [block for pair in zip(*halves, strict=True) for block in pair]


def _drawn(half: str) -> list[Block]:
    generator, found = random.Random(_SEEDS[half]), [_EXAMPLE] if half == JUDGE else []
    kinds = [*itertools.product(TYPES, ACTIVATIONS)]
    while len(found) < _COUNT:
        generator.shuffle(kinds)
        for kind, activation in kinds[: _COUNT - len(found)]:
            stratum = generator.choice([*STRATA])
            found.append(Block(f"{stratum} {half}", *_shape(generator, stratum), kind, activation))
    return found


def _shape(generator: random.Random, stratum: str) -> Shape:
    while True:
        m, n, k = STRATA[stratum](generator, generator.randrange(4))
        if m * n * k <= _MOST_MULTIPLICATIONS:
            return m, n, k


def measure(block: Block, options: argparse.Namespace, stream: Any) -> Row:
    """Times a block of two layers with untuned and with tuned plans.

    For a block to which priors are fitted (`FIT`), each pass is also timed by each strategy.
    """
    from benchmarks import splits

    sets = block.sets(timing.cache_size())
    count, chain = block.repetitions(sets), splits.chain_of(block)
    stratum, half = block.group.split()
    setting = block.as_json() | {"stratum": stratum, "half": half, "when": report.now()}
    buffers = [layers.arrays(block) for _ in range(sets)]
    with plan_cache():
        untuned = splits.by_priors(chain)
        if half == FIT:
            setting["strategies"] = {role: _by_strategies(problem) for role, problem in splits.roles(chain)}
        tuned = layers.tune(block)
        plans = {"lt": splits.decided(chain), "lt_priors": untuned}
        setting["splits"] = {name: str(splits.split_of(each)) for name, each in plans.items()}
        setting |= {"tuning_s": round(tuned.seconds, 3)}
        builders = {name: partial(each.contender, buffers) for name, each in plans.items()}
        timings, left_out = timing.measure(builders, sets, count, options.rounds, stream)
    return Row(block.name, timings, setting=setting, left_out=left_out)


def _by_strategies(problem: Any) -> dict[str, float]:
    """Microseconds of a pass by each of its strategies, the algorithms of its products chosen without a measurement."""
    from benchmarks.splits import DEVICE, strategy_name
    from lt_runtime.errors import PlanError
    from lt_runtime.plans.cache import plan_for, priors_of
    from lt_runtime.problem import ForwardProblem
    from lt_runtime.products.methods import heuristic_algorithm
    from lt_runtime.tuner.chain import Layer, LayerChain
    from lt_runtime.tuner.chain_operands import OperandSets
    from lt_runtime.tuner.timing import workbench

    choose, plans = functools.cache(heuristic_algorithm), {}
    for strategy in priors_of(problem, DEVICE):
        with contextlib.suppress(PlanError):
            plans[strategy] = plan_for(problem, DEVICE, strategy, choose)
    layer = Layer(problem) if isinstance(problem, ForwardProblem) else Layer(None, problem)
    with workbench(DEVICE) as bench:
        contenders = {strategy: [(0, plan)] for strategy, plan in plans.items()}
        times = OperandSets(bench, LayerChain((layer,))).take_times(contenders, _BUDGET_S, _ROUNDS)
    return {strategy_name(each): round(time.median_us, 3) for each, time in times.items()}


def findings(rows: Sequence[Json]) -> list[Finding]:
    """The suite's summary: tuned time over untuned time of blocks that no fit has read, by type and by activation."""
    judged = [row for row in rows if row.get("half") == JUDGE]
    kinds = (("type", TYPES), ("activation", ACTIVATIONS), ("stratum", STRATA))
    groups = {value: [row for row in judged if row[name] == value] for name, values in kinds for value in values}
    untuned = speedups(judged, "lt", "lt_priors")
    made = [report.mean("lt / lt_priors", untuned, 0.955), report.worst("lt / lt_priors", untuned, 0.85)]
    for name, some in groups.items():
        found = speedups(some, "lt", "lt_priors")
        made += [make(f"lt / lt_priors, {name}", found) for make in (report.mean, report.worst)]
    return made


SUITE: Final = Suite.of(measure, blocks(), rounds=5, findings=findings)
