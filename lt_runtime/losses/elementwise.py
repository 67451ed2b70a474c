"""Losses that are the mean of a function of each element: MSE, Huber, binary cross-entropy."""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Sequence
from typing import Any, ClassVar, Final

from lt_runtime import reference
from lt_runtime.arguments import number
from lt_runtime.arrays.checks import check_same, check_shape
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ArgumentError
from lt_runtime.kernels.elementwise_loss import ElementwiseLoss, ElementwiseLossPass
from lt_runtime.losses.operation import Loss, LossOperation, check_not_negative, perform_loss


class ElementwiseLossOperation(LossOperation):
    """A loss that is a mean over all elements.

    Attributes:
        loss: the name of the loss in the kernels.
    """

    loss: ClassVar[str]
    make_pass = staticmethod(functools.cache(ElementwiseLossPass))

    def read_target(
        self, scores: Operand, target: Operand, weighted: Sequence[bool], *options: Any
    ) -> tuple[Hashable, ...]:
        """See `LossOperation`."""
        check_shape(target.name, target.shape, scores.shape, f"the shape of {scores.name}")
        check_same(scores, target)
        return target.layout, ElementwiseLoss(self.loss, options[0] if options else 1.0, any(weighted))


class MeanSquaredError(ElementwiseLossOperation):
    """See `mse_loss`; it has no options of its own."""

    names = ("prediction", "target", "grad_scale", "out_gradient", "out_loss", "row_weights")
    loss = "mse"

    def exact(self, scores: Any, target: Any, weights: Sequence[Any], *options: Any) -> tuple[float, Any]:
        """See `LossOperation`."""
        return reference.mse_loss(scores, target, row_weights=weights[0])


class Huber(ElementwiseLossOperation):
    """See `huber_loss`; its own option is δ."""

    names = MeanSquaredError.names
    loss = "huber"

    def exact(self, scores: Any, target: Any, weights: Sequence[Any], *options: Any) -> tuple[float, Any]:
        """See `LossOperation`."""
        (delta,) = options
        return reference.huber_loss(scores, target, delta=delta, row_weights=weights[0])


class BinaryCrossEntropy(ElementwiseLossOperation):
    """See `bce_with_logits`; it has no options of its own."""

    names = ("logits", "targets", "grad_scale", "out_gradient", "out_loss", "row_weights", "pos_weight")
    loss = "bce_with_logits"

    def exact(self, scores: Any, target: Any, weights: Sequence[Any], *options: Any) -> tuple[float, Any]:
        """See `LossOperation`."""
        row_weights, pos_weight = weights
        check_not_negative("targets", target)
        return reference.bce_with_logits(scores, target, pos_weight=pos_weight, row_weights=row_weights)


MSE: Final = MeanSquaredError()
HUBER: Final = Huber()
BCE_WITH_LOGITS: Final = BinaryCrossEntropy()


