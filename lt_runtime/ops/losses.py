"""The losses, each with its gradient: mean squared error, Huber, binary cross-entropy and softmax cross-entropy.

Each takes predictions or logits, a target, optional row weights, and `grad_scale`, a factor of the gradient but not of
the loss; some also take weights of columns or classes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arguments import flag, integer, is_number, number, shown
from lt_runtime.arrays.checks import check_one_float32, check_same, check_shape, check_weights
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ArgumentError, DTypeError
from lt_runtime.gpu import driver
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.cross_entropy import FEW_CLASSES, CrossEntropyPass, Labels, Weighting
from lt_runtime.kernels.losses import ElementwiseLoss, ElementwiseLossPass, SummedLossPass
from lt_runtime.ops.call import New, Operation, PassOperation, PreparedCall, Request, perform, result_spec
from lt_runtime.problem import DType, Spec
from lt_runtime.products.plan import Pass

_GRADIENT, _LOSS, _WEIGHTS = 2, 3, slice(4, 6)  # indices in `LossOperation.names`
_DB: Final = 4  # index in `SummedLoss.names`
_RESULTS: Final = ("out_gradient", "out_loss")
_OTHERS: Final = ("grad_scale", "tally")
_INT64: Final = range(-(2**63), 2**63)
_NAN_BITS: Final = 0x7FC00000


_Scalars: TypeAlias = tuple[float, bool]


class Loss(NamedTuple):
    """A loss with its gradient.

    Attributes:
        loss: one FP32 number of shape (), on the arguments' device.
        gradient: with respect to the loss's first argument, of its shape.
    """

    loss: Any
    gradient: Any


class Tallied(NamedTuple):
    """Training steps pass it as `out_loss` instead of a buffer: the loss is then also added to sums over steps.

    The factor of the loss in the sums is its `share`. Rows are counted too if the loss has labels.

    Attributes:
        state: array on the GPU that holds a `TallyState`.
        first: whether the loss is of a step's first part.
    """

    state: Any
    first: bool


def adds_to_tally(classes: int | None) -> bool:
    """Whether a loss can be `Tallied`; `classes` is cross-entropy's number of classes, None for other losses."""
    return classes is None or classes <= FEW_CLASSES


class _NoElements:
    """The pass for empty arrays: sets the loss to NaN."""

    scratch_bytes = 0

    def launch(self, call: Call, memory: StreamMemory) -> None:
        """Writes NaN to the address of the loss; see `ElementwiseLossPass`."""
        driver.call("cuMemsetD32Async", call.addresses[3], _NAN_BITS, 1, memory.stream)


