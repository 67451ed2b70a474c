"""Losses, each with its gradient."""

from __future__ import annotations

import math
from typing import Any

from lt_runtime.arrays import on_host
from lt_runtime.errors import ArgumentError
from lt_runtime.ops import _loss_gpu, _loss_host
from lt_runtime.ops._loss_types import CrossEntropyOptions, Loss, Outputs, is_number

_INT64 = range(-(2**63), 2**63)


def mse_loss(
    prediction: Any,
    target: Any,
    *,
    grad_scale: Any = None,
    share: float = 1.0,
    out_gradient: Any = None,
    out_loss: Any = None,
    stream: Any = None,
) -> Loss:
    """Mean of (prediction - target)² over all elements, and its gradient 2 (prediction - target) / (M·N).

    Args:
        prediction: (M, N), float32, float16 or bfloat16. target: (M, N), same type.
        grad_scale: what the gradient, not the loss, is multiplied by: a number, or one FP32, shape () or (1,), with the
            operands. It keeps small FP16 gradients from vanishing.
        share: the part that these rows are of a larger batch; the gradient, not the loss, is multiplied by it too.
        out_gradient: (M, N) buffer; may be `prediction` itself.
        out_loss: () FP32 buffer.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        The loss, shape () and FP32 whatever the operands' type, and the gradient (M, N), of their type and rounded
        once. The loss of no elements is NaN.

    Raises:
        ArgumentError: share is out of its range.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    outputs = Outputs(out_gradient, out_loss, grad_scale, _share(share))
    if on_host({"prediction": prediction, "target": target}, outputs.arrays):
        return _loss_host.mse_loss(prediction, target, outputs)
    return _loss_gpu.mse_loss(prediction, target, outputs, stream)


def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    grad_scale: Any = None,
    share: float = 1.0,
    out_gradient: Any = None,
    out_loss: Any = None,
    stream: Any = None,
) -> Loss:
    """Mean over rows of -Σ target · log softmax(logits), and its gradient (softmax - target) / rows.

    The target is 1 - ε at the label plus ε / C everywhere, with ε the label smoothing. Everything means what it
    means in PyTorch's function of this name.

    Args:
        logits: (M, C), float32, float16 or bfloat16.
        labels: (M,) int32 or int64 in [0, C), or `ignore_index`.
        label_smoothing: ε, in [0, 1].
        ignore_index: rows with this label are left out of the mean, and their gradient is 0. None ignores none, and
            saves a GPU the counting.
        grad_scale: what the gradient, not the loss, is multiplied by: a number, or one FP32, shape () or (1,), with the
            operands. It keeps small FP16 gradients from vanishing.
        share: the part that these rows are of a larger batch; the gradient, not the loss, is multiplied by it too.
        out_gradient: (M, C) buffer; may be `logits` itself.
        out_loss: () FP32 buffer.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        The loss, shape () and FP32 whatever the logits' type, and the gradient (M, C), of their type and rounded once.
        On a GPU, where labels cannot be looked at without waiting for them, one that is out of range makes the loss and
        its row of the gradient NaN. The loss of no rows, or of none that counts, is NaN.

    Raises:
        ArgumentError: a label is out of range (NumPy arrays); label_smoothing, ignore_index or share is.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    options = _options(label_smoothing, ignore_index)
    outputs = Outputs(out_gradient, out_loss, grad_scale, _share(share))
    if on_host({"logits": logits, "labels": labels}, outputs.arrays):
        return _loss_host.cross_entropy(logits, labels, options, outputs)
    return _loss_gpu.cross_entropy(logits, labels, options, outputs, stream)


def _share(share: Any) -> float:
    if not is_number(share) or not 0 < share <= 1:
        raise ArgumentError(f"share is {share!r}; it must be above 0 and at most 1")
    return float(share)


def _options(label_smoothing: Any, ignore_index: Any) -> CrossEntropyOptions:
    if not is_number(label_smoothing) or math.isnan(label_smoothing) or not 0 <= label_smoothing <= 1:
        raise ArgumentError(f"label_smoothing is {label_smoothing!r}; accepted are numbers from 0 to 1")
    if ignore_index is not None and (type(ignore_index) is not int or ignore_index not in _INT64):
        raise ArgumentError(f"ignore_index is {ignore_index!r}; accepted are None and integers of 64 bits")
    return CrossEntropyOptions(float(label_smoothing), ignore_index)
