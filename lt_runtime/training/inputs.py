"""Which batches a training step on a GPU accepts."""

from __future__ import annotations

from typing import Any

from lt_runtime.arrays.checks import check_shape
from lt_runtime.arrays.operand import Operand, read
from lt_runtime.errors import DeviceError, DTypeError, LayoutError
from lt_runtime.losses.cross_entropy import check_labels
from lt_runtime.training.mlp import MLP


def read_batch(model: MLP, x: Any, target: Any, classifies: bool, stream: int) -> tuple[Operand, Operand]:
    """The operands of a batch whose x is known to have the shape (M, inputs).

    Args:
        target: labels (M,) of a loss that `classifies`, else targets (M, outputs).

    Raises:
        DeviceError, ShapeError, DTypeError, LayoutError: one of them cannot be copied into a step's buffers as it is.
    """
    name = "labels" if classifies else "target"
    operands = _read(model, "x", x, stream), _read(model, name, target, stream)
    inputs, wanted = operands
    outputs = inputs.shape[0], model.dims[-1]
    _check_values(model, inputs)
    if classifies:
        check_labels(wanted, outputs)
    else:
        check_shape(name, wanted.shape, outputs, "the outputs' shape")
        _check_values(model, wanted)
    return operands


def _read(model: MLP, name: str, array: Any, stream: int) -> Operand:
    operand = read(name, array, stream)
    if operand.device != model.device.ordinal:
        where = f"{operand.place}, the model on {model.device.description}"
        raise DeviceError(f"{name} is {where}; use lt.prefetch or cupy.asarray")
    return operand


def _check_values(model: MLP, operand: Operand) -> None:
    """Refuses another type than the model's, and rows that are not contiguous."""
    if operand.dtype != model.dtype.value:
        raise DTypeError(f"{operand.name} is {operand.dtype}; the model is {model.dtype.value}")
    rows, cols = operand.layout.shape
    if rows > 1 and cols > 1 and operand.strides[1] != 1:
        raise LayoutError(f"{operand.name} has strides {operand.strides}; its rows must be contiguous: lt.contiguous")
