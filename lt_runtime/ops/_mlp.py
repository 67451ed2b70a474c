"""The fused passes of a narrow MLP as operations: outputs; gradients; loss with gradients.

These operations run on GPUs only: an MLP on the host runs layer by layer.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Final

from lt_runtime.arrays.checks import check_one_float32, check_same, check_shape
from lt_runtime.arrays.operand import Operand
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.mlp import MAX_LAYERS
from lt_runtime.ops.call import New, Operation, PreparedCall, Request, result_spec
from lt_runtime.plans.mlp import MlpPlan
from lt_runtime.problem import Activation, DType, MLPProblem
from lt_runtime.products.plan import Plan

# Number of arrays for the parameters of `MAX_LAYERS` layers: each layer has a weight and a bias.
_PLACES: Final = 2 * MAX_LAYERS
# Index of the first weight among the arrays of a call.
_FIRST: Final = 2
_OUT: Final = 1
# Index of the loss among the arrays, after all parameters, their gradients, and `grad_scale`.
_LOSS: Final = _FIRST + 2 * _PLACES + 1
_plan: Final = functools.lru_cache(maxsize=2048)(MlpPlan)


def _named(suffix: str = "") -> tuple[str, ...]:
    return tuple(f"layer{i}.{each}{suffix}" for i in range(MAX_LAYERS) for each in ("weight", "bias"))


def filled(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """Pads a list of alternating weights and biases with None to the length for `MAX_LAYERS` layers."""
    return (*arrays, *(None,) * (_PLACES - len(arrays)))


class MlpOutputs(Operation):
    """The outputs of an MLP without dropout, whose last layer has no activation.

    A call's option is the hidden layers' activation.
    """

    names = ("x", "out", *_named())
    required = 1

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        x, out, *parameters = operands
        problem = _problem(x, parameters, options, backward=False)
        new: dict[int, New] = {}
        y = result_spec(_OUT, out, (problem.rows, problem.dims[-1]), x, new).layout
        return Request(problem, (_OUT,), new, (x.layout, y, False, None))

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """See `Operation`."""
        return _plan(request.problem, device, *request.detail)

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """See `Operation`."""
        return Call(addresses[: _FIRST + 2 * len(prepared.request.problem.biases)], stream)


class MlpGradients(MlpOutputs):
    """The gradients of all parameters of an MLP, from its inputs and the gradient of its outputs, or from a loss.

    A call's options are the hidden layers' activation, whether the gradients are accumulated in their buffers, and an
    `ElementwiseLoss` or None. The array `y` holds the gradient of the outputs or, with a loss, the targets. With a loss
    the call's scalars are `LossArguments`. The array `grad_scale` then holds another factor, one FP32 number,
    and the array `out_loss` receives the loss.
    """

    names = ("x", "y", *_named(), *_named(".grad"), "grad_scale", "out_loss")
    required = 2
    is_scaled = True

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        activation, accumulate, loss = options
        x, y, *rest, scale, out_loss = operands
        parameters, gradients = rest[:_PLACES], rest[_PLACES:]
        problem = _problem(x, parameters, activation, backward=True, loss=loss is not None)
        check_shape(y.name, y.shape, (problem.rows, problem.dims[-1]), "the outputs' shape")
        check_same(x, y)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter is not None:
                check_shape(gradient.name, gradient.shape, parameter.shape, f"that of {parameter.name}")
                check_same(x, gradient)
                gradient.check_packed()
        if scale is not None:
            check_one_float32(scale)
        new: dict[int, New] = {}
        written = tuple(place for place, each in enumerate(parameters, _FIRST + _PLACES) if each is not None)
        if loss is not None:
            result_spec(_LOSS, out_loss, (), x, new, DType.FLOAT32)
            written = *written, _LOSS
        return Request(problem, written, new, (x.layout, y.layout, accumulate, loss))

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """See `Operation`."""
        count, first = 2 * len(prepared.request.problem.biases), _FIRST + _PLACES
        *_, scale, loss = addresses
        of_loss = (loss,) if loss else ()
        of_mlp = *addresses[: _FIRST + count], *addresses[first : first + count]
        return Call((*of_mlp, *of_loss), stream, (scalars, scale))


MLP_OUTPUTS: Final = MlpOutputs()
MLP_GRADIENTS: Final = MlpGradients()


def _problem(
    x: Operand, parameters: Sequence[Operand | None], activation: Activation, *, backward: bool, loss: bool = False
) -> MLPProblem:
    """Checks that each layer's operands fit the layer below; returns the problem."""
    weights = [each for each in parameters[::2] if each is not None]
    dims = (weights[0].shape[1], *(each.shape[0] for each in weights))
    pairs = zip(parameters[::2], parameters[1::2], itertools.pairwise(dims), strict=False)
    for weight, bias, (inputs, outputs) in pairs:
        assert weight is not None
        check_shape(weight.name, weight.shape, (outputs, inputs), "as the layer below has it")
        if bias is not None:
            check_shape(bias.name, bias.shape, (outputs,), f"as {weight.name} has it")
        for each in (weight, bias):
            if each is not None:
                each.check_packed()
    check_shape(x.name, x.shape, (*x.shape[:1], dims[0]), f"as {weights[0].name} has it")
    check_same(x, *(each for each in parameters if each is not None))
    biases = tuple(each is not None for each in parameters[1 : 2 * len(weights) : 2])
    return MLPProblem(x.element_type(), x.shape[0], dims, biases, activation, backward, loss)