class LossOperation(PassOperation):
    """Base of all losses. A call's scalars are a factor of the gradient, and `Tallied.first`.

    Unless a subclass overrides `make_pass` and `read_target`, the loss is a mean over all elements, and the target has
    the shape of the scores.

    A call's arrays are those of the pass: the scores, the target, the gradient, the loss, the row weights, and the
    column weights, which not every loss has; then the gradient's scale, and `Tallied.state`. Its options are the loss's
    own.

    Attributes:
        exact: function that computes the loss of NumPy arrays and its gradient in float64. Its keyword arguments are
            the weights and the loss's own options.
        own_options: names of the loss's own options.
        loss: name of an elementwise loss in `kernels.losses.LOSSES`.
    """

    names: ClassVar[tuple[str, ...]] = ("prediction", "target", *_RESULTS, "row_weights", "column_weights", *_OTHERS)
    required = 2
    is_scaled = True
    loss: ClassVar[str]
    make_pass: ClassVar[Callable[..., Pass]] = staticmethod(functools.cache(ElementwiseLossPass))
    empty = _NoElements()
    exact: ClassVar[Callable[..., tuple[float, Any]]]
    own_options: ClassVar[tuple[str, ...]] = ()

    def read(self, operands: Sequence[Any], options: Any, scalars: _Scalars) -> Request:
        """See `Operation`."""
        scores, target, gradient, loss, *weights, scale, _ = operands
        dtype, layout = scores.element_type(), scores.layout
        exact = "float64" if dtype is DType.FLOAT64 else "float32"
        axes = (scores.shape[:-1], "row"), (scores.shape[-1:], "column")
        for each, (shape, what) in zip(weights, axes, strict=False):
            if each is not None:
                check_weights(each, shape, f"one a {what} of {scores.name}", exact)
        of_target = self.read_target(scores, target, [each is not None for each in weights], *options)
        if scale is not None:
            check_one_float32(scale, exact)
        new: dict[int, New] = {}
        wanted = self.needs_gradient(*options)
        gradient_layout = result_spec(_GRADIENT, gradient, scores.shape, scores, new).layout if wanted else None
        result_spec(_LOSS, loss, (), scores, new, DType(exact))
        problem = (dtype, layout, gradient_layout, *of_target) if layout.size else None
        written = *((_GRADIENT,) if wanted else ()), _LOSS, len(self.names) - 1
        return Request(problem, written, new, options, same=((0, _GRADIENT),))

    def needs_gradient(self, *options: Any) -> bool:
        """Whether a call with these options computes the gradient."""
        return True

    def read_target(self, scores: Operand, target: Operand, weighted: list[bool], *options: Any) -> tuple[Any, ...]:
        """Checks the target, and returns the arguments of `make_pass` that follow the layouts of the scores.

        Args:
            weighted: whether row weights and, for losses that take them, column weights are given.
        """
        check_shape(target.name, target.shape, scores.shape, f"the shape of {scores.name}")
        check_same(scores, target)
        return target.layout, ElementwiseLoss(self.loss, options[0] if options else 1.0, any(weighted))

    def check_values(self, scores: Any, target: Any, *options: Any) -> None:
        """Raises `ArgumentError` if NumPy arrays hold values that the loss does not take."""

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: _Scalars, stream: int) -> Call:
        """See `Operation`."""
        *of_pass, scale, tally = addresses
        return Call.of_loss(tuple(of_pass), stream, scalars, scale, tally)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: _Scalars) -> None:
        """See `Operation`."""
        scores, target, gradient, loss, *weights, scale, _ = arrays
        pairs, options = zip(self.names[_WEIGHTS], weights, strict=True), request.detail
        keywords = {name: each for name, each in pairs if each is not None}
        for name, each in keywords.items():
            check_not_negative(name, each)
        self.check_values(scores, target, *options)
        value, exact = self.exact(scores, target, **keywords, **dict(zip(self.own_options, options, strict=False)))
        factor = scalars[0] if scale is None else scalars[0] * float(scale.reshape(()))
        loss[...] = value
        if gradient is not None:
            gradient[...] = (exact * factor).astype(gradient.dtype)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: _Scalars) -> Loss:
        """See `Operation`."""
        return Loss(arrays[_LOSS], arrays[_GRADIENT])


class MeanSquaredError(LossOperation):
    """See `mse_loss`."""

    loss = "mse"
    exact = staticmethod(reference.mse_loss)


class Huber(LossOperation):
    """See `huber_loss`."""

    loss = "huber"
    exact = staticmethod(reference.huber_loss)
    own_options = ("delta",)


class BinaryCrossEntropy(LossOperation):
    """See `bce_with_logits`."""

    names = ("logits", "targets", *_RESULTS, "row_weights", "pos_weight", *_OTHERS)
    loss = "bce_with_logits"
    exact = staticmethod(reference.bce_with_logits)

    def check_values(self, scores: Any, target: Any, *options: Any) -> None:
        """See `LossOperation`."""
        check_not_negative("targets", target)


