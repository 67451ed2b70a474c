"""The suite `growth`: how times grow with a block's rows, a step's parameters, and the number of layers to tune.

Blocks and steps are measured as in the suites `layers` and `steps`, against PyTorch in a graph. Networks are tuned with
an empty plan cache: with layers of one width, most of which are the same problem, and with layers of different widths.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from benchmarks import report
from benchmarks.layers import Block, measure_block, tune
from benchmarks.peers import peer
from benchmarks.report import Finding, Json, Row, speedups
from benchmarks.steps import Setup, StepCase, contender, timed_row
from benchmarks.suite import GRAPH, Job, Suite, plan_cache
from benchmarks.timing import Timing, built

ROWS: Final = "rows of a block"
PARAMETERS: Final = "parameters of a step"
LAYERS: Final = "layers that are tuned"
_BATCH: Final = 2048
_ALIGNED: Final = 16  # Widths are multiples of this many columns.


def _mlp(name: str, dims: tuple[int, ...]) -> StepCase:
    """An MLP whose parameters and moments are BF16, as PyTorch's are."""
    return StepCase(name, "bf16", _BATCH, dims, "gelu", "mse", master=False)


def _step(power: int) -> StepCase:
    """A step with about 10^power parameters, in layers of the widths W, 4 W and W."""
    width = _ALIGNED * round(math.sqrt(10**power / 8) / _ALIGNED)
    return _mlp(f"step of 10^{power} parameters", (width, 4 * width, width))


def _network(layers: int, widening: int) -> StepCase:
    dims = tuple(512 + widening * number for number in range(layers + 1))
    return _mlp(f"tuning {layers} layers of {'different widths' if widening else 'one width'}", dims)


CASES: Final[dict[str, Sequence[Any]]] = {
    ROWS: [Block("growth", 1 << power, 1024, 256, "bf16", "gelu") for power in range(8, 21, 2)],
    PARAMETERS: [_step(power) for power in range(4, 10)],
    LAYERS: [_network(layers, widening) for widening in (0, _ALIGNED) for layers in (1, 4, 16, 64)],
}
"""The cases by the quantity that grows from one to the next."""


def _of_block(case: Block, options: argparse.Namespace, stream: Any) -> tuple[Row, int]:
    return measure_block(case, options, stream, strategies=False), case.rows


def _of_step(case: StepCase, options: argparse.Namespace, stream: Any) -> tuple[Row, int]:
    setup = Setup(case, stream)
    with plan_cache():
        tuned = tune(case).as_json()
        builders = {"lt": partial(contender, setup), GRAPH: peer("torch_steps", "contender", setup, "bf16")}
        contenders, left_out = built(builders)
        return timed_row(case, contenders, options, stream, left_out=left_out, **tuned), case.parameters


def _of_tuning(case: StepCase, _options: argparse.Namespace, _stream: Any) -> tuple[Row, int]:
    with plan_cache():
        tuned = tune(case)
    return Row(case.name, {"lt": Timing(tuned.seconds * 1e6, 0.0)}, setting=case.as_json()), len(case.dims) - 1


_MEASURES: Final = {ROWS: _of_block, PARAMETERS: _of_step, LAYERS: _of_tuning}


def measure(quantity: str, case: Any, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a case and times it; for a network, the time of tuning it once is measured."""
    row, size = _MEASURES[quantity](case, options, stream)
    return replace(row, setting={**row.setting, "quantity": quantity, "size": size})


def findings(rows: Sequence[Json]) -> list[Finding]:
    """Figures: PyTorch's time over ours, by rows and by parameters; and the longest time of tuning for each layer."""
    made, timed = [], [row for row in rows if "lt" in row["us"]]
    for quantity in CASES:
        found = speedups((row for row in timed if row["quantity"] == quantity), GRAPH)
        made += [make(f"{GRAPH} / lt, {quantity}", found) for make in (report.mean, report.worst) if found]
    seconds = {row["case"]: row["us"]["lt"] / row["size"] / 1e6 for row in timed if row["quantity"] == LAYERS}
    return [*made, report.worst("seconds of tuning for each layer", seconds, at_most=True)]


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    pairs = [(quantity, case) for quantity, cases in CASES.items() for case in cases]
    return {case.name: partial(measure, quantity, case, options) for quantity, case in pairs}


_NAMES: Final = [case.name for cases in CASES.values() for case in cases]
SUITE: Final = Suite(rounds=5, order=_NAMES, jobs=_jobs, findings=findings)
