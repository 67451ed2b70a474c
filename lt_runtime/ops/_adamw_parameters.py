"""What an optimizer is made with: parameters, as they are read, and options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from lt_runtime.arrays import Operand, check_no_overlap, check_shape, read
from lt_runtime.errors import DeviceError, DTypeError
from lt_runtime.grad_scaler import GradScaler
from lt_runtime.problem import DType
from lt_runtime.reference import AdamWHyper


@dataclass(slots=True, eq=False)
class Parameter:
    """A tensor that is trained, and its gradient.

    An optimizer keeps these very arrays: change them in place, do not replace them.

    Attributes:
        data: any shape, row-major without gaps; float32, float16 or bfloat16.
        grad: same shape; any of the three types.
        master: FP32 values that `data` is the rounding of. The optimizer makes one from `data` where that is not
            FP32 and none is given, except for BF16 with `stochastic_rounding`.
        name: for errors and reports.
        lr_scale: what the learning rate is multiplied by for this parameter; its weight decay scales with it.
        weight_decay: λ for this parameter; None leaves it to the optimizer.
    """

    data: Any
    grad: Any
    master: Any = None
    name: str = "parameter"
    lr_scale: float = 1.0
    weight_decay: float | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """Everything about an optimizer but its parameters.

    Attributes:
        hyper: of every parameter that has none of its own.
        max_norm: that the gradients are clipped to; None does not clip.
        skip_nonfinite: whether an update with a NaN or infinite gradient is left out; always with a scaler.
        moments: FP32 or BF16.
    """

    hyper: AdamWHyper
    amsgrad: bool
    max_norm: float | None
    skip_nonfinite: bool
    scaler: GradScaler | None
    moments: DType
    stochastic_rounding: bool
    seed: int

    @property
    def judges_gradients(self) -> bool:
        """Whether the gradients' norm and finiteness have to be known before an update."""
        return self.max_norm is not None or self.skip_nonfinite

    @property
    def moments_each(self) -> int:
        """Moments of a parameter: m and v, and with AMSGrad the largest v."""
        return 3 if self.amsgrad else 2

    def weight_decay_of(self, parameter: Parameter) -> float:
        """λ of one parameter."""
        return self.hyper.weight_decay if parameter.weight_decay is None else parameter.weight_decay

    def has_master(self, parameter: Parameter, dtype: DType) -> bool:
        """Whether a parameter of a type has an FP32 master copy, given or to be made."""
        if dtype is DType.BFLOAT16 and self.stochastic_rounding:
            return parameter.master is not None
        return dtype is not DType.FLOAT32


class ReadParameter(NamedTuple):
    """A parameter whose arrays are sound: of one shape, without gaps, where the first parameter is.

    Attributes:
        master: None where there is no master copy.
    """

    parameter: Parameter
    data: Operand
    grad: Operand
    master: Operand | None

    @property
    def value(self) -> Operand:
        """The array that an update reads and writes: the master copy if there is one."""
        return self.data if self.master is None else self.master


def read_parameters(parameters: Sequence[Parameter], options: Options, device: int, stream: int) -> list[ReadParameter]:
    """The parameters' arrays as read. Master copies that are needed and not given are made.

    Args:
        device: ordinal of the first parameter's GPU, which is current; `HOST` for host memory.
        stream: that the arrays' contents are ordered before.

    Raises:
        OperandError: arrays that do not fit together, overlap, or have gaps between their elements.
    """
    return [_read_parameter(parameter, options, device, stream) for parameter in parameters]


def _read_parameter(parameter: Parameter, options: Options, device: int, stream: int) -> ReadParameter:
    name = parameter.name
    data, grad = read(f"{name}.data", parameter.data, stream), read(f"{name}.grad", parameter.grad, stream)
    dtype, _ = DType.parse(data.name, data.dtype), DType.parse(grad.name, grad.dtype)
    master = None
    if options.has_master(parameter, dtype):
        if parameter.master is None:
            parameter.master = _in_fp32(parameter.data)
        master = read(f"{name}.master", parameter.master, stream)
        if master.dtype != "float32":
            raise DTypeError(f"{master.name} is {master.dtype}; it must be float32")
    others = [grad] if master is None else [grad, master]
    for operand in (data, *others):
        if operand.device != device:
            raise DeviceError(f"{operand.name} is {operand.place}, the first parameter on GPU {device}")
        check_shape(operand.name, operand.shape, data.shape, f"as {data.name}")
        operand.check_packed()
    check_no_overlap(data, *others)
    return ReadParameter(parameter, data, grad, master)


def _in_fp32(array: Any) -> Any:
    """An FP32 copy of a NumPy array, a CuPy array or a PyTorch tensor."""
    return array.float() if hasattr(array, "float") else array.astype(np.float32)
