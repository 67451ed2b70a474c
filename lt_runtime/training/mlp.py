"""A multilayer perceptron composed from linear layers."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final, TypeVar

import numpy as np

from lt_runtime.arguments import by_layer, flag, integer, integers, shown
from lt_runtime.arrays.operand import CUPY, Operand, library_of, read_step
from lt_runtime.arrays.transfer import arena_size, arena_views, copied, host_zeros
from lt_runtime.errors import ArgumentError, DTypeError, KindError, OperandError, ShapeError
from lt_runtime.gpu.devices import activated, parse_device
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.ops._parameters import LeftOut, Parameter, by_name, load_values
from lt_runtime.ops.linear import linear, linear_fwd
from lt_runtime.problem import Activation, Chosen, Compute, ComputeName, DType, DTypeLike, Philox, probability
from lt_runtime.ranges import range_of
from lt_runtime.training.parts import ComputeDevice, Linear, NarrowPasses, activations_by_layer, backward_layer

_Value = TypeVar("_Value")
_DRAWN: Final = 1 << 20  # number of initial values that are drawn at once
_OPTIONS: Final = ("dims", "activation", "dropout", "bias", "seed", "compute", "dtype", "master_weights")
"""The arguments of `MLP` except the device, in the order in which saved files list them."""


class MLP:
    """Linear layers in a row, each followed by its activation and its dropout.

    A single `activation` or `dropout` is for the hidden layers, which are all layers but the last. A list or tuple has
    a value for each layer, the last included::

        lt.MLP([784, 64, 32, 10], activation="relu", dropout=0.1)
        lt.MLP([784, 64, 32, 10], activation=["relu", "tanh", "none"], dropout=[0.2, 0.1, 0], bias=[False, False, True])

    Weights and biases are drawn from U(-1/√K, 1/√K) for K inputs, as in PyTorch's `nn.Linear`. The host draws them, so
    that a seed gives the same model on every device.

    Args:
        dims: inputs, hidden sizes and outputs, at least two.
        activation: a name of `lt.ACTIVATIONS`, or an `Activation`, or its fields in a dict; or a sequence of them with
            one for each layer. "gelu" is GELU's tanh form, as in GPT-2; "gelu_erf" is the exact form.
        dtype: FP32, FP16 or BF16, as a name or as a type of NumPy, `ml_dtypes` or PyTorch. Below FP32 each parameter
            has an FP32 master copy.
        master_weights: False makes no master copies in BF16, for `lt.AdamW(..., stochastic_rounding=True)`, which
            updates the parameters themselves. Any other optimizer makes its own copies.
        dropout: probability after each hidden layer, rounded to a multiple of 2^-16; or a sequence with one for each
            layer.
        bias: whether the layers have a bias, the last included; or a sequence with one for each layer.
        output_activation: the last layer's activation; "none" if left out. It must be left out if `activation` is a
            sequence, which has an entry for the last layer.
        seed: of the initial values and of dropout.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N", a GPU's ordinal, or a `torch.device`.
        compute: "float32" or "tf32".

    Attributes:
        layers: list of `Linear`.
        device: the device of the parameters.
        dims, dtype, seed, compute, master_weights: as given.
        narrow: the passes of a model with few columns, in one kernel each.

    Raises:
        ArgumentError: an option that is not accepted.
        DTypeError: a type that is not accepted.
        MissingLibraryError: the device is a GPU, and a library that it needs is not installed.
    """

    def __init__(
        self,
        dims: Sequence[int],
        activation: Chosen | Sequence[Chosen] = "relu",
        *,
        dtype: DTypeLike = "float32",
        dropout: float | Sequence[float] = 0.0,
        bias: bool | Sequence[bool] = True,
        output_activation: Chosen | None = None,
        seed: int = 0,
        device: object = "auto",
        compute: ComputeName = "float32",
        master_weights: bool = True,
    ) -> None:
        self.dims = integers("dims", dims)
        if len(self.dims) < 2 or min(self.dims) < 1:
            raise ArgumentError(f"dims is {list(self.dims)}; accepted are at least two positive sizes")
        self.seed = Philox(seed).seed  # `Philox` refuses anything but a 64-bit seed
        self.dtype = DType.parse("the model", dtype)
        self.master_weights = flag("master_weights", master_weights)
        if not self.master_weights and self.dtype is not DType.BFLOAT16:
            raise ArgumentError(f"master_weights is False, which is for bfloat16 alone; dtype is {self.dtype.value!r}")
        Compute.parse(compute, self.dtype)
        self.compute = compute
        count = len(self.dims) - 1
        self._hidden, activations = activations_by_layer(activation, output_activation, count)
        self._hidden_dropout, dropouts = by_layer("dropout", dropout, count, probability, 0.0)
        _, biases = by_layer("bias", bias, count, flag)
        self.device = ComputeDevice(parse_device(device))
        made = self._parameters(biases, has_masters=self.master_weights and self.dtype is not DType.FLOAT32)
        self.layers = [
            Linear(f"layer{i}", made[f"layer{i}.weight"], made.get(f"layer{i}.bias"), activations[i], dropouts[i])
            for i in range(count)
        ]
        self.narrow = NarrowPasses(self.layers, self.dims, self.dtype, self.device.ordinal)

    def parameters(self) -> list[Parameter]:
        """Weights and biases, layer by layer; a layer without a bias has its weight alone."""
        return [parameter for layer in self.layers for parameter in layer.parameters()]

    @property
    def activation(self) -> Activation | tuple[Activation, ...]:
        """The hidden layers' activation if they share it and the last layer has none; otherwise one for each layer."""
        return _condensed([each.activation for each in self.layers], self._hidden, Activation())

    @property
    def dropout(self) -> float | tuple[float, ...]:
        """The hidden layers' dropout if they share it and the last layer has none; otherwise one for each layer."""
        return _condensed([each.dropout for each in self.layers], self._hidden_dropout, 0.0)

    @property
    def bias(self) -> bool | tuple[bool, ...]:
        """Whether the layers have a bias; one value for each layer if they differ."""
        biases = [each.bias is not None for each in self.layers]
        return biases[0] if len({*biases}) == 1 else tuple(biases)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments, without the device, from which `MLP` makes a model like this, as values that JSON can hold."""
        return {name: _as_json(getattr(self, name)) for name in _OPTIONS}

    def __repr__(self) -> str:
        """A table of the layers, with the numbers of their parameters."""
        masters = ", FP32 master copies" if self.layers[0].weight.master is not None else ""
        rows = [("layer", "inputs", "outputs", "bias", "activation", "dropout", "parameters")]
        counts = [sum(each.data.size for each in layer.parameters()) for layer in self.layers]
        for layer, count in zip(self.layers, counts, strict=True):
            outputs, inputs = layer.weight.data.shape
            bias = "no" if layer.bias is None else "yes"
            what = layer.activation.name, f"{layer.dropout:g}"
            rows.append((layer.name, str(inputs), str(outputs), bias, *what, f"{count:,}"))
        rows.append(("total", "", "", "", "", "", f"{sum(counts):,}"))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row[:-1], widths)) + "  " + row[-1].rjust(widths[-1]) for row in rows]
        return "\n".join([f"MLP on {self.device.description}, {self.dtype.value}{masters}", *lines])

    def state_dict(self, *, names: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Copies of all parameters' values, in the model's type: NumPy arrays, on a GPU CuPy arrays. Waits for the GPU.

        Args:
            names: other names for parameters, by their own names ("layer0.weight", "layer0.bias" and so on), for
                example {"layer0.weight": "0.weight"} for PyTorch's `nn.Sequential`. `load_state_dict` takes the same.

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
        """Assigns values to the parameters, as `Parameter.assign`; optimizers and graphs use the new values.

        Args:
            state: arrays by name, each as `Parameter.assign` takes it: `state_dict()` of this class, or PyTorch's.
            strict: refuse a state that lacks a parameter or has an entry of no parameter. If False, all entries that
                belong to a parameter are loaded; there must be at least one.
            names: the state's name for each parameter whose name differs in the state, as for `state_dict`.

        Returns:
            `missing` and `unexpected`: lists of the names that were left out; both are empty if `strict`.

        Raises:
            OperandError: the state does not fit. The message lists every entry that is missing, unexpected or of
                another shape or kind. Nothing has been written.
            ArgumentError: `names` is wrong, as in `state_dict`.
            CaptureError: the current stream is being captured.
        """
        return load_values(by_name(self.parameters(), names), state, strict=flag("strict", strict))

    def __call__(self, x: Any, *, stream: Any = None) -> Any:
        """Outputs (M, dims[-1]) for inputs x (M, dims[0]), without dropout or tensors for backward; see `lt.linear`.

        Args:
            x: of the model's type, on its device.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.
        """
        try:
            if self.narrow.take(x, backward=False):
                return self.narrow.outputs(x, stream)
            y = x
            for each in self.layers:
                options: dict[str, Any] = {"activation": each.activation, "compute": self.compute, "stream": stream}
                y = linear(y, each.weight.data, each.bias and each.bias.data, **options)
        except OperandError:
            self._refuse_inputs(x, stream)
            raise
        return y

    def forward(
        self, x: Any, step: Any = None, *, micro_batch: int = 0, copy_step: bool = True, stream: Any = None
    ) -> tuple[Any, list[Any]]:
        """Outputs and the layers' contexts, for training: with dropout.

        Args:
            x: (M, dims[0]), of the model's type, on its device.
            step: the number of the step, which decides dropout's masks: an int, or an array of one uint32 on the
                model's device, such as an optimizer's `steps`. A model without dropout needs none.
            micro_batch: the index of x among the step's micro-batches. Each micro-batch has masks of its own.
            copy_step: whether the contexts keep a copy of an array `step`, so that `backward` draws the same masks even
                if the optimizer has advanced the array. The copy costs a GPU 4 bytes and a launch. Without the copy,
                the array must not change before `backward`.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

        Raises:
            ArgumentError: there is dropout, and no step.
            LtError: as `lt.linear_fwd` does.
        """
        if type(micro_batch) is not int:
            micro_batch = integer("micro_batch", micro_batch)
        copies = flag("copy_step", copy_step)
        if not any(each.dropout for each in self.layers):
            step = 0 if step is None else step
        elif step is None:
            raise ArgumentError(
                "step is None, but the model has dropout, whose masks are drawn for a step; pass forward(x, "
                "optimizer.steps) in training, or call model(x) for outputs without dropout"
            )
        elif copies:
            step = self._copied_step(step, x, stream)
        contexts, y = [], x
        try:
            for i, each in enumerate(self.layers, micro_batch * len(self.layers)):
                options: dict[str, Any] = {"activation": each.activation, "dropout": each.dropout}
                options |= {"rng": Philox(self.seed, i, step), "compute": self.compute, "stream": stream}
                with range_of(f"forward/{each.name}"):
                    y, ctx = linear_fwd(y, each.weight.data, each.bias and each.bias.data, **options)
                contexts.append(ctx)
        except OperandError:
            self._refuse_inputs(x, stream)
            raise
        return y, contexts

    def backward(
        self, dy: Any, contexts: Sequence[Any], *, accumulate: bool = False, need_dx: bool = False, stream: Any = None
    ) -> Any:
        """Writes every parameter's gradient into `Parameter.grad`.

        Args:
            dy: (M, dims[-1]), the gradient with respect to the outputs.
            contexts: from `forward`.
            accumulate: add to the gradients instead of replacing them.
            need_dx: whether to compute the gradient with respect to the inputs.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

        Returns:
            With `need_dx`, the gradient with respect to the inputs, (M, dims[0]), an array of dy's library; else None.

        Raises:
            LtError: as `lt.linear_bwd` does.
        """
        layers, needs_input = len(self.layers), flag("need_dx", need_dx)
        if not isinstance(contexts, Sequence) or len(contexts) != layers:
            raise KindError(
                f"contexts is {shown(contexts)}; it must be the contexts of the {layers} layers, from forward"
            )
        left = [*contexts]
        while left:
            dy = backward_layer(self.layers, dy, left, accumulate=accumulate, need_dx=needs_input, stream=stream)
        return dy

    def _refuse_inputs(self, x: Any, stream: Any) -> None:
        """Raises an error that names x if x does not fit the model; a layer's error would name the layer's weight."""
        device = self.device.ordinal
        with contextlib.nullcontext() if device is None else activated(device):
            handle = 0 if device is None else stream_handle(stream, device, library_of(x).current_stream)
            operand = self.device.read("x", x, handle)
        if len(operand.shape) != 2 or operand.shape[1] != self.dims[0]:
            raise ShapeError(f"x has shape {operand.shape}; the model takes (M, {self.dims[0]})")
        check_model_type(self, operand)

    def _copied_step(self, step: Any, x: Any, stream: Any) -> Any:
        """The number of the step, copied if it is an array; on a GPU the copy is in the order of the stream."""
        device = self.device.ordinal
        if isinstance(step, np.ndarray):
            return step.copy()
        if device is None or isinstance(step, (int, np.integer)):
            return step
        with activated(device):
            handle = stream_handle(stream, device, library_of(x).current_stream)
            source = read_step(Philox(step=step).step, device, handle)
            copy = CUPY.empty((), np.dtype(np.uint32), device, handle)
            call("cuMemcpyDtoDAsync", copy.data.ptr, source.address, copy.nbytes, handle)
        return copy

    def _parameters(self, biases: Sequence[bool], *, has_masters: bool) -> dict[str, Parameter]:
        """Weights and biases by their names. All values share one allocation, as do gradients and master copies."""
        named = shapes_of(self.dims, biases)
        generator, shapes = np.random.default_rng(self.seed), [*named.values()]
        # types of the values, the gradients and the master copies
        kinds = [self.dtype.numpy] * 2 + [np.dtype(np.float32)] * has_masters
        arenas = [host_zeros(arena_size(shapes, kind.itemsize), kind) for kind in kinds]
        values, _, *masters = [arena_views(arena, shapes) for arena in arenas]
        for place, (name, shape) in enumerate(named.items()):
            if name.endswith("weight"):  # `bound` is the weight's: each bias follows the weight of its layer
                bound = 1.0 / math.sqrt(shape[1])
            for start in range(0, math.prod(shape), _DRAWN):  # drawn in pieces, to take little memory
                drawn = generator.uniform(-bound, bound, min(_DRAWN, math.prod(shape) - start)).astype(np.float32)
                for views in (values, *masters):
                    views[place].reshape(-1)[start : start + drawn.size] = drawn
        made = [arena_views(self.device.asarray(arena), shapes) for arena in arenas]
        made += [[None] * len(shapes)] * (not has_masters)
        return {arrays[-1]: Parameter(*arrays) for arrays in zip(*made, named, strict=True)}


def shapes_of(dims: Sequence[int], biases: Sequence[bool]) -> dict[str, tuple[int, ...]]:
    """The shapes of an MLP's parameters, by name, layer by layer.

    Args:
        biases: whether each layer has a bias.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for i, (inputs, outputs) in enumerate(itertools.pairwise(dims)):
        shapes[f"layer{i}.weight"] = outputs, inputs
        if biases[i]:
            shapes[f"layer{i}.bias"] = (outputs,)
    return shapes