class CrossEntropy(LossOperation):
    """See `cross_entropy`."""

    names = ("logits", "labels", *_RESULTS, "row_weights", "class_weights", *_OTHERS)
    make_pass = staticmethod(functools.cache(CrossEntropyPass))
    exact = staticmethod(reference.cross_entropy)
    own_options = ("label_smoothing", "ignore_index")

    def read_target(self, scores: Operand, target: Operand, weighted: list[bool], *options: Any) -> tuple[Any, ...]:
        """See `LossOperation`."""
        smoothing, ignore_index, _ = options
        check_labels(target, scores.shape)
        return Labels(target.dtype == "int64", ignore_index), Weighting(smoothing, *weighted)

    def needs_gradient(self, *options: Any) -> bool:
        """See `LossOperation`."""
        return bool(options[2])

    def check_values(self, scores: Any, target: Any, *options: Any) -> None:
        """See `LossOperation`. Labels must be in range or ignored."""
        classes, ignore_index = scores.shape[-1], options[1]
        wrong = target[(target < 0) | (target >= classes)]
        wrong = wrong if ignore_index is None else wrong[wrong != ignore_index]
        if wrong.size:
            raise ArgumentError(f"labels holds {int(wrong[0])}; accepted are 0 to {classes - 1}")


def check_not_negative(name: str, array: NDArray[Any]) -> None:
    """Raises `ArgumentError` if a NumPy array holds a negative number or NaN."""
    wrong = array[~(array >= 0)]
    if wrong.size:
        raise ArgumentError(f"{name} holds {wrong[0]!s}; accepted are numbers that are not negative")


def check_labels(labels: Operand, logits_shape: tuple[int, ...]) -> None:
    """Raises `DTypeError`, `ShapeError` or `LayoutError` unless labels are packed, with an element for each row."""
    if labels.dtype not in ("int32", "int64"):
        raise DTypeError(f"labels has type {labels.dtype}; accepted are int32 and int64")
    check_shape("labels", labels.shape, logits_shape[:-1], "one a row of logits")
    labels.check_packed()


class SummedLoss(LossOperation):
    """See `summed_loss`. A call's options are the loss and `accumulate`."""

    names = ("prediction", "target", *_RESULTS, "out_db", *_OTHERS)
    loss = ""  # other operations have a fixed loss; this one takes the loss's name from the call's options
    make_pass = staticmethod(functools.cache(SummedLossPass))
    on_host = Operation.on_host

    def read(self, operands: Sequence[Any], options: Any, scalars: _Scalars) -> Request:
        """See `Operation`."""
        scores, target, gradient, loss, _, *others = operands
        request = super().read((scores, target, gradient, loss, None, None, *others), (), scalars)
        dtype, _, layout, *_ = request.problem
        specs = scores.spec, Spec(layout) if gradient is None else gradient.spec, target.spec
        return request._replace(problem=(dtype, *specs, *options), written=(*request.written, _DB))


MSE: Final = MeanSquaredError()
HUBER: Final = Huber()
BCE_WITH_LOGITS: Final = BinaryCrossEntropy()
CROSS_ENTROPY: Final = CrossEntropy()
SUMMED: Final = SummedLoss()


def perform_loss(
    operation: LossOperation, operands: tuple[Any, Any], weights: tuple[Any, ...], options: tuple[Any, ...], *rest: Any
) -> Loss:
    """Checks the scalars of a loss's call, and runs it.

    Args:
        operands: scores and target.
        weights: row weights and, for losses that take them, column weights.
        options: the loss's own options, which have been checked.
        rest: the caller's grad_scale, share, out_gradient, out_loss and stream.
    """
    grad_scale, share, out_gradient, out_loss, stream = rest
    factor, scale = share if type(share) is float else number("share", share), grad_scale
    if not 0 < factor <= 1:
        raise ArgumentError(f"share is {factor}; it must be above 0 and at most 1")
    if type(grad_scale) is float or is_number(grad_scale):
        factor, scale = factor * (grad_scale if type(grad_scale) is float else number("grad_scale", grad_scale)), None
    state, first = None, False
    if type(out_loss) is Tallied:
        (state, first), out_loss = out_loss, None
    arrays = *operands, out_gradient, out_loss, *weights, scale, state
    made: Loss = perform(operation, arrays, options, (factor, first), stream)
    return made


