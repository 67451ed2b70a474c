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

Float32 = NDArray[np.float32]


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


def adamw_update(
    parameter: NDArray[Any], gradient: NDArray[Any], m: Float32, v: Float32, hyper: AdamWHyper, step: int
) -> tuple[Float32, Float32, Float32]:
    """The `step`-th update (from 1) of one tensor.

    Args:
        parameter: FP32 values, the master copy where the model's are in lower precision.
        m, v: first and second moments.

    Returns:
        New parameter, m and v, each rounded once to FP32.
    """
    p, g = parameter.astype(np.float64), gradient.astype(np.float64)
    lr = hyper.lr * learning_rate_factor(hyper.schedule, step)
    m64 = hyper.beta1 * m.astype(np.float64) + (1.0 - hyper.beta1) * g
    v64 = hyper.beta2 * v.astype(np.float64) + (1.0 - hyper.beta2) * g * g
    m_hat = m64 / (1.0 - hyper.beta1**step)
    v_hat = v64 / (1.0 - hyper.beta2**step)
    p = p * (1.0 - lr * hyper.weight_decay) - lr * m_hat / (np.sqrt(v_hat) + hyper.eps)
    return p.astype(np.float32), m64.astype(np.float32), v64.astype(np.float32)
