"""Softmax cross-entropy."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence
from typing import Any, Final

import numpy as np

from lt_runtime import reference
from lt_runtime.arguments import integer, number, shown
from lt_runtime.arrays.checks import check_shape
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ArgumentError, DTypeError
from lt_runtime.kernels.cross_entropy import CrossEntropyPass, Labels, Weighting
from lt_runtime.losses.operation import Loss, LossOperation, perform_loss

_LABELS: Final = ("int32", "int64")
_INT64: Final = range(-(2**63), 2**63)


class CrossEntropy(LossOperation):
    """The operation of `cross_entropy`; its own options are the label smoothing and the ignored label."""

    names = ("logits", "labels", "grad_scale", "out_gradient", "out_loss", "row_weights", "class_weights")
    make_pass = staticmethod(functools.cache(CrossEntropyPass))

    def read_target(
        self, scores: Operand, target: Operand, weighted: Sequence[bool], *options: Any
    ) -> tuple[Hashable, ...]:
        """See `LossOperation`."""
        smoothing, ignore_index = options
        check_labels(target, scores.shape)
        return Labels(target.dtype == "int64", ignore_index), smoothing, Weighting(*weighted)

    def exact(self, scores: Any, target: Any, weights: Sequence[Any], *options: Any) -> tuple[float, Any]:
        """See `LossOperation`; a label out of range raises `ArgumentError`."""
        smoothing, ignore_index = options
        row_weights, class_weights = weights
        classes = scores.shape[1]
        counts = np.full(target.shape, True) if ignore_index is None else target != ignore_index
        wrong = target[((target < 0) | (target >= classes)) & counts]
        if wrong.size:
            raise ArgumentError(f"labels holds {int(wrong[0])}; accepted are 0 to {classes - 1}")
        return reference.cross_entropy(
            scores,
            target,
            label_smoothing=smoothing,
            ignore_index=ignore_index,
            class_weights=class_weights,
            row_weights=row_weights,
        )


CROSS_ENTROPY: Final = CrossEntropy()


def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    class_weights: Any = None,
    row_weights: Any = None,
    grad_scale: Any = None,
    share: float = 1.0,
    out_gradient: Any = None,
    out_loss: Any = None,
    stream: Any = None,
) -> Loss:
    """Mean over rows of -Σ target · log softmax(logits), and its gradient (softmax - target) / rows.

    The target is 1 - ε at the label plus ε / C everywhere, with ε the label smoothing. Everything means what it
    means in PyTorch's function of this name, whose `weight` is `class_weights`.

    Args:
        logits: (M, C), float32, float16 or bfloat16.
        labels: (M,) int32 or int64 in [0, C), or `ignore_index`.
        label_smoothing: ε, in [0, 1].
        ignore_index: rows with this label are left out of the mean, and their gradient is 0. None ignores no row, and
            spares a GPU the count of the other rows.
        class_weights: (C,) FP32, not negative. Each element of a row's target is multiplied by its class's weight, and
            the mean divides by the sum of the labels' weights instead of the number of rows.
        row_weights: (M,) FP32, not negative: factors of the rows' losses; the mean divides by the same number as
            without them, see `mse_loss`.
        grad_scale: factor of the gradient, not of the loss: a number, or one FP32, shape () or (1,), on the operands'
            device. It keeps small FP16 gradients from vanishing.
        share: these rows' share of a larger batch, in (0, 1]: another factor of the gradient, not of the loss. The
            parts' gradients add up to the batch's if all parts have equally many rows, no row is ignored and there are
            no class weights.
        out_gradient: (M, C) buffer; may be `logits` itself.
        out_loss: () FP32 buffer.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        `loss`, shape () and FP32 whatever the logits' type, and `gradient` (M, C), of their type and rounded once.
        On a GPU labels are not checked, which would mean to wait for them: a label that is out of range makes the loss
        and its row of the gradient NaN. If there are no rows, or all are ignored, the loss is NaN.

    Raises:
        ArgumentError: a label is out of range, or a weight negative or NaN (NumPy arrays); label_smoothing,
            ignore_index or share is out of its range.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    smoothing = label_smoothing if type(label_smoothing) is float else number("label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ArgumentError(f"label_smoothing is {smoothing}; accepted are numbers from 0 to 1")
    if ignore_index is not None:
        ignore_index = ignore_index if type(ignore_index) is int else integer("ignore_index", ignore_index)
        if ignore_index not in _INT64:
            raise ArgumentError(f"ignore_index is {shown(ignore_index)}; accepted are None and integers of 64 bits")
    options, weights = (smoothing, ignore_index), (row_weights, class_weights)
    buffers = grad_scale, share, out_gradient, out_loss, stream
    return perform_loss(CROSS_ENTROPY, (logits, labels), weights, options, *buffers)


def check_labels(labels: Operand, logits_shape: tuple[int, ...]) -> None:
    """Raises `DTypeError`, `ShapeError` or `LayoutError` unless labels are a packed vector, one a row."""
    if labels.dtype not in _LABELS:
        raise DTypeError(f"labels has type {labels.dtype}; accepted are int32 and int64")
    check_shape("labels", labels.shape, logits_shape[:1], "one a row of logits")
    labels.check_packed()
