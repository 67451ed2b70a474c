"""`AdamW`: an `Optimizer` of one group by the rule AdamW."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from lt_runtime.arguments import flag
from lt_runtime.grad_scaler import GradScaler
from lt_runtime.ops.optimizers.optimizer import MomentsType, Optimizer, checked_parameters
from lt_runtime.ops.optimizers.parameters import Parameter
from lt_runtime.rules import AdamW as AdamWRule
from lt_runtime.rules import AMSGrad as AMSGradRule
from lt_runtime.schedules import AnySchedule


def _setting(name: str, doc: str) -> Any:
    """A property of `AdamW` for a setting of its single rule."""

    def change(optimizer: AdamW, value: float) -> None:
        optimizer._change(rules=(dataclasses.replace(optimizer.rules[0], **dict[str, Any]({name: value})),))

    return property(lambda optimizer: getattr(optimizer.rules[0], name), change, doc=doc)


class AdamW(Optimizer):
    """`Optimizer` of one group by AdamW (Loshchilov and Hutter, 2019) as PyTorch defines it, in FP32 arithmetic.

    θ ← θ·(1 - lr·λ) - lr · m̂ / (√v̂ + ε), where lr is multiplied by the schedule's factor. On a GPU one kernel
    updates every parameter. It computes the bias corrections and the learning rate from the step's number on the
    device, and advances that number, so that a captured graph can be replayed. With `max_norm`, `skip_nonfinite` or
    `scaler` a second kernel reads the gradients before it. The host reads nothing back.

    A NaN or infinite gradient makes its own element NaN, and with `max_norm` every element. With `skip_nonfinite` or
    `scaler` the whole update is skipped instead: parameters, moments and `steps` stay.

    `lr`, `weight_decay` and `schedule` may be set between steps, as may `lr_scale` and `weight_decay` of a parameter.
    The next step uses them, also the next step of an `lt.TrainStep`, whose graph reads them from the device. Other
    attributes cannot be set. For a graph that you capture from `step` yourself, see `apply_settings`.

    Parameters' data must be the rounding of their master copies, as they are after `Parameter.assign` and after every
    update. The optimizer checks this when it is made and at each step on the host; on a GPU it checks before the first
    step and before the first graph of a `TrainStep`. Later steps on a GPU do not check, because reading `data` would
    take an eighth more memory traffic: later writes into `data` alone are lost silently.

    Args:
        parameters: one or more, without repetition; all NumPy arrays, or all on one GPU.
        lr: learning rate.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: λ.
        schedule: factor of the learning rate by step; None for a constant factor of 1.
        amsgrad: divide by the largest v̂ so far instead of the present one.
        max_norm: clip the gradients to this norm over all parameters together, as PyTorch's `clip_grad_norm_`. With
            infinity the norm is computed and nothing is clipped; with None it is not computed.
        skip_nonfinite: skip an update in which any gradient is NaN or infinite.
        scaler: divides the gradients by its scale, skips as `skip_nonfinite` does, and moves the scale. It serves one
            optimizer.
        moments: their type, FP32 or BF16, as a name or as a type of NumPy, `ml_dtypes` or PyTorch. BF16 moments are
            rounded stochastically, because rounding to nearest would lose small changes.
        stochastic_rounding: update BF16 parameters that have no master copy in place, rounded stochastically, rather
            than making master copies of them.
        seed: of the random numbers that stochastic rounding draws; 64 bits.

    Attributes:
        lr, weight_decay, schedule: the present settings.
        steps: array (1,) of uint32 on the parameters' device, the number of updates done; `steps.item()` is the int.
        skipped_steps: array (1,) of uint32 on the parameters' device, the number of updates skipped.
        grad_norm: FP32 array of shape (), the norm of the unscaled gradients in the last step, before clipping. None
            without `max_norm`, `skip_nonfinite` and `scaler`.
        moments: for each parameter m, v and, with `amsgrad`, the largest v; one allocation holds them all.
        options: all options but the parameters, with the present settings.
        parameters, scaler: as given.
        rates: the learning rate in force, in a tuple of one; see `Optimizer`.

    Raises:
        ArgumentError: no parameters, or an option out of its range.
        OperandError: a parameter whose arrays do not fit together, with gaps between its elements, or whose data are
            not the rounding of their master copy; or a parameter that was given twice.
    """

    _changeable: ClassVar[tuple[str, ...]] = ("lr", "weight_decay", "schedule")
    lr: float = _setting("lr", "The learning rate; may be set.")
    weight_decay: float = _setting("weight_decay", "λ of the parameters that have none of their own; may be set.")

    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        schedule: AnySchedule | None = None,
        *,
        amsgrad: bool = False,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        scaler: GradScaler | None = None,
        moments: MomentsType = "float32",
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        checked = checked_parameters("parameters", parameters)
        kind = AMSGradRule if flag("amsgrad", amsgrad) else AdamWRule
        super().__init__(
            [(checked, kind(lr, betas, eps, weight_decay))],
            schedule,
            max_norm=max_norm,
            skip_nonfinite=skip_nonfinite,
            scaler=scaler,
            moments=moments,
            stochastic_rounding=stochastic_rounding,
            seed=seed,
        )

    def __repr__(self) -> str:
        settings = str(self.rules[0]).partition("(")[2]
        return f"AdamW({len(self.parameters)} parameters, {settings}"
