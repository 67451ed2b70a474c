"""Losses of NumPy arrays, by the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

from lt_runtime import reference
from lt_runtime.arrays import check_shape
from lt_runtime.errors import ArgumentError, DTypeError, ShapeError
from lt_runtime.ops._loss_types import CrossEntropyOptions, Loss, Outputs, check_grad_scale, check_labels, is_number
from lt_runtime.ops._place import host_output
from lt_runtime.problem import DType


def mse_loss(prediction: Any, target: Any, outputs: Outputs) -> Loss:
    """See `lt_runtime.ops.loss.mse_loss`."""
    dtype = DType.parse("prediction", prediction.dtype)
    _check_matrix("prediction", prediction.shape)
    check_shape("target", target.shape, prediction.shape, "the prediction's shape")
    if target.dtype != prediction.dtype:
        raise DTypeError(f"target is {target.dtype.name} but prediction is {dtype.value}; types must be equal")
    with np.errstate(all="ignore"):
        value, gradient = reference.mse_loss(prediction, target)
    return _result(value, gradient, dtype, {"prediction": prediction, "target": target}, outputs)


def cross_entropy(logits: Any, labels: Any, options: CrossEntropyOptions, outputs: Outputs) -> Loss:
    """See `lt_runtime.ops.loss.cross_entropy`."""
    dtype = DType.parse("logits", logits.dtype)
    _check_matrix("logits", logits.shape)
    check_labels(labels.dtype.name, labels.shape, logits.shape)
    wrong = labels[((labels < 0) | (labels >= logits.shape[1])) & (labels != _unless_none(options.ignore_index))]
    if wrong.size:
        raise ArgumentError(f"labels holds {int(wrong[0])}; accepted are 0 to {logits.shape[1] - 1}")
    with np.errstate(all="ignore"):
        value, gradient = reference.cross_entropy(
            logits, labels, label_smoothing=options.label_smoothing, ignore_index=options.ignore_index
        )
    return _result(value, gradient, dtype, {"logits": logits, "labels": labels}, outputs)


def _unless_none(ignore_index: int | None) -> Any:
    """What to compare labels with; NaN is no label."""
    return np.nan if ignore_index is None else ignore_index


def _check_matrix(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 2:
        raise ShapeError(f"{name} has shape {shape}; accepted are matrices, two axes")


def _result(value: float, gradient: Any, dtype: DType, inputs: dict[str, Any], outputs: Outputs) -> Loss:
    """Puts both into their buffers; the gradient's may be the first of the inputs itself."""
    source, *_ = inputs
    scale = _scale(outputs.grad_scale) * outputs.share
    if isinstance(outputs.grad_scale, np.ndarray):
        inputs = {**inputs, "grad_scale": outputs.grad_scale}
    others = {name: array for name, array in inputs.items() if name != source or array is not outputs.gradient}
    buffer = host_output("out_gradient", outputs.gradient, gradient.shape, dtype, others)
    loss = host_output("out_loss", outputs.loss, (), DType.FLOAT32, {**inputs, "out_gradient": buffer})
    with np.errstate(all="ignore"):  # overflow is a result here, as it is on a GPU
        buffer[...], loss[...] = (gradient * scale).astype(dtype.numpy), value
    return Loss(loss, buffer)


def _scale(grad_scale: Any) -> float:
    if grad_scale is None:
        return 1.0
    if not is_number(grad_scale):
        check_grad_scale(grad_scale.dtype.name, grad_scale.shape)
    return float(np.reshape(grad_scale, ()))
