"""`Operand`, the description of an array of any library, and the functions that read arrays."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from cuda.bindings import driver

from lt_runtime.arguments import shown
from lt_runtime.arrays import libraries
from lt_runtime.arrays.libraries import Library, cupy_stream, is_from
from lt_runtime.errors import AlignmentError, DeviceError, DriverError, DTypeError, LayoutError, OperandError
from lt_runtime.gpu.devices import activated, current_device
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import order_after, stream_handle
from lt_runtime.layout import Layout, layout_of, packed
from lt_runtime.problem import DType, Spec

_ACCEPTED: Final = "NumPy and CuPy arrays, PyTorch tensors, and objects with __dlpack__ or __cuda_array_interface__"
_PROTOCOLS: Final = ("__dlpack_device__", "__cuda_array_interface__")
_UNKNOWN_ADDRESS: Final = int(driver.CUresult.CUDA_ERROR_INVALID_VALUE)
_DEVICE_ORDINAL: Final = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
_DLPACK_CUDA: Final = (2, 13)  # DLPack's device types kDLCUDA and kDLCUDAManaged

_Source: TypeAlias = "tuple[int, Library, Callable[[str, Any, int, int], Operand]]"
HOST: Final = -1
"""The device of NumPy arrays, in place of a GPU's ordinal."""
fp64_on_host: Final[ContextVar[bool]] = ContextVar("lt_runtime_fp64_on_host", default=False)
"""Whether operations of this context accept FP64 NumPy arrays, as they do for PyTorch tensors on the CPU."""
CUPY: Final = libraries.CupyLibrary()
NUMPY: Final = libraries.NumpyLibrary()
TORCH: Final = libraries.TorchLibrary()
_array_api: Final = functools.cache(libraries.ArrayApiLibrary)


@dataclass(frozen=True, slots=True)
class Operand:
    """Description of an array of any library, as operations need it.

    Attributes:
        name: for errors.
        address: address of the first element.
        shape, strides: as in NumPy, but strides are in elements.
        dtype: NumPy's name of the element type.
        itemsize: bytes of an element.
        device: ordinal of the GPU that holds the array; `HOST` for host memory.
        library: the library that allocates results of the same kind.
        array: the caller's array, which this reference keeps alive.
    """

    name: str
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    itemsize: int
    device: int
    library: Library
    array: Any

    @property
    def place(self) -> str:
        """The device in words, for errors."""
        return "in host memory (NumPy)" if self.device == HOST else f"on GPU {self.device}"

    def converted(self, dtype: str) -> str:
        """The expression by which a caller converts the array to another type, for errors."""
        return f"{self.name}.to(torch.{dtype})" if self.library is TORCH else f"{self.name}.astype({dtype!r})"

    def element_type(self, *, fp64: bool = False, fp8: bool = False) -> DType:
        """The element type as a `DType`. Raises `DTypeError`, whose message says how to convert, like `DType.parse`."""
        try:
            takes_fp64 = fp64 or (self.device == HOST and fp64_on_host.get())
            return DType.parse(self.name, self.dtype, fp64=takes_fp64, fp8=fp8)
        except DTypeError as error:
            raise DTypeError(f"{error}; convert it: {self.converted('float32')}") from None

    @property
    def layout(self) -> Layout:
        """The layout of the array as a matrix: all axes but the last make up its rows. Raises as `layout_of`."""
        return layout_of(self.name, self.shape, self.strides)

    @property
    def alignment(self) -> int:
        """The largest power of two, at most 256, that divides the address."""
        return min(self.address & -self.address, 256) or 256

    @property
    def spec(self) -> Spec:
        """Layout and alignment of the array for a problem. An array with fewer than two axes counts as one row."""
        return Spec(self.layout if len(self.shape) >= 2 else self.check_packed(), self.alignment)

    @property
    def extent(self) -> int:
        """Elements of memory from the first element to the end of the last, including gaps; 0 for empty arrays."""
        if 0 in self.shape:
            return 0
        return sum((extent - 1) * stride for extent, stride in zip(self.shape, self.strides, strict=True)) + 1

    def check_packed(self) -> Layout:
        """The layout of all elements as one row. Raises `LayoutError` unless the array is row-major and contiguous."""
        expected = _row_major_strides(self.shape)
        for extent, stride, packed_stride in zip(self.shape, self.strides, expected, strict=True):
            if extent > 1 and stride != packed_stride and 0 not in self.shape:
                raise LayoutError(f"{self.name} has strides {self.strides}; it must be row-major without gaps")
        return packed(1, math.prod(self.shape))


