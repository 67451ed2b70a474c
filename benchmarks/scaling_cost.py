"""Predicts the time of a training step on many GPUs from its time on one, by the bytes and rates of its sums.

Gradients are summed over the GPUs bucket by bucket. All sums but the last overlap with the rest of backward and slow it
down, because they occupy multiprocessors. The last sum overlaps with the update of the other buckets' parameters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lt_runtime.distributed.buckets import divided

GPUS: Final = (2, 8, 16, 64, 256, 1024)
PER_MACHINE: Final = 8
_START_US: Final = 20.0
"""Microseconds that a sum takes besides its transfers; fitted with `_NVLINK` to sums of 4 to 235 MB on two H200s."""
_HOP_US: Final = 6.0
"""Microseconds that a message takes from one machine to another."""
_NVLINK: Final = 275e3
"""Bytes that a GPU sends in a microsecond while the GPUs of one machine sum arrays."""
_BESIDE: Final = 0.25
"""The part of a sum's time by which it lengthens a long product beside it, as measured on two H200s."""
_UPDATED: Final = 524e3
"""Bytes of gradients whose parameters an update takes a microsecond for, as measured on an H200 (AdamW in BF16)."""
_BACKWARD: Final = 2 / 3
"""Fraction of a step's time that backward takes."""
_BYTES: Final = 2
"""Bytes of a gradient in BF16."""


@dataclass(frozen=True)
class Network:
    """A network that connects machines.

    Attributes:
        rate: bytes that a machine sends in a microsecond, eight tenths of the nominal rate.
    """

    name: str
    rate: float


NETWORKS: Final = (
    Network("400 Gb/s for each GPU", 0.8 * PER_MACHINE * 50e3),
    Network("100 Gb/s for each machine", 0.8 * 12.5e3),
)


def sum_us(size: float, gpus: int, network: Network) -> float:
    """Microseconds in which arrays of `size` bytes are summed over a number of GPUs.

    Within a machine, and between machines, each byte is sent about twice: once to be added, and once as a result. The
    two kinds of transfers overlap. Messages between machines go up and down a tree.
    """
    inner, machines = min(gpus, PER_MACHINE), math.ceil(gpus / PER_MACHINE)
    within = 2 * (inner - 1) / inner * size / _NVLINK
    between = 2 * (machines - 1) / machines * size / network.rate
    return _START_US + 2 * math.log2(machines) * _HOP_US + max(within, between)


def step_us(dims: Sequence[int], alone_us: float, gpus: int, network: Network) -> float:
    """The predicted time of a step of a multilayer perceptron on each of a number of GPUs, with the same rows for each.

    Args:
        dims: width of the input, then of each layer's output. Backward completes the gradients from the last layer to
            the first.
        alone_us: microseconds of the step on one GPU.
    """
    gradients = [_BYTES * (inputs + 1) * outputs for inputs, outputs in itertools.pairwise(dims)][::-1]
    *others, last = [sum(gradients[layer] for layer in bucket) for bucket in divided(gradients)]
    after_first = 1 - sum(others[:1]) / sum(gradients)
    sums = [sum_us(size, gpus, network) for size in (*others, last)]
    beside = min(sum(sums[:-1]), _BACKWARD * alone_us * after_first) + min(sums[-1], sum(others) / _UPDATED)
    return alone_us + sum(sums) - (1 - _BESIDE) * beside


def predictions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The predicted steps of all rows of the suite, by network, case and number of GPUs."""
    known = {row["case"]: (row["dims"], row["us"]["lt"]) for row in rows if "lt" in row.get("us", {})}
    predicted = {
        network.name: {
            case: {str(gpus): round(step_us(*each, gpus, network), 1) for gpus in GPUS} for case, each in known.items()
        }
        for network in NETWORKS
    }
    return {"predicted_us": predicted}
