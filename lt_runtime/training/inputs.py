"""Batches that are handed to a training step on a GPU: what is accepted, and their copies into its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cuda.bindings import driver

from lt_runtime.arrays import Operand, check_shape, is_host_array, read
from lt_runtime.errors import DeviceError, DTypeError, LayoutError
from lt_runtime.gpu.driver import call
from lt_runtime.ops._loss_types import check_labels
from lt_runtime.training.mlp import MLP

_DEVICE = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE


def read_batch(model: MLP, x: Any, target: Any, classifies: bool, stream: int) -> tuple[Operand, Operand]:
    """The operands of a batch whose x has been found to be (M, inputs).

    Args:
        target: labels (M,) of a loss that `classifies`, else (M, outputs).

    Raises:
        DeviceError, ShapeError, DTypeError, LayoutError: one cannot be copied into a step's buffers as it is.
    """
    name = "labels" if classifies else "target"
    operands = _read(model, "x", x, stream), _read(model, name, target, stream)
    inputs, wanted = operands
    outputs = inputs.shape[0], model.dims[-1]
    _check_type(model, inputs)
    _check_rows(inputs)
    if classifies:
        check_labels(wanted.dtype, wanted.shape, outputs)
        wanted.check_vector()
    else:
        check_shape(name, wanted.shape, outputs, "the outputs' shape")
        _check_type(model, wanted)
        _check_rows(wanted)
    return inputs, wanted


def _read(model: MLP, name: str, array: Any, stream: int) -> Operand:
    where = model.device.description
    if is_host_array(array):
        raise DeviceError(f"{name} is in host memory (NumPy), the model on {where}; use lt.prefetch or cupy.asarray")
    operand = read(name, array, stream)
    if operand.device != model.device.ordinal:
        raise DeviceError(f"{name} is on GPU {operand.device}, the model on {where}")
    return operand


def _check_type(model: MLP, operand: Operand) -> None:
    if operand.dtype != model.dtype.value:
        raise DTypeError(f"{operand.name} is {operand.dtype}; the model is {model.dtype.value}")


def _check_rows(operand: Operand) -> None:
    rows, cols = operand.layout.shape
    if rows > 1 and cols > 1 and operand.strides[1] != 1:
        raise LayoutError(f"{operand.name} has strides {operand.strides}; its rows must be contiguous: lt.contiguous")


def copy_rows(source: Operand, targets: Sequence[Any], stream: int) -> None:
    """Puts copies of an operand's rows on a stream, into one row-major array after the other."""
    address, width = source.address, source.itemsize * (source.shape[1] if len(source.shape) == 2 else 1)
    pitch = source.strides[0] * source.itemsize if source.shape[0] > 1 else width
    for target in targets:
        rows = target.shape[0]
        if pitch == width:
            call("cuMemcpyDtoDAsync", target.data.ptr, address, rows * width, stream)
        else:
            call("cuMemcpy2DAsync", _matrix_copy(address, pitch, target.data.ptr, width, rows), stream)
        address += rows * pitch


def _matrix_copy(source: int, pitch: int, target: int, width: int, rows: int) -> driver.CUDA_MEMCPY2D:
    """Of rows of `width` bytes, `pitch` bytes apart, to where there are no gaps."""
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = _DEVICE
    copy.srcDevice, copy.srcPitch = source, pitch
    copy.dstDevice, copy.dstPitch = target, width
    copy.WidthInBytes, copy.Height = width, rows
    return copy
