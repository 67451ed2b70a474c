"""`Linear`, and forward and backward of several linear layers in sequence."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arguments import by_layer, check_instance, flag, integer, one_of, shown
from lt_runtime.arrays.operand import HOST, device_of
from lt_runtime.errors import ArgumentError, ShapeError
from lt_runtime.fp8 import FP8
from lt_runtime.gpu.devices import parse_device
from lt_runtime.nn.block import Block
from lt_runtime.nn.device import ComputeDevice
from lt_runtime.nn.run import Pass
from lt_runtime.ops._gated import GatedContext
from lt_runtime.ops._linear import LinearContext
from lt_runtime.ops.add import add as sum_of
from lt_runtime.ops.gated import gated_fwd
from lt_runtime.ops.linear import linear, linear_bwd, linear_fwd
from lt_runtime.ops.optimizers.parameters import Parameter
from lt_runtime.problem import (
    Activation,
    BackwardProblem,
    Chosen,
    Compute,
    ComputeName,
    DType,
    DTypeLike,
    ForwardProblem,
    Philox,
    activation_of,
    probability,
)
from lt_runtime.ranges import range_of

if TYPE_CHECKING:
    from lt_runtime.ops.fp8.choice import Candidate
    from lt_runtime.ops.fp8.state import FP8State
    from lt_runtime.tuner.chain import LayerChain

_seeds: Final = itertools.count()
"""Yields seeds for blocks that are created without one, in order of their creation."""


def seed_of(seed: int | None) -> int:
    """Returns a seed after checking that it fits into 64 bits; for None the next seed of the process's sequence."""
    return next(_seeds) if seed is None else Philox(seed).seed


class Linear(Block):
    """y = dropout(act(x · weightᵀ + bias)), for x (..., inputs).

    The weight and the bias are drawn from U(-1/√inputs, 1/√inputs), as in PyTorch's `nn.Linear`.

    Args:
        inputs, outputs: numbers of columns.
        activation: a name of `lt.ACTIVATIONS`, or an `Activation`, or its fields in a dict.
        dropout: probability of dropout, which is applied after the activation.
        bias: whether there is a bias.
        weight: the weight of another layer to share, (outputs, inputs): `other.weight`, or `other.weight.T`.
        seed: of the initial values and of dropout; if None, the next of a sequence that begins at 0 in each process.
        dtype, compute, master_weights, device: as for `lt.MLP`.

        precision: "fp8", or an `lt.FP8`, to compute products in FP8, see `lt.FP8State`; None otherwise. Inference is
            in FP8 too, with the scales of training or of the file. Without scales, the first call finds them from its
            own x. On a GPU later calls read a copy of the weight in FP8, of one byte per element, see
            `Parameter.renew_copies`; a weight for which an optimizer has been made is cast in each call. Layers in
            FP32, those with another activation than "none", "relu" and "gelu", and those whose outputs an `lt.Parallel`
            concatenates stay in `dtype` for inference.

    Attributes:
        weight: (outputs, inputs).
        bias: (outputs,); None for a layer without a bias.
        activation, dropout, compute, seed: as given.
        scales: the `lt.FP8State` of a layer with `precision`; None otherwise.

    Raises:
        ArgumentError: an option that is not accepted.
        ShapeError: a shared weight has another shape.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        activation: Chosen = "none",
        dropout: float = 0.0,
        bias: bool = True,
        weight: Parameter | None = None,
        seed: int | None = None,
        dtype: DTypeLike = "float32",
        compute: ComputeName = "float32",
        master_weights: bool = True,
        precision: Literal["fp8"] | FP8 | None = None,
        device: object = "auto",
    ) -> None:
        self.scales = scales_of(precision)
        self.inputs, self.outputs = size_of("inputs", inputs), size_of("outputs", outputs)
        self.activation, self.dropout = activation_of("activation", activation), probability("dropout", dropout)
        self.seed, self.compute = seed_of(seed), compute
        kind, place = DType.parse("the layer", dtype), parse_device(device)
        shape = self.outputs, self.inputs
        if weight is not None:
            check_instance("weight", weight, Parameter, "None or a layer's weight")
            if tuple(weight.data.shape) != shape:
                raise ShapeError(f"weight is {weight!r}; a layer from {inputs} to {outputs} columns takes {shape}")
            kind, place = DType.parse("weight", weight.data.dtype), ordinal_of(weight)
        Compute.parse(compute, kind)
        generator, bound = np.random.default_rng(self.seed), 1.0 / math.sqrt(self.inputs)
        make = Maker(kind, place, has_master=flag("master_weights", master_weights))
        self.weight = weight or make(generator.uniform(-bound, bound, shape))
        self.bias = make(generator.uniform(-bound, bound, outputs)) if flag("bias", bias) else None

    @classmethod
    def of(cls, name: str, made: dict[str, Parameter], **options: Any) -> Self:
        """Makes a layer from existing parameters, given by name; the options become attributes of the layer."""
        layer = cls.__new__(cls)
        layer.name, layer.weight, layer.bias = name, made[f"{name}.weight"], made.get(f"{name}.bias")
        layer.outputs, layer.inputs = layer.weight.data.shape
        vars(layer).update(options)
        return layer

    def forward(self, x: Any, run: Pass, add: Any = None, out: Any = None) -> Any:
        """See `Block`. Adds `add` (..., outputs) to y, which is written into the buffer `out`."""
        return forward_layers([self], x, run, add, out=out)

    def backward(self, dy: Any, run: Pass) -> Any:
        """See `Block`."""
        held = [dy]
        del dy  # `held` has the only reference, so that the array is freed after its last reader
        return backward_layers([self], held, run)

    @property
    def precision(self) -> FP8 | None:
        """The recipe of the layer's products in FP8; None for a layer in its own type."""
        return None if self.scales is None else self.scales.recipe

    @property
    def candidate(self) -> Candidate:
        """The layer as the choice between FP8 and its own type reads it."""
        from lt_runtime.ops.fp8.choice import Candidate  # imported late: few models use FP8

        return Candidate.of(self.scales, self.weight.data, self.bias, self.activation, self.compute)

    def __repr__(self) -> str:
        bias, what = self.bias is not None, f"{self.inputs} to {self.outputs}, {self.activation.name}"
        return f"Linear({self.name}, {what}, {bias=}, dropout={self.dropout})"


