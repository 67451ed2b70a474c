"""AdamW over all parameters of a model in one launch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from lt_runtime import reference
from lt_runtime.arrays import check_shape, on_host
from lt_runtime.errors import ArgumentError, DTypeError, LayoutError, OverlapError
from lt_runtime.ops._adamw_gpu import GpuState
from lt_runtime.problem import DType
from lt_runtime.schedules import Schedule


@dataclass(slots=True, eq=False)
class Parameter:
    """A tensor that is trained, and its gradient.

    An optimizer keeps these very arrays: change them in place, do not replace them.

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
        host = on_host(*(_by_name(self.parameters, parts) for parts in (("data", "grad"), ("master",))))
        self._state: _State = _HostState(self.parameters) if host else GpuState(self.parameters)
        self.steps = self._state.steps

    def step(self, *, stream: Any = None) -> None:
        """Updates every parameter from its gradient.

        Args:
            stream: as in `linear_fwd`.

        Raises:
            GpuError: the driver or the compiler failed.
        """
        self._state.step(self._hyper, stream)


def _by_name(parameters: Sequence[Parameter], parts: tuple[str, ...]) -> dict[str, Any]:
    """Arrays of all parameters, by names that are theirs alone."""
    return {
        f"{parameter.name}.{part} (parameter {i})": getattr(parameter, part)
        for i, parameter in enumerate(parameters)
        for part in parts
    }


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
            is_master = parameter.data.dtype != np.float32
            values = parameter.master if is_master else parameter.data
            with np.errstate(all="ignore"):  # a gradient may be NaN or infinite, as it may on a GPU
                values[...], moments[0][...], moments[1][...] = reference.adamw_update(
                    values, parameter.grad, moments[0], moments[1], hyper, int(self.steps[0])
                )
                if is_master:
                    parameter.data[...] = values.astype(parameter.data.dtype)


def _prepare_on_host(parameter: Parameter) -> None:
    name, data, grad = parameter.name, parameter.data, parameter.grad
    dtype = DType.parse(f"{name}.data", data.dtype)
    DType.parse(f"{name}.grad", grad.dtype)
    others = {f"{name}.grad": grad}
    if dtype is not DType.FLOAT32:
        if parameter.master is None:
            parameter.master = data.astype(np.float32)
        if parameter.master.dtype != np.float32:
            raise DTypeError(f"{name}.master is {parameter.master.dtype.name}; it must be float32")
        others[f"{name}.master"] = parameter.master
    for each, array in {f"{name}.data": data, **others}.items():
        check_shape(each, array.shape, data.shape, f"as {name}.data")
        if not array.flags.c_contiguous:
            raise LayoutError(f"{each} has strides of {array.strides} bytes; it must be row-major without gaps")
    for other, array in others.items():
        if np.shares_memory(data, array):
            raise OverlapError(f"{name}.data shares memory with {other}; it must not")