def mse_loss(
    prediction: Any,
    target: Any,
    *,
    row_weights: Any = None,
    grad_scale: Any = None,
    share: float = 1.0,
    out_gradient: Any = None,
    out_loss: Any = None,
    stream: Any = None,
) -> Loss:
    """Mean of (prediction - target)² over all elements, and its gradient 2 (prediction - target) / (M·N).

    Args:
        prediction: (M, N), float32, float16 or bfloat16. target: (M, N), same type.
        row_weights: (M,) FP32, not negative: factors of the rows' losses. The mean divides by M·N all the same, as
            Keras does with `sample_weight`, and PyTorch in `binary_cross_entropy(weight=...)`, so that the losses of
            parts of a batch add up to the batch's. For a weighted average, such as scikit-learn's with `sample_weight`,
            pass weights whose mean is 1. Only NumPy arrays are checked: on a GPU a check would have to wait.
        grad_scale: factor of the gradient, not of the loss: a number, or one FP32, shape () or (1,), on the operands'
            device. It keeps small FP16 gradients from vanishing.
        share: these rows' share of a larger batch, in (0, 1]: another factor of the gradient, not of the loss.
        out_gradient: (M, N) buffer; may be `prediction` itself.
        out_loss: () FP32 buffer.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        `loss`, shape () and FP32 whatever the operands' type, and `gradient` (M, N), of their type and rounded once.
        The loss of no elements is NaN.

    Raises:
        ArgumentError: share is out of its range; a weight is negative or NaN (NumPy arrays).
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    buffers = grad_scale, share, out_gradient, out_loss, stream
    return perform_loss(MSE, (prediction, target), (row_weights,), (), *buffers)


def huber_loss(
    prediction: Any,
    target: Any,
    *,
    delta: float = 1.0,
    row_weights: Any = None,
    grad_scale: Any = None,
    share: float = 1.0,
    out_gradient: Any = None,
    out_loss: Any = None,
    stream: Any = None,
) -> Loss:
    """Mean over all elements of d² / 2 where |d| <= δ and of δ (|d| - δ / 2) elsewhere, and its gradient.

    Here d is prediction - target, and the gradient is d, but at least -δ and at most δ, divided by M·N. It is PyTorch's
    `huber_loss`.

    Args:
        prediction: (M, N), float32, float16 or bfloat16. target: (M, N), same type.
        delta: δ, positive and finite.
        row_weights: (M,) FP32, not negative: factors of the rows' losses; the mean divides by M·N all the same, see
            `mse_loss`.
        grad_scale: factor of the gradient, not of the loss: a number, or one FP32, shape () or (1,), on the operands'
            device. It keeps small FP16 gradients from vanishing.
        share: these rows' share of a larger batch, in (0, 1]: another factor of the gradient, not of the loss.
        out_gradient: (M, N) buffer; may be `prediction` itself.
        out_loss: () FP32 buffer.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        `loss`, shape () and FP32 whatever the operands' type, and `gradient` (M, N), of their type and rounded once.
        The loss of no elements is NaN.

    Raises:
        ArgumentError: delta or share is out of its range; a weight is negative or NaN (NumPy arrays).
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    if type(delta) is not float:
        delta = number("delta", delta)
    if not 0 < delta < math.inf:
        raise ArgumentError(f"delta is {delta}; it must be positive and finite")
    buffers = grad_scale, share, out_gradient, out_loss, stream
    return perform_loss(HUBER, (prediction, target), (row_weights,), (delta,), *buffers)


def bce_with_logits(
    logits: Any,
    targets: Any,
    *,
    pos_weight: Any = None,
    row_weights: Any = None,
    grad_scale: Any = None,
    share: float = 1.0,
    out_gradient: Any = None,
    out_loss: Any = None,
    stream: Any = None,
) -> Loss:
    """Mean over all elements of -p t log σ(z) - (1 - t) log (1 - σ(z)), and its gradient.

    Here z is a logit, t its target, σ the sigmoid function and p the column's positive weight. It is PyTorch's
    `binary_cross_entropy_with_logits`, and stays finite and exact for logits of any size. The gradient is
    (1 - t) σ(z) - p t (1 - σ(z)), divided by M·N.

    Args:
        logits: (M, N), float32, float16 or bfloat16.
        targets: (M, N), same type: 1 for what is there and 0 for what is not, or anything between. Negative numbers and
            NaN are refused in NumPy arrays. The formula is applied to all others, as in PyTorch.
        pos_weight: (N,) FP32, p for each column, not negative: above 1 where positive targets are rare.
        row_weights: (M,) FP32, not negative: factors of the rows' losses; the mean divides by M·N all the same, see
            `mse_loss`.
        grad_scale: factor of the gradient, not of the loss: a number, or one FP32, shape () or (1,), on the operands'
            device. It keeps small FP16 gradients from vanishing.
        share: these rows' share of a larger batch, in (0, 1]: another factor of the gradient, not of the loss.
        out_gradient: (M, N) buffer; may be `logits` itself.
        out_loss: () FP32 buffer.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        `loss`, shape () and FP32 whatever the logits' type, and `gradient` (M, N), of their type and rounded once. The
        loss of no elements is NaN.

    Raises:
        ArgumentError: share is out of its range; a weight or a target is negative or NaN (NumPy arrays).
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    buffers = grad_scale, share, out_gradient, out_loss, stream
    return perform_loss(BCE_WITH_LOGITS, (logits, targets), (row_weights, pos_weight), (), *buffers)
