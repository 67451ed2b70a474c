"""Two-layer blocks, the unit of the layers' suite: pure data, readable without a GPU."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

from lt_runtime.problem import Activation, Compute, DType
from lt_runtime.tuning.stacks import Stack

TYPES: Final[Mapping[str, tuple[DType, Compute]]] = {
    "bf16": (DType.BFLOAT16, Compute.FLOAT32),
    "tf32": (DType.FLOAT32, Compute.TF32),
}
"""Types of operands and how products are formed, by the names of the command line."""

ACTIVATIONS: Final = ("gelu", "relu")
REPRESENTATIVE: Final = (
    (256, 512, 784),
    (1024, 1024, 1024),
    (1600, 1024, 256),
    (2048, 1024, 479),
    (4096, 4096, 1024),
    (8192, 3072, 768),
)
"""The layers that are compared with torch.compile as well, which takes its time."""

_REPLAY_US: Final = 400.0  # one replay takes at least about this long: an event's resolution is half a microsecond
_MOST_REPETITIONS: Final = 48
_FLOPS_PER_US: Final = {"bf16": 7e8, "tf32": 3.5e8}  # what an H200 reaches, about
_BYTES_PER_US: Final = 4.2e6
_LAUNCHES_US: Final = 18.0  # nor does a dozen of kernels take less


@dataclass(frozen=True)
class Block:
    """Layers K→N→K over M rows with biases, the activation between them; forward and full backward.

    Attributes:
        group: where the layer is from.
        m, n, k: rows, outputs and inputs of the first layer.
        kind: one of `TYPES`.
        activation: one of `ACTIVATIONS`.
    """

    group: str
    m: int
    n: int
    k: int
    kind: str
    activation: str

    @property
    def name(self) -> str:
        """What the row is called."""
        activation = {"gelu": "GELU", "relu": "ReLU"}[self.activation]
        return f"{self.group} {self.m}×{self.n}×{self.k} {self.kind.upper()} {activation}"

    @property
    def layer(self) -> tuple[int, int, int]:
        """M, N and K."""
        return self.m, self.n, self.k

    @property
    def dtype(self) -> DType:
        """Of every array."""
        return TYPES[self.kind][0]

    @property
    def stack(self) -> Stack:
        """The layers, chained."""
        dtype, compute = TYPES[self.kind]
        activation = Activation(self.activation)
        return Stack(self.m, (self.k, self.n, self.k), activation, dtype, compute, input_gradient=True)

    @property
    def bytes(self) -> int:
        """All matrices that a block reads or writes: x, y and their gradients, what is between the layers, weights."""
        inside = 3 * self.m * self.n  # y, what is kept beside, and the gradient
        return self.dtype.itemsize * (4 * self.m * self.k + inside + 4 * self.n * self.k)

    @property
    def flops(self) -> int:
        """Those of its six products."""
        return 12 * self.m * self.n * self.k

    def repetitions(self, sets: int) -> int:
        """How often a graph repeats the block, every buffer set as often: few, so that the suite ends in minutes."""
        expected = max(self.flops / _FLOPS_PER_US[self.kind], self.bytes / _BYTES_PER_US, _LAUNCHES_US)
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
    """Every layer of the presets in every type with every activation, the representative ones first of a kind."""
    layers = [(group, *layer) for group, members in presets()["layers"].items() for layer in members]
    return [
        Block(group, m, n, k, kind, activation)
        for group, m, n, k in layers
        for kind in TYPES
        for activation in ACTIVATIONS
    ]
