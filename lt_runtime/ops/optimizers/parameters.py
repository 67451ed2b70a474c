"""`Parameter`, and functions that read, check and write the arrays of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arguments import check_instance, not_negative, shown
from lt_runtime.arrays.checks import check_disjoint, check_shape, check_type
from lt_runtime.arrays.copies import copies_of
from lt_runtime.arrays.libraries import cupy
from lt_runtime.arrays.operand import HOST, Operand, device_of, library_of, read
from lt_runtime.arrays.transfer import array_of, fetch, host_access, host_values, in_float32, replace_all, writes
from lt_runtime.errors import DeviceError, OperandError, ShapeError
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.kernels.optimizer import Options
from lt_runtime.problem import DType, type_name


class _Changes:
    """Detects whether any attribute of any parameter has been set since an optimizer or EMA last checked.

    Attributes:
        latest: an object that is replaced at each change. A holder compares it with the object that it saw last.
    """

    latest: object = None


changes: Final = _Changes()


@dataclass(slots=True, eq=False)
class Parameter:
    """A trained tensor and its gradient.

    An optimizer keeps the addresses of these arrays: do not replace the arrays, and change their values by `assign`.
    If there is a master copy, the next update overwrites values that were written into `data` alone; `lt.AdamW` states
    when it checks for such writes. Inference with `precision` keeps a copy in FP8 of each weight on a GPU for which no
    optimizer has been made: after a write into `data` itself, call `renew_copies`.

    `lr_scale` and `weight_decay` may be set at any time, and take effect at the optimizer's next step.

    Attributes:
        data: any shape, row-major without gaps; float32, float16 or bfloat16.
        grad: same shape; any of the three types.
        master: FP32 master copy; `data` is its rounding to nearest. The optimizer makes one for 16-bit `data` if none
            is given, except for BF16 with `stochastic_rounding`.
        name: for errors and reports.
        lr_scale: factor of the learning rate for this parameter, and so of its weight decay, which is lr·λ.
        weight_decay: λ for this parameter; None for the optimizer's λ.
        transposed: the parameter that this one is the transposed view of; None for a parameter of its own.
        is_trained: whether an optimizer has been made for this parameter.

    Raises:
        ArgumentError: `name` is no string, or `lr_scale` or `weight_decay` is no finite number or negative.
    """

    data: Any
    grad: Any
    master: Any = None
    name: str = "parameter"
    lr_scale: float = 1.0
    weight_decay: float | None = None
    transposed: Parameter | None = field(default=None, init=False, repr=False)
    is_trained: bool = field(default=False, init=False, repr=False)

    @property
    def T(self) -> Parameter:  # noqa: N802 - as in NumPy
        """A view for a layer that shares this weight transposed; optimizers and files hold this parameter alone."""
        if self.transposed is not None:
            return self.transposed
        view = Parameter(self.data.T, self.grad.T, name=f"{self.name}.T")
        view.transposed = self
        return view

    @property
    def owner(self) -> Parameter:
        """The parameter whose arrays these are: this one, unless it is a transposed view."""
        return self.transposed or self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "name":
            check_instance("name", value, str, "a string")
        elif name == "lr_scale" or (name == "weight_decay" and value is not None):
            value = not_negative(f"{self.name}.{name}", value)
        object.__setattr__(self, name, value)
        # `changes.latest` is replaced after the attribute is set, so that a thread that sees the new object also sees
        # the new value.
        changes.latest = object()

    def __repr__(self) -> str:
        shape, kind = getattr(self.data, "shape", None), getattr(self.data, "dtype", "of unknown type")
        master = "" if self.master is None else ", FP32 master copy"
        return f"Parameter({self.name}, {shape and tuple(shape)}, {type_name(kind)}{master})"

    def assign(self, values: Any) -> None:
        """Writes values into the parameter: into `master` as FP32, and into `data` rounded to nearest.

        The arrays are written in place, so that an optimizer and captured graphs continue with the new values. Waits
        for the GPU.

        Args:
            values: of the parameter's shape: an array of NumPy, CuPy, PyTorch or any library with DLPack or
                `__cuda_array_interface__`, on any device, or a nested sequence. Floating-point numbers of any type,
                NaN and infinity among them, or integers of at most 2²⁴ in magnitude.

        Raises:
            OperandError: the values are no array, or have another shape (`ShapeError`) or are no real numbers
                (`DTypeError`).
            ArgumentError: the parameter's type would make a finite value infinite, or an integer is too large.
            CaptureError: the current stream is being captured.
            GpuError: a copy failed. After every error the parameter has its old values.
        """
        write_values([(self, values_for(self, "values", values))])

    def renew_copies(self, *, stream: Any = None) -> None:
        """Casts `data` to FP8 again for the copies that inference keeps; call it after you have written into `data`.

        The next `lt.TrainStep` also makes its own copies anew. Copies are written in place, so that captured graphs of
        inference go on with the new values. If this call is captured, a replay renews the copies that there were at the
        capture. `assign`, functions that load files and optimizers renew the copies themselves.

        Args:
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that `data` comes from: PyTorch's for its tensors, CuPy's for all others.

        Raises:
            GpuError: the driver failed.
        """
        device = device_of(f"{self.name}.data", self.data)
        handle = stream_handle(stream, device, library_of(self.data).current_stream)
        writes.latest = None
        for each in copies_of(read(f"{self.name}.data", self.data, handle)):
            each.renew(handle)


class HeldArrays:
    """Remembers the arrays of parameters, and detects whether one has been replaced since.

    Args:
        holder: the name of the holder in errors, such as "the optimizer".

    Attributes:
        seen: `changes.latest` at the last check. While `changes.latest` is the same object, no check is needed.
    """

    def __init__(self, parameters: Sequence[Parameter], holder: str) -> None:
        self.seen, self._holder = changes.latest, holder
        self._arrays = [(each, each.data, each.grad, each.master) for each in parameters]

    def check(self) -> None:
        """Raises `OperandError` if an array of a parameter has been replaced since the construction."""
        latest = changes.latest
        if latest is self.seen:
            return
        for parameter, data, grad, master in self._arrays:
            if parameter.data is not data or parameter.grad is not grad or parameter.master is not master:
                found = f"an array of {parameter.name} was replaced after {self._holder} was made"
                raise OperandError(f"{found}; write into it instead, by parameter.assign(values)")
        self.seen = latest


class ReadParameter(NamedTuple):
    """A parameter whose arrays have been checked: equal shapes, contiguous, on the device of the first parameter.

    Attributes:
        master: the FP32 master copy; None if there is no master copy.
    """

    parameter: Parameter
    data: Operand
    grad: Operand
    master: Operand | None

    @property
    def value(self) -> Operand:
        """The array that an update reads and writes: the master copy if there is one."""
        return self.data if self.master is None else self.master

    def settings(self, weight_decay: float) -> tuple[float, float]:
        """The parameter's present `lr_scale`, and its λ: its own, or else the given `weight_decay`."""
        own = self.parameter.weight_decay
        return self.parameter.lr_scale, weight_decay if own is None else own


