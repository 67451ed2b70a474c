"""AdamW and learning-rate schedules.

Loshchilov, Hutter: "Decoupled weight decay regularization", ICLR 2019, in PyTorch's form: the decay is lr·λ.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime.schedules import Schedule


@dataclass(frozen=True, slots=True)
class AdamWHyper:
    """Learning rate, betas, epsilon, weight decay λ, and the schedule that the learning rate is multiplied by."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    schedule: Schedule


def learning_rate_factor(schedule: Schedule, step: int) -> float:
    """What the learning rate is multiplied by in update number `step`, counted from 1.

    Linear warm-up to 1 over `warmup_steps` updates; then constant, or down to `final_factor` at `total_steps`
    along a line or half a cosine, and constant from there.
    """
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.decay == "constant":
        return 1.0
    span = max(schedule.total_steps - schedule.warmup_steps, 1)
    progress = min((step - schedule.warmup_steps) / span, 1.0)
    remaining = 1.0 - progress if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.final_factor + (1.0 - schedule.final_factor) * remaining


@dataclass(frozen=True, slots=True)
class AdamWTensor:
    """One tensor in an optimizer, of one shape throughout.

    Attributes:
        value: FP32, the master copy where the model's are in lower precision; BF16 where there is none.
        m, v: first and second moments, FP32 or BF16.
        v_max: largest v so far; None without AMSGrad.
    """

    value: NDArray[Any]
    m: NDArray[Any]
    v: NDArray[Any]
    v_max: NDArray[Any] | None = None

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """Those that there are."""
        arrays = (self.value, self.m, self.v)
        return arrays if self.v_max is None else (*arrays, self.v_max)


def adamw_update(
    old: AdamWTensor, gradient: NDArray[Any], hyper: AdamWHyper, step: int, gradient_factor: float = 1.0
) -> AdamWTensor:
    """The `step`-th update (from 1) of one tensor.

    AMSGrad (Reddi, Kale, Kumar, 2018) as PyTorch has it: the largest v is taken before the bias correction.

    Args:
        gradient_factor: what the gradient is multiplied by first.

    Returns:
        The new tensor, each array rounded once to FP32.
    """
    value, m, v = (array.astype(np.float64) for array in (old.value, old.m, old.v))
    g = gradient.astype(np.float64) * gradient_factor
    lr = hyper.lr * learning_rate_factor(hyper.schedule, step)
    m = hyper.beta1 * m + (1.0 - hyper.beta1) * g
    v = hyper.beta2 * v + (1.0 - hyper.beta2) * g * g
    largest = v if old.v_max is None else np.maximum(old.v_max.astype(np.float64), v)
    m_hat = m / (1.0 - hyper.beta1**step)
    v_hat = largest / (1.0 - hyper.beta2**step)
    value = value * (1.0 - lr * hyper.weight_decay) - lr * m_hat / (np.sqrt(v_hat) + hyper.eps)
    new = [array.astype(np.float32) for array in (value, m, v, largest)]
    return AdamWTensor(*(new[:3] if old.v_max is None else new))
