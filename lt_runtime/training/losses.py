"""The losses of training steps, named losses and functions of the caller, and the checks of a step's batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from lt_runtime.arguments import check_instance, one_of, shown
from lt_runtime.arrays.checks import check_shape, check_type
from lt_runtime.arrays.libraries import cupy_stream
from lt_runtime.arrays.operand import CUPY, HOST, Operand
from lt_runtime.errors import ArgumentError, DTypeError, LayoutError, ShapeError
from lt_runtime.kernels.losses import LOSSES as ELEMENTWISE
from lt_runtime.kernels.losses import ElementwiseLoss, launch_scale
from lt_runtime.ops import losses
from lt_runtime.training.mlp import MLP, check_model_type, read_inputs

LOSSES: Final[Mapping[str, tuple[Callable[..., losses.Loss], tuple[str, ...]]]] = {
    "cross_entropy": (losses.cross_entropy, ("label_smoothing", "class_weights")),
    "mse": (losses.mse_loss, ()),
    "huber": (losses.huber_loss, ("delta",)),
    "bce_with_logits": (losses.bce_with_logits, ("pos_weight",)),
}
"""The function of each loss, and the options that it takes in a training step."""
_ARRAYS: Final = ("class_weights", "pos_weight")  # options that are arrays; the others are numbers
_RETURNED: Final = "what the loss function returned"
LossName: TypeAlias = Literal["cross_entropy", "mse", "huber", "bce_with_logits"]
OwnFunction: TypeAlias = Callable[[Any, Any, Any, int | None], Any]


class StepLoss:
    """A loss of a model's outputs: one of `LOSSES`, or in `OwnLoss` a function of the caller's.

    Attributes:
        name: of the loss, or of the caller's function.
        classifies: whether the targets are labels.
        is_own: whether the loss is the caller's function, whose targets may be any array.
        elementwise: the form of the loss for the kernels of narrow MLPs; None if the loss needs labels or weights.

    Raises:
        ArgumentError: the loss does not take an option, or a number among the options is out of its range.
        OperandError: an array among the options does not fit the model.
    """

    name: str
    classifies = False
    is_own = False
    elementwise: ElementwiseLoss | None = None

    def __init__(self, name: str, options: Mapping[str, Any], model: MLP) -> None:
        self._function, known = LOSSES[name]
        for option in options:
            if option not in known:
                raise ArgumentError(
                    f"loss_options has {shown(option)}; those of {name!r} are {', '.join(known) or 'none'}"
                )
        self.name, self.classifies = name, name == "cross_entropy"
        numbers = {option: value for option, value in options.items() if option not in _ARRAYS}
        row = np.zeros((1, model.dims[-1]), np.float32)
        self._function(row, np.zeros(1, np.int32) if self.classifies else row, **numbers)  # refuses wrong numbers
        arrays = {option: _on_device(option, options[option], model) for option in options if option in _ARRAYS}
        self._options = {**numbers, **arrays}
        if name in ELEMENTWISE and all(each is None for each in arrays.values()):
            self.elementwise = ElementwiseLoss(name, **numbers)

    def compute(
        self, outputs: Any, target: Any, row_weights: Any, *, scale: Any, share: float, reuse: bool, stream: int | None
    ) -> losses.Loss:
        """Computes the loss, and its gradient in the outputs' type.

        Args:
            scale: factor of the gradient: one FP32 number on the model's device; None for 1.
            share: the share of these rows in the step's batch, another factor of the gradient.
            reuse: whether the gradient may be written over the outputs, because nothing reads them later.
            stream: a handle on a GPU, None on the host.
        """
        scaling = {"row_weights": row_weights, "grad_scale": scale, "share": share}
        out = outputs if reuse else None
        return self._function(outputs, target, **self._options, **scaling, out_gradient=out, stream=stream)


class OwnLoss(StepLoss):
    """A loss that is a function of the caller; see `TrainStep`."""

    is_own = True

    def __init__(self, function: OwnFunction, model: MLP) -> None:
        self._function, self._model = function, model
        self.name = getattr(function, "__name__", type(function).__name__)

    def compute(
        self, outputs: Any, target: Any, row_weights: Any, *, scale: Any, share: float, reuse: bool, stream: int | None
    ) -> losses.Loss:
        """See `StepLoss`. The function writes an FP32 gradient, which is scaled before it is rounded.

        The gradient is never written over the outputs, because the function may have kept a reference to them.
        """
        device = self._model.device.ordinal
        with contextlib.nullcontext() if device is None else cupy_stream(device, stream or 0):
            shape, fp32 = outputs.shape, np.dtype(np.float32)
            gradient: Any = np.zeros(shape, fp32) if device is None else CUPY.zeros(shape, fp32, device, stream or 0)
            loss = self._read(self._function(outputs, target, gradient, stream), stream)
            if scale is None and share == 1.0 and outputs.dtype == gradient.dtype:
                return losses.Loss(loss, gradient)
            if device is None:
                factor = np.float32(share) * (np.float32(1.0) if scale is None else scale)
                with np.errstate(all="ignore"):  # overflow and NaN are results here, as on a GPU
                    return losses.Loss(loss, (gradient * factor).astype(outputs.dtype))
            rounded = gradient
            if outputs.dtype != gradient.dtype:
                rounded = CUPY.empty(outputs.shape, outputs.dtype, device, stream or 0)
            if rounded.size:
                places, at_scale = (gradient.data.ptr, rounded.data.ptr), 0 if scale is None else scale.data.ptr
                launch_scale(*places, rounded.size, self._model.dtype, at_scale, share, device, stream or 0)
            return losses.Loss(loss, rounded)

    def _read(self, loss: Any, stream: int | None) -> Any:
        """Checks that the function has returned one FP32 number on the model's device, and returns it."""
        if isinstance(loss, np.generic):
            loss = np.asarray(loss)
        operand = self._model.device.read(_RETURNED, loss, stream or 0)
        check_type(operand, "float32")
        if operand.shape not in ((), (1,)):
            raise ShapeError(f"{_RETURNED} has shape {operand.shape}; accepted are () and (1,)")
        return loss.reshape(()) if operand.device == HOST else loss


