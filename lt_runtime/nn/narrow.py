"""Passes of narrow MLPs by fused kernels, each of which runs all layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lt_runtime.arrays.operand import library_of
from lt_runtime.gpu.streams import is_captured, stream_handle
from lt_runtime.kernels.losses import ElementwiseLoss
from lt_runtime.kernels.mlp import LossArguments, supports
from lt_runtime.ops._mlp import MLP_GRADIENTS, MLP_OUTPUTS, filled
from lt_runtime.ops.call import perform
from lt_runtime.ops.first_use import asked_for, before_first_use
from lt_runtime.plans import cache
from lt_runtime.plans.mlp import is_fused
from lt_runtime.problem import Activation, DType, MLPProblem

if TYPE_CHECKING:
    from lt_runtime.nn.linear import Linear


class NarrowPasses:
    """The fused passes of a narrow model on a GPU, which are used if they are faster than running layer by layer.

    Args:
        device: the GPU's ordinal; None for the host, which runs every model layer by layer.
    """

    def __init__(self, layers: Sequence[Linear], dims: tuple[int, ...], dtype: DType, device: int | None) -> None:
        biases, hidden = tuple(each.bias is not None for each in layers), {each.activation for each in layers[:-1]}
        self._layers, self._problem = layers, MLPProblem(dtype, 1, dims, biases, layers[0].activation)
        is_plain = len(hidden) == 1 and layers[-1].activation == Activation()
        # `_device` is None if the fused kernels do not support the model, whatever the number of rows.
        self._device = device if is_plain and device is not None and supports(self._problem, device) else None
        # Maps (rows, backward, loss) to whether the passes are used, and to the result of `_reasons`.
        self._chosen: dict[tuple[int, bool, bool], tuple[bool, list[str | None]]] = {}
        self._generation: object = None

    def take(self, x: Any, stream: Any, *, backward: bool, loss: bool = False) -> bool:
        """Whether to use the fused passes for inputs x.

        The answer is False for a model that the kernels do not support with any number of rows, for a model with a
        layer in FP8, and for inputs that do not fit the model: the layers then raise the error. If the answer is True
        and `backward` is set, each layer's `FP8State.fallback` becomes the reason why the layer is not in FP8.

        Args:
            stream: the stream of the passes, or None for the current one of x's library. While it is being captured,
                nothing is measured, and the answer is not kept, so that a later call may measure.
            backward: whether gradients are computed too; if so, a model with dropout runs layer by layer.
            loss: whether `backward` is to be called with a loss.
        """
        if self._device is None or (backward and any(each.dropout for each in self._layers)):
            return False
        shape: tuple[int, ...] = tuple(getattr(x, "shape", ()))
        if shape[1:] != self._problem.dims[:1]:
            return False
        if self._generation is not cache.generation:
            self._chosen, self._generation = {}, cache.generation
        key = int(shape[0]), backward, loss
        chosen = self._chosen.get(key)
        if chosen is None or asked_for.get():
            handle = stream_handle(stream, self._device, library_of(x).current_stream)
            chosen = self._choose(replace(self._problem, rows=key[0], backward=backward, loss=loss), handle)
            if not is_captured(handle):
                self._chosen[key] = chosen
        is_chosen, reasons = chosen
        if is_chosen and backward:
            for layer, reason in zip(self._layers, reasons, strict=False):  # no reasons if the model has no `precision`
                if layer.scales is not None:
                    layer.scales.fallback = reason
        return is_chosen

    def _choose(self, problem: MLPProblem, stream: int) -> tuple[bool, list[str | None]]:
        """Whether to use the passes, and the result of `_reasons`; may measure unless the stream is being captured."""
        assert self._device is not None
        reasons = self._reasons(problem, stream)
        if not supports(problem, self._device) or None in reasons:
            return False, reasons
        before_first_use(problem, self._device, lambda: stream)
        return is_fused(problem, self._device), reasons

    def _reasons(self, problem: MLPProblem, stream: int) -> list[str | None]:
        """Why each layer's products are not computed in FP8; None for a layer in FP8. Empty without `precision`."""
        if self._device is None or self._layers[0].scales is None:
            return []
        from lt_runtime.ops.fp8.choice import reasons  # imported late, because few models have a precision

        if problem.backward:
            for number, layer in enumerate(self._layers):
                if layer.scales is not None:
                    layer.scales.needs_dx = number > 0
        candidates = [each.candidate for each in self._layers]
        return [*reasons(candidates, problem.rows, problem.dtype.numpy, self._device, lambda: stream)]

    def outputs(self, x: Any, stream: Any) -> Any:
        """The outputs for inputs x, without dropout."""
        return perform(MLP_OUTPUTS, (x, None, *self._arrays("data")), self._problem.activation, None, stream)

    def backward(
        self,
        x: Any,
        y: Any,
        *,
        loss: ElementwiseLoss | None,
        scale: Any,
        arguments: LossArguments | None,
        accumulate: bool,
        stream: Any,
    ) -> Any:
        """Writes every parameter's gradient into its buffer, or adds it to the buffer's values.

        With a loss, one pass computes forward, loss and backward, and does not write the outputs.

        Args:
            y: the gradient with respect to the outputs or, with a loss, the targets.
            loss: the loss that gives the gradient with respect to the outputs; None if y is this gradient.
            scale: a factor of the loss's gradient, as in `StepLoss.compute`; not used without a loss.
            arguments: a second factor of the loss's gradient, and a table that may replace the addresses of x and y;
                None without a loss.

        Returns:
            With a loss, its value: one FP32 number on the device.
        """
        arrays = x, y, *self._arrays("data"), *self._arrays("grad"), scale, None
        return perform(MLP_GRADIENTS, arrays, (self._problem.activation, accumulate, loss), arguments, stream)

    def _arrays(self, kind: str) -> tuple[Any, ...]:
        """Each layer's weight and bias: their values ("data") or their gradients ("grad")."""
        parameters = itertools.chain.from_iterable((each.weight, each.bias) for each in self._layers)
        return filled([None if each is None else getattr(each, kind) for each in parameters])
