"""Checks PyTorch's tensors, and converts them to and from the arrays of the package's operations."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from lt_runtime.arguments import shown
from lt_runtime.errors import DeviceError, DTypeError, KindError, LayoutError, OperandError, ShapeError
from lt_runtime.layout import layout_of
from lt_runtime.problem import ComputeName, DType

Tensor: TypeAlias = Any
"""A `torch.Tensor`, which is untyped here: the type checker does not read PyTorch."""
Tensors: TypeAlias = Sequence[Any]
"""Tensors, and None for absent ones."""
DTYPES: Final = {torch.float32, torch.float16, torch.bfloat16, torch.float64}
"""The types of operands; float64 on the CPU only."""


def as_rows(tensor: Tensor) -> Tensor:
    """The tensor itself if the package can read it in place, else a contiguous copy, as PyTorch's layers make one."""
    return tensor if tensor.is_contiguous() or _has_layout(tensor.shape, tensor.stride()) else tensor.contiguous()


@functools.lru_cache(maxsize=1024)
def _has_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether kernels can read an array that is not contiguous: they can read some matrices, but no vectors."""
    try:
        layout_of("x", shape, strides)
    except OperandError:
        return False
    return True


def is_autocast(tensor: Tensor) -> bool:
    """Whether `torch.autocast` is enabled for a tensor's device; the result is False for meta tensors."""
    is_any: bool = torch._C._is_any_autocast_enabled()
    return is_any and not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def check_tensors(**operands: Tensor) -> None:
    """Raises `KindError` unless all operands, given by name, are tensors; a bias, and an addend "add", may be None."""
    for name, each in operands.items():
        if not (isinstance(each, torch.Tensor) or (each is None and name.endswith(("bias", "add")))):
            raise KindError(f"{name} is {shown(each)}; it must be a torch.Tensor")


def check_operands(operands: dict[str, Tensor]) -> None:
    """Raises unless all operands, given by name, have the device and type of the first.

    Raises:
        KindError: see `check_tensors`.
        DeviceError: an operand is neither on a GPU nor on the CPU, or not on the first one's device.
        DTypeError: the first one's type is not accepted, or another's differs. FP64 is accepted on the CPU only.
        LayoutError: see `check_dense`.
    """
    check_tensors(**operands)
    operands = {name: each for name, each in operands.items() if each is not None}
    first = next(iter(operands))
    device, dtype = operands[first].device, operands[first].dtype
    for name, each in operands.items():
        check_dense(name, each)
        if each.device != device:
            raise DeviceError(f"{name} is on {each.device} but {first} on {device}; all must be on one device")
        if each.dtype != dtype:
            raise DTypeError(f"{name} is {each.dtype} but {first} is {dtype}; types must be equal, see torch.autocast")
    if device.type not in ("cuda", "cpu", "meta"):
        raise DeviceError(f"{first} is on {device}; accepted are tensors on a GPU of NVIDIA's and on the CPU")
    if dtype not in DTYPES or (dtype is torch.float64 and device.type == "cuda"):
        raise DTypeError(f"{first} is {dtype}; accepted are float32, float16, bfloat16, and on the CPU float64")


def check_dense(name: str, tensor: Tensor) -> None:
    """Raises `LayoutError` for a sparse, nested or quantised tensor."""
    if tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized):
        return
    kind, way = ("nested", "to_padded_tensor(0.0)") if tensor.is_nested else (tensor.layout, "to_dense()")
    if tensor.is_quantized:
        kind, way = "quantised", "dequantize()"
    raise LayoutError(f"{name} is {kind}; accepted are dense tensors: {name}.{way}")


def check_shape(name: str, tensor: Tensor, expected: tuple[Any, ...], why: str) -> None:
    """Raises `ShapeError` unless a tensor has the expected shape or is None; `why` is the reason for the shape."""
    if tensor is not None and tuple(tensor.shape) != expected:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it must be {expected}, {why}")


def as_numpy(tensor: Tensor) -> Any:
    """A NumPy array over the memory of a tensor on the CPU. BF16 is `ml_dtypes.bfloat16`.

    `Tensor.numpy` is not called: it makes the memory unresizable, and FSDP resizes that of parameters.
    """
    shape, size, name = tuple(tensor.shape), tensor.element_size(), str(tensor.dtype).removeprefix("torch.")
    dtype = DType.BFLOAT16.numpy if name == "bfloat16" else np.dtype(name)
    if not tensor.numel():
        return np.empty(shape, dtype)
    strides = tuple(stride * size for stride in tensor.stride())
    interface = {"version": 3, "data": (tensor.data_ptr(), False), "typestr": f"|V{size}", "shape": shape}
    # The attribute `tensor` keeps the memory alive.
    memory = SimpleNamespace(__array_interface__=interface | {"strides": strides}, tensor=tensor)
    return np.asarray(memory).view(dtype)


def as_tensor(array: Any) -> Tensor:
    """Converts an operation's result to a tensor, which shares the memory of a NumPy array; None stays None."""
    if array is None or isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(array.view(f"i{array.itemsize}")).view(getattr(torch, array.dtype.name))


def as_tensors(arrays: Sequence[Any]) -> list[Tensor]:
    """Converts each of an operation's results by `as_tensor`."""
    return [*map(as_tensor, arrays)]


def compute_of(dtype: Any) -> ComputeName:
    """The compute type of products: "tf32" for FP32 operands if PyTorch's setting says so, else "float32"."""
    is_tf32 = dtype is torch.float32 and torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    return "tf32" if is_tf32 else "float32"


def placed(tensors: Tensors) -> list[Any]:
    """Converts tensors for the package's operations: by `as_rows`, and those on the CPU to NumPy arrays."""
    return [each if each is None or (each.is_cuda and each.is_contiguous()) else _placed(each) for each in tensors]


def _placed(tensor: Tensor) -> Any:
    rows = as_rows(tensor.resolve_neg())
    return rows if rows.is_cuda else as_numpy(rows)
