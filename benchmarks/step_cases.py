"""Training steps, the rows of the steps' suite: pure data, readable without a GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any, Final

from benchmarks.blocks import TYPES, presets
from lt_runtime.problem import Activation, Compute, DType
from lt_runtime.tuning.stacks import Stack

LEARNING_RATE: Final = 1e-3
WEIGHT_DECAY: Final = 0.01

_TURN_US: Final = 10_000.0  # a turn takes at least about this long
_LEAST_REPLAYS: Final = 8
_MOST_REPLAYS: Final = 200
_FLOPS_PER_US: Final = {"bf16": 7e8, "tf32": 3.5e8}  # what an H200 reaches, about
_BYTES_PER_US: Final = 4.2e6
_LAUNCHES_US: Final = 40.0  # nor do some dozens of kernels take less
_OPTIMIZER_BYTES: Final = 28  # of a parameter: gradient and copy in BF16; master and moments, read and written


@dataclass(frozen=True)
class StepCase:
    """Forward, loss, backward and AdamW of an MLP.

    Attributes:
        preset: what the row is called, with the type.
        kind: one of `TYPES`.
        master: in BF16, whether our parameters have FP32 master copies and moments; if not, parameters and moments are
            BF16 alone, as PyTorch's are where it is fastest, but rounded stochastically.
        rows, dims, activation: of the MLP.
        loss: "cross_entropy" where the outputs are classes, or "mse".
        least: the multiple of our time that torch.compile at its greatest effort has to take.
    """

    preset: str
    kind: str
    rows: int
    dims: tuple[int, ...]
    activation: str
    loss: str
    least: float
    master: bool = True

    @property
    def name(self) -> str:
        """What the row is called."""
        return f"{self.preset} {self.kind.upper()}"

    @property
    def dtype(self) -> DType:
        """Of the batch, of the parameters that products read, and of their gradients."""
        return TYPES[self.kind][0]

    @property
    def compute(self) -> Compute:
        """How products are formed."""
        return TYPES[self.kind][1]

    @property
    def stack(self) -> Stack:
        """The layers, for the tuner."""
        return Stack(self.rows, self.dims, Activation(self.activation), self.dtype, self.compute)

    @property
    def parameters(self) -> int:
        """Weights and biases."""
        return sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(self.dims))

    @property
    def flops(self) -> int:
        """Those of the products; the first layer's inputs need no gradient."""
        products = 6 * sum(inputs * outputs for inputs, outputs in itertools.pairwise(self.dims))
        return self.rows * (products - 2 * self.dims[0] * self.dims[1])

    @property
    def replays(self) -> int:
        """Steps in one turn."""
        products, update = self.flops / _FLOPS_PER_US[self.kind], _OPTIMIZER_BYTES * self.parameters / _BYTES_PER_US
        wanted = math.ceil(_TURN_US / max(products + update, _LAUNCHES_US))
        return max(_LEAST_REPLAYS, min(wanted, _MOST_REPLAYS))

    @property
    def ways(self) -> tuple[str | None, ...]:
        """How PyTorch may hold the parameters of a BF16 step: FP32 under autocast, or BF16. Else there is one way."""
        return ("autocast", "bf16") if self.kind == "bf16" else (None,)

    def as_json(self) -> dict[str, Any]:
        """What the case is, for its row."""
        facts = {"rows": self.rows, "dims": list(self.dims), "type": self.kind, "activation": self.activation}
        return {**facts, "loss": self.loss, "parameters": self.parameters, "master": self.master}


def cases() -> list[StepCase]:
    """The suite."""
    return [
        _case("mnist", "tf32", "cross_entropy", 1.6),
        _case("mnist", "bf16", "cross_entropy", 1.6),
        _case("gpt2-mlp-x2", "bf16", "mse", 1.15, master=False),
        _case("dlrm-top", "bf16", "mse", 1.5, master=False),
        _case("llama-width", "bf16", "mse", 1.02, master=False),
    ]


def _case(preset: str, kind: str, loss: str, least: float, *, master: bool = True) -> StepCase:
    shape = presets()["mlps"][preset]
    return StepCase(preset, kind, shape["rows"], tuple(shape["dims"]), shape["activation"], loss, least, master)