def read_parameters(parameters: Sequence[Parameter], options: Options, device: int, stream: int) -> list[ReadParameter]:
    """Reads and checks the arrays of all parameters, and makes missing master copies.

    Args:
        device: ordinal of the first parameter's GPU, which is current; `HOST` for host memory.
        stream: the stream that will use the arrays; earlier work on them is ordered before it.

    Raises:
        OperandError: arrays do not fit together, overlap, or have gaps between their elements, or data are not the
            rounding of their master copy. The parameters are unchanged.
    """
    read = [_read_parameter(parameter, options, device, stream) for parameter in parameters]
    written, gradients = list[Operand](), list[Operand]()
    for i, each in enumerate(read):
        for operand, group in ((each.data, written), (each.grad, gradients), (each.master, written)):
            if operand is not None:
                group.append(replace(operand, name=f"{operand.name} (parameter {i})"))
    check_disjoint(written, gradients)
    check_masters(parameters, stream)
    for each in read:
        if each.master is not None:
            each.parameter.master = each.master.array
    return read


def _read_parameter(parameter: Parameter, options: Options, device: int, stream: int) -> ReadParameter:
    name = parameter.name
    data, grad = read(f"{name}.data", parameter.data, stream), read(f"{name}.grad", parameter.grad, stream)
    dtype, _ = data.element_type(), grad.element_type()
    master = None
    rounds_in_place = dtype is DType.BFLOAT16 and options.stochastic_rounding and parameter.master is None
    if dtype is not DType.FLOAT32 and not rounds_in_place:
        given = parameter.master
        master = read(f"{name}.master", _in_fp32(data, stream) if given is None else given, stream)
        check_type(master, "float32")
    for operand in filter(None, (data, grad, master)):
        if operand.device != device:
            raise DeviceError(f"{operand.name} is {operand.place}, the first parameter on GPU {device}")
        check_shape(operand.name, operand.shape, data.shape, f"as {data.name}")
        operand.check_packed()
    return ReadParameter(parameter, data, grad, master)


