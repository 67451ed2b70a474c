"""Layers as modules, with the parameters, initial values and state_dict keys of PyTorch's modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lt_runtime.arguments import by_layer, check_instance
from lt_runtime.errors import ArgumentError
from lt_runtime.problem import Activation, ActivationName, activation_of, probability
from lt_runtime.torch.fp8 import Precision, chain, set_precision
from lt_runtime.torch.functional import GATED, LINEAR, layer_norm, rms_norm
from lt_runtime.torch.kinds import unusual
from lt_runtime.torch.operators import Operator
from lt_runtime.torch.tensors import Tensor, check_shape, check_tensors, is_autocast


class Linear(torch.nn.Linear):
    """`torch.nn.Linear`, followed by an activation and dropout: y = dropout(act(x · weightᵀ + bias)) + add.

    Args:
        in_features, out_features, bias, device, dtype: as for `torch.nn.Linear`, whose initial values it has.
        activation: a name of `lt.ACTIVATIONS`, or an `lt.Activation`.
        dropout: probability of dropout in training, in [0, 1).
        precision: "fp8", or an `lt.FP8`, to train with products in FP8; None otherwise. A call that computes no
            gradient, and sizes that are no multiples of 16, stay in the type of the weight. See docs/fp8.md.

    Attributes:
        scales: the `lt.FP8State` of a layer with `precision`; None otherwise. Each step of the optimizer that trains
            the weight updates the scales once, also in a CUDA graph, even if the gradient is a sum over several
            backward passes. This holds for subclasses of `torch.optim.Optimizer`: after a step of any other optimizer,
            call `scales.update()`. The state_dict holds the scales.

    Raises:
        KindError: `precision` is of another type.
        ArgumentError: an unknown activation or precision; `dropout` outside [0, 1).
        GpuError: in the first call with `precision` on a GPU without FP8.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: ActivationName | Activation = "none",
        dropout: float = 0.0,
        *,
        precision: Precision = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        chosen, p = activation_of("activation", activation), probability("dropout", dropout)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation, self.negative_slope, self.dropout = chosen.name, chosen.negative_slope, p
        set_precision(self, precision)

    def forward(self, x: Tensor, add: Tensor = None) -> Tensor:
        """y (..., out_features) for x (..., in_features) and add (..., out_features)."""
        dropout = self.dropout if self.training else 0.0
        options = (self.activation,), (self.negative_slope,), (dropout,)
        return chain(LINEAR, (self,), x, (self.weight, self.bias), options, add)

    def extra_repr(self) -> str:
        """The text that `repr` shows for the module's options."""
        return f"{super().extra_repr()}, activation={self.activation}, dropout={self.dropout}"


def _chained(layers: Sequence[Linear], x: Tensor, add: Tensor, operator: Operator = LINEAR) -> Tensor:
    """Runs layers as one operator, see `linear_layers`."""
    parameters = [each for layer in layers for each in (layer.weight, layer.bias)]
    forms = [(each.activation, each.negative_slope, each.dropout if each.training else 0.0) for each in layers]
    return chain(operator, layers, x, parameters, tuple(zip(*forms, strict=True)), add)


def _run_as_one(layers: Iterable[Any]) -> bool:
    """Whether layers may run as one operator: each is a `Linear` without hooks, computed weights or a new `forward`."""
    # A parametrization changes a layer's class; pruning and the old weight_norm add hooks.
    return all(type(each) is Linear and not unusual(each) for each in layers)


def _plus(y: Tensor, add: Tensor) -> Tensor:
    """y + add; y if `add` is None. Under autocast the sum has y's type, as the operator's result has."""
    check_tensors(add=add)
    check_shape("add", add, tuple(y.shape), "y's shape")
    return y if add is None else y + (add.to(y.dtype) if is_autocast(y) else add)


