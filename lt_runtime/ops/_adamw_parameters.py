"""The parameters that an optimizer is made with, as they are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

from lt_runtime.arguments import check_instance, not_negative
from lt_runtime.arrays.checks import check_disjoint, check_shape, check_type
from lt_runtime.arrays.operand import Operand, read
from lt_runtime.errors import DeviceError, OperandError
from lt_runtime.kernels.adamw import Options
from lt_runtime.problem import DType


class _Changes:
    """Tells those who keep something of a parameter that an attribute of some parameter was set.

    Attributes:
        latest: another object after every such change, so that one comparison shows whether there was any.
    """

    latest: object = None


changes: Final = _Changes()


@dataclass(slots=True, eq=False)
class Parameter:
    """A tensor that is trained, and its gradient.

    An optimizer keeps these very arrays: change them in place, do not replace them. `lr_scale` and `weight_decay` may
    be set at any time, and take effect at the optimizer's next step.

    Attributes:
        data: any shape, row-major without gaps; float32, float16 or bfloat16.
        grad: same shape; any of the three types.
        master: FP32 values that `data` is the rounding of. The optimizer makes one from `data` where that is not
            FP32 and none is given, except for BF16 with `stochastic_rounding`.
        name: for errors and reports.
        lr_scale: what the learning rate is multiplied by for this parameter; its weight decay scales with it.
        weight_decay: λ for this parameter; None leaves it to the optimizer.

    Raises:
        ArgumentError: `name` is no string, or `lr_scale` or `weight_decay` no finite number, or negative.
    """

    data: Any
    grad: Any
    master: Any = None
    name: str = "parameter"
    lr_scale: float = 1.0
    weight_decay: float | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "name":
            check_instance("name", value, str, "a string")
        elif name == "lr_scale" or (name == "weight_decay" and value is not None):
            value = not_negative(f"{self.name}.{name}", value)
        object.__setattr__(self, name, value)
        changes.latest = object()  # after the change, so that nobody who has seen this object has missed it


class HeldArrays:
    """The arrays that parameters have when this is made, for those who keep their addresses.

    Args:
        holder: who does, as errors name it.

    Attributes:
        seen: what `changes.latest` was when the parameters last had these arrays; as long as it is, they have.
    """

    def __init__(self, parameters: Sequence[Parameter], holder: str) -> None:
        self.seen, self._holder = changes.latest, holder
        self._arrays = [(each, each.data, each.grad, each.master) for each in parameters]

    def check(self) -> None:
        """Raises `OperandError` if a parameter has another array now."""
        latest = changes.latest
        if latest is self.seen:
            return
        for parameter, data, grad, master in self._arrays:
            if parameter.data is not data or parameter.grad is not grad or parameter.master is not master:
                raise OperandError(
                    f"an array of {parameter.name} was replaced after {self._holder} was made; write into it instead, "
                    "as in parameter.data[...] = values"
                )
        self.seen = latest


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

    def settings(self, options: Options) -> tuple[float, float]:
        """The factor of its learning rate, and its weight decay λ, as they are now."""
        own = self.parameter.weight_decay
        return self.parameter.lr_scale, options.hyper.weight_decay if own is None else own


def read_parameters(parameters: Sequence[Parameter], options: Options, device: int, stream: int) -> list[ReadParameter]:
    """All parameters' arrays as read. A master copy that is needed and not given is made.

    Args:
        device: ordinal of the first parameter's GPU, which is current; `HOST` for host memory.
        stream: that the arrays' contents are ordered before.

    Raises:
        OperandError: arrays that do not fit together, overlap, or have gaps between their elements. The parameters are
            as they were.
    """
    read = [_read_parameter(parameter, options, device, stream) for parameter in parameters]
    numbered: dict[str, list[Operand]] = {
        part: [
            replace(operand, name=f"{operand.name} (parameter {i})")
            for i, each in enumerate(read)
            if (operand := getattr(each, part)) is not None
        ]
        for part in ("data", "grad", "master")
    }
    check_disjoint(numbered["data"] + numbered["master"], numbered["grad"])
    for each in read:
        if each.master is not None:
            each.parameter.master = each.master.array
    return read


def _read_parameter(parameter: Parameter, options: Options, device: int, stream: int) -> ReadParameter:
    name = parameter.name
    data, grad = read(f"{name}.data", parameter.data, stream), read(f"{name}.grad", parameter.grad, stream)
    dtype, _ = DType.parse(data.name, data.dtype), DType.parse(grad.name, grad.dtype)
    master = None
    rounds_in_place = dtype is DType.BFLOAT16 and options.stochastic_rounding and parameter.master is None
    if dtype is not DType.FLOAT32 and not rounds_in_place:
        given = parameter.master
        master = read(f"{name}.master", _in_fp32(parameter.data) if given is None else given, stream)
        check_type(master, "float32")
    others = [grad] if master is None else [grad, master]
    for operand in (data, *others):
        if operand.device != device:
            raise DeviceError(f"{operand.name} is {operand.place}, the first parameter on GPU {device}")
        check_shape(operand.name, operand.shape, data.shape, f"as {data.name}")
        operand.check_packed()
    return ReadParameter(parameter, data, grad, master)


def _in_fp32(array: Any) -> Any:
    """An FP32 copy of a NumPy array, a CuPy array or a PyTorch tensor."""
    return array.float() if hasattr(array, "float") else array.astype(np.float32)
