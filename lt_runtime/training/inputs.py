"""Batches that are handed to a training step on a GPU: what is accepted, and their copies into its buffers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from lt_runtime.arrays import Operand, check_shape, is_host_array, read
from lt_runtime.errors import DeviceError, DTypeError, LayoutError
from lt_runtime.gpu.direct import copy_on_device
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


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Rows of a batch that go into one of a step's buffers.

    Attributes:
        target: address of the buffer, in which there are no gaps between rows.
        offset: bytes before the first of these rows in the batch. pitch: from one row to the next.
        width: bytes of a row.
    """

    target: int
    offset: int
    pitch: int
    width: int
    rows: int

    def put(self, batch: int, stream: int) -> None:
        """Puts the copy on a stream, from the batch at an address."""
        source = batch + self.offset
        if self.pitch == self.width:
            copy_on_device(self.target, source, self.rows * self.width, stream)
        else:
            call("cuMemcpy2DAsync", _matrix_copy(source, self.pitch, self.target, self.width, self.rows), stream)


def row_copies(source: Operand, targets: Sequence[Any]) -> list[RowCopy]:
    """How an operand's rows go into one row-major array after the other."""
    width = source.itemsize * (source.shape[1] if len(source.shape) == 2 else 1)
    pitch = source.strides[0] * source.itemsize if source.shape[0] > 1 else width
    copies, row = [], 0
    for target in targets:
        copies.append(RowCopy(target.data.ptr, row * pitch, pitch, width, target.shape[0]))
        row += target.shape[0]
    return copies


def _matrix_copy(source: int, pitch: int, target: int, width: int, rows: int) -> driver.CUDA_MEMCPY2D:
    """Of rows of `width` bytes, `pitch` bytes apart, to where there are no gaps."""
    copy = driver.CUDA_MEMCPY2D()
    copy.srcMemoryType = copy.dstMemoryType = _DEVICE
    copy.srcDevice, copy.srcPitch = source, pitch
    copy.dstDevice, copy.dstPitch = target, width
    copy.WidthInBytes, copy.Height = width, rows
    return copy