class MLP(torch.nn.Sequential):
    """Linear layers in sequence as one operator.

    Backward of a layer also multiplies dx by the derivative of the activation of the layer below. If a layer has hooks
    or computed weights, or was exchanged for another module, the layers are called one after another. Each `Linear`
    then applies its own activation and dropout; a module in its place must apply its own too. A slice is an `MLP` that
    shares its layers with this one.

    Args:
        sizes: columns of the inputs, of each hidden layer and of the outputs.
        activation: the activation of the hidden layers: a name of `lt.ACTIVATIONS` or an `lt.Activation`; or a sequence
            with one for each layer, the last included.
        output_activation: the activation of the last layer; used only if `activation` is no sequence.
        dropout: probability of dropout after each hidden layer, in training.
        bias: whether the layers have a bias.
        options: precision, device and dtype, as for `Linear`. In FP8 each layer has its own scales. In BF16, and with
            one scale for a tensor, the next layer's cast to FP8 applies a hidden layer's activation and dropout.

    Raises:
        KindError, GpuError: as for `Linear`.
        ArgumentError: sizes without a layer, an unknown activation or precision, `dropout` outside [0, 1).
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: Any = "relu",
        output_activation: ActivationName | Activation = "none",
        dropout: float = 0.0,
        bias: bool = True,
        **options: Any,
    ) -> None:
        check_instance("sizes", sizes, Sequence, "a list or a tuple of integers")
        count = len(sizes) - 1
        if count < 1:
            raise ArgumentError(f"sizes is {sizes}; it must hold the columns of the inputs and of at least one layer")
        last = activation_of("output_activation", output_activation)
        _, each = by_layer("activation", activation, count, activation_of, last)
        drops = [dropout] * (count - 1) + [0.0]
        layers = zip(sizes[:-1], sizes[1:], each, drops, strict=True)
        super().__init__(*[Linear(k, n, bias, act, p, **options) for k, n, act, p in layers])

    def forward(self, x: Tensor, add: Tensor = None) -> Tensor:
        """y (..., sizes[-1]) for x (..., sizes[0]); `add` (..., sizes[-1]) is added to y."""
        layers = [*self]
        if layers and _run_as_one(layers):
            return _chained(layers, x, add)
        return _plus(super().forward(x), add)

    def __getitem__(self, index: Any) -> Any:
        """A layer; for a slice an `MLP` that shares its layers with this one."""
        if not isinstance(index, slice):
            return super().__getitem__(index)
        made = MLP.__new__(MLP)
        torch.nn.Sequential.__init__(made, OrderedDict([*self._modules.items()][index]))
        return made


class FeedForward(torch.nn.Module):
    """The feed-forward block of a transformer: y = down(dropout(act(up(x)))) + add, or gated.

    Gated, y = down(dropout(act(gate(x)) ∘ up(x))) + add, such as SwiGLU with "silu". The layers run as one operator.
    If a layer has hooks or computed weights, or was exchanged, they are called one after another, as in `MLP`: `gate`
    (`up` in a block without a gate) then applies the activation, and `up` the dropout.

    Args:
        width: columns of x and y.
        hidden: columns of the hidden values.
        activation: a name of `lt.ACTIVATIONS`, or an `lt.Activation`.
        gated: whether the block has a gate.
        dropout: probability of dropout of the hidden values, in training.
        bias: whether the layers have a bias.
        options: precision, device and dtype, as for `Linear`. A gated block computes in FP8 only if the sizes of all
            three layers allow it.

    Attributes:
        up, gate, down: layers; `gate` is None without a gate.

    Raises:
        KindError, GpuError: as for `Linear`.
        ArgumentError: an unknown activation or precision; `dropout` outside [0, 1).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activation: ActivationName | Activation = "gelu",
        gated: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        self.gate = Linear(width, hidden, bias, activation, **options) if gated else None
        self.up = Linear(width, hidden, bias, "none" if gated else activation, dropout, **options)
        self.down = Linear(hidden, width, bias, **options)

    def forward(self, x: Tensor, add: Tensor = None) -> Tensor:
        """y (..., width) for x (..., width); `add` (..., width) is added to y."""
        gate, up, down = self.gate, self.up, self.down
        layers, operator = ((up, down), LINEAR) if gate is None else ((gate, up, down), GATED)
        if _run_as_one(layers):
            return _chained(layers, x, add, operator)
        return _plus(down(up(x) if gate is None else gate(x) * up(x)), add)


class _Norm(torch.nn.Module):
    """Base of the norms: takes PyTorch's arguments, and refuses those that the package's kernels do not support."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if len(self.normalized_shape) != 1 or not self.elementwise_affine:
            found = f"normalized_shape is {self.normalized_shape} and elementwise_affine {self.elementwise_affine}"
            raise ArgumentError(f"{found}; accepted is a single axis, with a weight")


class LayerNorm(_Norm, torch.nn.LayerNorm):
    """`torch.nn.LayerNorm` over the last axis; it must have a weight, and may add a residual to x before it normalises.

    Raises:
        ArgumentError: the shape has several axes, or there is no weight.
    """

    def forward(self, x: Tensor, add: Tensor = None) -> Any:
        """y (..., N); with `add` (..., N) the pair (y, x + add), of which y is the normalised sum."""
        return layer_norm(x, self.weight, self.bias, eps=self.eps, add=add)


class RMSNorm(_Norm, torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` over the last axis; it must have a weight, and may add a residual to x before it normalises.

    Raises:
        ArgumentError: the shape has several axes, or there is no weight.
    """

    def forward(self, x: Tensor, add: Tensor = None) -> Any:
        """y (..., N); with `add` (..., N) the pair (y, x + add), of which y is the normalised sum."""
        return rms_norm(x, self.weight, eps=self.eps, add=add)
