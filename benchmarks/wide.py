"""The suite `wide`: blocks as in `layers`, of random shapes; half of them fit untuned choices, and half judge them.

The shapes are drawn by a seed, so that they do not depend on any fit. Each stratum's first half is
for fitting the untuned choices, and its second for judging them.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final

from benchmarks import report
from benchmarks.layers import Block, measure_block
from benchmarks.report import Finding, Json, Row, speedups
from benchmarks.suite import MAX_AUTOTUNE, TORCH_COMPILE, Suite

FIT: Final = "fit"
JUDGE: Final = "judge"
_SEED: Final = 2026
_SHAPES: Final = 16  # Number of shapes in each stratum.
_MOST_MULTIPLICATIONS: Final = 1 << 35  # Upper limit of M·N·K, so that the suite takes minutes.
_APART: Final = "apart"  # the half of the shape that was not drawn
_SLOW: Final = 16384, 100, 700
"""M, N and K of a block that was not drawn; untuned plans for it were slower than PyTorch."""
_PEERS: Final = ("torch_graph", TORCH_COMPILE, MAX_AUTOTUNE)

Shape = tuple[int, int, int]
Draw = Callable[[random.Random, int], Shape]


def _between(generator: random.Random, low: int, high: int, step: int = 1) -> int:
    """A random multiple of `step` between two limits, distributed evenly on a logarithmic scale."""
    return max(low, round(low * (high / low) ** generator.random() / step) * step)


def _odd(generator: random.Random, number: int) -> Shape:
    """Draws odd shapes, in turn with N odd; with K odd; with both odd; and with both odd and thousands of rows."""
    kind = number % 4
    n, k = (_between(generator, 500 if kind == 3 else 13, 4999) | 1 for _ in range(2))
    n, k = (n + 7 & -8 if kind == 1 else n), (k + 7 & -8 if kind == 0 else k)
    return _between(generator, 2048 if kind == 3 else 128, 16384), n, k


def _tall(generator: random.Random, number: int) -> Shape:
    """Draws layers with few columns, as in networks that are called for each point or ray."""
    n, k = (_between(generator, 16, 128, 8) for _ in range(2))
    return 1 << 16 + number % 3, n, k


def _narrow(generator: random.Random, number: int) -> Shape:
    """Draws output layers: a few classes or values from hundreds or thousands of inputs."""
    return _between(generator, 64, 8192), 1 + int(24 * generator.random()), _between(generator, 128, 2048, 8)


def _ordinary(generator: random.Random, number: int) -> Shape:
    """Draws layers whose sizes are multiples of 64, as most layers' sizes are."""
    n, k = (_between(generator, 64, 8192, 64) for _ in range(2))
    return _between(generator, 16, 16384), n, k


STRATA: Final[dict[str, Draw]] = {"odd": _odd, "tall": _tall, "narrow": _narrow, "ordinary": _ordinary}


def shapes(stratum: str) -> list[Shape]:
    """Draws M, N and K of a stratum's layers, all different: the shapes for fitting, then the shapes for judging."""
    generator, found = random.Random(f"{_SEED} {stratum}"), list[Shape]()
    while len(found) < _SHAPES:
        m, n, k = STRATA[stratum](generator, len(found))
        if m * n * k <= _MOST_MULTIPLICATIONS and (m, n, k) not in found:
            found.append((m, n, k))
    return found


def blocks() -> list[Block]:
    """All blocks, with GELU: the drawn shapes in BF16, the odd ones and `_SLOW` in BF16 and TF32.

    A block's group names its stratum and one of `FIT`, `JUDGE` and `_APART`.
    """
    drawn = [
        Block(f"{stratum} {FIT if 2 * number < _SHAPES else JUDGE}", *shape, kind, "gelu")
        for stratum in STRATA
        for number, shape in enumerate(shapes(stratum))
        for kind in (("bf16", "tf32") if stratum == "odd" else ("bf16",))
    ]
    return [*drawn, *(Block(f"odd {_APART}", *_SLOW, kind, "gelu") for kind in ("bf16", "tf32"))]


def measure(block: Block, options: argparse.Namespace, stream: Any) -> Row:
    """A row with the same fields as in the suite `layers`, and the block's stratum and half."""
    row = measure_block(block, options, stream)
    stratum, half = block.group.split()
    return replace(row, setting={**row.setting, "stratum": stratum, "half": half})


def findings(rows: Sequence[Json]) -> list[Finding]:
    """The suite's figures.

    The figures are tuned time over untuned time, for the half of the blocks that no fit has read; and, for blocks of
    odd shape, the time of every other library over ours, tuned and untuned.
    """
    untuned = speedups([row for row in rows if row.get("half") == JUDGE], "lt", "lt_priors")
    odd = [row for row in rows if row.get("stratum") == "odd"]
    made = [report.mean("lt / lt_priors", untuned, 0.96), report.worst("lt / lt_priors", untuned, 0.88)]
    for ours in ("lt", "lt_priors"):
        made += [report.worst(f"{peer} / {ours}, odd", speedups(odd, peer, ours), 1.1) for peer in _PEERS]
    return made


SUITE: Final = Suite.of(measure, blocks(), rounds=5, findings=findings)
