"""The suite `narrow`: training steps of narrow MLPs by lt_runtime, PyTorch and JAX.

Our step is measured as it is tuned, with one fused kernel for each pass, and layer by layer. Each step is one CUDA
graph, measured as in the suite `steps`. A row also has two floors of the step's time: moving the bytes of a step in one
kernel at the bandwidth of the fastest copy kernel in the same run, and computing its products at the tensor cores'
nominal peak.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from benchmarks import report
from benchmarks.buffers import itemsize
from benchmarks.copies import measured_copies
from benchmarks.layers import tune
from benchmarks.report import Finding, Json, Row
from benchmarks.steps import Setup, StepCase, contender, peers, timed_row
from benchmarks.suite import GRAPH, JAX, MAX_AUTOTUNE, TORCH_COMPILE, Suite, plan_cache
from benchmarks.timing import built

_INPUTS_AND_OUTPUTS: Final = {16: (16, 3), 32: (32, 3), 64: (64, 3), 96: (48, 16), 128: (128, 10)}
_ACTIVATIONS: Final = {"relu": "", "gelu": " GELU", "silu": " SiLU"}
_SEED: Final = 38
_DRAWN: Final = 8  # number of cases that are drawn at random
_FUSED: Final = "lt_one_kernel"
_LAYERS: Final = "lt_layers"
_PEERS: Final = (GRAPH, TORCH_COMPILE, MAX_AUTOTUNE, JAX)
# Bytes moved for each parameter: BF16, FP32 master, two FP32 moments, each read and written; no gradients.
_PARAMETER_BYTES: Final = 28
_PEAK_TFLOPS: Final = {"NVIDIA H200": 989.4}
"""By GPU, the peak of dense BF16 products in its data sheet, at 1.83 GHz; small steps run at up to 1.98 GHz."""


def _case(width: int, hidden: int, power: int, activation: str = "relu") -> StepCase:
    inputs, outputs = _INPUTS_AND_OUTPUTS[width]
    name, dims = f"{width}x{hidden} 2^{power}{_ACTIVATIONS[activation]}", (inputs, *[width] * hidden, outputs)
    return StepCase(name, "bf16", 1 << power, dims, activation, "mse")


def _drawn() -> list[StepCase]:
    """Cases of any widths up to 128, 1 to 5 hidden layers and 2^16 to 2^18 rows, which the seed alone decides."""
    generator, found = random.Random(_SEED), list[StepCase]()
    for _ in range(_DRAWN):
        hidden = [generator.randint(8, 128) for _ in range(generator.randint(1, 5))]
        dims = generator.randint(3, 128), *hidden, generator.randint(1, 32)
        rows, activation = generator.randint(1 << 16, 1 << 18), generator.choice([*_ACTIVATIONS])
        name = f"drawn {'-'.join(map(str, dims))} {rows}{_ACTIVATIONS[activation]}"
        found.append(StepCase(name, "bf16", rows, dims, activation, "mse"))
    return found


_RELU: Final = tuple(
    _case(*each)
    for each in sorted(
        (
            *itertools.product((16, 32, 64), (1, 3, 5), (10, 14, 18)),
            *itertools.product((128,), (1, 2), (10, 14, 18)),
            *itertools.product((16, 32, 64), (7,), (18,)),
            *itertools.product((128,), (3, 5, 7), (18,)),
            *((32, 3, 20), (64, 3, 20), (128, 2, 20)),
            *((16, 3, 16), (64, 3, 16), (96, 3, 16), (96, 3, 18), (128, 2, 16)),
        )
    )
)
_OTHERS: Final = tuple(
    _case(*shape, power, activation)
    for shape, power, activation in itertools.product(((16, 3), (64, 3), (96, 3), (128, 2)), (16, 18), ("gelu", "silu"))
)
CASES: Final = (*_RELU, *_OTHERS, *_drawn())


def least_bytes(case: StepCase) -> int:
    """The fewest bytes that a step in one kernel moves: inputs, targets, parameters, masters and moments.

    Every case has BF16 parameters with FP32 masters, and targets of the shape and type of its outputs.
    """
    ends = case.rows * (case.dims[0] + case.dims[-1])
    return itemsize(case.dtype) * ends + _PARAMETER_BYTES * case.parameters


def measure(case: StepCase, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a step and times it, also by one kernel for each pass and layer by layer, and other libraries' steps."""
    from benchmarks.internals import one_kernel_a_pass

    copy_gb_s, setup = measured_copies(stream).gb_s, Setup(case, stream)
    with plan_cache():
        tuned = tune(case).as_json()
        contenders = {"lt": contender(setup)}
        for name, fused in ((_FUSED, True), (_LAYERS, False)):
            with one_kernel_a_pass(fused):
                contenders[name] = contender(setup)
        theirs, left_out = built(dict(peers(setup, options, ("bf16",), called=False)))
        facts = {"left_out": left_out, "copy_gb_s": round(copy_gb_s, 1), **tuned}
        row = timed_row(case, contenders | theirs, options, stream, **facts)
    # The row's operations are those of the MLP's own widths, not of the widths to which a kernel pads them.
    peak = _PEAK_TFLOPS.get(report.machine()["gpu"])
    return replace(row, bytes=least_bytes(case), copy_gb_s=copy_gb_s, peak_tflops=peak)


def findings(rows: Sequence[Json]) -> list[Finding]:
    """The suite's summary: every contender's time against the tuned step's."""
    return report.against_ours(rows, (_FUSED, _LAYERS, *_PEERS))


SUITE: Final = Suite.of(measure, CASES, rounds=9, findings=findings)
