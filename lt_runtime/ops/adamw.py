"""AdamW over all parameters of a model in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lt_runtime import reference
from lt_runtime.arrays import on_host
from lt_runtime.errors import ArgumentError, DTypeError, OperandError, ShapeError
from lt_runtime.ops._adamw_gpu import GpuState
from lt_runtime.problem import DType
from lt_runtime.schedules import Schedule


@dataclass(slots=True, eq=False)
class Parameter:
    """A tensor that is trained, and its gradient.

    Attributes:
        data: any shape, row-major without gaps; float32, float16 or bfloat16.
        grad: same shape; any of the three types.
        master: FP32 values that `data` is the rounding of. The optimizer makes one from `data` where that is not
            FP32 and none is given.
        name: for errors and reports.
    """

    data: Any
    grad: Any
    master: Any = None
    name: str = "parameter"


class _State(Protocol):
    steps: Any

    def step(self, hyper: reference.AdamWHyper, stream: Any) -> None: ...


class AdamW:
    """AdamW (Loshchilov and Hutter, 2019) as PyTorch defines it, with moments and arithmetic in FP32.

    θ ← θ·(1 - lr·λ) - lr · m̂ / (√v̂ + ε), where lr is multiplied by the schedule's factor. On a GPU one kernel
    updates every parameter, finds the step, the bias corrections and the learning rate by itself, and advances the
    step, so that a captured graph can be replayed.

    Args:
        parameters: at least one; all NumPy arrays, or all on one GPU.
        lr: learning rate.
        betas: decay rates of the moments, in [0, 1).
        eps: added to the denominator.
        weight_decay: λ.
        schedule: factor on the learning rate by step; constant if None.

    Attributes:
        steps: array of one uint32, the number of updates done, living where the parameters live.

    Raises:
        ArgumentError: no parameters, or a hyperparameter out of its range.
        OperandError: a parameter whose arrays do not fit together, or with gaps between its elements.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        schedule: Schedule | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        if not self.parameters:
            raise ArgumentError("parameters is empty; there is nothing to optimize")
        _check_hyper(lr, betas, eps, weight_decay)
        self._hyper = reference.AdamWHyper(lr, *betas, eps, weight_decay, schedule or Schedule())
        arrays = {f"{p.name}.{part}": getattr(p, part) for p in self.parameters for part in ("data", "grad", "master")}
        self._state: _State = _HostState(self.parameters) if on_host(arrays) else GpuState(self.parameters)
        self.steps = self._state.steps

    def step(self, *, stream: Any = None) -> None:
        """Updates every parameter from its gradient.

        Args:
            stream: as in `linear_fwd`.

        Raises:
            GpuError: the driver or the compiler failed.
        """
        self._state.step(self._hyper, stream)


def _check_hyper(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        if not (math.isfinite(value) and value >= 0):
            raise ArgumentError(f"{name} is {value}; it must be finite and not negative")
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ArgumentError(f"betas is {betas}; accepted are two numbers in [0, 1)")


class _HostState:
    """Moments, master copies and the step of NumPy parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.steps = np.zeros(1, np.uint32)
        self._parameters = parameters
        for parameter in parameters:
            _prepare_on_host(parameter)
        self._moments = [[np.zeros(p.data.shape, np.float32) for _ in range(2)] for p in parameters]

    def step(self, hyper: reference.AdamWHyper, stream: Any) -> None:
        """One update; there is no stream to run on."""
        self.steps += 1
        for parameter, moments in zip(self._parameters, self._moments, strict=True):
            values = parameter.data if parameter.master is None else parameter.master
            with np.errstate(all="ignore"):  # a gradient may be NaN or infinite, as it may on a GPU
                values[...], moments[0][...], moments[1][...] = reference.adamw_update(
                    values, parameter.grad, moments[0], moments[1], hyper, int(self.steps[0])
                )
                if parameter.master is not None:
                    parameter.data[...] = values.astype(parameter.data.dtype)


def _prepare_on_host(parameter: Parameter) -> None:
    name, data, grad = parameter.name, parameter.data, parameter.grad
    dtype = DType.parse(f"{name}.data", data.dtype)
    DType.parse(f"{name}.grad", grad.dtype)
    if grad.shape != data.shape:
        raise ShapeError(f"{name}.grad has shape {grad.shape}; it must be {data.shape}, as {name}.data")
    if not (data.flags.c_contiguous and grad.flags.c_contiguous):
        raise OperandError(f"{name} has gaps between its elements; pass row-major arrays without gaps")
    if dtype is DType.FLOAT32:
        return
    if parameter.master is None:
        parameter.master = data.astype(np.float32)
    if parameter.master.dtype != np.float32 or parameter.master.shape != data.shape:
        raise DTypeError(f"{name}.master must be float32 of shape {data.shape}")
