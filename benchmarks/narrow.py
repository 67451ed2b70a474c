"""The suite `narrow`: training steps of narrow MLPs, tuned, in one kernel a pass, layer by layer, PyTorch's and JAX's.

Each step is one CUDA graph, and is measured as in the suite `steps`.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from benchmarks import report
from benchmarks.peers import peer
from benchmarks.report import Finding, Json, Row, speedups
from benchmarks.steps import MODES, Setup, StepCase, StepContender, contender, graph_turn, tune
from benchmarks.suite import JAX, MAX_AUTOTUNE, Job, Suite, plan_cache
from benchmarks.timing import built, take_turns

_INPUTS_AND_OUTPUTS: Final = {16: (16, 3), 32: (32, 3), 64: (64, 3), 128: (128, 10)}
_FUSED: Final = "lt_one_kernel"
_LAYERS: Final = "lt_layers"
_TORCH: Final = "torch_graph_bf16"
_NAMED: Final = "64x3 2^18"


def _case(width: int, hidden: int, power: int) -> StepCase:
    inputs, outputs = _INPUTS_AND_OUTPUTS[width]
    name, dims = f"{width}x{hidden} 2^{power}", (inputs, *[width] * hidden, outputs)
    return StepCase(name, "bf16", 1 << power, dims, "relu", "mse", 1.0)


CASES: Final = tuple(
    _case(*each)
    for each in (
        *itertools.product((16, 32, 64), (1, 3, 5), (10, 14, 18)),
        *itertools.product((128,), (1, 2), (10, 14, 18)),
        (64, 3, 20),
        (16, 7, 18),
        (32, 7, 18),
    )
)


def measure(case: StepCase, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a step, and lets it, both of its ways, and PyTorch's take turns."""
    from benchmarks.internals import one_kernel_a_pass

    setup = Setup(case, stream)
    with plan_cache():
        tuned = tune(case).as_json()
        contenders = {"lt": contender(setup)}
        for name, fused in ((_FUSED, True), (_LAYERS, False)):
            with one_kernel_a_pass(fused):
                contenders[name] = contender(setup)
        theirs, left_out = built(_peers(setup, options))
        contenders |= theirs
        turns = {name: graph_turn(each, case.replays, stream) for name, each in contenders.items()}
        timings = take_turns(turns, options.rounds)
    setting = case.as_json() | {"when": report.now(), "rounds": options.rounds, "replays": case.replays} | tuned
    setting |= {"nodes": {name: each.nodes for name, each in contenders.items()}}
    setting |= {"first_loss": {name: round(each.first_loss, 6) for name, each in contenders.items()}}
    return Row(case.name, timings, setting=setting, left_out=left_out)


def _peers(setup: Setup, options: argparse.Namespace) -> dict[str, Callable[[], StepContender]]:
    """PyTorch's own kernels, and what is asked for besides."""
    made = {_TORCH: peer("torch_steps", "contender", setup, "bf16")}
    if options.max_autotune:
        mode = MODES[MAX_AUTOTUNE]
        made[MAX_AUTOTUNE] = peer("torch_steps", "contender", setup, "bf16", mode, options.compile_seconds)
    if options.jax:
        made[JAX] = peer("jax", "step", setup)
    return made


def findings(rows: Sequence[Json]) -> list[Finding]:
    """All that the suite has to show."""
    return [*_ratios(rows), Finding(f"µs of a step of {_NAMED}", *_microseconds(rows), at_most=True)]


def _ratios(rows: Sequence[Json]) -> Iterator[Finding]:
    for name in (_FUSED, _LAYERS, _TORCH, MAX_AUTOTUNE, JAX):
        found = speedups(rows, name)
        worst = min(found, key=found.__getitem__, default=None)
        value = None if worst is None else found[worst]
        yield Finding(f"{name} / lt, least", value, 0.97, len(found), worst)


def _microseconds(rows: Sequence[Json]) -> tuple[float | None, float, int]:
    """At most what a JAX step takes on an H200, divided by 2.5."""
    found = [row["us"]["lt"] for row in rows if row["case"].startswith(_NAMED) and "lt" in row.get("us", {})]
    return (found[0] if found else None), 131.0, len(found)


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    return {case.name: partial(measure, case, options) for case in CASES}


_NAMES: Final = [case.name for case in CASES]
SUITE: Final = Suite(
    rounds=9, order=_NAMES, jobs=_jobs, findings=findings, optional={MAX_AUTOTUNE: _NAMES, JAX: _NAMES}
)
