"""The common part of all losses: scores, target, weights of rows and columns, and the gradient with its scale."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from numpy.typing import NDArray

from lt_runtime.arguments import is_number, number
from lt_runtime.arrays.checks import check_shape, check_type
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ArgumentError, ShapeError
from lt_runtime.gpu import driver
from lt_runtime.gpu.memory import StreamMemory
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.cross_entropy import CrossEntropyPass
from lt_runtime.kernels.losses import ElementwiseLossPass
from lt_runtime.ops.call import perform
from lt_runtime.ops.operation import New, Operation, PreparedCall, Request, result_spec
from lt_runtime.problem import DType
from lt_runtime.products.plan import Plan

_GRADIENT, _LOSS = 3, 4  # indices in `LossOperation.names`
_NAN_BITS: Final = 0x7FC00000


class Loss(NamedTuple):
    """A loss with its gradient.

    Attributes:
        loss: one FP32 number of shape (), on the arguments' device.
        gradient: with respect to the loss's first argument, of its shape.
    """

    loss: Any
    gradient: Any


class LossPlan(Plan):
    """The plan of a loss and its gradient. The loss of no elements is NaN.

    A call's addresses belong, in this order, to the scores, target, gradient, loss, row weights and column weights.

    Args:
        loss_pass: the kernels for the arrays' types and layouts; None if the arrays are empty.
    """

    def __init__(self, loss_pass: ElementwiseLossPass | CrossEntropyPass | None, device: int) -> None:
        self.device, self._pass = device, loss_pass

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        if self._pass is not None:
            memory.scratch(self._pass.scratch_bytes)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        if self._pass is None:
            driver.call("cuMemsetD32Async", call.addresses[3], _NAN_BITS, 1, memory.stream)
            return
        self._pass.run(call, memory)


class LossOperation(Operation):
    """A loss of the rows of a matrix; a call's scalar is the number that the gradient is multiplied by.

    A call's arrays are the scores, the target, the gradient's scale, the gradient, the loss, the row weights and, for
    some losses, the column weights. Its options are the loss's own.

    Attributes:
        make_pass: makes the kernels for a request's problem and a device, at the first use of the problem.
        exact: computes the loss of NumPy arrays and its gradient in float64. Its keywords are the names of the weights
            and of the loss's own options.
        own_options: names of the loss's own options.
    """

    required = 2
    is_scaled = True
    make_pass: ClassVar[Callable[..., ElementwiseLossPass | CrossEntropyPass]]
    exact: ClassVar[Callable[..., tuple[float, Any]]]
    own_options: ClassVar[tuple[str, ...]] = ()

    def read(self, operands: Sequence[Any], options: Any, scalars: float) -> Request:
        """See `Operation`."""
        scores, target, scale, gradient, loss, *weights = operands
        dtype, layout = scores.element_type(), scores.layout
        check_weights(scores, weights)
        of_target = self.read_target(scores, target, [each is not None for each in weights], *options)
        if scale is not None:
            check_type(scale, "float32")
            if scale.shape not in ((), (1,)):
                raise ShapeError(f"grad_scale has shape {scale.shape}; accepted are () and (1,)")
        new: dict[int, New] = {}
        gradient_layout = result_spec(_GRADIENT, gradient, scores.shape, scores, new).layout
        result_spec(_LOSS, loss, (), scores, new, DType.FLOAT32)
        problem = (dtype, layout, gradient_layout, *of_target) if layout.size else None
        return Request(problem, (_GRADIENT, _LOSS), new, options, same=(0, _GRADIENT))

    @abstractmethod
    def read_target(
        self, scores: Operand, target: Operand, weighted: Sequence[bool], *options: Any
    ) -> tuple[Hashable, ...]:
        """Checks the target, and returns the arguments of `make_pass` that follow the layouts of the scores.

        Args:
            weighted: whether row weights and, for losses that take them, column weights are given.
        """

    def check_values(self, scores: Any, target: Any, *options: Any) -> None:
        """Raises `ArgumentError` if NumPy arrays hold values that the loss does not take."""

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """See `Operation`."""
        return LossPlan(None if request.problem is None else self.make_pass(*request.problem, device), device)

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: float, stream: int) -> Call:
        """See `Operation`."""
        scores, target, scale, gradient, loss, of_rows, *of_columns = addresses
        column_weights = of_columns[0] if of_columns else 0
        return Call((scores, target, gradient, loss, of_rows, column_weights), stream, (scalars, scale))

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: float) -> None:
        """See `Operation`."""
        scores, target, scale, gradient, loss, *weights = arrays
        options = request.detail
        keywords = dict(zip(self.names[_LOSS + 1 :], weights, strict=True))
        for name, each in keywords.items():
            if each is not None:
                check_not_negative(name, each)
        self.check_values(scores, target, *options)
        value, exact = self.exact(scores, target, **keywords, **dict(zip(self.own_options, options, strict=True)))
        factor = scalars if scale is None else scalars * float(scale.reshape(()))
        gradient[...], loss[...] = (exact * factor).astype(gradient.dtype), value

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: float) -> Loss:
        """See `Operation`."""
        return Loss(arrays[_LOSS], arrays[_GRADIENT])


def check_not_negative(name: str, array: NDArray[Any]) -> None:
    """Raises `ArgumentError` if a NumPy array holds a negative number or NaN."""
    wrong = array[~(array >= 0)]
    if wrong.size:
        raise ArgumentError(f"{name} holds {wrong[0]!s}; accepted are numbers that are not negative")


def check_weights(scores: Operand, weights: Sequence[Operand | None]) -> None:
    """Checks that row weights and column weights are packed FP32 vectors of the right lengths.

    Args:
        weights: row weights and, for losses that take them, column weights; None where they are absent.

    Raises:
        DTypeError, ShapeError, LayoutError: a vector has another type, length or layout.
    """
    for each, length, what in zip(weights, scores.shape, ("row", "column"), strict=False):
        if each is not None:
            check_type(each, "float32")
            check_shape(each.name, each.shape, (length,), f"one a {what} of {scores.name}")
            each.check_packed()


def perform_loss(
    operation: LossOperation, operands: tuple[Any, Any], weights: tuple[Any, ...], options: tuple[Any, ...], *rest: Any
) -> Loss:
    """Checks the scalars of a loss's call, and runs it.

    Args:
        operands: scores and target.
        weights: row weights and, for losses that take them, column weights.
        options: the loss's own options, which have been checked.
        rest: grad_scale, share, out_gradient, out_loss and stream, as the caller gave them.
    """
    grad_scale, share, out_gradient, out_loss, stream = rest
    factor, scale = share if type(share) is float else number("share", share), grad_scale
    if not 0 < factor <= 1:
        raise ArgumentError(f"share is {factor}; it must be above 0 and at most 1")
    if type(grad_scale) is float or is_number(grad_scale):
        factor, scale = factor * (grad_scale if type(grad_scale) is float else number("grad_scale", grad_scale)), None
    made: Loss = perform(operation, (*operands, scale, out_gradient, out_loss, *weights), options, factor, stream)
    return made
