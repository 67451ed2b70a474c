"""The suite `layers`: blocks of two layers, forward and full backward, against others and against other strategies.

Contenders are CUDA graphs of repetitions of a whole block. Their buffers rotate through more memory than the L2 cache
holds, but for blocks so small that their data would be found there in practice: these have one buffer set.
"""

from __future__ import annotations

import argparse
import functools
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
from benchmarks.fastest import is_peer
from benchmarks.peers import peer
from benchmarks.report import Finding, Json, Row, speedups
from benchmarks.suite import JAX, MAX_AUTOTUNE, Job, Suite, plan_cache
from benchmarks.timing import Contender, Timing

TYPES: Final[Mapping[str, tuple[str, str]]] = {
    "bf16": ("bfloat16", "float32"),
    "tf32": ("float32", "tf32"),
    "fp32": ("float32", "float32"),
}
"""The type of all operands and the compute type, by the names of the command line."""
_KINDS: Final = ("bf16", "tf32")
ACTIVATIONS: Final = ("gelu", "relu")
REPRESENTATIVE: Final = (
    (256, 512, 784),
    (1024, 1024, 1024),
    (1600, 1024, 256),
    (2048, 1024, 479),
    (4096, 4096, 1024),
    (8192, 3072, 768),
)
"""The layers that are compared with torch.compile and JAX as well, which takes its time."""

FLOPS_PER_US: Final = {"bf16": 7e8, "tf32": 3.5e8, "fp32": 4.5e7}  # what an H200 reaches, about
BYTES_PER_US: Final = 4.2e6
_REPLAY_US: Final = 400.0  # One replay takes about this long or longer: an event's resolution is half a microsecond.
_MOST_REPETITIONS: Final = 48
_LAUNCHES_US: Final = 18.0  # A dozen kernels do not take less.
_CACHES: Final = 3  # Rotating buffers take at least this many times the size of the L2 cache.
_MOST_SETS: Final = 16
_NEAR: Final = 1.25  # Candidates that are further behind by the tuner's times are not measured again.
_MOST_CANDIDATES: Final = 10
_SUSTAINED: Final = ("lt", "torch_graph")
_SHOWN: Final = 200  # characters of a reason

Builders = dict[str, Callable[[], Contender]]


