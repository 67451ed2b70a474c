"""The suite `fp8`: training steps and inference of MLPs with products in FP8, against BF16, PyTorch and torchao.

Each step is one CUDA graph. Steps are timed in short bursts, as in the suite `steps`. Steps that other libraries make
too are also timed over two seconds without a pause, in which the GPU's power limit lowers its clock. Models have two
layers with GELU between them, and are trained with MSE and AdamW; all contenders of a row hold parameters, masters and
moments in the same types.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np

from benchmarks import report, timing
from benchmarks.buffers import normal
from benchmarks.peers import peer
from benchmarks.report import Finding, Json, Row
from benchmarks.steps import Peer, Setup, StepCase, StepContender, contender, graph_turn, memory_of, timed_row
from benchmarks.suite import UNTUNED, Job, Suite, modes, plan_cache, variable
from benchmarks.timing import Contender, Timing, built, take_turns

RECIPES: Final = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""The names of torchao's FP8 recipes that take part."""
SUSTAINED_US: Final = 2e6  # the duration of a sustained turn of a contender, in microseconds
_SUSTAINED_ROUNDS: Final = 3
_PEERS: Final = ("torch_bf16", "torch_autocast", "torchao")
"""Groups of other libraries' contenders; a row has the time of each group's fastest one under the group's name."""
_WIDTHS: Final = (512, 1024, 2048, 4096, 8192)
_BATCHES: Final = (1024, 4096, 16384)
_INFERENCE_ROWS: Final = (64, 4096)
_WIDE: Final = (4096, 14336, 4096)


@dataclass(frozen=True)
class FP8Case(StepCase):
    """A training step of an MLP of two layers.

    Attributes:
        precision: the option `precision` of our model.
    """

    precision: Any = None
    # Layers are tuned in the step's first rehearsal, because `lt.tune` does not measure FP8 products.
    tune: ClassVar[bool | None] = True

    @property
    def name(self) -> str:
        """The row's name."""
        return self.preset

    def model(self, device: str = "cuda:0") -> Any:
        """Makes a new model of the case."""
        import lt_runtime as lt

        options: dict[str, Any] = {"dtype": self.dtype, "master_weights": self.master, "precision": self.precision}
        return lt.MLP(self.dims, self.activation, device=device, **options)

    def as_json(self) -> dict[str, Any]:
        """The case's fields as entries of its row, and the types that every contender's optimizer updates."""
        kept = "float32" if self.master else "bfloat16"
        return super().as_json() | {"types": {"parameters": kept, "moments": kept}}


def case(dims: tuple[int, ...], rows: int, told: str = "", *, master: bool = False) -> FP8Case:
    """Makes a case, whose name consists of its widths and a remark."""
    return FP8Case("-".join(map(str, dims)) + told, "bf16", rows, dims, "gelu", "mse", master)


COMPARED: Final = (case(_WIDE, 4096), case((768, 3072, 768), 8192), case(_WIDE, 4096, " FP32 masters", master=True))
"""Cases of training steps in which lt_runtime is compared with other libraries."""
GRID: Final = tuple(case((w, 4 * w, w), rows, f" batch {rows}") for w, rows in itertools.product(_WIDTHS, _BATCHES))
"""Cases of training steps of lt_runtime alone, which show for which sizes FP8 is faster than BF16."""
INFERENCE: Final = tuple(case(_WIDE, rows, f" inference {rows}") for rows in _INFERENCE_ROWS)


_EXACT_BACKWARD: Final = "lt_exact_backward"
"""Our contender whose fast accumulation is "forward": products of backward are summed with more than 14 bits."""


def precisions(*, all_ways: bool) -> dict[str, Any]:
    """The option `precision` of our contenders, by name."""
    import lt_runtime as lt

    exact = {_EXACT_BACKWARD: lt.FP8(fast_accumulation="forward")} if all_ways else {}
    return {"lt": "fp8", "lt_bf16": None, **exact}


