"""AdamW's state, on the host and on a GPU: moments, the number of steps, and the update itself."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arrays.operand import CUPY, HOST, Operand, device_of, library_of
from lt_runtime.arrays.transfer import arena_size, arena_views, host_zeros
from lt_runtime.errors import CaptureError, DriverError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import is_captured, stream_handle
from lt_runtime.kernels import adamw as kernels
from lt_runtime.kernels.adamw import Options
from lt_runtime.kernels.kernel import Launches
from lt_runtime.ops._adamw_parameters import (
    Parameter,
    ReadParameter,
    changes,
    check_masters,
    check_rounding,
    read_parameters,
)
from lt_runtime.problem import DType
from lt_runtime.reference import RoundedTensor

_WORDS: Final = [name for name, *_ in kernels.OptimizerState._fields_]  # names of the 32-bit words
_BLOCK: Final = 32768  # elements that the host updates at a time, so that intermediate results stay in its cache
_PARTS: Final = (RoundedTensor.PARAMETER, RoundedTensor.M, RoundedTensor.V, RoundedTensor.V)

Moments = Sequence[tuple[Any, ...]]
"""For each parameter m, v and, with AMSGrad, the largest v."""


def _moments(parameters: Sequence[Parameter], options: Options, zeros: Callable[[int, np.dtype[Any]], Any]) -> Moments:
    """Makes all moments, in one allocation.

    Args:
        zeros: function of a size and a type that returns a flat array of zeros.
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
        self.options = options
        self._parameters = read_parameters(parameters, options, HOST, 0)
        self.moments = _moments(parameters, options, host_zeros)
        if options.scaler is not None:
            options.scaler.bind(np.array(options.scaler.init_scale, np.float32), np.zeros((), np.int32))

    def apply_settings(self, stream: Any) -> None:
        """Checks the stream and writes nothing: updates on the host read the settings directly."""
        stream_handle(stream, HOST)

    def step(self, stream: Any) -> None:
        """Updates all parameters; `stream` is checked, but not used."""
        self.apply_settings(stream)
        scaler = self.options.scaler
        for read in self._parameters:
            if read.master is not None:
                check_rounding(read.parameter.name, read.data.array, read.master.array)
        with np.errstate(all="ignore"):  # a gradient may be NaN or infinite, as on a GPU
            factor, finite = self._judge()
            if self.options.skip_nonfinite and not finite:
                self.skipped_steps += 1
            else:
                self.steps += 1
                for i, parameter in enumerate(self._parameters):
                    self._update(i, parameter, factor)
            if scaler is not None:
                scale, tracker = reference.next_scale(scaler, float(scaler.scale), int(scaler.growth_tracker), finite)
                scaler.scale[...], scaler.growth_tracker[...] = scale, tracker

    def _judge(self) -> tuple[float, bool]:
        """The gradients' factor, from clipping and the loss scale; and whether all gradients are finite."""
        options = self.options
        if self.grad_norm is None:
            return 1.0, True
        scale = 1.0 if options.scaler is None else float(options.scaler.scale)
        norm, finite = reference.gradient_norm([each.grad.array for each in self._parameters], scale)
        self.grad_norm[...] = norm
        clipping = 1.0 if options.max_norm is None else reference.clip_factor(float(self.grad_norm), options.max_norm)
        return clipping / scale, finite

    def _update(self, index: int, read: ReadParameter, gradient_factor: float) -> None:
        """Updates one parameter and its moments; `steps` has already been increased for this update."""
        (lr_scale, weight_decay), step = read.settings(self.options), int(self.steps[0])
        own = dataclasses.replace(self.options.hyper, lr=self.options.hyper.lr * lr_scale, weight_decay=weight_decay)
        # reshape returns views, because the arrays have no gaps.
        arrays = [each.reshape(-1) for each in (read.value.array, *self.moments[index])]
        gradient = read.grad.array.reshape(-1)
        for first in range(0, gradient.size, _BLOCK):
            block = slice(first, first + _BLOCK)
            old = [array[block] for array in arrays]
            new = reference.adamw_update(reference.AdamWTensor(*old), gradient[block], own, step, gradient_factor)
            for array, exact, part in zip(old, new, _PARTS, strict=False):  # v_max exists only with AMSGrad
                if array.dtype == np.float32:
                    array[...] = exact
                else:
                    lanes = reference.rounding_lanes(exact.size, self.options.seed, index, step, part, first)
                    array[...] = reference.round_stochastically(exact, lanes)
        if read.master is not None:
            read.data.array[...] = read.master.array.astype(read.data.array.dtype)


