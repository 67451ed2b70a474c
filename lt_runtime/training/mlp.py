"""A multilayer perceptron composed from linear layers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arguments import flag, integer, integers, shown
from lt_runtime.arrays.arena import arena_size, arena_views, host_zeros
from lt_runtime.errors import ArgumentError, KindError
from lt_runtime.gpu.devices import parse_device
from lt_runtime.ops.adamw import Parameter
from lt_runtime.ops.linear import linear, linear_bwd, linear_fwd
from lt_runtime.problem import Activation, Compute, DType, Philox, keep_threshold
from lt_runtime.ranges import range_of
from lt_runtime.training.device import ComputeDevice
from lt_runtime.training.state_dict import LeftOut, by_name, copied, load


@dataclass(slots=True, eq=False)
class Linear:
    """One layer: y = dropout(act(x · weightᵀ + bias)).

    Attributes:
        name: of the layer's ranges in profiles.
        weight: (outputs, inputs).
        bias: (outputs,).
        activation, dropout: what follows the product.
    """

    name: str
    weight: Parameter
    bias: Parameter
    activation: Activation
    dropout: float


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
        master_weights: False leaves out these copies in BF16, for `lt.AdamW(..., stochastic_rounding=True)`, which
            updates the parameters themselves. Any other optimizer makes its own copies.
        dropout: probability after each hidden layer, rounded to a multiple of 2^-16.
        seed: of the initial values and of dropout.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N", a GPU's ordinal, or a `torch.device`.
        compute: "float32" or "tf32".

    Attributes:
        layers: of `Linear`.
        device: where the model lives.
        dims, activation, dtype, dropout, seed, compute, master_weights: as given.

    Raises:
        ArgumentError: an option that is not accepted.
        DTypeError: a type that is not accepted.
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
        self.dims = integers("dims", dims)
        if len(self.dims) < 2 or min(self.dims) < 1:
            raise ArgumentError(f"dims is {list(self.dims)}; accepted are at least two positive sizes")
        keep_threshold(dropout)
        self.dropout, self.seed = float(dropout), Philox(seed).seed  # which refuses what is no 64-bit seed
        self.dtype = DType.parse("the model", dtype)
        self.master_weights = flag("master_weights", master_weights)
        if not self.master_weights and self.dtype is not DType.BFLOAT16:
            raise ArgumentError(f"master_weights is False, which is for bfloat16 alone; dtype is {self.dtype.value!r}")
        self.compute = Compute.parse(compute, self.dtype).value
        self.device = ComputeDevice(parse_device(device))
        self.activation = Activation.of(activation)
        parameters = self._parameters(has_masters=self.master_weights and self.dtype is not DType.FLOAT32)
        self.layers = [
            Linear(f"layer{i}", weight, bias, self.activation, self.dropout)
            for i, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True))
        ]
        self.layers[-1].activation, self.layers[-1].dropout = Activation(), 0.0

    def parameters(self) -> list[Parameter]:
        """Weights and biases, layer by layer."""
        return [parameter for layer in self.layers for parameter in (layer.weight, layer.bias)]

    @property
    def options(self) -> dict[str, Any]:
        """What a model like this is made with, wherever it lives, as JSON keeps it: `lt.load_model` makes one of it."""
        return {
            "dims": [*self.dims],
            "activation": dataclasses.asdict(self.activation),
            "dtype": self.dtype.value,
            "dropout": self.dropout,
            "seed": self.seed,
            "compute": self.compute,
            "master_weights": self.master_weights,
        }

    def state_dict(self, *, names: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Copies of all parameters' values, in the model's type: NumPy arrays, on a GPU CuPy arrays. Waits for the GPU.

        Args:
            names: what parameters are to be called instead of "layer0.weight", "layer0.bias" and so on, for example
                {"layer0.weight": "0.weight"} for PyTorch's `nn.Sequential`. `load_state_dict` takes the same mapping.

        Raises:
            ArgumentError: `names` has a name of no parameter, or gives two parameters one name.
        """
        self.device.synchronize()
        with self.device.current():
            state = {name: copied(each.data) for name, each in by_name(self.parameters(), names).items()}
        self.device.synchronize()
        return state

    def load_state_dict(
        self, state: Mapping[str, Any], *, strict: bool = True, names: Mapping[str, str] | None = None
    ) -> LeftOut:
        """Puts values into the parameters as `Parameter.assign` does, so that optimizers and graphs go on with them.

        Args:
            state: arrays by name, each as `Parameter.assign` takes it: `state_dict()` of this class, or PyTorch's.
            strict: refuse a state that lacks a parameter or has anything else. Otherwise what fits is loaded, if
                anything does.
            names: the state's name for each parameter that it calls differently, as for `state_dict`.

        Returns:
            `missing` and `unexpected`, the lists of what was left out; both are empty if `strict`.

        Raises:
            OperandError: the state does not fit. The message lists everything that is missing, unexpected or of another
                shape or kind. Nothing has been written.
            ArgumentError: as `state_dict` raises it.
            CaptureError: the current stream is being captured.
        """
        return load(by_name(self.parameters(), names), state, strict=flag("strict", strict))

    def __call__(self, x: Any, *, stream: Any = None) -> Any:
        """Outputs (M, dims[-1]) for inputs x (M, dims[0]), without dropout; nothing is kept. Raises as `lt.linear`.

        Args:
            x: of the model's type, on its device.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.
        """
        for each in self.layers:
            activation, compute = each.activation, self.compute
            x = linear(x, each.weight.data, each.bias.data, activation=activation, compute=compute, stream=stream)
        return x

    def forward(self, x: Any, step: Any = 0, *, micro_batch: int = 0, stream: Any = None) -> tuple[Any, list[Any]]:
        """Outputs and the layers' contexts.

        Args:
            x: (M, dims[0]), of the model's type, on its device.
            step: what dropout's masks are drawn for: an int, or an array of one uint32 on the model's device.
            micro_batch: which part of the step's batch x is. Each part has masks of its own.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

        Raises:
            LtError: as `lt.linear_fwd` does.
        """
        if type(micro_batch) is not int:
            micro_batch = integer("micro_batch", micro_batch)
        contexts, options = [], {"compute": self.compute, "stream": stream}
        for i, each in enumerate(self.layers, micro_batch * len(self.layers)):
            asked: dict[str, Any] = {"activation": each.activation, "dropout": each.dropout, **options}
            with range_of(f"forward/{each.name}"):
                x, ctx = linear_fwd(x, each.weight.data, each.bias.data, rng=Philox(self.seed, i, step), **asked)
            contexts.append(ctx)
        return x, contexts

    def backward(self, dy: Any, contexts: Sequence[Any], *, accumulate: bool = False, stream: Any = None) -> None:
        """Puts every parameter's gradient into `Parameter.grad`.

        Args:
            dy: (M, dims[-1]), the gradient with respect to the outputs.
            contexts: from `forward`.
            accumulate: add to the gradients instead of replacing them.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

        Raises:
            LtError: as `lt.linear_bwd` does.
        """
        last = len(self.layers) - 1
        if not isinstance(contexts, Sequence) or len(contexts) != len(self.layers):
            raise KindError(
                f"contexts is {shown(contexts)}; it must be the contexts of the {last + 1} layers, from forward"
            )
        for i in range(last, -1, -1):
            # Each call also takes the gradient through the activation of the layer below, and makes that layer's bias
            # gradient on the way, so that only the last layer's own bias gradient is left.
            options: dict[str, Any] = {"before_activation": i < last, "need_db": i == last, "need_dx": i > 0}
            if i:
                options |= {"through": contexts[i - 1], "out_db_below": self.layers[i - 1].bias.grad}
            options |= {"out_dw": self.layers[i].weight.grad, "out_db": self.layers[i].bias.grad}
            with range_of(f"backward/{self.layers[i].name}"):
                dy, *_ = linear_bwd(dy, contexts[i], accumulate=accumulate, stream=stream, **options)

    def _parameters(self, *, has_masters: bool) -> list[Parameter]:
        """Weights and biases; values, gradients and master copies lie in an arena each."""
        generator, values = np.random.default_rng(self.seed), dict[str, NDArray[np.float32]]()
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
