"""The checks of a training step's batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from lt_runtime.arrays.checks import check_shape, check_type
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import DTypeError, LayoutError, ShapeError
from lt_runtime.losses.functions import check_labels
from lt_runtime.training.losses import StepLoss
from lt_runtime.training.mlp import MLP, check_model_type, read_inputs

Batch: TypeAlias = tuple[Operand, ...]
"""Inputs, targets and, if there are any, row weights."""
_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
_INTEGERS: Final = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


def read_batch(model: MLP, batch: Sequence[Any], loss: StepLoss, stream: int) -> Batch:
    """Reads and checks the arrays of a batch.

    Args:
        batch: x (M, inputs); the target: labels (M,) for a loss that classifies, (M, outputs) for another loss with a
            name, any array of M rows for the caller's own loss; and (M,) FP32 row weights, if there are any.

    Raises:
        DeviceError, ShapeError, DTypeError, LayoutError: one of them cannot be copied into a step's buffers as it is.
    """
    (x, target, *row_weights), name = batch, "labels" if loss.classifies else "target"
    inputs, wanted = read_inputs(model, x, stream), model.device.read(name, target, stream)
    outputs = inputs.shape[0], model.dims[-1]
    _check_rows(inputs)
    if loss.is_own:
        _check_any(wanted, outputs[0])
    elif loss.classifies:
        check_labels(wanted, outputs)
    else:
        check_shape(name, wanted.shape, outputs, "the outputs' shape")
        check_model_type(model, wanted)
        _check_rows(wanted)
    weights = [model.device.read("row_weights", each, stream) for each in row_weights]
    for each in weights:
        check_type(each, "float32")
        check_shape("row_weights", each.shape, outputs[:1], "one a row of x")
        each.check_packed()
    return inputs, wanted, *weights


def _check_any(target: Operand, rows: int) -> None:
    """Refuses a target with another number of rows, without numbers, or with rows that are not contiguous."""
    if target.shape[:1] != (rows,):
        raise ShapeError(f"target has shape {target.shape}; it must have {rows} rows, as x has")
    if target.dtype not in (*_FLOATS, *_INTEGERS, "bool"):
        raise DTypeError(f"target is {target.dtype}; accepted are {', '.join(_FLOATS)}, integers and bool")
    if len(target.shape) == 2:
        _check_rows(target)
    else:
        target.check_packed()


def _check_rows(operand: Operand) -> None:
    rows, cols = operand.layout.shape
    if rows > 1 and cols > 1 and operand.strides[1] != 1:
        raise LayoutError(f"{operand.name} has strides {operand.strides}; its rows must be contiguous: lt.contiguous")
