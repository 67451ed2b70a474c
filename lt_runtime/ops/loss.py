"""Losses, each with its gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lt_runtime import reference
from lt_runtime.arrays import Operand, check_device, check_no_overlap, check_same, check_shape, on_host
from lt_runtime.errors import ArgumentError, DTypeError, ShapeError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.kernels import THREADS, get_kernel
from lt_runtime.gpu.memory import stream_memory
from lt_runtime.gpu.params import SCALAR, CrossEntropyParams, LossFinishParams, Matrix, MseParams
from lt_runtime.ops._place import Place, host_output
from lt_runtime.problem import DType

_LABELS = {"int32": "int", "int64": "long long"}
_MAX_BLOCKS = 1024
_MAX_GRID_X = 2**31 - 1
_FLOAT32 = DType.FLOAT32.numpy
_NAN_BITS = 0x7FC00000


class Loss(NamedTuple):
    """The loss, one FP32 number that stays on its device until it is read, and its gradient."""

    loss: Any
    gradient: Any


def mse_loss(
    prediction: Any, target: Any, *, out_gradient: Any = None, out_loss: Any = None, stream: Any = None
) -> Loss:
    """Mean of (prediction - target)² over all elements, and its gradient 2 (prediction - target) / (M·N).

    Args:
        prediction: (M, N). target: (M, N), same type.
        out_gradient: (M, N) buffer; may be `prediction` itself.
        out_loss: () FP32 buffer.
        stream: as in `linear_fwd`.

    Returns:
        The loss, shape () and FP32 whatever the operands' type, and the gradient (M, N). The loss of no elements
        is NaN.

    Raises:
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    outputs = {"out_gradient": out_gradient, "out_loss": out_loss}
    if on_host({"prediction": prediction, "target": target}, outputs):
        return _mse_on_host(prediction, target, out_gradient, out_loss)
    place = Place.of("prediction", prediction, stream)
    with activated(place.device):
        predicted, wanted = place.read("prediction", prediction), place.read("target", target)
        check_same(predicted, wanted)
        check_shape("target", wanted.shape, predicted.shape, "the prediction's shape")
        gradient = _gradient(place, predicted, out_gradient, (wanted,))
        loss = _loss_buffer(place, predicted, out_loss, (predicted, wanted, gradient))
        _launch_mse(place, predicted, wanted, gradient, loss)
        return Loss(place.result(out_loss, loss, predicted), place.result(out_gradient, gradient, predicted))


def cross_entropy(
    logits: Any, labels: Any, *, out_gradient: Any = None, out_loss: Any = None, stream: Any = None
) -> Loss:
    """Mean over rows of -log softmax(logits)[label], and its gradient (softmax - onehot) / M.

    Args:
        logits: (M, C).
        labels: (M,) int32 or int64 in [0, C).
        out_gradient: (M, C) buffer; may be `logits` itself.
        out_loss: () FP32 buffer.
        stream: as in `linear_fwd`.

    Returns:
        The loss, shape () and FP32 whatever the logits' type, and the gradient (M, C). On a GPU, where labels
        cannot be looked at without waiting for them, one that is out of range makes the loss and its row of the
        gradient NaN. The loss of no rows is NaN.

    Raises:
        ArgumentError: a label is out of range (NumPy arrays).
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    outputs = {"out_gradient": out_gradient, "out_loss": out_loss}
    if on_host({"logits": logits, "labels": labels}, outputs):
        return _cross_entropy_on_host(logits, labels, out_gradient, out_loss)
    place = Place.of("logits", logits, stream)
    with activated(place.device):
        scores, classes = place.read("logits", logits), place.read("labels", labels)
        _check_labels(classes.dtype, classes.shape, scores.shape)
        check_device(scores, classes)
        gradient = _gradient(place, scores, out_gradient, (classes,))
        loss = _loss_buffer(place, scores, out_loss, (scores, classes, gradient))
        _launch_cross_entropy(place, scores, classes, gradient, loss)
        return Loss(place.result(out_loss, loss, scores), place.result(out_gradient, gradient, scores))


def _check_labels(dtype: str, shape: tuple[int, ...], logits_shape: tuple[int, ...]) -> None:
    if dtype not in _LABELS:
        raise DTypeError(f"labels has type {dtype}; accepted are int32 and int64")
    check_shape("labels", shape, logits_shape[:1], "one a row of logits")


def _check_matrix(name: str, shape: tuple[int, ...]) -> None:
    if len(shape) != 2:
        raise ShapeError(f"{name} has shape {shape}; accepted are matrices, two axes")


def _mse_on_host(prediction: Any, target: Any, out_gradient: Any, out_loss: Any) -> Loss:
    dtype = DType.parse("prediction", prediction.dtype)
    _check_matrix("prediction", prediction.shape)
    check_shape("target", target.shape, prediction.shape, "the prediction's shape")
    if target.dtype != prediction.dtype:
        raise DTypeError(f"target is {target.dtype.name} but prediction is {dtype.value}; types must be equal")
    with np.errstate(all="ignore"):
        value, gradient = reference.mse_loss(prediction, target)
    return _host_result(value, gradient, dtype, {"prediction": prediction, "target": target}, out_gradient, out_loss)


def _cross_entropy_on_host(logits: Any, labels: Any, out_gradient: Any, out_loss: Any) -> Loss:
    dtype = DType.parse("logits", logits.dtype)
    _check_matrix("logits", logits.shape)
    _check_labels(labels.dtype.name, labels.shape, logits.shape)
    wrong = labels[(labels < 0) | (labels >= logits.shape[1])]
    if wrong.size:
        raise ArgumentError(f"labels holds {int(wrong[0])}; accepted are 0 to {logits.shape[1] - 1}")
    with np.errstate(all="ignore"):
        value, gradient = reference.cross_entropy(logits, labels)
    return _host_result(value, gradient, dtype, {"logits": logits, "labels": labels}, out_gradient, out_loss)


def _host_result(
    value: float, gradient: Any, dtype: DType, inputs: dict[str, Any], out_gradient: Any, out_loss: Any
) -> Loss:
    """Puts both into their buffers; the gradient's may be the first of the inputs itself."""
    source, *_ = inputs
    others = {name: array for name, array in inputs.items() if name != source or array is not out_gradient}
    buffer = host_output("out_gradient", out_gradient, gradient.shape, dtype, others)
    loss = host_output("out_loss", out_loss, (), DType.FLOAT32, {**inputs, "out_gradient": buffer})
    with np.errstate(all="ignore"):  # overflow is a result here, as it is on a GPU
        buffer[...], loss[...] = gradient.astype(dtype.numpy), value
    return Loss(loss, buffer)


