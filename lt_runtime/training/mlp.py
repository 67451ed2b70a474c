"""A multilayer perceptron composed from linear layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arrays import arena_size, arena_views, host_zeros
from lt_runtime.errors import ArgumentError
from lt_runtime.ops.adamw import Parameter
from lt_runtime.ops.linear import linear, linear_bwd, linear_fwd
from lt_runtime.problem import Activation, Compute, DType, Philox, keep_threshold
from lt_runtime.ranges import range_of
from lt_runtime.training.device import ComputeDevice


class Linear:
    """One layer: y = dropout(act(x · weightᵀ + bias)).

    Attributes:
        name: of its range in profiles.
        weight: (outputs, inputs). bias: (outputs,).
        activation, dropout: what follows the product.
        rng: seed and layer id of its dropout.
    """

    def __init__(
        self, name: str, weight: Parameter, bias: Parameter, activation: Activation, dropout: float, rng: Philox
    ) -> None:
        self.name, self.weight, self.bias = name, weight, bias
        self.activation, self.dropout, self.rng = activation, dropout, rng

    def infer(self, x: Any, compute: str, stream: Any) -> Any:
        """The output without dropout; nothing is kept."""
        return linear(x, self.weight.data, self.bias.data, activation=self.activation, compute=compute, stream=stream)

    def forward(self, x: Any, rng: Philox, compute: str, stream: Any) -> tuple[Any, Any]:
        """The output, and the context for `backward`; `rng` draws dropout's mask."""
        return linear_fwd(
            x,
            self.weight.data,
            self.bias.data,
            activation=self.activation,
            dropout=self.dropout,
            rng=rng,
            compute=compute,
            stream=stream,
        )

    def backward(self, dy: Any, ctx: Any, below: tuple[Linear, Any] | None, *, last: bool, **options: Any) -> Any:
        """Puts the gradients of weight and bias into their parameters.

        Args:
            dy: the gradient of the output; of what the activation is applied to, unless this is the model's last layer.
            below: the layer whose output was this one's input, with its context; None for the first.
            options: `accumulate` and `stream` of `linear_bwd`.

        Returns:
            The gradient of what the activation of the layer below is applied to, that layer's bias gradient being
            made; None for the first.
        """
        chain = {"before_activation": not last, "need_db": last, "out_dw": self.weight.grad, "out_db": self.bias.grad}
        if below is None:
            linear_bwd(dy, ctx, need_dx=False, **chain, **options)
            return None
        layer, context = below
        return linear_bwd(dy, ctx, through=context, out_db_below=layer.bias.grad, **chain, **options).dz_below


