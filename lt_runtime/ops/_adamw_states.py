"""AdamW's state between steps: moments, the number of steps, and what an update runs; on the host and on a GPU."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arrays.arena import arena_size, arena_views, host_zeros
from lt_runtime.arrays.operand import CUPY, HOST, Operand, device_of, library_of
from lt_runtime.errors import DriverError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.kernels.adamw import (
    AdamWParams,
    GradientNormParams,
    OptimizerState,
    Options,
    Tensor,
    adamw_params,
    norm_launches,
    norm_table,
    update_launches,
    update_table,
)
from lt_runtime.kernels.kernel import Launches
from lt_runtime.ops._adamw_parameters import Parameter, ReadParameter, read_parameters
from lt_runtime.problem import DType
from lt_runtime.reference import RoundedTensor

_WORDS: Final = [name for name, *_ in OptimizerState._fields_]  # each of 32 bits
_PARTS: Final = (RoundedTensor.PARAMETER, RoundedTensor.M, RoundedTensor.V, RoundedTensor.V)

Moments = Sequence[tuple[Any, ...]]
"""Of each parameter: m, v and with AMSGrad the largest v."""


def _moments(parameters: Sequence[Parameter], options: Options, zeros: Callable[[int, np.dtype[Any]], Any]) -> Moments:
    """All moments, in one piece of memory.

    Args:
        zeros: makes a flat array of a size and a type.
    """
    each, dtype = 3 if options.amsgrad else 2, options.moments.numpy
    shapes = [tuple(parameter.data.shape) for parameter in parameters for _ in range(each)]
    arrays = iter(arena_views(zeros(arena_size(shapes, dtype.itemsize), dtype), shapes))
    return [tuple(next(arrays) for _ in range(each)) for _ in parameters]


class HostState:
    """The state of NumPy parameters, updated by the reference; its arrays are attributes of `lt.AdamW`."""

    def __init__(self, parameters: Sequence[Parameter], options: Options) -> None:
        self.steps, self.skipped_steps = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        self.grad_norm = np.zeros((), np.float32) if options.judges_gradients else None
        self._options = options
        self._parameters = read_parameters(parameters, options, HOST, 0)
        self.moments = _moments(parameters, options, host_zeros)
        if options.scaler is not None:
            options.scaler.bind(np.array(options.scaler.init_scale, np.float32), np.zeros((), np.int32))

    def step(self, stream: Any) -> None:
        """One update of all parameters; `stream` is checked, and not used on the host."""
        if stream is not None:
            stream_handle(stream, HOST)
        scaler = self._options.scaler
        with np.errstate(all="ignore"):  # a gradient may be NaN or infinite, as it may on a GPU
            factor, finite = self._judge()
            if self._options.skip_nonfinite and not finite:
                self.skipped_steps += 1
            else:
                self.steps += 1
                for i in range(len(self._parameters)):
                    self._update(i, factor)
            if scaler is not None:
                scale, tracker = reference.next_scale(scaler, float(scaler.scale), int(scaler.growth_tracker), finite)
                scaler.scale[...], scaler.growth_tracker[...] = scale, tracker

    def _judge(self) -> tuple[float, bool]:
        """What the gradients are to be multiplied by, and whether all are finite."""
        options = self._options
        if self.grad_norm is None:
            return 1.0, True
        scale = 1.0 if options.scaler is None else float(options.scaler.scale)
        norm, finite = reference.gradient_norm([each.grad.array for each in self._parameters], scale)
        self.grad_norm[...] = norm
        clipping = 1.0 if options.max_norm is None else reference.clip_factor(float(self.grad_norm), options.max_norm)
        return clipping / scale, finite

    def _update(self, index: int, gradient_factor: float) -> None:
        """Updates one parameter and its moments; `steps` counts this update already."""
        step, options = int(self.steps[0]), self._options
        parameter, data, grad, _, weight_decay = read = self._parameters[index]
        lr = options.hyper.lr * float(parameter.lr_scale)
        hyper = dataclasses.replace(options.hyper, lr=lr, weight_decay=weight_decay)
        old = reference.AdamWTensor(read.value.array, *self.moments[index])
        new = reference.adamw_update(old, grad.array, hyper, step, gradient_factor)
        for array, exact, part in zip(old.arrays, new.arrays, _PARTS, strict=False):  # the last with AMSGrad only
            if array.dtype != np.float32:
                lanes = reference.rounding_lanes(exact.size, options.seed, index, step, part)
                exact = reference.round_stochastically(exact, lanes.reshape(exact.shape))
            array[...] = exact
        if read.master is not None:
            data.array[...] = read.master.array.astype(data.array.dtype)


class GpuState:
    """The state of parameters on one GPU, with the tables of tensors and the launches that make an update."""

    def __init__(self, parameters: Sequence[Parameter], options: Options) -> None:
        first = parameters[0]
        self._device = device_of(f"{first.name}.data", first.data)
        self._current_stream = library_of(first.data).current_stream
        self._options, self._stream = options, self._current_stream(self._device)
        with activated(self._device):
            read = read_parameters(parameters, options, self._device, self._stream)
            self._kept: list[Any] = [(each.data, each.grad, each.master) for each in parameters]  # kernels read them
            words = self._zeros((len(_WORDS),), np.dtype(np.uint32))
            self.moments = _moments(parameters, options, lambda size, dtype: self._zeros((size,), dtype))
            tensors = [_tensor(*pair, options) for pair in zip(read, self.moments, strict=True)]
            self._scale = None if options.scaler is None else self._scale_arrays(options.scaler.init_scale)
            norms = [self._norm(tensors, words)] if options.judges_gradients else []
            self._launches: list[Launches[Any]] = [*norms, self._update(tensors, words)]
            call("cuStreamSynchronize", self._stream)  # later steps may come on any stream
        if options.scaler is not None and self._scale is not None:
            options.scaler.bind(*self._scale)
        self.steps, self.skipped_steps = (_word(words, name) for name in ("steps", "skipped"))
        self._nonfinite = int(_word(words, "nonfinite").data.ptr)
        norm = _word(words, "norm").view(np.float32).reshape(())
        self.grad_norm = norm if options.judges_gradients else None

    def step(self, stream: Any) -> None:
        """One update of all parameters: one launch, or two."""
        with activated(self._device):
            handle = stream_handle(stream, self._device, self._current_stream)
            ready = [launches[handle] for launches in self._launches]
            try:
                for _, launch in ready:
                    launch()
            except DriverError:
                # The next step must not be judged by what the norm's kernel has found in these gradients.
                call("cuMemsetD32Async", self._nonfinite, 0, 1, handle)
                raise

    def _update(self, tensors: Sequence[Tensor], words: Any) -> Launches[AdamWParams]:
        table, params = update_table(tensors), adamw_params(self._options)
        params.chunks, params.state = self._upload(table), words.data.ptr
        if self._scale is not None:
            params.scale, params.growth_tracker = (array.data.ptr for array in self._scale)
        stochastic = any(tensor.arrays["value"][1] is not DType.FLOAT32 for tensor in tensors)
        return update_launches(params, len(table), self._device, self._options, stochastic=stochastic)

    def _norm(self, tensors: Sequence[Tensor], words: Any) -> Launches[GradientNormParams]:
        table = norm_table(tensors)
        params = GradientNormParams(
            chunks=self._upload(table),
            partial=self._zeros((len(table),), np.dtype(np.float32)).data.ptr,
            state=words.data.ptr,
            scale=0 if self._scale is None else self._scale[0].data.ptr,
        )
        return norm_launches(params, len(table), self._device)

    def _scale_arrays(self, init_scale: float) -> tuple[Any, Any]:
        scale, tracker = (self._zeros((), np.dtype(dtype)) for dtype in (np.float32, np.int32))
        bits = int(np.float32(init_scale).view(np.uint32))
        call("cuMemsetD32Async", scale.data.ptr, bits, 1, self._stream)
        return scale, tracker

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        array = CUPY.empty(shape, dtype, self._device, self._stream)
        if array.nbytes:
            call("cuMemsetD8Async", array.data.ptr, 0, array.nbytes, self._stream)
        self._kept.append(array)
        return array

    def _upload(self, table: NDArray[Any]) -> int:
        array = self._zeros((table.nbytes,), np.dtype(np.uint8))
        call("cuMemcpyHtoDAsync", array.data.ptr, table.ctypes.data, table.nbytes, self._stream)
        return int(array.data.ptr)


def _tensor(read: ReadParameter, moments: tuple[Any, ...], options: Options) -> Tensor:
    arrays = {"value": _typed(read.value), "gradient": _typed(read.grad)}
    if read.master is not None:
        arrays["copy"] = _typed(read.data)
    for name, array in zip(("m", "v", "v_max"), moments, strict=False):  # the last with AMSGrad only
        arrays[name] = array.data.ptr, options.moments
    return Tensor(math.prod(read.data.shape), arrays, read.parameter.lr_scale, read.weight_decay)


def _word(words: Any, name: str) -> Any:
    index = _WORDS.index(name)
    return words[index : index + 1]


def _typed(operand: Operand) -> tuple[int, DType]:
    return operand.address, DType.parse(operand.name, operand.dtype)