def _in_fp32(operand: Operand, stream: int) -> Any:
    """An FP32 copy of an array, made by the array's library.

    A CuPy array is converted on the host, because on the GPU CuPy would first compile a kernel.
    """
    array = operand.array
    if hasattr(array, "float"):  # only PyTorch's tensors have the method `float`
        return array.float()
    return array_of(fetch(operand, stream).astype(np.float32), operand.device, stream)


def values_for(parameter: Parameter, name: str, values: Any) -> NDArray[np.float32]:
    """Values for a parameter as FP32 on the host.

    Raises the errors of `Parameter.assign` that concern values; their messages name the values `name`.
    """
    host, (data, _) = host_values(name, values), host_access(f"{parameter.name}.data", parameter.data)
    if host.shape != data.shape:
        found = f"{name} is {shown(values)}, of shape {host.shape}"
        raise ShapeError(f"{found}; it must have shape {data.shape}, as {data.name}")
    return in_float32(name, host, data.element_type().numpy)


def write_values(assigned: Sequence[tuple[Parameter, NDArray[np.float32]]]) -> None:
    """Writes values into master copies and, rounded, into data; after an error no array has changed. Waits for the GPU.

    Raises:
        CaptureError: the current stream is being captured.
        OperandError: an array cannot be written.
    """
    writes = []
    for parameter, values in assigned:
        for part in ("master", "data"):
            if getattr(parameter, part) is not None:
                operand, stream = host_access(f"{parameter.name}.{part}", getattr(parameter, part))
                check_shape(operand.name, operand.shape, values.shape, "as the values")
                operand.check_packed()
                writes.append((operand, rounded(values, np.dtype(operand.dtype)), stream))
    for device in {operand.device for operand, *_ in writes} - {HOST}:
        cupy().cuda.Device(device).synchronize()  # waits for all streams, since any of them may use the arrays
    replace_all(writes)


def check_masters(parameters: Sequence[Parameter], stream: int) -> None:
    """Raises `OperandError` if data are not the rounding of their master copy.

    The host reads each parameter and its master copy completely, which would be too slow in every step on a GPU.

    Args:
        stream: the arrays' contents at this point of the stream are checked; the host waits for it.
    """
    for parameter in parameters:
        if parameter.master is not None:
            arrays = parameter.data, parameter.master
            data, master = (fetch(read(parameter.name, array, stream), stream) for array in arrays)
            if data.dtype != np.float32:  # FP32 data have no master copy: the optimizer updates them directly
                check_rounding(parameter.name, data, master)


def check_rounding(name: str, data: NDArray[Any], master: NDArray[Any]) -> None:
    """Raises `OperandError` unless data are the rounding of a master copy."""
    expected, bits = rounded(master, data.dtype), f"u{data.itemsize}"
    if np.array_equal(data.view(bits), expected.view(bits)):
        return
    stale = ~((data == expected) | (np.isnan(data) & np.isnan(expected)))
    if stale.any():
        index = tuple(map(int, np.argwhere(stale)[0]))
        found = f"{name}.data has {data[index]!s} at {index}, but its master copy {master[index]!s}"
        why = "what is written into data alone is lost at the next update"
        raise OperandError(f"{found}: {why}; write values by parameter.assign(values)")


def rounded(values: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    """FP32 values rounded to the nearest value of a type."""
    with np.errstate(all="ignore"):
        return values.astype(dtype, copy=False)