def on_host(operands: Mapping[str, Any]) -> bool:
    """Whether all operands, given by name, are NumPy arrays. False if none is.

    Raises:
        OperandError: some operands are NumPy arrays, and another one is not an array.
        DeviceError: some operands are NumPy arrays, and another is an array on another device.
    """
    host = [name for name, array in operands.items() if isinstance(array, np.ndarray)]
    others = [name for name in operands if name not in host]
    if host and others:
        for name in others:
            _check_tensor(name, operands[name])
            if not any(hasattr(operands[name], protocol) for protocol in _PROTOCOLS):
                raise _no_array(name, operands[name])
        found = f"{', '.join(host)} in host memory (NumPy) but {', '.join(others)} not; all must be on one device"
        raise DeviceError(f"{found}: cupy.asarray copies an array to a GPU, cupy.asnumpy to the host")
    return bool(host)


def _no_array(name: str, value: object) -> OperandError:
    remedy = f"; numpy.asarray({name}) makes one" if isinstance(value, (list, tuple, int, float)) else ""
    return OperandError(f"{name} is a {type(value).__name__} ({shown(value)}); accepted are {_ACCEPTED}{remedy}")


def _check_tensor(name: str, array: Any) -> None:
    """Raises `DeviceError` for a tensor of PyTorch's that is not on a GPU."""
    if is_from(array, "torch") and not array.is_cuda:
        found = f"{name} is {shown(array)}, a tensor on {array.device}"
        raise DeviceError(f"{found}, which is not accepted; pass {name}.numpy(), or move it to a GPU: {name}.cuda()")


def read_call(
    names: Sequence[str], required: int, arrays: Sequence[Any], stream: Any
) -> tuple[list[Operand | None], int, int]:
    """Reads the arrays of a call, and finds the stream that it runs on.

    Args:
        names: names of the arrays, in their order.
        required: number of leading arrays that must not be None.
        stream: the caller's argument; None for the current stream of the first array's library. For host arrays it is
            checked and otherwise ignored.

    Returns:
        The operands, None for an absent array; the ordinal of the GPU that the first array lives on, or `HOST` if all
        are NumPy arrays; and the handle of the stream, 0 on the host.

    Raises:
        As `on_host`, `read` and `stream_handle`.
    """
    named = [*zip(names, arrays, strict=True)]
    on_host({name: array for name, array in named if array is not None})
    found = [_source(*each) if each[1] is not None or i < required else None for i, each in enumerate(named)]
    assert found[0] is not None, "the first array is required"
    device, library, _ = found[0]
    handle = stream_handle(stream, device, library.current_stream)
    operands = [source and _read_from(source, *each, handle) for source, each in zip(found, named, strict=True)]
    return operands, device, handle


def read(name: str, array: Any, stream: int) -> Operand:
    """Reads an array as an operand.

    An array that is read by DLPack, or by a `__cuda_array_interface__` that names a stream, makes `stream` wait for
    earlier work on it. For arrays of CuPy and PyTorch `stream` does not wait.

    Raises:
        DeviceError: the array is neither on a GPU nor a NumPy array.
        OperandError: the argument is not an array.
        AlignmentError: the array's address is not a multiple of its element size.
    """
    return _read_from(_source(name, array), name, array, stream)


def device_of(name: str, array: Any) -> int:
    """Ordinal of the GPU that holds an array; `HOST` for NumPy arrays.

    Raises `DeviceError`, `OperandError` as `read`.
    """
    return _source(name, array)[0]


def library_of(array: Any) -> Library:
    """The library whose current stream orders work on an array: PyTorch for its tensors, CuPy for all others."""
    return TORCH if is_from(array, "torch") else CUPY


def _source(name: str, array: Any) -> _Source:
    """Device of an array, the library whose stream orders work on it, and the function that reads it as an operand."""
    if isinstance(array, np.ndarray):
        return HOST, NUMPY, _read_numpy
    if is_from(array, "cupy"):
        return int(array.device.id), CUPY, _read_cupy
    if is_from(array, "torch"):
        _check_tensor(name, array)
        return int(array.device.index), TORCH, _read_torch
    if hasattr(array, "__dlpack_device__"):
        kind, ordinal = map(int, array.__dlpack_device__())
        if kind not in _DLPACK_CUDA:
            raise DeviceError(f"{name} lives on DLPack device {(kind, ordinal)}; accepted are NumPy arrays and GPUs")
        return ordinal, CUPY, _read_dlpack if hasattr(array, "__dlpack__") else _read_interface
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        raise _no_array(name, array)
    return device_of_address(name, interface["data"][0]), CUPY, _read_interface


def _read_from(source: _Source, name: str, array: Any, stream: int) -> Operand:
    device, _, reader = source
    operand = reader(name, array, device, stream)
    if operand.address % operand.itemsize:
        raise AlignmentError(f"{name} is at {operand.address:#x}; it must be a multiple of {operand.itemsize}")
    return operand