def forward_layers(
    layers: Sequence[Linear],
    x: Any,
    run: Pass,
    add: Any = None,
    stand_in: Any = None,
    out: Any = None,
    gate: GatedContext | None = None,
) -> Any:
    """Runs layers one after the other; in training, `run` keeps the list of their contexts for `backward_layers`.

    Args:
        add: an array to add to the outputs of the last layer.
        out: a buffer for the outputs of the last layer.
        stand_in: an array of x's shape and type that is kept instead of x; see `remake` of `backward_layers`.
        gate: a gate whose outputs the first layer reads; x is then its operand h. If the first layer is in FP8, its
            cast computes these outputs.
    """
    needs_dx, contexts, met = run.needs_gradient(x), list[LinearContext](), run.met
    below: LinearContext | GatedContext | None = None
    start = len(met.problems) if met else 0
    _set_needs(layers, run, needs_dx=needs_dx)
    if run.trains and any(layer.scales for layer in layers):
        from lt_runtime.ops.fp8.choice import choose  # imported late: few models use FP8

        choose(x, [layer.candidate for layer in layers], stream=run.stream)
    if gate is not None:
        x, below = _through_gate(gate, layers[0], run)
    for i, layer in enumerate(layers, 1):
        bias, rng = layer.bias and layer.bias.data, run.rng(layer.seed)
        options: dict[str, Any] = {"activation": layer.activation, "compute": layer.compute, "stream": run.stream}
        options |= {"add": add, "out": out} if i == len(layers) else {}
        with range_of(f"forward/{layer.name}"):
            if rng is None and layer.scales is not None:
                from lt_runtime.nn.fp8 import fp8_outputs  # imported late: few models use FP8

                x = fp8_outputs(layer.scales, x, layer.weight, bias, **options)
            elif rng is None:
                x = linear(x, layer.weight.data, bias, **options)
            elif layer.scales is not None:
                from lt_runtime.ops.fp8.linear import LinearCall, forward_of_several  # late: few models use FP8

                following = layers[i].scales if i < len(layers) else None
                arrays = x, layer.weight.data, bias, options.get("out"), None, options.get("add")
                chosen = layer.activation, layer.activation.negative_slope, layer.dropout, layer.compute, False, True
                given = LinearCall(arrays, chosen, rng, run.stream)
                x, context, below = forward_of_several(layer.scales, following, given, below)
                contexts.append(context)
            else:
                options |= {"dropout": layer.dropout, "rng": rng}
                x, context = linear_fwd(x, layer.weight.data, bias, **options)
                contexts.append(context)
    if contexts and stand_in is not None:
        contexts[0].x = stand_in
    # The tuner tunes FP8 layers as single products, not as a chain.
    run.keep(contexts, needs_dx, met.taken(start) if met and not _are_in_fp8(contexts) else [])
    return x