def brief(model: MLP) -> str:
    """A model in a few words, such as "MLP 784-64-10 on cuda:0"."""
    return f"MLP {'-'.join(map(str, model.dims))} on {model.device.name}"


def check_model_type(model: MLP, operand: Operand) -> None:
    """Raises `DTypeError` unless an operand has the model's type."""
    if operand.dtype != model.dtype.value:
        found = f"{operand.name} is {operand.dtype}; the model takes {model.dtype.value}"
        raise DTypeError(f"{found}: {operand.converted(model.dtype.value)}")


def _condensed(values: Sequence[_Value], single: _Value | None, last: _Value) -> _Value | tuple[_Value, ...]:
    """The hidden layers' value if they share it and the last layer's is `last`; otherwise the values of all layers.

    Args:
        single: if there are no hidden layers, the value that was given for hidden layers; None if it is unknown.
    """
    hidden: set[_Value | None] = {*values[:-1]} or {single}
    (first, *others) = hidden
    return tuple(values) if others or first is None or values[-1] != last else first


def _as_json(option: Any) -> Any:
    """Converts an option for JSON: tuples become lists, activations dicts, and a type its name."""
    if isinstance(option, tuple):
        return [_as_json(each) for each in option]
    if isinstance(option, DType):
        return option.value
    return asdict(option) if isinstance(option, Activation) else option