def summed_loss(
    loss: ElementwiseLoss, db: Any, accumulate: bool, prediction: Any, target: Any, *, share: float, **options: Any
) -> Loss:
    """A loss on a GPU with its gradient; the same pass also sums the gradient's columns.

    The sums are the bias gradient of the linear layer that made the prediction.

    Args:
        loss: without weights.
        db: (N,) buffer of the sums, packed and of the prediction's type.
        accumulate: whether the sums are added to the values in `db`.
        prediction, target, share: as for `mse_loss`; the prediction has rows.
        options: out_gradient, stream, and grad_scale (None or an array, not a number), as for `mse_loss`; out_loss, a
            `Tallied`.
    """
    state, first = options["out_loss"]
    arrays = prediction, target, options["out_gradient"], None, db, options["grad_scale"], state
    made: Loss = perform(SUMMED, arrays, (loss, accumulate), (share, first), options["stream"])
    return made


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

    All axes but the last are rows, as in every loss; M is their number.

    Args:
        prediction: (..., N), float32, float16 or bfloat16. target: (..., N), same type.
        row_weights: (...) FP32, not negative: factors of the rows' losses. The mean divides by M·N with weights too, as
            in Keras with `sample_weight`, and in PyTorch's `binary_cross_entropy(weight=...)`, so that the losses of
            parts of a batch add up to the batch's. For a weighted average, such as scikit-learn's with `sample_weight`,
            pass weights whose mean is 1. Only NumPy arrays are checked: on a GPU a check would have to wait.
        grad_scale: factor of the gradient, not of the loss: a number, or one FP32, shape () or (1,), on the operands'
            device. It keeps small FP16 gradients from vanishing.
        share: these rows' share of a larger batch, in (0, 1]: another factor of the gradient, not of the loss.
        out_gradient: (..., N) buffer; may be `prediction` itself.
        out_loss: () FP32 buffer.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        `loss`, shape () and FP32 whatever the operands' type, and `gradient` (..., N), of their type and rounded once.
        The loss of no elements is NaN.

    Raises:
        ArgumentError: share is out of its range; a weight is negative or NaN (NumPy arrays).
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    buffers = grad_scale, share, out_gradient, out_loss, stream
    return perform_loss(MSE, (prediction, target), (row_weights, None), (), *buffers)


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

    Here d is prediction - target, and the gradient is d, but at least -δ and at most δ, divided by M·N. This loss is
    PyTorch's `huber_loss`.

    Args:
        prediction: (..., N), float32, float16 or bfloat16. target: (..., N), same type.
        delta: δ, positive and finite.
        row_weights: (...) FP32, not negative: factors of the rows' losses; the mean divides by M·N all the same, see
            `mse_loss`.
        grad_scale: factor of the gradient, not of the loss: a number, or one FP32, shape () or (1,), on the operands'
            device. It keeps small FP16 gradients from vanishing.
        share: these rows' share of a larger batch, in (0, 1]: another factor of the gradient, not of the loss.
        out_gradient: (..., N) buffer; may be `prediction` itself.
        out_loss: () FP32 buffer.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        `loss`, shape () and FP32 whatever the operands' type, and `gradient` (..., N), of their type and rounded once.
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
    return perform_loss(HUBER, (prediction, target), (row_weights, None), (delta,), *buffers)


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

    Here z is a logit, t its target, σ the sigmoid function and p the column's positive weight. The loss is PyTorch's
    `binary_cross_entropy_with_logits`, and stays finite and exact for logits of any size. The gradient is
    (1 - t) σ(z) - p t (1 - σ(z)), divided by M·N.

    Args:
        logits: (..., N), float32, float16 or bfloat16.
        targets: (..., N), same type: the probability of the column's class, 1 if it is present and 0 if it is absent.
            Negative numbers and NaN are refused in NumPy arrays. The formula is applied to all others, as in PyTorch.
        pos_weight: (N,) FP32, p for each column, not negative: above 1 where positive targets are rare.
        row_weights: (...) FP32, not negative: factors of the rows' losses; the mean divides by M·N all the same, see
            `mse_loss`.
        grad_scale: factor of the gradient, not of the loss: a number, or one FP32, shape () or (1,), on the operands'
            device. It keeps small FP16 gradients from vanishing.
        share: these rows' share of a larger batch, in (0, 1]: another factor of the gradient, not of the loss.
        out_gradient: (..., N) buffer; may be `logits` itself.
        out_loss: () FP32 buffer.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        `loss`, shape () and FP32 whatever the logits' type, and `gradient` (..., N), of their type and rounded once.
        The loss of no elements is NaN.

    Raises:
        ArgumentError: share is out of its range; a weight or a target is negative or NaN (NumPy arrays).
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    buffers = grad_scale, share, out_gradient, out_loss, stream
    return perform_loss(BCE_WITH_LOGITS, (logits, targets), (row_weights, pos_weight), (), *buffers)


