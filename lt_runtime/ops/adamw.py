"""AdamW over all parameters of a model in one launch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal, TypeAlias

import numpy as np

from lt_runtime import ranges
from lt_runtime.arguments import Fixed, check_instance, flag, not_negative, number, shown
from lt_runtime.arrays.operand import on_host
from lt_runtime.errors import ArgumentError, KindError
from lt_runtime.grad_scaler import GradScaler
from lt_runtime.kernels.adamw import Options
from lt_runtime.ops._adamw_parameters import HeldArrays, Parameter, changes
from lt_runtime.ops._adamw_states import GpuState, HostState
from lt_runtime.problem import DType, Philox, TorchDType, type_name
from lt_runtime.reference import AdamWHyper
from lt_runtime.schedules import Schedule

__all__ = ["AdamW", "Parameter"]

MomentsType: TypeAlias = Literal["float32", "bfloat16"] | DType | np.dtype[Any] | type[Any] | TorchDType


class AdamW(Fixed):
    """AdamW (Loshchilov and Hutter, 2019) as PyTorch defines it, with arithmetic in FP32.

    θ ← θ·(1 - lr·λ) - lr · m̂ / (√v̂ + ε), where lr is multiplied by the schedule's factor. On a GPU one kernel
    updates every parameter. It computes the bias corrections and the learning rate from the step's number on the
    device, and advances that number, so that a captured graph can be replayed. With `max_norm`, `skip_nonfinite` or
    `scaler` a second kernel reads the gradients before it. The host reads nothing back.

    A NaN or infinite gradient makes its own element NaN, and with `max_norm` every element. With `skip_nonfinite` or
    `scaler` the whole update is skipped instead: parameters, moments and `steps` stay.

    `lr`, `weight_decay` and `schedule` may be set between steps, as may `lr_scale` and `weight_decay` of a parameter.
    The next step uses them, also that of an `lt.TrainStep`, whose graph reads them from the device. Other attributes
    cannot be set. For a graph that you capture from `step` yourself, see `apply_settings`.

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

    Raises:
        ArgumentError: no parameters, or an option out of its range.
        OperandError: a parameter whose arrays do not fit together, with gaps between its elements, or whose data are
            not the rounding of their master copy; or a parameter that was given twice.
    """

    _changeable: ClassVar = ("lr", "weight_decay", "schedule")

    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        schedule: Schedule | None = None,
        *,
        amsgrad: bool = False,
        max_norm: float | None = None,
        skip_nonfinite: bool = False,
        scaler: GradScaler | None = None,
        moments: MomentsType = "float32",
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        self.parameters: Final = _parameters(parameters)
        self.scaler: Final = scaler
        check_instance("scaler", scaler, (GradScaler, type(None)), "None or an lt.GradScaler")
        if scaler is not None and scaler.is_bound:
            raise ArgumentError("scaler already serves an optimizer; make one for each")
        max_norm = None if max_norm is None else number("max_norm", max_norm)
        if max_norm is not None and not max_norm > 0:
            raise ArgumentError(f"max_norm is {max_norm}; it must be positive, or None")
        options = Options(
            _hyper(lr, betas, eps, weight_decay, schedule),
            flag("amsgrad", amsgrad),
            max_norm,
            flag("skip_nonfinite", skip_nonfinite) or scaler is not None,
            scaler,
            _moments_type(moments),
            flag("stochastic_rounding", stochastic_rounding),
            Philox(seed).seed,  # refuses anything but a 64-bit seed
        )
        arrays = {
            f"{each.name}.{part} (parameter {i})": getattr(each, part)
            for i, each in enumerate(self.parameters)
            for part in ("data", "grad", "master")
            if part != "master" or each.master is not None
        }
        kind = HostState if on_host(arrays) else GpuState
        self._state: HostState | GpuState = kind(self.parameters, options)
        self._held = HeldArrays(self.parameters, "the optimizer")
        self.steps, self.skipped_steps = self._state.steps, self._state.skipped_steps
        self.grad_norm: Final = self._state.grad_norm
        self.moments: Final = self._state.moments
        self._is_made = True

    @property
    def options(self) -> Options:
        """All options but the parameters, with the present settings."""
        return self._state.options

    @property
    def lr(self) -> float:
        """The learning rate; may be set."""
        return self.options.hyper.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._change(lr=not_negative("lr", value))

    @property
    def weight_decay(self) -> float:
        """λ of the parameters that have none of their own; may be set."""
        return self.options.hyper.weight_decay

    @weight_decay.setter
    def weight_decay(self, value: float) -> None:
        self._change(weight_decay=not_negative("weight_decay", value))

    @property
    def schedule(self) -> Schedule:
        """The factor of the learning rate by step; may be set; None is a constant factor of 1."""
        return self.options.hyper.schedule

    @schedule.setter
    def schedule(self, value: Schedule | None) -> None:
        self._change(schedule=_schedule(value))

    def __repr__(self) -> str:
        hyper, count = self.options.hyper, len(self.parameters)
        rates = f"lr={hyper.lr}, betas=({hyper.beta1}, {hyper.beta2}), eps={hyper.eps}, "
        return f"AdamW({count} parameters, {rates}weight_decay={hyper.weight_decay})"

    def step(self, *, stream: Any = None) -> None:
        """Updates every parameter from its gradient.

        Args:
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. The first
                operand is the first parameter.

        Raises:
            OperandError: an array of a parameter has been replaced; or data are not the rounding of their master copy,
                which a GPU checks only before the first step. Nothing has been updated.
            CaptureError: the stream is being captured, and settings have been changed since the last step.
            GpuError: the driver or the compiler failed.
        """
        ranges.tell(self)
        self._held.check()
        self._state.step(stream)

    def apply_settings(self, *, stream: Any = None) -> None:
        """Writes changed settings to the device, in the order of a stream.

        `step` and `lt.TrainStep` do so by themselves. If you have captured a graph from `step`, call this before the
        graph's next launch. Do not capture it with the step: each launch would then restore the captured settings.

        Args:
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. The first
                operand is the first parameter.

        Raises:
            CaptureError: the stream is being captured, and settings have been changed.
            GpuError: the driver failed.
        """
        self._state.apply_settings(stream)

    def check_arrays(self) -> None:
        """Raises `OperandError` if an array of a parameter has been replaced since the optimizer was made."""
        self._held.check()

    def _change(self, **settings: Any) -> None:
        options = self.options
        self._state.options = dataclasses.replace(options, hyper=dataclasses.replace(options.hyper, **settings))
        changes.latest = object()


def _parameters(given: Any) -> tuple[Parameter, ...]:
    """Checks that there is at least one parameter, and returns all; their arrays are checked later."""
    accepted = "a sequence of lt.Parameter, such as model.parameters()"
    try:
        parameters = tuple(given)
    except TypeError:
        raise KindError(f"parameters is {shown(given)}; it must be {accepted}") from None
    if not parameters:
        raise ArgumentError(f"parameters is empty ({shown(given)}); it must be {accepted}")
    for i, parameter in enumerate(parameters):
        check_instance(f"parameters[{i}]", parameter, Parameter, "an lt.Parameter")
    return parameters


def _hyper(lr: float, betas: Any, eps: float, weight_decay: float, schedule: Schedule | None) -> AdamWHyper:
    try:
        first, second = betas
    except (TypeError, ValueError):
        raise KindError(f"betas is {shown(betas)}; it must be two numbers in [0, 1)") from None
    rates = number("betas[0]", first), number("betas[1]", second)
    if not all(0.0 <= rate < 1.0 for rate in rates):
        raise ArgumentError(f"betas is {rates}; accepted are two numbers in [0, 1)")
    rest = not_negative("eps", eps), not_negative("weight_decay", weight_decay)
    return AdamWHyper(not_negative("lr", lr), *rates, *rest, _schedule(schedule))


def _schedule(schedule: Schedule | None) -> Schedule:
    if schedule is None:
        return Schedule()
    check_instance("schedule", schedule, Schedule, "None or an lt.Schedule, such as lt.schedules.warmup_cosine makes")
    return schedule


def _moments_type(moments: object) -> DType:
    for accepted in (DType.FLOAT32, DType.BFLOAT16):
        if type_name(moments) == accepted.value:
            return accepted
    raise ArgumentError(f"moments is {shown(moments)}; accepted are 'float32' and 'bfloat16'")