def measure(case: FP8Case, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a step in FP8 and in BF16 with an empty plan cache, and times both alternately."""
    with plan_cache(keep=options.keep_plans):
        contenders, left_out = built(_ours(case, stream))
        return timed_row(case, contenders, options, stream, left_out=left_out)


def measure_compared(case: FP8Case, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes steps as `measure` does, and times them and other libraries' steps alternately, in bursts and sustained.

    Each group of other libraries' contenders takes part in sustained turns by the one that was fastest in bursts.
    """
    with plan_cache(keep=options.keep_plans):
        theirs = {} if options.ours else dict(peers(Setup(case, stream), options))
        contenders, left_out = built(_ours(case, stream, is_compared=True) | theirs)
        row = timed_row(case, contenders, options, stream, left_out=left_out)
        bursts = with_fastest(row.timings)
        turns = {
            name: graph_turn(each, math.ceil(SUSTAINED_US / bursts[name].median), stream)
            for name, each in contenders.items()
            if not any(name.startswith(f"{base}_") and bursts[base] < bursts[name] for base in _PEERS)
        }
        sustained = with_fastest(take_turns(turns, _SUSTAINED_ROUNDS, warm_up=0))
    facts: dict[str, Any] = {
        "sustained_us": {name: round(each.median, 4) for name, each in sustained.items()},
        "sustained_spread": {name: round(each.spread, 4) for name, each in sustained.items()},
    }
    if {"lt", "lt_bf16"} <= contenders.keys():
        facts["memory_ratio"] = round(contenders["lt"].memory / contenders["lt_bf16"].memory, 4)
    return replace(row, timings=bursts, setting={**row.setting, **facts})


def _ours(case: FP8Case, stream: Any, *, is_compared: bool = False) -> dict[str, Callable[[], StepContender]]:
    """By name, functions that build our training steps and tune them; with `is_compared` they also learn the memory."""

    def build(of: FP8Case) -> StepContender:
        made = contender(Setup(of, stream))
        return made._replace(memory=memory_of(of, stream)) if is_compared else made

    found = precisions(all_ways=is_compared)
    return {name: partial(build, replace(case, precision=each)) for name, each in found.items()}


def peers(setup: Setup, options: argparse.Namespace) -> Iterator[Peer]:
    """Names and builders of the other libraries' contenders.

    These contenders hold BF16 parameters, or FP32 parameters under autocast if lt_runtime's have FP32 masters.
    """
    way = "autocast" if setup.case.master else "bf16"
    for name, mode in modes(options, compiled=True).items():
        yield name.replace("torch", f"torch_{way}"), peer("torch_steps", "contender", setup, way, compiled=mode)
    for recipe in RECIPES:
        yield f"torchao_{recipe}", peer("torch_steps", "contender", setup, way, compiled="default", recipe=recipe)


def with_fastest(timings: Mapping[str, Timing]) -> dict[str, Timing]:
    """Adds to the timings, for each group of other libraries' contenders, the fastest one's under the group's name."""
    found = {base: [each for name, each in timings.items() if name.startswith(f"{base}_")] for base in _PEERS}
    return {**timings, **{base: min(each) for base, each in found.items() if each}}


def measure_inference(case: FP8Case, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes inference in FP8 and in BF16, and times graphs of both alternately.

    FP8 is left out if its outputs are BF16's bit for bit, because then the products are in BF16.
    """
    models = {name: replace(case, precision=each).model() for name, each in precisions(all_ways=False).items()}
    weights = 2 * case.parameters
    sets = timing.buffer_sets(weights, timing.cache_size())
    batches = [normal((case.rows, case.dims[0]), case.dtype) for _ in range(sets)]

    def build(name: str) -> Contender:
        outputs = [models[each].device.to_host(models[each](batches[0])) for each in {name, "lt_bf16"}]
        if name != "lt_bf16" and np.array_equal(*(each.view(np.uint16) for each in outputs)):
            raise RuntimeError("inference is in BF16: its outputs are those of lt_bf16")
        return Contender(lambda i, handle: models[name](batches[i], stream=handle))

    count = timing.repetitions(weights, sets)
    with plan_cache(keep=options.keep_plans), variable(UNTUNED[0], "first-use"):
        measured = timing.measure({name: partial(build, name) for name in models}, sets, count, options.rounds, stream)
    setting = case.as_json() | {"rounds": options.rounds, "repetitions": count}
    return Row(case.name, measured.timings, setting=setting, left_out=measured.left_out)


_TARGETS: Final[Mapping[tuple[str, str, str], float]] = {
    (COMPARED[0].name, "lt", "torch_bf16"): 1.6,
    (COMPARED[0].name, "lt", "torchao"): 1.3,
    (COMPARED[0].name, _EXACT_BACKWARD, "torchao"): 1.22,
    (COMPARED[0].name, "lt", "lt_bf16"): 1.55,
    (COMPARED[1].name, "lt", "lt_bf16"): 1.15,
    (COMPARED[2].name, "lt", "torch_autocast"): 1.9,
}
"""Targets: maps a case, a contender of ours and a second contender to the least ratio of the second's sustained time to
ours.
"""
_NEVER_SLOWER: Final = 0.99
_INFERENCE: Final = 1.4
_MEMORY: Final = {False: 1.1, True: 1.0}
"""Upper limit of the memory of a step in FP8 as a multiple of BF16's, without and with FP32 masters."""


def findings(rows: Sequence[Json]) -> list[Finding]:
    """The suite's summary: sustained steps against all contenders, BF16 against FP8 (also in inference), and memory."""
    made = []
    for row, ours, name in itertools.product(rows, ("lt", _EXACT_BACKWARD), ("lt_bf16", *_PEERS)):
        us = row.get("sustained_us", {})
        if ours in us and name in us:
            target = _TARGETS.get((row["case"], ours, name))
            made.append(Finding(f"{name} / {ours}, sustained, {row['case']}", us[name] / us[ours], target))
    for cases, what, target in ((GRID, "training", _NEVER_SLOWER), (INFERENCE, "inference", _INFERENCE)):
        names = {case.name for case in cases}
        found = report.speedups([row for row in rows if row["case"] in names], "lt_bf16")
        made += [report.worst(f"lt_bf16 / lt, {what}", found, target)] if found else []
    for row in rows:
        if ratio := row.get("memory_ratio"):
            what, most = f"memory of lt / lt_bf16, {row['case']}", _MEMORY[row["master"]]
            made.append(Finding(what, ratio, most, at_most=True))
    return made


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    measures = ((measure_compared, COMPARED), (measure, GRID), (measure_inference, INFERENCE))
    return {case.name: partial(how, case, options) for how, cases in measures for case in cases}


_NAMES: Final = [case.name for case in (*COMPARED, *GRID, *INFERENCE)]
SUITE: Final = Suite(rounds=9, order=_NAMES, jobs=_jobs, findings=findings)
