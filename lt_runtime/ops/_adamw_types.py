"""What passes between `lt.AdamW` and the two ways of running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lt_runtime.grad_scaler import GradScaler
from lt_runtime.problem import DType
from lt_runtime.reference import AdamWHyper


@dataclass(slots=True, eq=False)
class Parameter:
    """A tensor that is trained, and its gradient.

    An optimizer keeps these very arrays: change them in place, do not replace them.

    Attributes:
        data: any shape, row-major without gaps; float32, float16 or bfloat16.
        grad: same shape; any of the three types.
        master: FP32 values that `data` is the rounding of. The optimizer makes one from `data` where that is not
            FP32 and none is given, except for BF16 with `stochastic_rounding`.
        name: for errors and reports.
        lr_scale: what the learning rate is multiplied by for this parameter; its weight decay scales with it.
        weight_decay: λ for this parameter; None leaves it to the optimizer.
    """

    data: Any
    grad: Any
    master: Any = None
    name: str = "parameter"
    lr_scale: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Everything about an optimizer but its parameters.

    Attributes:
        hyper: of every parameter that has none of its own.
        max_norm: that the gradients are clipped to; None does not clip.
        skip_nonfinite: whether an update with a NaN or infinite gradient is left out; always with a scaler.
        moments: FP32 or BF16.
    """

    hyper: AdamWHyper
    amsgrad: bool
    max_norm: float | None
    skip_nonfinite: bool
    scaler: GradScaler | None
    moments: DType
    stochastic_rounding: bool
    seed: int

    @property
    def judges_gradients(self) -> bool:
        """Whether the gradients' norm and finiteness have to be known before an update."""
        return self.max_norm is not None or self.skip_nonfinite

    @property
    def moments_each(self) -> int:
        """Moments of a parameter: m and v, and with AMSGrad the largest v."""
        return 3 if self.amsgrad else 2

    def weight_decay_of(self, parameter: Parameter) -> float:
        """λ of one parameter."""
        return self.hyper.weight_decay if parameter.weight_decay is None else parameter.weight_decay

    def has_master(self, parameter: Parameter, dtype: DType) -> bool:
        """Whether a parameter of a type has an FP32 master copy, given or to be made."""
        if dtype is DType.BFLOAT16 and self.stochastic_rounding:
            return parameter.master is not None
        return dtype is not DType.FLOAT32


class State(Protocol):
    """What an optimizer keeps between steps, on the host or on a GPU; its arrays are attributes of `lt.AdamW`."""

    steps: Any
    skipped_steps: Any
    grad_norm: Any
    moments: Sequence[tuple[Any, ...]]

    def step(self, stream: Any) -> None:
        """One update of all parameters."""
