"""The suite `layers`: blocks of two layers, forward and full backward, against other libraries and other strategies.

Contenders are CUDA graphs of repetitions of a whole block. Their buffers rotate through more memory than the L2 cache
holds. Blocks so small that their data stays in the cache in practice have one buffer set.
"""

from __future__ import annotations

import argparse
import collections
import functools
import itertools
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, Final, NamedTuple

from benchmarks import report, timing
from benchmarks.buffers import itemsize, normal
from benchmarks.kept import is_peer
from benchmarks.peers import peer
from benchmarks.report import Finding, Json, Row
from benchmarks.suite import GRAPH, JAX, MAX_AUTOTUNE, TORCH_COMPILE, Job, Suite, jobs_of, modes, plan_cache
from benchmarks.timing import Contender, Timing

TYPES: Final = {"bf16": ("bfloat16", "float32"), "tf32": ("float32", "tf32"), "fp32": ("float32", "float32")}
"""For each value of the option `--dtype`, the type of all operands and the compute type."""
_KINDS: Final = ("bf16", "tf32")
ACTIVATIONS: Final = ("gelu", "relu")
REPRESENTATIVE: Final = (
    *((256, 512, 784), (1024, 1024, 1024), (1600, 1024, 256), (2048, 1024, 479), (4096, 4096, 1024), (8192, 3072, 768)),
)
"""Small and large layers that the suite `tuning` tunes."""

FLOPS_PER_US: Final = {"bf16": 7e8, "tf32": 3.5e8, "fp32": 4.5e7}  # approximate rates of an H200
BYTES_PER_US: Final = 4.2e6
_REPLAY_US: Final = 400.0  # the least time of a replay, because an event's resolution is half a microsecond
_MOST_REPETITIONS: Final = 48
_LAUNCHES_US: Final = 18.0  # The dozen kernels of a block cannot take less than this (µs).
_CACHES: Final = 3  # Rotating buffers take at least this many times the size of the L2 cache.
_MOST_SETS: Final = 16
_NEAR: Final = 1.25  # Candidates that were slower than this multiple of the best in tuning are not measured again.
_MOST_CANDIDATES: Final = 10

Builders = dict[str, Callable[[], Contender]]


class Typed:
    """A case of the suites, with a `kind` that is one of `TYPES`."""

    kind: str

    @property
    def dtype(self) -> str:
        """The name of the operands' type."""
        return TYPES[self.kind][0]

    @property
    def compute(self) -> str:
        """The compute type: how products are formed."""
        return TYPES[self.kind][1]