@dataclass(frozen=True)
class Block:
    """Layers K→N→K over M rows with biases, the activation between them.

    Attributes:
        group: where the layer is from.
        rows, n, k: M, N and K of the first layer.
        kind: one of `TYPES`.
        activation: its name in `lt_runtime`; the suite `layers` has those of `ACTIVATIONS`.
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
        """What the row is called."""
        activation = {"gelu": "GELU", "relu": "ReLU"}.get(self.activation, self.activation)
        return f"{self.group} {self.rows}×{self.n}×{self.k} {self.kind.upper()} {activation}"

    @property
    def layer(self) -> tuple[int, int, int]:
        """M, N and K of the first layer."""
        return self.rows, self.n, self.k

    @property
    def dims(self) -> tuple[int, ...]:
        """Inputs of the first layer, then outputs of each."""
        return self.k, self.n, self.k

    @property
    def dtype(self) -> str:
        """The element type of every array, by name."""
        return TYPES[self.kind][0]

    @property
    def compute(self) -> str:
        """How products are formed."""
        return TYPES[self.kind][1]

    @property
    def bytes(self) -> int:
        """All matrices that a block reads or writes: x, y and their gradients, what is between the layers, weights."""
        inside = 3 * self.rows * self.n  # y1, what is kept beside it, and the gradient
        return itemsize(self.dtype) * (4 * self.rows * self.k + inside + 4 * self.n * self.k)

    @property
    def flops(self) -> int:
        """Floating-point operations of the six products."""
        return 12 * self.rows * self.n * self.k

    def sets(self, cache: int) -> int:
        """How many buffer sets exceed an L2 cache of so many bytes; one for blocks whose data is in it in practice."""
        wanted = -(-_CACHES * cache // self.bytes)
        return wanted if wanted <= _MOST_SETS else 1

    def repetitions(self, sets: int) -> int:
        """How often a graph repeats the block, every buffer set equally often: few, so that the suite takes minutes."""
        expected = max(self.flops / FLOPS_PER_US[self.kind], self.bytes / BYTES_PER_US, _LAUNCHES_US)
        wanted = min(math.ceil(_REPLAY_US / expected), _MOST_REPETITIONS)
        return math.ceil(wanted / sets) * sets

    def as_json(self) -> dict[str, Any]:
        """What the block is, for its row."""
        return {"layer": list(self.layer), "type": self.kind, "activation": self.activation}


@functools.cache
def presets() -> Mapping[str, Any]:
    """The shapes that ship with the package."""
    return json.loads((files("lt_runtime") / "presets.json").read_text())


def blocks() -> list[Block]:
    """Every layer of the presets in every type with every activation."""
    layers = [(group, *layer) for group, members in presets()["layers"].items() for layer in members]
    return [Block(*layer, kind, activation) for layer in layers for kind in _KINDS for activation in ACTIVATIONS]


def chosen_blocks(options: argparse.Namespace) -> list[Block]:
    """The blocks that the command line asks for, but for `--only`."""
    return [
        block
        for block in blocks()
        if options.dtype in (None, block.kind)
        and options.activation in (None, block.activation)
        and (block.layer in REPRESENTATIVE or not (options.max_autotune or options.jax))
    ]


# The block through public calls.


class Arrays(NamedTuple):
    """One buffer set: the operands of both layers, and what the four passes make.

    `kept` is what forward of the first layer keeps beside y1 (public calls make it themselves), and dz1 the gradient
    before its activation.
    """

    x: Any
    w1: Any
    b1: Any
    w2: Any
    b2: Any
    dy: Any
    y1: Any
    y2: Any
    kept: Any
    dx: Any
    dw1: Any
    db1: Any
    dz1: Any
    dw2: Any
    db2: Any


def arrays(block: Block, make: Callable[[tuple[int, ...], str], Any] = normal) -> Arrays:
    """Random numbers, also in what is to be written."""
    m, n, k = block.layer
    padded = -(-n // 8) * 8  # cuBLASLt wants such rows of a pre-activation that is kept; a mask needs less.
    w1, w2 = (n, k), (k, n)
    shapes = ((m, k), w1, (n,), w2, (k,), (m, k), (m, n), (m, k), (m, padded), (m, k), w1, (n,), (m, n), w2, (k,))
    return Arrays(*(make(shape, block.dtype) for shape in shapes))


def run_block(block: Block, at: Arrays, stream: Any = None) -> object:
    """Forward and full backward on a stream; returns the contexts, which own what forward has kept."""
    import lt_runtime as lt

    how = {"compute": block.compute, "stream": stream}
    _, first = lt.linear_fwd(at.x, at.w1, at.b1, activation=block.activation, out=at.y1, **how)
    _, second = lt.linear_fwd(at.y1, at.w2, at.b2, out=at.y2, **how)
    lt.linear_bwd(
        at.dy,
        second,
        through=first,
        out_dx=at.dz1,
        out_dw=at.dw2,
        out_db=at.db2,
        out_db_below=at.db1,
        stream=stream,
    )
    lt.linear_bwd(at.dz1, first, before_activation=True, need_db=False, out_dx=at.dx, out_dw=at.dw1, stream=stream)
    return first, second


def ours(block: Block, buffers: Sequence[Arrays]) -> Contender:
    """Public calls, by whatever plans the cache holds."""
    return Contender(lambda i, stream: run_block(block, buffers[i], stream))


class Tuned(NamedTuple):
    """How long tuning took, and what the tuner said."""

    seconds: float
    report: Sequence[Any]

    def as_json(self) -> dict[str, Any]:
        """For the row."""
        return {"tuning_s": round(self.seconds, 3), "tuned": [_group_as_json(each) for each in self.report]}


def tune(case: Any, effort: str = "default") -> Tuned:
    """Measures the problems of a block or of a training step, unless the plan cache has them."""
    import lt_runtime as lt

    start = time.perf_counter()
    made = lt.tune(
        case.dims,
        case.rows,
        activation=case.activation,
        dtype=case.dtype,
        compute=case.compute,
        input_gradient=case.input_gradient,
        effort=effort,
        progress=False,
    )
    return Tuned(time.perf_counter() - start, made)


def _group_as_json(group: Any) -> dict[str, Any]:
    """What the tuner says of problems that it decided together."""
    return {
        "strategy": group.strategy,
        "before_us": round(group.before_us, 3),
        "after_us": round(group.after_us, 3),
        "measured": group.measured,
        "rejected": [each[:_SHOWN] for each in group.rejected],
        "seconds": round(group.seconds, 3),
    }


def measure_block(block: Block, options: argparse.Namespace, stream: Any) -> Row:
    """Tunes a block, in a fresh plan cache unless the options say otherwise, and lets all contenders take turns."""
    sets = block.sets(timing.cache_size())
    count = block.repetitions(sets)
    sustained: dict[str, Any] = {}

    def run_long(name: str, replay: timing.Replay, took: Timing) -> None:
        if name in _SUSTAINED and took.median >= timing.LONG_US:
            sustained[name] = timing.sustained(partial(timing.repeat, replay), took.median, stream, count)

    with plan_cache(keep=options.keep_plans):
        tuned = tune(block)
        buffers = [arrays(block) for _ in range(sets)]
        builders: Builders = {"lt": partial(ours, block, buffers)}
        candidates: Builders = {}
        facts: dict[str, Any] = {}
        if not options.ours:
            others, candidates, facts = _others(block, buffers)
            builders |= others | candidates | _peers(block, buffers, options)
        timings, left_out = timing.measure(builders, sets, count, options.rounds, stream, run_long)
    setting = block.as_json() | {"when": report.now()}
    setting |= {"buffer_sets": sets, "repetitions": count, "rounds": options.rounds} | tuned.as_json()
    setting |= facts
    setting |= no_loss(timings, candidates) if candidates else {}
    setting |= {"sustained": sustained} if sustained else {}
    timings = {name: each for name, each in timings.items() if name not in candidates}
    return Row(block.name, timings, setting=setting, left_out=left_out)


def _others(block: Block, buffers: Sequence[Arrays]) -> tuple[Builders, Builders, dict[str, Any]]:
    """Our passes split in other ways; the candidates that could have been chosen; and facts about both."""
    from benchmarks import splits

    addresses = [Arrays(*(array.data.ptr for array in each)) for each in buffers]
    chain = splits.chain_of(block)

    def contender(plans: splits.Plans) -> Contender:
        return Contender(lambda i, stream: plans.run(addresses[i], stream))

    def candidate(split: splits.Split, choose: splits.Choose = splits.known_algorithm) -> Contender:
        return contender(splits.by_split(chain, split, choose))

    fused, refused = splits.fused_first(chain)
    plans = {"lt_priors": splits.by_priors(chain), "lt_fused_top1": fused, "lt_split_top1": splits.split_first(chain)}
    chosen, entries = splits.decided(chain), splits.entries_of(chain)
    split = splits.split_of(chosen)
    found = splits.near(chain, entries, split, _NEAR, _MOST_CANDIDATES)
    candidates: Builders = {str(each): partial(candidate, each) for each in found}
    candidates["as chosen, first algorithms"] = partial(candidate, split, splits.heuristic_algorithm)
    names = {name: str(splits.split_of(each)) for name, each in ({"lt": chosen} | plans).items()}
    facts = {"splits": names, "fusion_refused": refused}
    return {name: partial(contender, each) for name, each in plans.items()}, candidates, facts


def _peers(block: Block, buffers: Sequence[Arrays], options: argparse.Namespace) -> Builders:
    made: Builders = {"torch_graph": peer("torch_layers", "eager", block, buffers)}
    if options.max_autotune:
        made[MAX_AUTOTUNE] = peer("torch_layers", "compiled", block, buffers, options.compile_seconds)
    if options.jax:
        made[JAX] = peer("jax", "block", block, buffers)
    return made


# The figures over all rows.

_TORCH: Final = {"bf16": 1.15, "tf32": 1.10}
_COLUMNS: Final = ("lt_priors", "lt_fused_top1", "lt_split_top1", "torch_graph", MAX_AUTOTUNE, JAX)


def no_loss(timings: Mapping[str, Timing], candidates: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """The candidates' times, and the chosen plan's as a multiple of the best of all that are ours."""
    medians = {name: each.median for name, each in timings.items() if not is_peer(name)}
    loss = {"chosen_vs_best": round(medians["lt"] / min(medians.values()), 4)} if "lt" in medians else {}
    return loss | {"candidates": {name: round(medians[name], 4) for name in candidates if name in medians}}


def findings(rows: Sequence[Json]) -> list[Finding]:
    """All that the suite has to show."""
    fused = speedups(rows, "lt_fused_top1")
    of_best = {row["case"]: row["chosen_vs_best"] for row in rows if "chosen_vs_best" in row}
    made = [
        report.share("within 3 % of the best candidate", of_best, lambda loss: loss <= 1.03, 0.95),
        report.share("within 8 % of the best candidate", of_best, lambda loss: loss <= 1.08, 1.0),
        report.mean("lt_fused_top1 / lt", fused, 1.3),
        report.worst("lt_fused_top1 / lt", fused, 0.98),
    ]
    for kind, target in _TORCH.items():
        torch = speedups((row for row in rows if row.get("type") == kind), "torch_graph")
        made.append(report.mean(f"torch_graph / lt, {kind.upper()}", torch, target))
        made.append(report.worst(f"torch_graph / lt, {kind.upper()}", torch, 0.97))
    made.append(report.mean(f"{MAX_AUTOTUNE} / lt", speedups(rows, MAX_AUTOTUNE), 1.08))
    made.append(report.worst(f"{JAX} / lt", speedups(rows, JAX)))
    made.append(report.mean("lt / lt_priors", speedups(rows, "lt", "lt_priors"), 0.90))
    return made


def lines(rows: Sequence[Json]) -> report.Table:
    more = {
        "÷ best": lambda row: f"{row['chosen_vs_best']:.3f}" if "chosen_vs_best" in row else "",
        "tuned in": lambda row: f"{row['tuning_s']:.2f} s",
    }
    return report.compact_table(rows, _COLUMNS, more)


def _jobs(options: argparse.Namespace) -> dict[str, Job]:
    return {block.name: partial(measure_block, block, options) for block in chosen_blocks(options)}


_NAMES: Final = [block.name for block in blocks()]
SUITE: Final = Suite(
    rounds=9, order=_NAMES, jobs=_jobs, findings=findings, lines=lines, optional={MAX_AUTOTUNE: _NAMES, JAX: _NAMES}
)
