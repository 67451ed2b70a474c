"""Losses, each with its gradient."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from lt_runtime import reference
from lt_runtime.arguments import integer, is_number, number, shown
from lt_runtime.arrays.checks import check_same, check_shape, check_type
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ArgumentError, DTypeError, ShapeError
from lt_runtime.gpu import driver
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.cross_entropy import CrossEntropyPass, Labels
from lt_runtime.kernels.mse import MsePass
from lt_runtime.layout import packed
from lt_runtime.ops.call import Known, New, Operation, Reading, perform
from lt_runtime.problem import DType
from lt_runtime.products.plan import Plan

_GRADIENT, _LOSS = 3, 4  # places among the arrays
_NAN_BITS: Final = 0x7FC00000
_LABELS: Final = ("int32", "int64")
_INT64: Final = range(-(2**63), 2**63)


class Loss(NamedTuple):
    """The loss, one FP32 number that stays on its device until it is read, and its gradient."""

    loss: Any
    gradient: Any


class LossPlan(Plan):
    """A loss and its gradient. The loss of no elements is NaN.

    A call's addresses are those of the scores, the target, the gradient and the loss.

    Args:
        loss_pass: the kernels for the arrays' types and layouts; None where there are no elements.
    """

    def __init__(self, loss_pass: MsePass | CrossEntropyPass | None, device: int) -> None:
        self.device, self._pass = device, loss_pass

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        if self._pass is not None:
            memory.scratch(self._pass.scratch_bytes)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        if self._pass is None:
            driver.call("cuMemsetD32Async", call.addresses[-1], _NAN_BITS, 1, memory.stream)
            return
        self._pass.run(call, memory)


class LossOperation(Operation):
    """A loss of the rows of a matrix; a call's extra is the number that the gradient is multiplied by.

    What is asked is whether the gradient is written over the first array, and then the loss's own options.

    Attributes:
        make_pass: makes the kernels for a reading's problem and a device at the first use of each.
    """

    required = 2
    is_scaled = True
    make_pass: ClassVar[Callable[..., MsePass | CrossEntropyPass]]

    def read(self, operands: Sequence[Any], asked: Any, extras: float) -> Reading:
        """See `Operation`."""
        in_place, *options = asked
        scores, target, scale, gradient, loss = operands
        dtype, layout = DType.parse(scores.name, scores.dtype), scores.layout
        of_target = self.read_target(scores, target, *options)
        if scale is not None:
            check_type(scale, "float32")
            if scale.shape not in ((), (1,)):
                raise ShapeError(f"grad_scale has shape {scale.shape}; accepted are () and (1,)")
        new = {}
        if gradient is not None:
            check_shape(gradient.name, gradient.shape, scores.shape, "the result's shape")
            check_same(scores, gradient)
        elif not in_place:
            new[_GRADIENT] = New(scores.shape, dtype.numpy, scores.library)
        if loss is not None:
            check_shape("out_loss", loss.shape, (), "one number")
            check_type(loss, "float32")
        else:
            new[_LOSS] = New((), DType.FLOAT32.numpy, scores.library)
        gradient_layout = layout if in_place else packed(*scores.shape) if gradient is None else gradient.layout
        problem = (dtype, layout, gradient_layout, *of_target) if layout.size else None
        return Reading(problem, (0 if in_place else _GRADIENT, _LOSS), new, asked)

    @abstractmethod
    def read_target(self, scores: Operand, target: Operand, *options: Any) -> tuple[Hashable, ...]:
        """Checks the second array; gives what `make_pass` takes between the first array's layouts and the device."""

    @abstractmethod
    def exact(self, scores: Any, target: Any, *options: Any) -> tuple[float, Any]:
        """The loss of NumPy arrays and its gradient, in float64."""

    def plan(self, reading: Reading, device: int, stream: int) -> Plan:
        """See `Operation`."""
        return LossPlan(None if reading.problem is None else self.make_pass(*reading.problem, device), device)

    def call(self, known: Known, addresses: tuple[int, ...], extras: float, stream: int) -> Call:
        """See `Operation`."""
        scores, target, scale, gradient, loss = addresses
        in_place, *_ = known.reading.detail
        return Call((scores, target, scores if in_place else gradient, loss), stream, (extras, scale))

    def on_host(self, reading: Reading, arrays: Sequence[Any], extras: float) -> None:
        """See `Operation`."""
        scores, target, scale, gradient, loss = arrays
        in_place, *options = reading.detail
        value, exact = self.exact(scores, target, *options)
        factor = extras if scale is None else extras * float(scale.reshape(()))
        out = scores if in_place else gradient
        out[...], loss[...] = (exact * factor).astype(out.dtype), value

    def result(self, known: Known, arrays: Sequence[Any], extras: float) -> Loss:
        """See `Operation`."""
        in_place, *_ = known.reading.detail
        return Loss(arrays[_LOSS], arrays[0 if in_place else _GRADIENT])


