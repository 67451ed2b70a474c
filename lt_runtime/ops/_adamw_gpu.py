"""AdamW's state on a GPU: moments, the table of tensors, the step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Protocol

import numpy as np

from lt_runtime.arrays import Operand, check_no_overlap, check_shape
from lt_runtime.arrays.libraries import CupyLibrary
from lt_runtime.errors import DeviceError, DTypeError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.kernels import THREADS, get_kernel
from lt_runtime.gpu.params import AdamWChunk, AdamWParams, AdamWTensor
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.ops._place import Place
from lt_runtime.problem import DType
from lt_runtime.reference import AdamWHyper
from lt_runtime.schedules import DECAYS

_CHUNK: Final = 4096  # elements a block updates
_TYPES: Final = {DType.FLOAT32: 0, DType.FLOAT16: 1, DType.BFLOAT16: 2}


class _Parameter(Protocol):
    data: Any
    grad: Any
    master: Any
    name: str


class GpuState:
    """Moments, master copies, the step and the kernel's table of parameters on one GPU."""

    def __init__(self, parameters: Sequence[_Parameter]) -> None:
        first = parameters[0]
        place = Place.of(f"{first.name}.data", first.data, None)
        self._device = place.device
        self._kept: list[Any] = []  # arrays whose addresses are in the table
        with activated(self._device):
            rows = [self._row(parameter, place) for parameter in parameters]
            sizes = [row.size for row in rows]
            chunks = [
                AdamWChunk(start, tensor, 0) for tensor, size in enumerate(sizes) for start in range(0, size, _CHUNK)
            ]
            self._tensors, self._chunks = self._upload(rows, place), self._upload(chunks, place)
            self._blocks = len(chunks)
            self.steps = self._zeros((1,), np.dtype(np.uint32), place)
            self._ticket = self._zeros((1,), np.dtype(np.uint32), place)
            call("cuStreamSynchronize", place.stream)  # later steps may come on any stream
            self._kernel = get_kernel("adamw", (), self._device)

    def step(self, hyper: AdamWHyper, stream: Any) -> None:
        """One update of all parameters, in one launch."""
        if not self._blocks:
            return
        schedule = hyper.schedule
        params = AdamWParams(
            tensors=self._tensors,
            chunks=self._chunks,
            step=self.steps.data.ptr,
            ticket=self._ticket.data.ptr,
            chunk_size=_CHUNK,
            lr=hyper.lr,
            log_beta1=_log(hyper.beta1),
            log_beta2=_log(hyper.beta2),
            beta1=hyper.beta1,
            beta2=hyper.beta2,
            one_minus_beta1=1.0 - hyper.beta1,
            one_minus_beta2=1.0 - hyper.beta2,
            eps=hyper.eps,
            weight_decay=hyper.weight_decay,
            decay=DECAYS.index(schedule.decay),
            warmup_steps=schedule.warmup_steps,
            total_steps=schedule.total_steps,
            final_factor=schedule.final_factor,
        )
        with activated(self._device):
            self._kernel.launch((self._blocks, 1), (THREADS, 1), params, stream_handle(stream, self._device))

    def _row(self, parameter: _Parameter, place: Place) -> AdamWTensor:
        name = parameter.name
        data, grad = place.read(f"{name}.data", parameter.data), place.read(f"{name}.grad", parameter.grad)
        check_shape(f"{name}.grad", grad.shape, data.shape, f"as {name}.data")
        dtype = DType.parse(data.name, data.dtype)
        master = self._master(parameter, data, dtype, place)
        _check(self._device, data, grad, master)
        m, v = (self._zeros(data.shape, DType.FLOAT32.numpy, place).data.ptr for _ in range(2))
        self._kept += [parameter.data, parameter.grad, parameter.master]
        return AdamWTensor(
            parameter=data.address,
            master=master.address if master else 0,
            gradient=grad.address,
            m=m,
            v=v,
            size=math.prod(data.shape),
            parameter_type=_TYPES[dtype],
            gradient_type=_TYPES[DType.parse(grad.name, grad.dtype)],
        )

    def _master(self, parameter: _Parameter, data: Operand, dtype: DType, place: Place) -> Operand | None:
        if dtype is DType.FLOAT32:
            return None
        if parameter.master is None:
            parameter.master = _in_fp32(parameter.data)
        master = place.read(f"{parameter.name}.master", parameter.master)
        check_shape(master.name, master.shape, data.shape, f"as {data.name}")
        if master.dtype != "float32":
            raise DTypeError(f"{master.name} is {master.dtype}; it must be float32")
        return master

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any], place: Place) -> Any:
        array = CupyLibrary().empty(shape, dtype, self._device, place.stream)
        if array.nbytes:
            call("cuMemsetD8Async", array.data.ptr, 0, array.nbytes, place.stream)
        self._kept.append(array)
        return array

    def _upload(self, rows: Sequence[Any], place: Place) -> int:
        content = b"".join(bytes(row) for row in rows)
        array = self._zeros((len(content),), np.dtype(np.uint8), place)
        if content:
            call("cuMemcpyHtoDAsync", array.data.ptr, content, len(content), place.stream)
        return int(array.data.ptr)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


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
