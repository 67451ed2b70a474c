"""Predicts the time of a training step on many GPUs from its time on one, by the bytes and rates of its sums.

Backward computes the layers' gradients from the last layer to the first. A bucket of gradients is summed over all GPUs
once it is complete and the sums before it are done. Beside the last sum, the parameters whose gradients are in
other buckets are updated. A sum takes multiprocessors from the products that run beside it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from lt_runtime.distributed.buckets import divided
from lt_runtime.distributed.nccl import MOST_BLOCKS

GPUS: Final = (2, 8, 16, 64, 256, 1024)
PER_MACHINE: Final = 8
_MULTIPROCESSORS: Final = 132
_START_US: Final = 15.0
"""Microseconds of a sum of a few bytes over the GPUs of one machine."""
_HOP_US: Final = 6.0
"""Microseconds that a message takes from one machine to another."""
_NVLINK: Final = 330e3
"""Bytes that a GPU sends in a microsecond while large arrays are summed in a machine, measured with NCCL on H100s."""
_BYTES: Final = 2
"""Bytes of a parameter, of a gradient or of a moment in BF16."""
_MOVED: Final = 7 * _BYTES
"""Bytes that an update moves for each parameter: it reads four arrays, and writes three."""
_MEMORY: Final = 4.2e6
"""Bytes that a GPU's memory moves in a microsecond."""


@dataclass(frozen=True)
class Network:
    """What connects the machines.

    Attributes:
        rate: bytes that a machine sends in a microsecond, eight tenths of the nominal rate.
    """

    name: str
    rate: float


NETWORKS: Final = (
    Network("400 Gb/s for each GPU", 0.8 * PER_MACHINE * 50e3),
    Network("100 Gb/s for each machine", 0.8 * 12.5e3),
)


def sum_us(size: float, gpus: int, network: Network, nvlink: float = _NVLINK) -> float:
    """Microseconds in which arrays of `size` bytes are summed over a number of GPUs.

    Within a machine, and between machines, each byte is sent about twice: once to be added, and once as a result. The
    two kinds of transfers overlap. Messages between machines go up and down a tree.
    """
    inner, machines = min(gpus, PER_MACHINE), math.ceil(gpus / PER_MACHINE)
    within = 2 * (inner - 1) / inner * size / nvlink
    between = 2 * (machines - 1) / machines * size / network.rate
    return _START_US + 2 * math.log2(machines) * _HOP_US + max(within, between)


@dataclass(frozen=True)
class Net:
    """A network of linear layers, and the microseconds of its training step on one GPU.

    Attributes:
        gradients: bytes of the gradients of each layer, from the first to the last.
        shares: for each layer, the share of its backward in the time of all products.
        forward: the share of all forwards.
    """

    step_us: float
    gradients: Sequence[int]
    shares: Sequence[float]
    forward: float

    @classmethod
    def of(cls, dims: Sequence[int], step_us: float) -> Net:
        """The network of a multilayer perceptron; nothing reads the gradient of its first layer's inputs."""
        pairs = [*itertools.pairwise(dims)]
        products = [inputs * outputs for inputs, outputs in pairs]
        backward = [each * (1 if i == 0 else 2) for i, each in enumerate(products)]
        whole = sum(products) + sum(backward)
        sizes = [_BYTES * (inputs + 1) * outputs for inputs, outputs in pairs]
        return cls(step_us, sizes, [each / whole for each in backward], sum(products) / whole)

    def on(self, gpus: int, network: Network, nvlink: float = _NVLINK) -> float:
        """The predicted microseconds of a step on each of a number of GPUs, with the same rows for each."""
        update = sum(self.gradients) / _BYTES * _MOVED / _MEMORY
        products = self.step_us - update
        now, free, before, last = products * self.forward, 0.0, 0.0, len(self.gradients) - 1
        for bucket in divided([*reversed(self.gradients)]):
            for layer in bucket:  # `layer` is the index counted backwards from the last layer
                share = products * self.shares[last - layer]
                now += share + min(max(0.0, free - now), share) * MOST_BLOCKS / _MULTIPROCESSORS
            size = sum(self.gradients[last - layer] for layer in bucket)
            before, free = max(now, free), max(now, free) + sum_us(size, gpus, network, nvlink)
        late = update * size / sum(self.gradients)
        return max(before + update - late, free) + late


def predictions(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The predicted steps of all rows of the suite, by network, case and number of GPUs."""
    rates = [row["nvlink_bytes_per_us"] for row in rows if "nvlink_bytes_per_us" in row]
    nvlink = max(rates, default=_NVLINK)
    nets = {row["case"]: Net.of(row["dims"], row["us"]["lt"]) for row in rows if "lt" in row.get("us", {})}
    predicted = {
        network.name: {
            case: {str(gpus): round(net.on(gpus, network, nvlink), 1) for gpus in GPUS} for case, net in nets.items()
        }
        for network in NETWORKS
    }
    return {"nvlink_bytes_per_us": round(nvlink), "predicted_us": predicted}
