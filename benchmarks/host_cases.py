"""What the host's time is measured of, and what it has to reach: pure data, readable without a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from benchmarks.blocks import presets
from benchmarks.cases import GPT2, AdamWStep, Target
from lt_runtime.problem import DType

_QUEUE: Final = 1000  # launches, about, that the driver queues before the host has to wait for the GPU


@dataclass(frozen=True)
class HostCase:
    """One row of the suite.

    Attributes:
        kind: "matmul", "linear_fwd", "linear", "adamw" or "train_step": which calls are compared.
        shape: M, N and K of a layer or a product; empty for the rest, whose sizes are `ADAMW` and `train_step_sizes`.
        launches: that one call of any contender puts on the stream, at most.
        most: calls in a turn, at most: fewer where the GPU needs long for each.
    """

    kind: str
    name: str
    launches: int
    shape: tuple[int, ...] = ()
    target: Target = field(default_factory=Target)
    most: int = 200

    @property
    def calls(self) -> int:
        """How many in a turn, so that the driver's queue is not filled."""
        return min(self.most, _QUEUE // self.launches)


@dataclass(frozen=True)
class StepSizes:
    """A model of the presets, and its batch."""

    rows: int
    dims: tuple[int, ...]


def train_step_sizes() -> StepSizes:
    """Those of the small model: what the host does is the same for a large one."""
    preset: dict[str, Any] = presets()["mlps"]["mnist"]
    return StepSizes(preset["rows"], tuple(preset["dims"]))


ADAMW: Final = AdamWStep("GPT-2 124M", GPT2, DType.FLOAT32)
_SMALL: Final = (64, 64, 64)
_MNIST: Final = (256, 512, 784)
_FORWARD: Final = Target(ratio={"torch_eager": 1.4, "nvmath": 3.5})
_AUTOGRAD: Final = Target(ratio={"torch_eager": 3.0})

HOST: Final = (
    HostCase("matmul", "matmul FP32 64×64×64, out=", 2, _SMALL),
    HostCase("linear_fwd", "linear_fwd GELU BF16 64×64×64, out=", 4, _SMALL, _FORWARD),
    HostCase("linear_fwd", "linear_fwd GELU BF16 256×512×784, out=", 4, _MNIST, _FORWARD),
    HostCase("linear", "linear_fwd + linear_bwd GELU BF16 64×64×64, eager", 12, _SMALL, _AUTOGRAD),
    HostCase("linear", "linear_fwd + linear_bwd GELU BF16 256×512×784, eager", 12, _MNIST, _AUTOGRAD),
    HostCase("adamw", ADAMW.name, 40, target=Target(ratio={"torch_eager": 20.0}), most=10),
    HostCase("train_step", "TrainStep call, mnist MLP BF16, batch 256", 50, most=20),
)
"""The suite of `benchmarks.host`."""
