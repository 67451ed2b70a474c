"""AdamW in float64, written out apart from the package's own reference, which has one function for all rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime.reference import learning_rate_factor
from lt_runtime.schedules import AnySchedule


@dataclass(frozen=True, slots=True)
class AdamWHyper:
    """Learning rate, betas, epsilon, weight decay λ, and the schedule, whose factor multiplies the learning rate."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    schedule: AnySchedule


class AdamWTensor(NamedTuple):
    """One tensor of an optimizer: its FP32 or BF16 value and its moments; `v_max` is None without AMSGrad."""

    value: NDArray[Any]
    m: NDArray[Any]
    v: NDArray[Any]
    v_max: Any = None


def adamw_update(
    old: AdamWTensor, gradient: NDArray[Any], hyper: Any, step: int, gradient_factor: float = 1.0
) -> AdamWTensor:
    """Update number `step`, counted from 1, of one tensor; each array is rounded once to FP32.

    AMSGrad (Reddi, Kale, Kumar, 2018) is PyTorch's form, which takes the largest v before the bias correction.
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