def _gradient(place: Place, like: Operand, out: Any, others: tuple[Operand, ...]) -> Operand:
    inputs = others if out is like.array else (like, *others)
    return place.output("out_gradient", out, like.shape, like, inputs)


def _loss_buffer(place: Place, like: Operand, out: Any, others: tuple[Operand, ...]) -> Operand:
    if out is None:
        return place.read("out_loss", like.library.empty((), _FLOAT32, place.device, place.stream))
    operand = place.read("out_loss", out)
    check_shape("out_loss", operand.shape, (), "one number")
    if operand.dtype != "float32":
        raise DTypeError(f"out_loss is {operand.dtype}; it must be float32")
    check_device(like, operand)
    check_no_overlap(operand, *others)
    return operand


def _launch_mse(place: Place, predicted: Operand, wanted: Operand, gradient: Operand, loss: Operand) -> None:
    dtype, layout = DType.parse("prediction", predicted.dtype), predicted.layout
    if not layout.size:
        _store_nan(loss, place)
        return
    blocks = min(-(-layout.size // THREADS), _MAX_BLOCKS)
    memory = stream_memory(place.device, place.stream)
    with memory.lock:
        partial = memory.scratch(4 * blocks)
        params = MseParams(
            prediction=Matrix.at(predicted.address, layout),
            target=Matrix.at(wanted.address, wanted.layout),
            gradient=Matrix.at(gradient.address, gradient.layout),
            partial=partial,
            rows=layout.rows,
            cols=layout.cols,
            gradient_scale=2.0 / layout.size,
        )
        kernel = get_kernel("mse_loss", _macros(dtype, "int32"), place.device)
        kernel.launch((blocks, 1), (THREADS, 1), params, place.stream)
        _finish(place, dtype, "int32", partial, blocks, 1.0 / layout.size, loss)


def _launch_cross_entropy(place: Place, scores: Operand, labels: Operand, gradient: Operand, loss: Operand) -> None:
    dtype, layout = DType.parse("logits", scores.dtype), scores.layout
    labels.check_vector()
    if not layout.size:
        _store_nan(loss, place)
        return
    memory = stream_memory(place.device, place.stream)
    with memory.lock:
        partial = memory.scratch(4 * layout.rows)
        params = CrossEntropyParams(
            logits=Matrix.at(scores.address, layout),
            labels=labels.address,
            gradient=Matrix.at(gradient.address, gradient.layout),
            partial=partial,
            rows=layout.rows,
            cols=layout.cols,
            gradient_scale=1.0 / layout.rows,
        )
        kernel = get_kernel("cross_entropy", _macros(dtype, labels.dtype), place.device)
        kernel.launch((min(layout.rows, _MAX_GRID_X), 1), (THREADS, 1), params, place.stream)
        _finish(place, dtype, labels.dtype, partial, layout.rows, 1.0 / layout.rows, loss)


def _macros(dtype: DType, labels: str) -> tuple[tuple[str, str], ...]:
    return (("SCALAR", SCALAR[dtype]), ("LABEL", _LABELS[labels]))


def _finish(place: Place, dtype: DType, labels: str, partial: int, parts: int, scale: float, loss: Operand) -> None:
    kernel = get_kernel("loss_finish", _macros(dtype, labels), place.device)
    kernel.launch((1, 1), (THREADS, 1), LossFinishParams(partial, loss.address, parts, scale), place.stream)


def _store_nan(loss: Operand, place: Place) -> None:
    """The mean over nothing."""
    call("cuMemsetD32Async", loss.address, _NAN_BITS, 1, place.stream)
