"""The suite `narrow`: training steps of narrow MLPs, tuned, in one kernel a pass, layer by layer, PyTorch's and JAX's.

Each step is one CUDA graph, and is measured as in the suite `steps`. Beside it stand two least times of a step: of the
bytes that a step in one kernel moves, at the bandwidth of the best copy kernel in the same run, and of its products, at
the tensor cores' nominal peak.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final

from benchmarks import report
from benchmarks.buffers import itemsize
from benchmarks.copies import Ceiling, measure_copies
from benchmarks.peers import peer
from benchmarks.report import Finding, Json, Row, speedups
from benchmarks.steps import MODES, Setup, StepCase, StepContender, contender, graph_turn, tune
from benchmarks.suite import JAX, MAX_AUTOTUNE, Job, Suite, plan_cache
from benchmarks.timing import Timing, built, take_turns

_INPUTS_AND_OUTPUTS: Final = {16: (16, 3), 32: (32, 3), 64: (64, 3), 128: (128, 10)}
_FUSED: Final = "lt_one_kernel"
_LAYERS: Final = "lt_layers"
_TORCH: Final = "torch_graph_bf16"
_NAMED: Final = "64x3 2^18"
_PARAMETER_BYTES: Final = 28  # BF16, FP32 master and two FP32 moments, each read and written; gradients stay inside
_PEAK_TFLOPS: Final = {"NVIDIA H200": 989.4}
"""Data sheets state this peak of dense BF16 products. It is that of 1.83 GHz; small steps run at up to 1.98 GHz."""


def _case(width: int, hidden: int, power: int) -> StepCase:
    inputs, outputs = _INPUTS_AND_OUTPUTS[width]
    name, dims = f"{width}x{hidden} 2^{power}", (inputs, *[width] * hidden, outputs)
    return StepCase(name, "bf16", 1 << power, dims, "relu", "mse", 1.0)


CASES: Final = tuple(
    _case(*each)
    for each in sorted(
        (
            *itertools.product((16, 32, 64), (1, 3, 5), (10, 14, 18)),
            *itertools.product((128,), (1, 2), (10, 14, 18)),
            *itertools.product((16, 32, 64), (7,), (18,)),
            *itertools.product((128,), (3, 5, 7), (18,)),
            *((32, 3, 20), (64, 3, 20), (128, 2, 20)),
        )
    )
)


def least_bytes(case: StepCase) -> int:
    """The fewest that a step in one kernel moves: inputs and targets are read, and parameters with all that is theirs.

    Every case has BF16 parameters with FP32 masters, and targets of the shape and type of its outputs.
    """
    ends = case.rows * (case.dims[0] + case.dims[-1])
    return itemsize(case.dtype) * ends + _PARAMETER_BYTES * case.parameters


def measure(case: StepCase, options: argparse.Namespace, copies: Callable[[Any], Ceiling], stream: Any) -> Row:
    """Measures a step, and how near it comes to its least times.

    Args:
        copies: measures the best copy kernel, or knows it already.
    """
    copy_gb_s = copies(stream).gb_s
    timings, setting, left_out = _times(case, options, stream)
    return Row(
        case.name,
        timings,
        bytes=least_bytes(case),
        copy_gb_s=copy_gb_s,
        flops=case.flops,  # of the MLP's own widths: what a kernel pads them to is no work that was asked for
        peak_tflops=_PEAK_TFLOPS.get(report.machine()["gpu"]),
        setting={**setting, "copy_gb_s": round(copy_gb_s, 1)},
        left_out=left_out,
    )


def _times(
    case: StepCase, options: argparse.Namespace, stream: Any
) -> tuple[dict[str, Timing], dict[str, Any], dict[str, str]]:
    """Tunes a step, and lets it, both of its ways, and PyTorch's take turns.

    Returns:
        Their times, facts for the record, and why some were left out.
    """
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
    return timings, setting, left_out


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
    """The copies are measured once in a run, by its first row."""
    copies = functools.cache(measure_copies)
    return {case.name: partial(measure, case, options, copies) for case in CASES}


_NAMES: Final = [case.name for case in CASES]
SUITE: Final = Suite(
    rounds=9, order=_NAMES, jobs=_jobs, findings=findings, optional={MAX_AUTOTUNE: _NAMES, JAX: _NAMES}
)
