"""`MLP`: a multilayer perceptron of linear layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, ClassVar, Final, Literal, TypeVar

import numpy as np

from lt_runtime.arguments import by_layer, flag, integers, shown
from lt_runtime.arrays.operand import CUPY, library_of, read_step
from lt_runtime.arrays.transfer import arena_size, arena_views, host_zeros
from lt_runtime.errors import ArgumentError, KindError, OperandError
from lt_runtime.fp8 import FP8
from lt_runtime.gpu.devices import activated, parse_device
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.nn.block import Block
from lt_runtime.nn.device import ComputeDevice
from lt_runtime.nn.linear import Linear, activations_by_layer, backward_layers, forward_layers, scales_of
from lt_runtime.nn.narrow import NarrowPasses
from lt_runtime.nn.run import Pass
from lt_runtime.ops._linear import LinearContext
from lt_runtime.ops.optimizers.parameters import Parameter
from lt_runtime.problem import Activation, Chosen, Compute, ComputeName, DType, DTypeLike, Philox, probability

_Value = TypeVar("_Value")
_DRAWN: Final = 1 << 20  # number of initial values that are drawn at once
_OPTIONS: Final = ("dims", "activation", "dropout", "bias", "seed", "compute", "dtype", "master_weights", "precision")
"""The arguments of `MLP` except the device, in the order in which saved files list them."""


class MLP(Block, surrounded=False):
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
            updates the parameters themselves. An optimizer without `stochastic_rounding` makes master copies.
        dropout: probability after each hidden layer, rounded to a multiple of 2^-16; or a sequence with one for each
            layer.
        bias: whether the layers have a bias, the last included; or a sequence with one for each layer.
        output_activation: the last layer's activation; "none" if left out. It must be left out if `activation` is a
            sequence, which has an entry for the last layer.
        seed: of the initial values and of dropout.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:N", a GPU's ordinal, or a `torch.device`.
        compute: "float32" or "tf32".
        precision: "fp8", or an `lt.FP8`, to compute the layers' products in FP8, in training and, as for `lt.Linear`,
            in inference; None otherwise. Layers with sizes that are no multiples of 16 stay in `dtype`.

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

    has_range: ClassVar[bool] = False

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
        precision: Literal["fp8"] | FP8 | None = None,
    ) -> None:
        self.dims = integers("dims", dims)
        if len(self.dims) < 2 or min(self.dims) < 1:
            raise ArgumentError(f"dims is {list(self.dims)}; accepted are at least two positive sizes")
        self.inputs, self.outputs = self.dims[0], self.dims[-1]
        self.seed = Philox(seed).seed  # `Philox` raises for anything but a 64-bit seed
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
        shared, each = {"seed": self.seed, "compute": compute}, enumerate(zip(activations, dropouts, strict=True))
        self.layers = [Linear.of(f"layer{i}", made, activation=f, dropout=p, **shared) for i, (f, p) in each]
        for layer in self.layers:
            layer.scales = scales_of(precision)
        self.narrow = NarrowPasses(self.layers, self.dims, self.dtype, self.device.ordinal)

    def parts(self) -> Iterable[tuple[str, Any]]:
        """See `Block`."""
        return [(f"layer{i}", layer) for i, layer in enumerate(self.layers)]

    def parameters(self) -> list[Parameter]:
        """Weights and biases, layer by layer; a layer without a bias has its weight alone.

        A parameter of two layers is listed twice, which optimizers refuse: the kernels of narrow MLPs would not add its
        gradients. In an `lt.Chain` of `lt.Linear`, layers may share parameters.
        """
        super().parameters()  # this call also sets the parameters' names
        return [each for layer in self.layers for each in (layer.weight, layer.bias) if each is not None]

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
    def precision(self) -> FP8 | None:
        """The recipe of the layers' products in FP8; None for layers in the model's type."""
        return self.layers[0].precision

    @property
    def options(self) -> dict[str, Any]:
        """The arguments, without the device, from which `MLP` makes a model like this, as values that JSON can hold."""
        return {name: _as_json(getattr(self, name)) for name in _OPTIONS}

    def __call__(self, x: Any, *, stream: Any = None) -> Any:
        """Outputs (M, dims[-1]) for inputs x (M, dims[0]), without dropout or tensors for backward; see `lt.linear`.

        Args:
            x: of the model's type, on its device.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.
        """
        try:
            if self.narrow.take(x, stream, backward=False):
                return self.narrow.outputs(x, stream)
            return forward_layers(self.layers, x, Pass(trains=False, stream=stream))
        except OperandError:
            self._refuse_inputs(x, stream)
            raise

    def forward(
        self,
        x: Any,
        step: Any = None,
        *,
        micro_batch: int = 0,
        copy_step: bool = True,
        add: Any = None,
        stream: Any = None,
    ) -> Any:
        """Outputs and the layers' contexts, for training: with dropout.

        Within another block, the second argument is a `Pass`, and the outputs alone are returned, as by any block.

        Args:
            x: (M, dims[0]), of the model's type, on its device.
            step: the number of the step, which decides dropout's masks: an int, or an array of one uint32 on the
                model's device, such as an optimizer's `steps`. A model without dropout needs none.
            micro_batch: the index of x among the step's micro-batches. Each micro-batch has masks of its own.
            copy_step: whether the contexts keep a copy of an array `step`, so that `backward` draws the same masks even
                if the optimizer has advanced the array. The copy costs a GPU 4 bytes and a launch. Without the copy,
                the array must not change before `backward`.
            add: (M, dims[-1]), added to the outputs; a block around the model may give it with its `Pass`.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

        Raises:
            ArgumentError: there is dropout, and no step.
            LtError: as `lt.linear_fwd` does.
        """
        if isinstance(step, Pass):
            with step.forward_of(self):
                return self._run_layers(x, step, add)
        _refuse_add(add)
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
        run = Pass(step, micro_batch=micro_batch, stream=stream)
        run.places = len(self.layers)
        y = self._run_layers(x, run)
        contexts, *_ = run.take()
        return y, contexts

    def _run_layers(self, x: Any, run: Pass, add: Any = None) -> Any:
        try:
            return forward_layers(self.layers, x, run, add)
        except OperandError:
            self._refuse_inputs(x, run.stream)
            raise

    def backward(
        self,
        dy: Any,
        contexts: Any,
        *,
        accumulate: bool = False,
        need_dx: bool = False,
        add: Any = None,
        stream: Any = None,
    ) -> Any:
        """Writes every parameter's gradient into `Parameter.grad`.

        Within another block, the second argument is the `Pass` of forward.

        Args:
            dy: (M, dims[-1]), the gradient with respect to the outputs.
            contexts: from `forward`.
            accumulate: add to the gradients instead of replacing them.
            need_dx: whether to compute the gradient with respect to the inputs.
            add: (M, dims[0]), added to the gradient with respect to the inputs; as in `forward`.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

        Returns:
            With `need_dx`, the gradient with respect to the inputs, (M, dims[0]), an array of dy's library; else None.

        Raises:
            LtError: as `lt.linear_bwd` does.
        """
        held = [dy]
        del dy  # `held` has the only reference, so that the array is freed after its last reader
        if isinstance(contexts, Pass):
            with contexts.backward_of(self):
                return backward_layers(self.layers, held, contexts, add)
        _refuse_add(add)
        layers, needs_input = len(self.layers), flag("need_dx", need_dx)
        fits = isinstance(contexts, Sequence) and all(isinstance(each, LinearContext) for each in contexts)
        if not fits or len(contexts) != layers:
            raise KindError(
                f"contexts is {shown(contexts)}; it must be the contexts of the {layers} layers, from forward"
            )
        run = Pass(accumulate=accumulate, stream=stream)
        # Copies of the contexts, because backward removes arrays from them.
        run.keep([*map(replace, contexts)], needs_input, [])
        return backward_layers(self.layers, held, run)

    def _copied_step(self, step: Any, x: Any, stream: Any) -> Any:
        """The step number; if it is an array, a copy of it, made in order on the stream."""
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
            if name.endswith("weight"):  # the bias, which comes next, is drawn from the same range as its weight
                bound = 1.0 / math.sqrt(shape[1])
            for start in range(0, math.prod(shape), _DRAWN):  # initial values are drawn in pieces, to limit memory
                drawn = generator.uniform(-bound, bound, min(_DRAWN, math.prod(shape) - start)).astype(np.float32)
                for views in (values, *masters):
                    views[place].reshape(-1)[start : start + drawn.size] = drawn
        made = [arena_views(self.device.asarray(arena), shapes) for arena in arenas]
        made += [[None] * len(shapes)] * (not has_masters)
        return {arrays[-1]: Parameter(*arrays) for arrays in zip(*made, named, strict=True)}


def _refuse_add(add: object) -> None:
    """Raises `ArgumentError` if an array to be added was given without a `Pass`."""
    if add is not None:
        raise ArgumentError(f"add is {shown(add)}; only a block around the model may give it, with its lt.Pass")


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


def brief(model: Block) -> str:
    """A short description of a model, such as "MLP 784-64-10 on cuda:0"."""
    sizes = f" {'-'.join(map(str, model.dims))}" if isinstance(model, MLP) else ""
    return f"{type(model).__name__}{sizes} on {model.device.name}"


def _condensed(values: Sequence[_Value], single: _Value | None, last: _Value) -> _Value | tuple[_Value, ...]:
    """The shortest argument of `MLP` that gives the layers these values of an option.

    Args:
        values: the option's value in each layer.
        single: the value that the caller gave for hidden layers, used if there are none; None if it is unknown.
        last: the value that the last layer gets if `MLP` is given a single value.

    Returns:
        The hidden layers' value if they share it and the last layer's is `last`; otherwise the values of all layers.
    """
    hidden: set[_Value | None] = {*values[:-1]} or {single}
    (first, *others) = hidden
    return tuple(values) if others or first is None or values[-1] != last else first


def _as_json(option: Any) -> Any:
    """Converts an option for JSON: tuples become lists, activations and recipes dicts, and a type its name."""
    if isinstance(option, tuple):
        return [_as_json(each) for each in option]
    if isinstance(option, DType):
        return option.value
    return asdict(option) if isinstance(option, (Activation, FP8)) else option