class MeanSquaredError(LossOperation):
    """See `mse_loss`; it has no options of its own."""

    names = ("prediction", "target", "grad_scale", "out_gradient", "out_loss")
    make_pass = staticmethod(functools.cache(MsePass))

    def read_target(self, scores: Operand, target: Operand, *options: Any) -> tuple[Hashable, ...]:
        """See `LossOperation`."""
        check_shape(target.name, target.shape, scores.shape, "the prediction's shape")
        check_same(scores, target)
        return (target.layout,)

    def exact(self, scores: Any, target: Any, *options: Any) -> tuple[float, Any]:
        """See `LossOperation`."""
        return reference.mse_loss(scores, target)


class CrossEntropy(LossOperation):
    """See `cross_entropy`; its own options are the label smoothing and the ignored label."""

    names = ("logits", "labels", "grad_scale", "out_gradient", "out_loss")
    make_pass = staticmethod(functools.cache(CrossEntropyPass))

    def read_target(self, scores: Operand, target: Operand, *options: Any) -> tuple[Hashable, ...]:
        """See `LossOperation`."""
        smoothing, ignore_index = options
        check_labels(target, scores.shape)
        return Labels(target.dtype == "int64", ignore_index), smoothing

    def exact(self, scores: Any, target: Any, *options: Any) -> tuple[float, Any]:
        """See `LossOperation`; a label out of range raises `ArgumentError`."""
        smoothing, ignore_index = options
        classes = scores.shape[1]
        counts = np.full(target.shape, True) if ignore_index is None else target != ignore_index
        wrong = target[((target < 0) | (target >= classes)) & counts]
        if wrong.size:
            raise ArgumentError(f"labels holds {int(wrong[0])}; accepted are 0 to {classes - 1}")
        return reference.cross_entropy(scores, target, label_smoothing=smoothing, ignore_index=ignore_index)


MSE: Final = MeanSquaredError()
CROSS_ENTROPY: Final = CrossEntropy()


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
    return _perform(MSE, prediction, target, (), grad_scale, share, out_gradient, out_loss, stream)


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
    smoothing = label_smoothing if type(label_smoothing) is float else number("label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ArgumentError(f"label_smoothing is {smoothing}; accepted are numbers from 0 to 1")
    if ignore_index is not None:
        ignore_index = ignore_index if type(ignore_index) is int else integer("ignore_index", ignore_index)
        if ignore_index not in _INT64:
            raise ArgumentError(f"ignore_index is {shown(ignore_index)}; accepted are None and integers of 64 bits")
    options = smoothing, ignore_index
    return _perform(CROSS_ENTROPY, logits, labels, options, grad_scale, share, out_gradient, out_loss, stream)


def _perform(
    operation: LossOperation,
    scores: Any,
    target: Any,
    options: tuple[Hashable, ...],
    grad_scale: Any,
    share: Any,
    out_gradient: Any,
    out_loss: Any,
    stream: Any,
) -> Loss:
    factor, scale = share if type(share) is float else number("share", share), grad_scale
    if not 0 < factor <= 1:
        raise ArgumentError(f"share is {factor}; it must be above 0 and at most 1")
    if type(grad_scale) is float or is_number(grad_scale):
        factor, scale = factor * (grad_scale if type(grad_scale) is float else number("grad_scale", grad_scale)), None
    in_place = out_gradient is not None and out_gradient is scores
    arrays = (scores, target, scale, None if in_place else out_gradient, out_loss)
    made: Loss = perform(operation, arrays, (in_place, *options), factor, stream)
    return made


def check_labels(labels: Operand, logits_shape: tuple[int, ...]) -> None:
    """Raises `DTypeError`, `ShapeError` or `LayoutError` unless there is an integer a row, without gaps."""
    if labels.dtype not in _LABELS:
        raise DTypeError(f"labels has type {labels.dtype}; accepted are int32 and int64")
    check_shape("labels", labels.shape, logits_shape[:1], "one a row of logits")
    labels.check_packed()