def _through_gate(gate: GatedContext, layer: Linear, run: Pass) -> tuple[Any, GatedContext | None]:
    """The outputs of a gate and None; or h and the gate if the layer that reads the outputs computes them itself."""
    if run.trains and layer.scales is not None:
        from lt_runtime.ops.fp8.linear import applies_prologue  # imported late: few models use FP8

        if applies_prologue(layer.scales, gate.h):
            return gate.h, gate
    options: dict[str, Any] = {"activation": gate.activation, "dropout": gate.dropout, "rng": gate.rng}
    return gated_fwd(gate.h, **options, stream=run.stream)[0], None


def _set_needs(layers: Sequence[Linear], run: Pass, *, needs_dx: bool) -> None:
    """Tells the states of FP8 layers which gradients `backward_layers` will compute.

    Args:
        needs_dx: whether the gradient with respect to the first layer's inputs is read.
    """
    for layer in layers if run.trains else ():
        trains = [*map(run.trains_parameter, (layer.weight, layer.bias))]
        if layer.scales is not None:
            layer.scales.needs_dx, layer.scales.needs_dw = needs_dx, trains[0]
            if trains[0] and layer.scales.kept is not None:
                layer.scales.kept.drop()
        needs_dx |= any(trains)


def _are_in_fp8(contexts: Sequence[LinearContext]) -> bool:
    """Whether the products of any of the layers are computed in FP8."""
    return any(each.state is not None for each in contexts)


def backward_layers(
    layers: Sequence[Linear], dy: list[Any], run: Pass, add: Any = None, remake: Callable[[Any], Any] | None = None
) -> Any:
    """Propagates the gradient back through layers that `forward_layers` ran.

    If the gradient with respect to the inputs is not read, no layer below the lowest one with a trained parameter runs.

    Args:
        dy: a list of one array. The array is removed from the list, so that it is freed after its last reader.
        add: an array to add to the gradient with respect to the inputs.
        remake: for a single layer whose forward kept a stand-in for x: a function that takes the gradient with respect
            to x, and returns x, possibly in the gradient's memory.

    Returns:
        The gradient with respect to the inputs; None if nothing reads it, or if it was given to `remake`.
    """
    contexts, needs_dx, forwards = run.take()
    lowest = 0
    if not needs_dx:
        trained = [any(map(run.trains_parameter, (layer.weight, layer.bias))) for layer in layers]
        lowest = trained.index(True) if True in trained else len(layers)
    met, last = None if _are_in_fp8(contexts) else run.met, len(layers) - 1
    own, run.has_db = None if run.has_db else layers[-1].bias, False
    is_through = False  # whether the backward call of the layer above has applied this layer's derivative
    start = len(met.problems) if met else 0
    for i in range(last, -1, -1):
        context = contexts.pop()
        if i < lowest:
            dy.clear()
            continue
        if remake is not None:
            with range_of(f"backward/{layers[i].name}"):
                dx, *_ = linear_bwd(dy[0], context, need_dw=False, need_db=False, stream=run.stream)
            if met:
                met.chains.append(_chain(forwards, met.taken(start)))
            context.x, needs_dx = remake(dx), False
        # A layer's backward call also computes the bias gradient of the layer below. The last layer, which has no layer
        # above it, computes its own bias gradient as well. If both gradients would go to one buffer, because the two
        # layers share their bias, the call of the layer below computes the gradient of that layer. An FP8 layer
        # computes nothing for the layer below.
        goes_on = i > lowest
        takes_through = goes_on and context.state is None
        below = layers[i - 1].bias if takes_through else None
        below, left = (None, own) if below is own else (below, None)
        if goes_on and not takes_through:
            left = layers[i - 1].bias
        (dw, db, db_below), adds = run.grads(layers[i].weight, own, below)
        options: dict[str, Any] = {"need_dw": dw is not None, "need_db": db is not None, "need_dx": goes_on or needs_dx}
        options |= {"through": contexts[-1], "need_db_below": db_below is not None} if takes_through else {}
        options |= {"out_dw": dw, "out_db": db, "before_activation": is_through, "accumulate": adds}
        # A graph computes dw on a branch, beside dx or, if dx was computed before, beside the layer below.
        has_branch = dw is not None and context.state is None and (options["need_dx"] or remake is not None)
        deferring = run.deferring(dy[0], context.x) if has_branch else contextlib.nullcontext()
        with range_of(f"backward/{layers[i].name}"), deferring:
            dx, *_ = linear_bwd(dy.pop(), context, out_db_below=db_below, stream=run.stream, **options)
        run.wrote()
        dy.append(dx)
        own, is_through = left, takes_through
        del dx, context
        if goes_on:
            contexts[-1].y = None  # nothing reads y any more, so that other arrays may reuse its memory
    if met:
        met.chains.append(_chain(forwards, met.taken(start)))
    dx = dy.pop() if dy else None
    return dx if add is None or dx is None else sum_of(add, dx, out=dx, stream=run.stream)


