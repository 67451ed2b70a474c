"""Update rules, learning-rate schedules, and the steps before an update: gradient norm, clipping, loss scale.

`lt_runtime/rules.py` has the rules' formulas and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime.grad_scaler import LARGEST_SCALE, SMALLEST_SCALE, GradScaler
from lt_runtime.rules import SGD, Lion, Rule
from lt_runtime.schedules import AnySchedule, Table


@dataclass(frozen=True, slots=True)
class AdamWHyper:
    """Learning rate, betas, epsilon, weight decay λ, and the schedule, whose factor multiplies the learning rate."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    schedule: AnySchedule


def learning_rate_factor(schedule: AnySchedule, step: int) -> float:
    """The factor of the learning rate in update number `step`, counted from 1.

    A table has it at index `step - 1`, and after its end its last value. Otherwise the factor rises linearly to 1 over
    `warmup_steps` updates. Then it stays 1, or falls to `final_factor` at `total_steps` along a line or half a cosine,
    and keeps that value.
    """
    if isinstance(schedule, Table):
        return schedule.values[min(step, len(schedule.values)) - 1]
    if step <= schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.decay == "constant":
        return 1.0
    span = max(schedule.total_steps - schedule.warmup_steps, 1)
    progress = min((step - schedule.warmup_steps) / span, 1.0)
    remaining = 1.0 - progress if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.final_factor + (1.0 - schedule.final_factor) * remaining


class AdamWTensor(NamedTuple):
    """One tensor of an optimizer: its value and its moments, all of one shape.

    Attributes:
        value: the FP32 value, which for a 16-bit parameter is its master copy; or BF16 if there is no master copy.
        m, v: the first and second moments, FP32 or BF16.
        v_max: the largest v so far, an array like v; None without AMSGrad.
    """

    value: NDArray[Any]
    m: NDArray[Any]
    v: NDArray[Any]
    v_max: Any = None


def adamw_update(
    old: AdamWTensor, gradient: NDArray[Any], hyper: AdamWHyper, step: int, gradient_factor: float = 1.0
) -> AdamWTensor:
    """Update number `step`, counted from 1, of one tensor.

    AMSGrad (Reddi, Kale, Kumar, 2018) is PyTorch's form, which takes the largest v before the bias correction.

    Args:
        gradient_factor: factor of the gradient, applied before the update.

    Returns:
        The updated parameter and its moments, each rounded once to FP32.
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


def rule_update(
    rule: Rule,
    schedule: AnySchedule,
    old: Sequence[NDArray[Any]],
    gradient: NDArray[Any],
    step: int,
    gradient_factor: float = 1.0,
) -> tuple[NDArray[np.float32], ...]:
    """Update number `step`, counted from 1, of one tensor by any rule.

    Args:
        rule: with the tensor's own learning rate and weight decay.
        old: the value, then the moments that the rule names; as in `AdamWTensor`.
        gradient_factor: factor of the gradient, applied before the update.

    Returns:
        The new value and moments, each rounded once to FP32.
    """
    if not isinstance(rule, (SGD, Lion)):
        hyper = AdamWHyper(rule.lr, *rule.betas, rule.eps, rule.weight_decay, schedule)
        new = adamw_update(AdamWTensor(*old), gradient, hyper, step, gradient_factor)
        return new[: len(old)]
    value, *moments = (array.astype(np.float64) for array in old)
    g = gradient.astype(np.float64) * gradient_factor
    lr = rule.lr * learning_rate_factor(schedule, step)
    if isinstance(rule, Lion):
        (beta1, beta2), (m,) = rule.betas, moments
        move = np.sign(beta1 * m + (1.0 - beta1) * g)
        moments = [beta2 * m + (1.0 - beta2) * g]
    else:
        moments = [rule.momentum * m + g for m in moments]
        move = moments[0] if moments else g
        move = g + rule.momentum * move if rule.nesterov else move
    value = value * (1.0 - lr * rule.weight_decay) - lr * move
    return tuple(array.astype(np.float32) for array in (value, *moments))


def gradient_norm(gradients: Sequence[NDArray[Any]], scale: float = 1.0) -> tuple[float, bool]:
    """The norm of all gradients together, each divided by `scale`, and whether every element is finite."""
    exact = [gradient.astype(np.float64).reshape(-1) for gradient in gradients]
    finite = all(bool(np.isfinite(gradient).all()) for gradient in exact)
    squares = sum(float(np.square(gradient / scale).sum()) for gradient in exact)
    return math.sqrt(squares), finite


def clip_factor(norm: float, max_norm: float) -> float:
    """The factor that clips gradients of norm `norm` to `max_norm`, as in PyTorch's `clip_grad_norm_`."""
    # Python's min returns its first argument if this is NaN: the factor is NaN if the norm is NaN
    return min(max_norm / (norm + 1e-6), 1.0)


def next_scale(scaler: GradScaler, scale: float, growth_tracker: int, finite: bool) -> tuple[float, int]:
    """Scale and growth tracker after a step, updated as by PyTorch's GradScaler.

    Args:
        finite: whether all elements of all gradients were finite.
    """
    if not finite:
        return max(scale * scaler.backoff_factor, SMALLEST_SCALE), 0
    if growth_tracker + 1 < scaler.growth_interval:
        return scale, growth_tracker + 1
    grown = scale * scaler.growth_factor
    return (grown if grown <= LARGEST_SCALE else scale), 0