@dataclass(frozen=True)
class Block(Typed):
    """Layers K→N→K over M rows with biases, the activation between them.

    Attributes:
        group: the preset that has the layer.
        rows, n, k: M, N and K of the first layer.
        kind: one of `TYPES`.
        activation: its name in `lt_runtime`; the suite `layers` has the activations in `ACTIVATIONS`.
    """

    group: str
    rows: int
    n: int
    k: int
    kind: str
    activation: str
    input_gradient = True

    @property
    def name(self) -> str:
        """The row's name in tables and result files."""
        activation = {"gelu": "GELU", "relu": "ReLU"}.get(self.activation, self.activation)
        return f"{self.group} {self.rows}×{self.n}×{self.k} {self.kind.upper()} {activation}"

    @property
    def layer(self) -> tuple[int, int, int]:
        """Sizes M, N and K of the first layer."""
        return self.rows, self.n, self.k

    @property
    def dims(self) -> tuple[int, ...]:
        """Widths: the inputs of the first layer, then the outputs of each layer."""
        return self.k, self.n, self.k

    @property
    def bytes(self) -> int:
        """Bytes of all matrices that a block reads or writes: x, y, their gradients, hidden activations, weights."""
        inside = 3 * self.rows * self.n  # the hidden activations, the tensor saved with them, and their gradient
        return itemsize(self.dtype) * (4 * self.rows * self.k + inside + 4 * self.n * self.k)

    @property
    def flops(self) -> int:
        """Floating-point operations of the six products."""
        return 12 * self.rows * self.n * self.k

    def sets(self, cache: int) -> int:
        """How many sets of buffers exceed an L2 cache of `cache` bytes; 1 for a block whose data stay in the cache."""
        wanted = -(-_CACHES * cache // self.bytes)
        return wanted if wanted <= _MOST_SETS else 1

    def repetitions(self, sets: int) -> int:
        """How often one graph repeats the block: every buffer set equally often, and few times, to save time."""
        expected = max(self.flops / FLOPS_PER_US[self.kind], self.bytes / BYTES_PER_US, _LAUNCHES_US)
        wanted = min(math.ceil(_REPLAY_US / expected), _MOST_REPETITIONS)
        return math.ceil(wanted / sets) * sets

    def as_json(self) -> dict[str, Any]:
        """The block's fields as entries of its row."""
        return {"layer": list(self.layer), "type": self.kind, "activation": self.activation}


@functools.cache
def presets() -> Mapping[str, Any]:
    """The shapes of the presets that ship with the package."""
    return json.loads((files("lt_runtime") / "presets.json").read_text())


def blocks() -> list[Block]:
    """Every layer of the presets in every type with every activation."""
    layers = [(group, *layer) for group, members in presets()["layers"].items() for layer in members]
    return [Block(*layer, kind, activation) for layer in layers for kind in _KINDS for activation in ACTIVATIONS]


def compared() -> list[Block]:
    """The blocks that options compare with torch.compile and JAX, which take up to a minute each.

    They are three of every four layers of the presets, each with the next pair of a type and an activation in turn.
    """
    layers = [(group, *layer) for group, members in presets()["layers"].items() for layer in members]
    some = (layer for number, layer in enumerate(layers) if number % 4 < 3)
    ways = itertools.cycle(itertools.product(_KINDS, ACTIVATIONS))
    return [Block(*layer, *way) for layer, way in zip(some, ways, strict=False)]


# Contenders that run the block through public calls.


Arrays = collections.namedtuple("Arrays", "x w1 b1 w2 b2 dy y1 y2 kept dx dw1 db1 dz1 dw2 db2")
"""One buffer set: the operands of both layers, and the results of the four passes.

`kept` holds the tensor that forward of the first layer saves for backward; public calls allocate it themselves. dz1 is
the gradient before the first layer's activation.
"""


def arrays(block: Block, make: Callable[[tuple[int, ...], str], Any] = normal) -> Arrays:
    """Fills operands and results with random numbers."""
    m, n, k = block.layer
    # Rows of the tensor saved for backward: cuBLASLt saves a pre-activation only in rows of a multiple of 8 elements.
    padded = -(-n // 8) * 8
    w1, w2 = (n, k), (k, n)
    shapes = ((m, k), w1, (n,), w2, (k,), (m, k), (m, n), (m, k), (m, padded), (m, k), w1, (n,), (m, n), w2, (k,))
    return Arrays(*(make(shape, block.dtype) for shape in shapes))


def run_block(block: Block, at: Arrays, stream: Any = None) -> object:
    """Runs forward and full backward on a stream; returns the contexts, which own the saved tensors."""
    import lt_runtime as lt

    how = {"compute": block.compute, "stream": stream}
    _, first = lt.linear_fwd(at.x, at.w1, at.b1, activation=block.activation, out=at.y1, **how)
    _, second = lt.linear_fwd(at.y1, at.w2, at.b2, out=at.y2, **how)
    out = {"out_dx": at.dz1, "out_dw": at.dw2, "out_db": at.db2, "out_db_below": at.db1}
    lt.linear_bwd(at.dy, second, through=first, **out, stream=stream)
    lt.linear_bwd(at.dz1, first, before_activation=True, need_db=False, out_dx=at.dx, out_dw=at.dw1, stream=stream)
    return first, second


def ours(block: Block, buffers: Sequence[Arrays]) -> Contender:
    """Contenders that run the block through public calls, by the plans of the plan cache."""
    return Contender(lambda i, stream: run_block(block, buffers[i], stream))


class Tuned(NamedTuple):
    """Result of tuning a block: its duration, and the tuner's report."""

    seconds: float
    report: Sequence[Any]

    def as_json(self) -> dict[str, Any]:
        """The result as entries of the row."""
        tuned = [{"strategy": each.strategy, "seconds": round(each.seconds, 3)} for each in self.report]
        return {"tuning_s": round(self.seconds, 3), "tuned": tuned}


def tune(case: Any) -> Tuned:
    """Tunes the problems of a block or of a training step that have no entry in the plan cache."""
    import lt_runtime as lt

    start = time.perf_counter()
    how = {"dtype": case.dtype, "compute": case.compute, "input_gradient": case.input_gradient}
    with timing.stopwatch("tuning"):
        made = lt.tune(case.dims, case.rows, activation=case.activation, progress=False, **how)
    return Tuned(time.perf_counter() - start, made)


def measure_block(block: Block, options: argparse.Namespace, stream: Any, *, strategies: bool = True) -> Row:
    """Tunes a block, with an empty plan cache unless `--keep-plans` is given, and times all contenders alternately.

    Args:
        strategies: whether the block is also measured by strategies that the tuner did not choose.
    """
    sets = block.sets(timing.cache_size())
    count = block.repetitions(sets)
    with plan_cache(keep=options.keep_plans):
        tuned = tune(block)
        buffers = [arrays(block) for _ in range(sets)]
        builders: Builders = {"lt": partial(ours, block, buffers)}
        candidates: Builders = {}
        facts: dict[str, Any] = {}
        if strategies and not options.ours:
            others, candidates, facts = _others(block, buffers)
            builders |= others | candidates
        builders |= {} if options.ours else _peers(block, buffers, options)
        timings, left_out = timing.measure(builders, sets, count, options.rounds, stream)
    setting = block.as_json() | {"buffer_sets": sets, "repetitions": count, "rounds": options.rounds} | tuned.as_json()
    setting |= facts
    setting |= no_loss(timings, candidates) if candidates else {}
    timings = {name: each for name, each in timings.items() if name not in candidates}
    return Row(block.name, timings, setting=setting, left_out=left_out)


def _others(block: Block, buffers: Sequence[Arrays]) -> tuple[Builders, Builders, dict[str, Any]]:
    """Makes the contenders that run the block by other strategies, and by the tuner's other candidates.

    Returns the contenders, and facts about them for the row.
    """
    from benchmarks import splits

    chain = splits.chain_of(block)

    def candidate(split: splits.Split, choose: splits.Choose = splits.known_algorithm) -> Contender:
        return splits.by_split(chain, split, choose).contender(buffers)

    fused, refused = splits.fused_first(chain)
    plans = {"lt_priors": splits.by_priors(chain), "lt_fused_top1": fused, "lt_split_top1": splits.split_first(chain)}
    chosen, entries = splits.decided(chain), splits.entries_of(chain)
    split = splits.split_of(chosen)
    found = splits.near(chain, entries, split, _NEAR, _MOST_CANDIDATES)
    candidates: Builders = {str(each): partial(candidate, each) for each in found}
    candidates["as chosen, first algorithms"] = partial(candidate, split, splits.heuristic_algorithm)
    names = {name: str(splits.split_of(each)) for name, each in ({"lt": chosen} | plans).items()}
    facts = {"splits": names, "fusion_refused": refused}
    return {name: partial(each.contender, buffers) for name, each in plans.items()}, candidates, facts


def _peers(block: Block, buffers: Sequence[Arrays], options: argparse.Namespace) -> Builders:
    theirs = {name: peer("torch_kernels", "block", block, buffers, mode) for name, mode in modes(options).items()}
    return theirs | ({JAX: peer("jax_layers", "block", block, buffers)} if options.jax else {})


# Functions that compute the figures over all rows for the suite's summary.

_OTHERS: Final = ("lt_priors", "lt_fused_top1", "lt_split_top1", GRAPH, TORCH_COMPILE, MAX_AUTOTUNE, JAX)


def no_loss(timings: Mapping[str, Timing], candidates: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The times of the tuner's candidates, and the chosen plan's time as a multiple of the best time of lt_runtime."""
    medians = {name: each.median for name, each in timings.items() if not is_peer(name)}
    loss = {"chosen_vs_best": round(medians["lt"] / min(medians.values()), 4)} if "lt" in medians else {}
    return loss | {"candidates": {name: round(medians[name], 4) for name in candidates if name in medians}}


def findings(rows: Sequence[Json]) -> list[Finding]:
    """The suite's summary: all contenders against the tuned plan, and the tuned plan against the best candidate."""
    of_best = {row["case"]: row["chosen_vs_best"] for row in rows if "chosen_vs_best" in row}
    return [report.worst("lt / best candidate", of_best, at_most=True), *report.against_ours(rows, _OTHERS)]


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    has_more_peers = options.torch_compile or options.max_autotune or options.jax
    return jobs_of(measure_block, compared() if has_more_peers else blocks(), options)


SUITE: Final = Suite(rounds=9, order=[block.name for block in blocks()], jobs=_jobs, findings=findings)