def device_of_address(name: str, address: int) -> int:
    """Ordinal of the GPU that an address belongs to; the current GPU for address 0, which empty arrays may have.

    Raises:
        DeviceError: the address is not in GPU memory.
    """
    if address == 0:
        return current_device()
    try:
        return int(call("cuPointerGetAttribute", _DEVICE_ORDINAL, address))
    except DriverError as error:
        if error.status != _UNKNOWN_ADDRESS:
            raise
        raise DeviceError(f"{name} is {address:#x}, which is not an address of GPU memory") from error


def _read_numpy(name: str, array: np.ndarray[Any, Any], device: int, stream: int) -> Operand:
    check_plain(name, array)
    _check_byte_order(name, array.dtype)
    size, address = array.itemsize, array.__array_interface__["data"][0]
    strides = _in_elements(name, array.strides, size) if array.size else _row_major_strides(array.shape)
    return Operand(name, address, array.shape, strides, array.dtype.name, size, HOST, NUMPY, array)


def check_plain(name: str, array: np.ndarray[Any, Any]) -> None:
    """Raises `OperandError` for masked arrays and `numpy.matrix`, which compute differently from plain arrays."""
    masked = sys.modules.get("numpy.ma")  # NumPy imports numpy.ma on first use: before that no masked array exists
    if masked is not None and isinstance(array, masked.MaskedArray):
        found = f"{name} is a masked array of shape {array.shape}"
        raise OperandError(f"{found}; accepted are arrays without a mask, as {name}.filled(value) makes them")
    if isinstance(array, np.matrix):
        found = f"{name} is a numpy.matrix of shape {array.shape}"
        raise OperandError(f"{found}; accepted are plain arrays, as numpy.asarray({name}) makes them")


def _check_byte_order(name: str, dtype: np.dtype[Any]) -> None:
    if not dtype.isnative:
        found = f"{name} has byte order {dtype.byteorder!r}, as {dtype.str!r} says"
        raise DTypeError(f"{found}; accepted is this machine's, as in {name}.astype({dtype.newbyteorder('=').str!r})")


def _read_cupy(name: str, array: Any, device: int, stream: int, library: Library = CUPY) -> Operand:
    _check_byte_order(name, array.dtype)
    size = array.itemsize
    strides = _in_elements(name, array.strides, size)
    return Operand(name, array.data.ptr, array.shape, strides, array.dtype.name, size, device, library, array)


def _read_torch(name: str, tensor: Any, device: int, stream: int) -> Operand:
    shape, strides, dtype = tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")
    return Operand(name, tensor.data_ptr(), shape, strides, dtype, tensor.element_size(), device, TORCH, tensor)


def _read_dlpack(name: str, array: Any, device: int, stream: int) -> Operand:
    # in `from_dlpack` the array's library makes CuPy's current stream wait for earlier work on the array
    with cupy_stream(device, stream) as module:
        view = module.from_dlpack(array)
    namespace = getattr(array, "__array_namespace__", None)
    return _read_cupy(name, view, device, stream, CUPY if namespace is None else _array_api(namespace()))


def _read_interface(name: str, array: Any, device: int, stream: int) -> Operand:
    interface = array.__cuda_array_interface__
    dtype = _interface_dtype(name, array, interface["typestr"])
    shape = tuple(interface["shape"])
    byte_strides: Sequence[int] | None = interface.get("strides")
    strides = _row_major_strides(shape) if byte_strides is None else _in_elements(name, byte_strides, dtype.itemsize)
    producer = interface.get("stream")
    if producer is not None:
        with activated(device):
            order_after(stream, producer)
    return Operand(name, interface["data"][0], shape, strides, dtype.name, dtype.itemsize, device, CUPY, array)


def _interface_dtype(name: str, array: Any, typestr: str) -> np.dtype[Any]:
    if typestr == "<V2" and "bfloat16" in str(getattr(array, "dtype", "")):
        return DType.BFLOAT16.numpy  # `__cuda_array_interface__` has no type code for bfloat16
    if typestr.startswith((">V", "|V", "<V")):
        raise DTypeError(f"{name} has type string {typestr!r}; accepted are float32, float16 and bfloat16")
    dtype = np.dtype(typestr)
    _check_byte_order(name, dtype)
    return dtype


def _in_elements(name: str, byte_strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    if any(stride % itemsize for stride in byte_strides):
        raise LayoutError(f"{name} has strides of {tuple(byte_strides)} bytes; they must be multiples of {itemsize}")
    return tuple(stride // itemsize for stride in byte_strides)


def _row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis:]) for axis in range(1, len(shape) + 1))


def read_step(step: Any, device: int, stream: int) -> Operand:
    """Reads a step counter on the device, an array of one uint32.

    Raises:
        OperandError: the array has another type or size, or is on another device.
    """
    operand = read("step", step, stream)
    if operand.dtype != "uint32" or math.prod(operand.shape) != 1:
        raise DTypeError(f"step is {operand.dtype} of shape {operand.shape}; accepted are an int or one uint32")
    if operand.device != device:
        raise DeviceError(f"step is on GPU {operand.device}, the operands on GPU {device}")
    return operand