def _chain(forwards: Sequence[Any], backwards: Sequence[Any]) -> LayerChain:
    """Makes a chain for the tuner from the problems of a run; backward problems are given from the last layer down."""
    from lt_runtime.tuner.chain import Layer, LayerChain  # imported late, because only tuning needs the tuner

    fronts = [each for each in forwards if isinstance(each, ForwardProblem)]
    backs: list[BackwardProblem | None] = [each for each in backwards if isinstance(each, BackwardProblem)]
    backs += [None] * (len(fronts) - len(backs))  # layers below the lowest trained one have no backward
    return LayerChain((*map(Layer, fronts, reversed(backs)),)).plain


def scales_of(precision: object) -> FP8State | None:
    """Makes the `FP8State` of a layer with the option `precision`; None for None.

    Raises:
        KindError, ArgumentError: the option is neither None, "fp8", an `lt.FP8` nor all its fields in a dict.
    """
    if precision is None:
        return None
    from lt_runtime.ops.fp8.state import FP8State  # imported late, because few models have a precision

    if isinstance(precision, Mapping) and precision.keys() == {each.name for each in fields(FP8)}:
        return FP8State(FP8(**precision))
    if not isinstance(precision, FP8):
        one_of("precision", precision, ("fp8",))
    return FP8State(precision if isinstance(precision, FP8) else FP8(fallback=True))


class Maker:
    """Makes parameters of one type on one device, optionally with master copies."""

    def __init__(self, dtype: DType, ordinal: int | None, *, has_master: bool = True) -> None:
        self.dtype, self.device = dtype, ComputeDevice(ordinal)
        self.has_master = has_master and dtype is not DType.FLOAT32

    def __call__(self, values: NDArray[Any]) -> Parameter:
        """Makes a parameter with these initial values, a gradient of zeros and, below FP32, a master copy."""
        exact = values.astype(np.float32)
        data, grad = exact.astype(self.dtype.numpy), np.zeros(values.shape, self.dtype.numpy)
        master = self.device.asarray(exact) if self.has_master else None
        return Parameter(self.device.asarray(data), self.device.asarray(grad), master)


def ordinal_of(parameter: Parameter) -> int | None:
    """The ordinal of a parameter's GPU; None for the host."""
    device = device_of(parameter.name, parameter.data)
    return None if device == HOST else device


def size_of(name: str, value: object) -> int:
    """A number of columns; raises `ArgumentError` unless it is positive."""
    size = integer(name, value)
    if not 1 <= size < 1 << 48:
        raise ArgumentError(f"{name} is {shown(value)}; accepted are integers of at least 1, below 2**48")
    return size


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
