"""The parts of a model: its device, its linear layers, and, for narrow models, passes over all layers in one kernel."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from lt_runtime.arguments import by_layer, shown
from lt_runtime.arrays.libraries import cupy
from lt_runtime.arrays.operand import HOST, Operand, on_host, read
from lt_runtime.errors import ArgumentError, CaptureError, DeviceError
from lt_runtime.gpu.devices import device_info
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.kernels.losses import ElementwiseLoss
from lt_runtime.kernels.mlp import supports
from lt_runtime.ops._mlp import MLP_GRADIENTS, MLP_OUTPUTS, filled
from lt_runtime.ops._parameters import Parameter
from lt_runtime.ops.call import perform
from lt_runtime.ops.first_use import asked_for, before_first_use
from lt_runtime.ops.linear import linear_bwd
from lt_runtime.plans import cache
from lt_runtime.plans.mlp import is_fused
from lt_runtime.problem import Activation, Chosen, DType, MLPProblem, activation_of
from lt_runtime.ranges import range_of

_PATIENCE_S: Final = 2.0
_CAPTURING: Final = 900  # the number of cudaErrorStreamCaptureUnsupported


@dataclass(frozen=True, slots=True)
class ComputeDevice:
    """The host (`ordinal` None, NumPy) or a GPU (CuPy)."""

    ordinal: int | None

    @property
    def type(self) -> str:
        """The kind of device as in `torch.device`: "cpu" or "cuda"."""
        return "cpu" if self.ordinal is None else "cuda"

    @property
    def index(self) -> int | None:
        """The GPU's ordinal, None for the host, as `torch.device.index`."""
        return self.ordinal

    @property
    def name(self) -> str:
        """The device as a string, such as "cpu" or "cuda:0"."""
        return "cpu" if self.ordinal is None else f"cuda:{self.ordinal}"

    @property
    def description(self) -> str:
        """The name with the GPU's model, such as "cpu" or "cuda:0 (NVIDIA H200)"."""
        return self.name if self.ordinal is None else f"{self.name} ({device_info(self.ordinal).name})"

    def current(self) -> AbstractContextManager[Any]:
        """Context manager that makes this device CuPy's current one; does nothing on the host."""
        return contextlib.nullcontext() if self.ordinal is None else cupy().cuda.Device(self.ordinal)

    def asarray(self, array: np.ndarray[Any, Any]) -> Any:
        """Copies a NumPy array to this device, and waits for the copy; on the host returns the array itself."""
        if self.ordinal is None:
            return array
        with self.current():
            copy = cupy().asarray(array)
            # waits, because work on any stream may read the copy
            call("cuStreamSynchronize", stream_handle(None, self.ordinal))
            return copy

    def read(self, name: str, array: Any, stream: int) -> Operand:
        """Reads an array as an operand; raises `DeviceError`, with a remedy, if it is not on this device."""
        if self.ordinal is None:
            # refuses arrays on a GPU, also on a machine without a driver
            on_host({"the model": np.empty(0), name: array})
        operand = read(name, array, stream)
        if operand.device == (HOST if self.ordinal is None else self.ordinal):
            return operand
        if operand.device == HOST:
            found = f"{name} is a NumPy array, the model is on {self.description}"
            raise DeviceError(f"{found}; cupy.asarray({name}) copies it there, and lt.prefetch does so for batches")
        found = f"{name} is {operand.place}, the model on {self.description}"
        raise DeviceError(
            f"{found}; within `with cupy.cuda.Device({self.ordinal}):` cupy.array({name}) copies it there"
        )

    def synchronize(self) -> None:
        """Waits for all work on the device.

        CUDA cannot wait for a device while a thread captures a graph: the wait is tried again for up to 2 s.

        Raises:
            CaptureError: a capture lasts longer than 2 s. Each attempt has invalidated the captures in progress.
        """
        if self.ordinal is None:
            return
        cuda, end = cupy().cuda, time.monotonic() + _PATIENCE_S
        while True:
            try:
                cuda.Device(self.ordinal).synchronize()
                return
            except cuda.runtime.CUDARuntimeError as error:
                if error.status != _CAPTURING:
                    raise
                if time.monotonic() > end:
                    raise CaptureError(f"a stream of {self.description} is being captured: {error}") from error
            time.sleep(1e-3)

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """Returns an array of this device as a NumPy array; waits until a GPU has computed it."""
        host: np.ndarray[Any, Any] = array if self.ordinal is None else cupy().asnumpy(array)
        return host


@dataclass(slots=True, eq=False, repr=False)
class Linear:
    """One layer: y = dropout(act(x · weightᵀ + bias)).

    Attributes:
        name: the name of the layer's ranges in profiles.
        weight: (outputs, inputs).
        bias: (outputs,); None for a layer without a bias.
        activation: the function that is applied to x · weightᵀ + bias.
        dropout: probability of dropout, which is applied after the activation.
    """

    name: str
    weight: Parameter
    bias: Parameter | None
    activation: Activation
    dropout: float

    def parameters(self) -> list[Parameter]:
        """The weight, and the bias if there is one."""
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def __repr__(self) -> str:
        outputs, inputs = self.weight.data.shape
        bias = self.bias is not None
        return f"Linear({self.name}, {inputs} to {outputs}, {self.activation.name}, {bias=}, dropout={self.dropout})"