def step_loss(loss: object, options: Any, model: MLP) -> StepLoss:
    """Makes the loss of a training step.

    Args:
        loss: a name of `LOSSES`, or a function.
        options: the options of a named loss, or None.

    Raises:
        ArgumentError, OperandError: the loss or one of the options is not accepted.
    """
    if callable(loss):
        if options:
            raise ArgumentError(
                "loss_options are for losses with a name; a function of your own may hold what it needs"
            )
        return OwnLoss(loss, model)
    name, given = one_of("loss", loss, LOSSES), {} if options is None else options
    check_instance("loss_options", given, Mapping, "a mapping from names to values")
    return StepLoss(name, given, model)


def _on_device(name: str, array: Any, model: MLP) -> Any:
    """Checks an array of weights of the model's outputs, or None; copies a NumPy array to the model's device."""
    if array is None:
        return None
    placed = array
    if isinstance(array, np.ndarray):
        placed = model.device.asarray(array.copy())
        model.device.synchronize()  # later steps may use any stream
    operand = model.device.read(name, placed, 0)
    check_type(operand, "float32")
    check_shape(name, operand.shape, (model.dims[-1],), "one an output")
    operand.check_packed()
    if isinstance(array, np.ndarray):
        losses.check_not_negative(name, array)
    return placed


Batch: TypeAlias = tuple[Operand, ...]
"""The arrays of a batch: inputs, targets and, if given, row weights."""
_FLOATS: Final = ("float16", "bfloat16", "float32", "float64")
_INTEGERS: Final = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


def read_batch(model: MLP, batch: Sequence[Any], loss: StepLoss, stream: int) -> Batch:
    """Reads and checks the arrays of a batch.

    Args:
        batch: x (M, inputs); the target; and (M,) FP32 row weights, if given. The target is labels (M,) for a loss that
            classifies, (M, outputs) for any other named loss, and any array of M rows for the caller's own loss.

    Raises:
        DeviceError, ShapeError, DTypeError, LayoutError: an array cannot be copied into a step's buffers.
    """
    (x, target, *row_weights), name = batch, "labels" if loss.classifies else "target"
    inputs, wanted = read_inputs(model, x, stream), model.device.read(name, target, stream)
    outputs = inputs.shape[0], model.dims[-1]
    _check_rows(inputs)
    if loss.is_own:
        _check_any(wanted, outputs[0])
    elif loss.classifies:
        losses.check_labels(wanted, outputs)
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
