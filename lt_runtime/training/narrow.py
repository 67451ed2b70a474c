"""Forward and backward passes of a narrow MLP as one kernel each, where that is faster than layer by layer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from lt_runtime.kernels.losses import ElementwiseLoss
from lt_runtime.kernels.mlp import MAX_LAYERS, MAX_WIDTH, TYPES, supports
from lt_runtime.ops._mlp import MLP_GRADIENTS, MLP_LOSS, MLP_OUTPUTS, filled
from lt_runtime.ops.adamw import Parameter
from lt_runtime.ops.call import perform
from lt_runtime.ops.first_use import asked_for, before_first_use
from lt_runtime.plans import cache
from lt_runtime.plans.mlp import is_fused
from lt_runtime.problem import Activation, DType, MLPProblem


class Layer(Protocol):
    """The attributes of a model's layer; see `lt.MLP`."""

    weight: Parameter
    bias: Parameter | None
    activation: Activation
    dropout: float


class NarrowPasses:
    """The one-kernel passes of a model on a GPU; made by `passes_of`."""

    def __init__(self, layers: Sequence[Layer], dims: tuple[int, ...], dtype: DType, device: int) -> None:
        self._layers, self._dims, self._dtype, self._device = layers, dims, dtype, device
        self._activation = layers[0].activation
        self._chosen: dict[tuple[int, bool], bool] = {}
        self._generation: object = None

    def take(self, x: Any, *, backward: bool) -> bool:
        """Whether to use the one-kernel passes for inputs x.

        False for inputs that do not fit the model: the layers then raise the error.

        Args:
            backward: whether gradients are computed too; if so, a model with dropout runs layer by layer.
        """
        shape: tuple[int, ...] = tuple(getattr(x, "shape", ()))
        if len(shape) != 2 or shape[1] != self._dims[0] or (backward and any(each.dropout for each in self._layers)):
            return False
        if self._generation is not cache.generation:
            self._chosen, self._generation = {}, cache.generation
        key = int(shape[0]), backward
        if key not in self._chosen or asked_for.get():
            biases = tuple(each.bias is not None for each in self._layers)
            problem = MLPProblem(self._dtype, key[0], self._dims, biases, self._activation, backward)
            if supports(problem, self._device):
                before_first_use(problem, self._device)
            self._chosen[key] = is_fused(problem, self._device)
        return self._chosen[key]

    def outputs(self, x: Any, stream: Any) -> Any:
        """The outputs for inputs x, without dropout."""
        return perform(MLP_OUTPUTS, (x, None, *self._arrays("data")), self._activation, None, stream)

    def backward(self, x: Any, dy: Any, *, accumulate: bool, stream: Any) -> None:
        """Writes every parameter's gradient into its buffer, or adds it to the buffer's values.

        Args:
            dy: the gradient with respect to the outputs.
        """
        arrays = x, dy, *self._arrays("data"), *self._arrays("grad")
        perform(MLP_GRADIENTS, arrays, (self._activation, accumulate, None), 1.0, stream)

    def loss_and_backward(
        self, x: Any, target: Any, loss: ElementwiseLoss, *, scale: Any, share: float, accumulate: bool, stream: Any
    ) -> Any:
        """Runs forward, loss and backward in one pass, without writing the outputs.

        Args:
            scale, share: as in `StepLoss.compute`.

        Returns:
            The loss, one FP32 number on the device.
        """
        arrays = x, target, *self._arrays("data"), *self._arrays("grad"), scale, None
        return perform(MLP_LOSS, arrays, (self._activation, accumulate, loss), share, stream)

    def _arrays(self, kind: str) -> tuple[Any, ...]:
        """Each layer's weight and bias: their values ("data") or their gradients ("grad")."""
        parameters = itertools.chain.from_iterable((each.weight, each.bias) for each in self._layers)
        return filled([None if each is None else getattr(each, kind) for each in parameters])


def passes_of(layers: Sequence[Layer], dims: tuple[int, ...], dtype: DType, device: int | None) -> NarrowPasses | None:
    """The one-kernel passes of a model on a GPU; None if the kernels do not support the model for any number of rows.

    Args:
        device: the GPU's ordinal; None for the host.
    """
    hidden, last = {each.activation for each in layers[:-1]}, layers[-1].activation
    if device is None or len(hidden) != 1 or last != Activation() or dtype not in TYPES:
        return None
    if len(layers) > MAX_LAYERS or max(dims) > MAX_WIDTH:
        return None
    return NarrowPasses(layers, dims, dtype, device)
