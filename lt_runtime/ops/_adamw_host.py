"""AdamW's state for NumPy parameters, updated by the reference."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arrays import arena_size, arena_views, check_shape, host_zeros
from lt_runtime.errors import DTypeError, LayoutError, OverlapError
from lt_runtime.grad_scaler import GradScaler
from lt_runtime.ops._adamw_types import Options, Parameter
from lt_runtime.problem import DType
from lt_runtime.reference import RoundedTensor

_PARTS: Final = (RoundedTensor.PARAMETER, RoundedTensor.M, RoundedTensor.V, RoundedTensor.V)


class HostState:
    """Moments, master copies, the step and the scale; see `State`."""

    def __init__(self, parameters: Sequence[Parameter], options: Options) -> None:
        self.steps, self.skipped_steps = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        self.grad_norm = np.zeros((), np.float32) if options.judges_gradients else None
        self._options = options
        self.moments: Sequence[tuple[Any, ...]] = _moments(parameters, options)
        self._tensors = [
            _Tensor(i, *pair, options) for i, pair in enumerate(zip(parameters, self.moments, strict=True))
        ]
        if options.scaler is not None:
            options.scaler.bind(np.array(options.scaler.init_scale, np.float32), np.zeros((), np.int32))

    def step(self, stream: Any) -> None:
        """See `State`; there is no stream to run on."""
        with np.errstate(all="ignore"):  # a gradient may be NaN or infinite, as it may on a GPU
            factor, finite = self._judge()
            if self._options.skip_nonfinite and not finite:
                self.skipped_steps += 1
            else:
                self.steps += 1
                for tensor in self._tensors:
                    tensor.update(int(self.steps[0]), factor)
            if self._options.scaler is not None:
                _move(self._options.scaler, finite)

    def _judge(self) -> tuple[float, bool]:
        """What the gradients are to be multiplied by, and whether all are finite."""
        options = self._options
        if self.grad_norm is None:
            return 1.0, True
        scale = 1.0 if options.scaler is None else float(options.scaler.scale)
        norm, finite = reference.gradient_norm([tensor.parameter.grad for tensor in self._tensors], scale)
        self.grad_norm[...] = norm
        clipping = 1.0 if options.max_norm is None else reference.clip_factor(float(self.grad_norm), options.max_norm)
        return clipping / scale, finite


def _moments(parameters: Sequence[Parameter], options: Options) -> list[tuple[NDArray[Any], ...]]:
    each, dtype = options.moments_each, options.moments.numpy
    shapes = [parameter.data.shape for parameter in parameters for _ in range(each)]
    arrays = iter(arena_views(host_zeros(arena_size(shapes, dtype.itemsize), dtype), shapes))
    return [tuple(next(arrays) for _ in range(each)) for _ in parameters]


def _move(scaler: GradScaler, finite: bool) -> None:
    scale, tracker = reference.next_scale(scaler, float(scaler.scale), int(scaler.growth_tracker), finite)
    scaler.scale[...], scaler.growth_tracker[...] = scale, tracker


class _Tensor:
    """One parameter with its moments."""

    def __init__(self, index: int, parameter: Parameter, moments: tuple[NDArray[Any], ...], options: Options) -> None:
        has_master = _prepare(parameter, options)
        self.parameter = parameter
        self._index, self._options = index, options
        self._value: NDArray[Any] = parameter.master if has_master else parameter.data
        self._moments = moments
        self._hyper = dataclasses.replace(
            options.hyper,
            lr=options.hyper.lr * parameter.lr_scale,
            weight_decay=options.weight_decay_of(parameter),
        )

    def update(self, step: int, gradient_factor: float) -> None:
        """The `step`-th update."""
        old = reference.AdamWTensor(self._value, *self._moments)
        new = reference.adamw_update(old, self.parameter.grad, self._hyper, step, gradient_factor)
        for array, exact, part in zip(old.arrays, new.arrays, _PARTS, strict=False):  # the last with AMSGrad only
            array[...] = self._rounded(exact, array.dtype, part, step)
        if self._value is not self.parameter.data:
            self.parameter.data[...] = self._value.astype(self.parameter.data.dtype)

    def _rounded(
        self, exact: NDArray[np.float32], dtype: np.dtype[Any], part: RoundedTensor, step: int
    ) -> NDArray[Any]:
        if dtype == np.float32:
            return exact
        lanes = reference.rounding_lanes(exact.size, self._options.seed, self._index, step, part)
        return reference.round_stochastically(exact, lanes.reshape(exact.shape))


def _prepare(parameter: Parameter, options: Options) -> bool:
    """Checks a parameter's arrays and makes its master copy; whether it has one."""
    name, data, grad = parameter.name, parameter.data, parameter.grad
    dtype = DType.parse(f"{name}.data", data.dtype)
    DType.parse(f"{name}.grad", grad.dtype)
    others = {f"{name}.grad": grad}
    has_master = options.has_master(parameter, dtype)
    if has_master:
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
    return has_master
