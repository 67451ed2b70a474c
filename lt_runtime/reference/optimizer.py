"""Update rules, learning-rate schedules, and the steps before an update: gradient norm, clipping, loss scale.

`lt_runtime/rules.py` has the rules' formulas and their sources.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.grad_scaler import LARGEST_SCALE, SMALLEST_SCALE, GradScaler
from lt_runtime.reference.products import Values
from lt_runtime.reference.rounding import RoundedTensor, round_stochastically, rounding_lanes
from lt_runtime.rules import AdamW, Lion, Rule
from lt_runtime.schedules import AnySchedule, Table

_BLOCK: Final = 32768  # elements that are updated at a time, so that intermediate results stay in the CPU's cache
_PARTS: Final = (RoundedTensor.PARAMETER, RoundedTensor.M, RoundedTensor.V, RoundedTensor.V)


def learning_rate_factor(schedule: AnySchedule, step: int) -> float:
    """The factor of the learning rate in update number `step`, counted from 1.

    If the schedule is a table, the factor is its entry `step - 1`, and after the table's end its last entry. Otherwise
    the factor rises linearly to 1 over `warmup_steps` updates. Then it stays 1, or falls to `final_factor` at
    `total_steps` along a line or half a cosine, and keeps that value.
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


def rule_update(
    rule: Rule, schedule: AnySchedule, old: Sequence[Values], gradient: Values, step: int, gradient_factor: float = 1.0
) -> tuple[NDArray[np.float32], ...]:
    """Computes update number `step`, counted from 1, of one tensor by any update rule.

    Args:
        rule: the update rule, with the tensor's own learning rate and weight decay.
        old: the value, then the moments that the rule names, all of one shape. The value is FP32, which for a 16-bit
            parameter is its master copy, or BF16 if there is no master copy; moments are FP32 or BF16.
        gradient_factor: factor of the gradient, applied before the update.

    Returns:
        The new value and moments, each rounded once to FP32.
    """
    value, *moments = (array.astype(np.float64) for array in old)
    g = gradient.astype(np.float64) * gradient_factor
    lr, divisor = rule.lr * learning_rate_factor(schedule, step), np.ones(())
    if isinstance(rule, Lion):
        (beta1, beta2), (m,) = rule.betas, moments
        move = np.sign(beta1 * m + (1.0 - beta1) * g)
        moments = [beta2 * m + (1.0 - beta2) * g]
    elif isinstance(rule, AdamW):
        (beta1, beta2), (m, v, *largest) = rule.betas, moments
        m, v = beta1 * m + (1.0 - beta1) * g, beta2 * v + (1.0 - beta2) * g * g
        moments = [m, v, *(np.maximum(each, v) for each in largest)]  # AMSGrad's v_max is taken before the correction
        move, divisor = m / (1.0 - beta1**step), np.sqrt(moments[-1] / (1.0 - beta2**step)) + rule.eps
    else:
        moments = [rule.momentum * m + g for m in moments]
        move = moments[0] if moments else g
        move = g + rule.momentum * move if rule.nesterov else move
    value = value * (1.0 - lr * rule.weight_decay) - lr * move / divisor
    return tuple(array.astype(np.float32) for array in (value, *moments))


def update_in_place(
    rule: Rule,
    schedule: AnySchedule,
    arrays: Sequence[NDArray[Any]],
    gradient: NDArray[Any],
    step: int,
    gradient_factor: float,
    *,
    seed: int,
    tensor: int,
) -> None:
    """Writes the result of `rule_update` into the arrays, rounded to nearest in FP32, stochastically in BF16.

    Args:
        arrays: the value, then the moments, all flat.
        seed, tensor: of the random bits, see `rounding_lanes`.
    """
    for first in range(0, gradient.size, _BLOCK):
        block = slice(first, first + _BLOCK)
        old = [array[block] for array in arrays]
        new = rule_update(rule, schedule, old, gradient[block], step, gradient_factor)
        # `zip` is not strict: rules have one to three moments.
        for array, exact, part in zip(old, new, _PARTS, strict=False):
            if array.dtype == np.float32:
                array[...] = exact
            else:
                lanes = rounding_lanes(exact.size, seed, tensor, step, part, first)
                array[...] = round_stochastically(exact, lanes)


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