def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = -100,
    class_weights: Any = None,
    row_weights: Any = None,
    need_gradient: bool = True,
    grad_scale: Any = None,
    share: float = 1.0,
    out_gradient: Any = None,
    out_loss: Any = None,
    stream: Any = None,
) -> Loss:
    """Mean over rows of -Σ target · log softmax(logits), and its gradient (softmax - target) / rows.

    The target is 1 - ε at the label plus ε / C everywhere, with ε the label smoothing. All options have the meaning of
    PyTorch's `cross_entropy`, where `class_weights` is called `weight`.

    Args:
        logits: (..., C), float32, float16 or bfloat16.
        labels: (...) int32 or int64 in [0, C), or `ignore_index`.
        label_smoothing: ε, in [0, 1].
        ignore_index: rows with this label are left out of the mean, and their gradient is 0. None ignores no row, and
            spares a GPU the count of the other rows.
        class_weights: (C,) FP32, not negative. Each element of a row's target is multiplied by its class's weight, and
            the mean divides by the sum of the labels' weights instead of the number of rows.
        row_weights: (...) FP32, not negative: factors of the rows' losses; the mean divides by the same number as
            without them, see `mse_loss`.
        need_gradient: False computes the loss alone: the gradient in the result is None.
        grad_scale: factor of the gradient, not of the loss: a number, or one FP32, shape () or (1,), on the operands'
            device. It keeps small FP16 gradients from vanishing.
        share: these rows' share of a larger batch, in (0, 1]: another factor of the gradient, not of the loss. The
            parts' gradients add up to the batch's if all parts have equally many rows, no row is ignored and there are
            no class weights.
        out_gradient: (..., C) buffer; may be `logits` itself.
        out_loss: () FP32 buffer.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        `loss`, shape () and FP32 whatever the logits' type, and `gradient` (..., C), of their type and rounded once.
        On a GPU labels are not checked, which would mean to wait for them: a label that is out of range makes the loss
        and its row of the gradient NaN. If there are no rows, or all are ignored, the loss is NaN.

    Raises:
        ArgumentError: a label is out of range, or a weight negative or NaN (NumPy arrays); label_smoothing,
            ignore_index or share is out of its range; out_gradient is given with need_gradient=False.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    smoothing = label_smoothing if type(label_smoothing) is float else number("label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ArgumentError(f"label_smoothing is {smoothing}; accepted are numbers from 0 to 1")
    if ignore_index is not None:
        ignore_index = ignore_index if type(ignore_index) is int else integer("ignore_index", ignore_index)
        if ignore_index not in _INT64:
            raise ArgumentError(f"ignore_index is {shown(ignore_index)}; accepted are None and integers of 64 bits")
    if not flag("need_gradient", need_gradient) and out_gradient is not None:
        raise ArgumentError("out_gradient is given, but need_gradient is False; pass out_gradient=None")
    options, weights = (smoothing, ignore_index, need_gradient), (row_weights, class_weights)
    buffers = grad_scale, share, out_gradient, out_loss, stream
    return perform_loss(CROSS_ENTROPY, (logits, labels), weights, options, *buffers)