class GpuState:
    """The state of parameters on one GPU: moments, settings, the kernels' tables of addresses, and the launches."""

    def __init__(self, parameters: Sequence[Parameter], options: Options) -> None:
        first = parameters[0]
        self._device = device_of(f"{first.name}.data", first.data)
        self._current_stream = library_of(first.data).current_stream
        self.options, self._stream = options, self._current_stream(self._device)
        self._unchecked = parameters
        with activated(self._device):
            self._parameters = read = read_parameters(parameters, options, self._device, self._stream)
            self._seen: object = None
            # These references keep the arrays alive, whose addresses the kernels' tables hold.
            self._kept: list[Any] = [(each.data, each.grad, each.master) for each in parameters]
            words = self._zeros((len(_WORDS),), np.dtype(np.uint32))
            self.moments = _moments(parameters, options, lambda size, dtype: self._zeros((size,), dtype))
            self._written = self._settings()
            self._device_settings = self._upload(self._written)
            tensors = [_tensor(*pair, options) for pair in zip(read, self.moments, strict=True)]
            self._scale: tuple[Any, Any] | None = None
            if options.scaler is not None:
                self._scale = self._zeros((), np.dtype(np.float32)), self._zeros((), np.dtype(np.int32))
                bits = int(np.float32(options.scaler.init_scale).view(np.uint32))
                call("cuMemsetD32Async", self._scale[0].data.ptr, bits, 1, self._stream)
            norms = [self._norm(tensors, words)] if options.judges_gradients else []
            self._launches: list[Launches] = [*norms, self._update(tensors, words)]
            call("cuStreamSynchronize", self._stream)  # waits, because later steps may use any stream
        if options.scaler is not None and self._scale is not None:
            options.scaler.bind(*self._scale)
        self.steps, self.skipped_steps = (_word(words, name) for name in ("steps", "skipped"))
        self._nonfinite = int(_word(words, "nonfinite").data.ptr)
        norm = _word(words, "norm").view(np.float32).reshape(())
        self.grad_norm = norm if options.judges_gradients else None

    def step(self, stream: Any) -> None:
        """Updates all parameters by one or two launches. Before the first update, master copies are checked."""
        with activated(self._device):
            handle = stream_handle(stream, self._device, self._current_stream)
            if self._unchecked and not is_captured(handle):
                check_masters(self._unchecked, handle)
                self._unchecked = ()
            self._apply(handle)
            ready = [launches[handle] for launches in self._launches]
            try:
                for _, launch in ready:
                    launch()
            except DriverError:
                # Resets the count of NaN gradients: otherwise the next step would be skipped too.
                call("cuMemsetD32Async", self._nonfinite, 0, 1, handle)
                raise

    def apply_settings(self, stream: Any) -> None:
        """See `AdamW.apply_settings`."""
        with activated(self._device):
            self._apply(stream_handle(stream, self._device, self._current_stream))

    def _apply(self, stream: int) -> None:
        """Writes the settings that differ from those on the device, by a memset for each run of equal words.

        A memset has its value in its arguments; a copy would need a host buffer that stays unchanged until it runs. The
        stream orders the memset after earlier updates, which read the old settings.
        """
        latest = changes.latest
        if latest is self._seen:
            return
        words = self._settings()
        changed = np.flatnonzero(words != self._written)
        if changed.size and is_captured(stream):
            raise CaptureError(
                "settings of the optimizer were changed before the capture; call its apply_settings first"
            )
        ends = np.flatnonzero((np.diff(changed) > 1) | (words[changed[1:]] != words[changed[:-1]])) + 1
        for run in np.split(changed, ends) if changed.size else ():
            first, value = int(run[0]), int(words[run[0]])
            call("cuMemsetD32Async", self._device_settings + first * kernels.WORD_BYTES, value, run.size, stream)
            self._written[run] = value
        self._seen = latest

    def _settings(self) -> NDArray[np.uint32]:
        return kernels.settings_words(self.options.hyper, [each.settings(self.options) for each in self._parameters])

    def _update(self, tensors: Sequence[kernels.Tensor], words: Any) -> Launches:
        table = kernels.update_table(tensors)
        params = kernels.adamw_params(self.options, self._device_settings, len(tensors))
        params.chunks, params.state = self._upload(table), words.data.ptr
        params.tickets = self._zeros((kernels.UPDATE_TICKETS,), np.dtype(np.uint32)).data.ptr
        if self._scale is not None:
            params.scale, params.growth_tracker = (array.data.ptr for array in self._scale)
        stochastic = any(tensor.arrays["value"][1] is not DType.FLOAT32 for tensor in tensors)
        return kernels.update_launches(params, len(table), self._device, self.options, stochastic=stochastic)

    def _norm(self, tensors: Sequence[kernels.Tensor], words: Any) -> Launches:
        table = kernels.norm_table(tensors)
        params = kernels.GRADIENT_NORM.params(
            chunks=self._upload(table),
            partial=self._zeros((len(table),), np.dtype(np.float32)).data.ptr,
            state=words.data.ptr,
            scale=0 if self._scale is None else self._scale[0].data.ptr,
        )
        return kernels.launches_by_row(kernels.GRADIENT_NORM, params, len(table), self._device)

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        array = CUPY.zeros(shape, dtype, self._device, self._stream)
        self._kept.append(array)
        return array

    def _upload(self, table: NDArray[Any]) -> int:
        array = self._zeros((table.nbytes,), np.dtype(np.uint8))
        call("cuMemcpyHtoDAsync", array.data.ptr, table.ctypes.data, table.nbytes, self._stream)
        return int(array.data.ptr)


def _tensor(read: ReadParameter, moments: tuple[Any, ...], options: Options) -> kernels.Tensor:
    arrays = {"value": _typed(read.value), "gradient": _typed(read.grad)}
    if read.master is not None:
        arrays["copy"] = _typed(read.data)
    for name, array in zip(("m", "v", "v_max"), moments, strict=False):  # v_max exists only with AMSGrad
        arrays[name] = array.data.ptr, options.moments
    return kernels.Tensor(math.prod(read.data.shape), arrays)


def _word(words: Any, name: str) -> Any:
    index = _WORDS.index(name)
    return words[index : index + 1]


def _typed(operand: Operand) -> tuple[int, DType]:
    return operand.address, operand.element_type()