def activations_by_layer(
    activation: Chosen | Sequence[Chosen], output_activation: Chosen | None, layers: int
) -> tuple[Activation | None, list[Activation]]:
    """The hidden layers' single activation, or None if a sequence was given; and the activation of each layer."""
    output = activation_of("output_activation", "none" if output_activation is None else output_activation)
    hidden, each = by_layer("activation", activation, layers, activation_of, output)
    if hidden is None and output_activation is not None:
        both = f"output_activation is {shown(output_activation)} and activation is {shown(activation)}"
        raise ArgumentError(f"{both}; a sequence has the last layer's activation itself, so pass one of them")
    return hidden, each


def backward_layer(
    layers: Sequence[Linear], dy: Any, contexts: list[Any], *, accumulate: bool, need_dx: bool, stream: Any
) -> Any:
    """Propagates the gradient back through one layer and the activation of the layer below it.

    Later calls, for the layers below, do not read dy or this layer's context again.

    Args:
        layers: all layers of the model.
        dy: for the last layer, the gradient with respect to the outputs; otherwise the result for the layer above.
        contexts: the contexts of the layers from the first to this one, which is removed from the list.
        accumulate, stream: as in `MLP.backward`.
        need_dx: whether to compute the gradient with respect to the first layer's inputs.
    """
    context, i, last = contexts.pop(), len(contexts), len(layers) - 1
    # Each call also computes the bias gradient of the layer below. Only the last layer, which has no layer above it,
    # computes its own bias gradient.
    options: dict[str, Any] = {"before_activation": i < last, "need_db": i == last, "need_dx": i > 0 or need_dx}
    below, bias = layers[i - 1].bias, layers[i].bias
    if i:
        options |= {"through": contexts[-1], "out_db_below": below and below.grad}
    options |= {"out_dw": layers[i].weight.grad, "out_db": bias and bias.grad}
    with range_of(f"backward/{layers[i].name}"):
        dx, *_ = linear_bwd(dy, context, accumulate=accumulate, stream=stream, **options)
    return dx


class NarrowPasses:
    """The passes of a narrow model on a GPU as one kernel each, where that is faster than layer by layer.

    Args:
        device: the GPU's ordinal; None for the host, which runs every model layer by layer.
    """

    def __init__(self, layers: Sequence[Linear], dims: tuple[int, ...], dtype: DType, device: int | None) -> None:
        biases, hidden = tuple(each.bias is not None for each in layers), {each.activation for each in layers[:-1]}
        self._layers, self._problem = layers, MLPProblem(dtype, 1, dims, biases, layers[0].activation)
        is_plain = len(hidden) == 1 and layers[-1].activation == Activation()
        # None if the one-kernel passes do not support the model, whatever the number of rows.
        self._device = device if is_plain and device is not None and supports(self._problem, device) else None
        self._chosen: dict[tuple[int, bool], bool] = {}
        self._generation: object = None

    def take(self, x: Any, *, backward: bool) -> bool:
        """Whether to use the one-kernel passes for inputs x.

        False for a model that the kernels do not support with any number of rows, and for inputs that do not fit the
        model: the layers then raise the error.

        Args:
            backward: whether gradients are computed too; if so, a model with dropout runs layer by layer.
        """
        if self._device is None or (backward and any(each.dropout for each in self._layers)):
            return False
        shape: tuple[int, ...] = tuple(getattr(x, "shape", ()))
        if shape[1:] != self._problem.dims[:1]:
            return False
        if self._generation is not cache.generation:
            self._chosen, self._generation = {}, cache.generation
        key = int(shape[0]), backward
        if key not in self._chosen or asked_for.get():
            problem = replace(self._problem, rows=key[0], backward=backward)
            if supports(problem, self._device):
                before_first_use(problem, self._device)
            self._chosen[key] = is_fused(problem, self._device)
        return self._chosen[key]

    def outputs(self, x: Any, stream: Any) -> Any:
        """The outputs for inputs x, without dropout."""
        return perform(MLP_OUTPUTS, (x, None, *self._arrays("data")), self._problem.activation, None, stream)

    def backward(
        self, x: Any, y: Any, *, loss: ElementwiseLoss | None, scale: Any, share: float, accumulate: bool, stream: Any
    ) -> Any:
        """Writes every parameter's gradient into its buffer, or adds it to the buffer's values.

        With a loss, forward, loss and backward run in one pass, without writing the outputs.

        Args:
            y: the gradient with respect to the outputs or, with a loss, the targets.
            loss: computes the gradient with respect to the outputs from the targets; None if y is this gradient.
            scale, share: factors of the loss's gradient, as in `StepLoss.compute`; not used without a loss.

        Returns:
            With a loss, its value: one FP32 number on the device.
        """
        arrays = x, y, *self._arrays("data"), *self._arrays("grad"), scale, None
        return perform(MLP_GRADIENTS, arrays, (self._problem.activation, accumulate, loss), share, stream)

    def _arrays(self, kind: str) -> tuple[Any, ...]:
        """Each layer's weight and bias: their values ("data") or their gradients ("grad")."""
        parameters = itertools.chain.from_iterable((each.weight, each.bias) for each in self._layers)
        return filled([None if each is None else getattr(each, kind) for each in parameters])