class MLP:
    """Linear layers in a row; activation and dropout follow every one but the last.

    Weights and biases are drawn from U(-1/√K, 1/√K) for K inputs, as in PyTorch's `nn.Linear`, by a generator of
    the host, so that a seed gives the same model on every device.

    Args:
        dims: inputs, hidden sizes and outputs, at least two.
        activation: a name of `lt.ACTIVATIONS`, or an `Activation`. "gelu" is GELU's tanh form, as in GPT-2; "gelu_erf"
            is the exact form.
        dtype: FP32, FP16 or BF16, as a name or as a type of NumPy, `ml_dtypes` or PyTorch. Below FP32 each parameter
            has an FP32 master copy.
        master_weights: False does without these copies in BF16, for `lt.AdamW(..., stochastic_rounding=True)`, which
            then updates the parameters themselves; any other makes its own copies.
        dropout: probability after each hidden layer, rounded to a multiple of 2^-16.
        seed: of the initial values and of dropout.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N", a GPU's ordinal, or a `torch.device`.
        compute: "float32" or "tf32".

    Attributes:
        layers: of `Linear`.
        device: where the model lives.
        dims, activation, dtype, dropout, seed, compute: as given.

    Raises:
        ArgumentError: an option that is not accepted.
        MissingLibraryError: a GPU was asked for and what it needs is not installed.
    """

    def __init__(
        self,
        dims: Sequence[int],
        activation: str | Activation = "relu",
        *,
        dtype: object = "float32",
        dropout: float = 0.0,
        seed: int = 0,
        device: object = "auto",
        compute: str = "float32",
        master_weights: bool = True,
    ) -> None:
        if len(dims) < 2 or min(dims) < 1:
            raise ArgumentError(f"dims is {list(dims)}; accepted are at least two positive sizes")
        keep_threshold(dropout)
        Philox(seed)  # refuses what is no 64-bit seed
        self.dims = tuple(dims)
        self.dtype = DType.parse("the model", dtype)
        if not master_weights and self.dtype is not DType.BFLOAT16:
            raise ArgumentError(f"master_weights is False, which is for bfloat16 alone; dtype is {self.dtype.value!r}")
        self.compute = Compute.parse(compute, self.dtype).value
        self.device = ComputeDevice.parse(device)
        self.activation = activation if isinstance(activation, Activation) else Activation(activation)
        self.dropout, self.seed = dropout, seed
        has_masters = master_weights and self.dtype is not DType.FLOAT32
        parameters = self._parameters(np.random.default_rng(seed), has_masters)
        pairs = zip(parameters[::2], parameters[1::2], strict=True)
        self.layers = [self._layer(i, *pair) for i, pair in enumerate(pairs)]

    def parameters(self) -> list[Parameter]:
        """Weights and biases, layer by layer."""
        return [parameter for layer in self.layers for parameter in (layer.weight, layer.bias)]

    def __call__(self, x: Any, *, stream: Any = None) -> Any:
        """Outputs (M, dims[-1]) for inputs x (M, dims[0]), without dropout; nothing is kept."""
        for layer in self.layers:
            x = layer.infer(x, self.compute, stream)
        return x

    def forward(self, x: Any, step: Any = 0, *, micro_batch: int = 0, stream: Any = None) -> tuple[Any, list[Any]]:
        """Outputs and the layers' contexts.

        Args:
            x: (M, dims[0]).
            step: what dropout's masks are drawn for: an int, or an array of one uint32 on the model's device.
            micro_batch: which part of the step's batch x is; each has masks of its own.
        """
        contexts = []
        for layer in self.layers:
            with range_of(f"forward/{layer.name}"):
                rng = Philox(self.seed, layer.rng.layer + micro_batch * len(self.layers), step)
                x, ctx = layer.forward(x, rng, self.compute, stream)
            contexts.append(ctx)
        return x, contexts

    def backward(self, dy: Any, contexts: Sequence[Any], *, accumulate: bool = False, stream: Any = None) -> None:
        """Puts every parameter's gradient into `Parameter.grad`.

        Args:
            dy: (M, dims[-1]), the gradient with respect to the outputs.
            contexts: from `forward`.
            accumulate: add to the gradients instead of replacing them.
        """
        chain = [*zip(self.layers, contexts, strict=True)]
        for i in reversed(range(len(chain))):
            (layer, ctx), last = chain[i], i == len(chain) - 1
            with range_of(f"backward/{layer.name}"):
                below = chain[i - 1] if i else None
                dy = layer.backward(dy, ctx, below, last=last, accumulate=accumulate, stream=stream)

    def _layer(self, index: int, weight: Parameter, bias: Parameter) -> Linear:
        last = index == len(self.dims) - 2
        activation, dropout = (Activation(), 0.0) if last else (self.activation, self.dropout)
        return Linear(f"layer{index}", weight, bias, activation, dropout, Philox(self.seed, index))

    def _parameters(self, generator: np.random.Generator, has_masters: bool) -> list[Parameter]:
        """Weights and biases; values, gradients and master copies lie in an arena each."""
        values: dict[str, NDArray[np.float32]] = {}
        for i, (inputs, outputs) in enumerate(itertools.pairwise(self.dims)):
            bound = 1.0 / math.sqrt(inputs)
            for part, shape in (("weight", (outputs, inputs)), ("bias", (outputs,))):
                values[f"layer{i}.{part}"] = generator.uniform(-bound, bound, shape).astype(np.float32)
        drawn, own = [*values.values()], self.dtype.numpy
        data, grads = self._arena(drawn, own), self._arena([np.zeros_like(array) for array in drawn], own)
        masters = self._arena(drawn, np.dtype(np.float32)) if has_masters else [None] * len(drawn)
        return [Parameter(*arrays) for arrays in zip(data, grads, masters, values, strict=True)]

    def _arena(self, values: Sequence[NDArray[np.float32]], dtype: np.dtype[Any]) -> list[Any]:
        """Arrays of these values, rounded, on the model's device."""
        shapes = [array.shape for array in values]
        flat = host_zeros(arena_size(shapes, dtype.itemsize), dtype)
        for view, array in zip(arena_views(flat, shapes), values, strict=True):
            view[...] = array
        return arena_views(self.device.asarray(flat), shapes)
