"""AdamW's state on a GPU: moments, the tables of tensors, the step, and launches ready to go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arrays import Operand, arena_size, arena_views, check_no_overlap, check_shape, library_of
from lt_runtime.arrays.libraries import CupyLibrary
from lt_runtime.errors import DeviceError, DTypeError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.kernels.adamw import (
    AdamWParams,
    GradientNormParams,
    OptimizerState,
    Tensor,
    adamw_params,
    norm_launches,
    norm_table,
    update_launches,
    update_table,
)
from lt_runtime.kernels.kernel import Launches
from lt_runtime.ops._adamw_types import Options, Parameter
from lt_runtime.ops._place import Place
from lt_runtime.problem import DType

_WORDS: Final = [name for name, *_ in OptimizerState._fields_]  # each of 32 bits


class GpuState:
    """Moments, master copies, the step, the scale and the kernels' tables on one GPU; see `State`."""

    def __init__(self, parameters: Sequence[Parameter], options: Options) -> None:
        first = parameters[0]
        self._place = Place.of(f"{first.name}.data", first.data, None)
        self._current_stream = library_of(first.data).current_stream
        self._options = options
        self._kept: list[Any] = []  # arrays whose addresses the kernels have
        with activated(self._place.device):
            words = self._zeros((len(_WORDS),), np.dtype(np.uint32))
            self.moments: Sequence[tuple[Any, ...]] = self._moments(parameters)
            tensors = [self._tensor(*pair) for pair in zip(parameters, self.moments, strict=True)]
            self._scale = None if options.scaler is None else self._scale_arrays(options.scaler.init_scale)
            norms = [self._norm(tensors, words)] if options.judges_gradients else []
            self._launches: list[Launches[Any]] = [*norms, self._update(tensors, words)]
            call("cuStreamSynchronize", self._place.stream)  # later steps may come on any stream
        if options.scaler is not None and self._scale is not None:
            options.scaler.bind(*self._scale)
        self.steps, self.skipped_steps = (_word(words, name) for name in ("steps", "skipped"))
        norm = _word(words, "norm").view(np.float32).reshape(())
        self.grad_norm = norm if options.judges_gradients else None

    def step(self, stream: Any) -> None:
        """See `State`: one launch, or two."""
        device = self._place.device
        with activated(device):
            handle = stream_handle(stream, device, self._current_stream)
            for launches in self._launches:
                _, launch = launches[handle]
                launch()

    def _update(self, tensors: Sequence[Tensor], words: Any) -> Launches[AdamWParams]:
        table, options = update_table(tensors), self._options
        params = adamw_params(
            options.hyper,
            options.scaler,
            max_norm=options.max_norm,
            skip_nonfinite=options.skip_nonfinite,
            seed=options.seed,
        )
        params.chunks, params.state = self._upload(table), words.data.ptr
        if self._scale is not None:
            params.scale, params.growth_tracker = (array.data.ptr for array in self._scale)
        stochastic = any(tensor.value[1] is not DType.FLOAT32 for tensor in tensors)
        kinds: dict[str, Any] = {"moments": options.moments, "amsgrad": options.amsgrad, "stochastic": stochastic}
        return update_launches(params, len(table), self._place.device, **kinds)

    def _norm(self, tensors: Sequence[Tensor], words: Any) -> Launches[GradientNormParams]:
        table = norm_table(tensors)
        params = GradientNormParams(
            chunks=self._upload(table),
            partial=self._zeros((len(table),), np.dtype(np.float32)).data.ptr,
            state=words.data.ptr,
            scale=0 if self._scale is None else self._scale[0].data.ptr,
        )
        return norm_launches(params, len(table), self._place.device)

    def _moments(self, parameters: Sequence[Parameter]) -> list[tuple[Any, ...]]:
        each, dtype = self._options.moments_each, self._options.moments.numpy
        shapes = [tuple(parameter.data.shape) for parameter in parameters for _ in range(each)]
        arrays = iter(arena_views(self._zeros((arena_size(shapes, dtype.itemsize),), dtype), shapes))
        return [tuple(next(arrays) for _ in range(each)) for _ in parameters]

    def _tensor(self, parameter: Parameter, arrays: tuple[Any, ...]) -> Tensor:
        name, place, options = parameter.name, self._place, self._options
        data, grad = place.read(f"{name}.data", parameter.data), place.read(f"{name}.grad", parameter.grad)
        check_shape(f"{name}.grad", grad.shape, data.shape, f"as {name}.data")
        master = self._master(parameter, data)
        _check(place.device, data, grad, master)
        self._kept += [parameter.data, parameter.grad, parameter.master]
        moments = [(array.data.ptr, options.moments) for array in arrays]
        return Tensor(
            size=math.prod(data.shape),
            value=_typed(data if master is None else master),
            copy=None if master is None else _typed(data),
            gradient=_typed(grad),
            m=moments[0],
            v=moments[1],
            v_max=moments[2] if options.amsgrad else None,
            lr_scale=parameter.lr_scale,
            weight_decay=options.weight_decay_of(parameter),
        )

    def _master(self, parameter: Parameter, data: Operand) -> Operand | None:
        if not self._options.has_master(parameter, DType.parse(data.name, data.dtype)):
            return None
        if parameter.master is None:
            parameter.master = _in_fp32(parameter.data)
        master = self._place.read(f"{parameter.name}.master", parameter.master)
        check_shape(master.name, master.shape, data.shape, f"as {data.name}")
        if master.dtype != "float32":
            raise DTypeError(f"{master.name} is {master.dtype}; it must be float32")
        return master

    def _scale_arrays(self, init_scale: float) -> tuple[Any, Any]:
        scale, tracker = (self._zeros((), np.dtype(dtype)) for dtype in (np.float32, np.int32))
        bits = int(np.float32(init_scale).view(np.uint32))
        call("cuMemsetD32Async", scale.data.ptr, bits, 1, self._place.stream)
        return scale, tracker

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        array = CupyLibrary().empty(shape, dtype, self._place.device, self._place.stream)
        if array.nbytes:
            call("cuMemsetD8Async", array.data.ptr, 0, array.nbytes, self._place.stream)
        self._kept.append(array)
        return array

    def _upload(self, table: NDArray[Any]) -> int:
        array = self._zeros((table.nbytes,), np.dtype(np.uint8))
        call("cuMemcpyHtoDAsync", array.data.ptr, table.ctypes.data, table.nbytes, self._place.stream)
        return int(array.data.ptr)


def _word(words: Any, name: str) -> Any:
    index = _WORDS.index(name)
    return words[index : index + 1]


def _typed(operand: Operand) -> tuple[int, DType]:
    return operand.address, DType.parse(operand.name, operand.dtype)


def _in_fp32(array: Any) -> Any:
    """An FP32 copy of a CuPy array or a PyTorch tensor."""
    return array.float() if hasattr(array, "float") else array.astype(np.float32)


def _check(device: int, data: Operand, *others: Operand | None) -> None:
    """Raises unless a parameter's arrays are packed, on one device, and `data` overlaps none of the others."""
    present = [other for other in others if other is not None]
    for operand in (data, *present):
        if operand.device != device:
            raise DeviceError(f"{operand.name} is on GPU {operand.device}, the first parameter on GPU {device}")
        operand.check_packed()
    check_no_overlap(data, *present)
