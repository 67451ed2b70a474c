"""Consecutive linear layers as one operator.

Backward of a layer also multiplies dx by the derivative of the activation of the layer below.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch

from lt_runtime.errors import ShapeError
from lt_runtime.ops._linear import BACKWARD, FORWARD, Layer
from lt_runtime.ops.call import perform
from lt_runtime.ops.first_use import is_tuning
from lt_runtime.problem import Activation, ComputeName, Philox, Saved, probability
from lt_runtime.torch.operators import Needs, Operator, Options, applied, begin_backward
from lt_runtime.torch.repeats import repeated
from lt_runtime.torch.tensors import Tensor, Tensors, check_operands, check_shape, compute_of, placed

_make_layer: Final = functools.lru_cache(maxsize=1024)(Layer)
"""Returns one `Layer` object for equal arguments, because prepared calls are found by the identity of the object."""


@functools.lru_cache(maxsize=1024)
def _layers_of(options: Options, rows: int, forms: Sequence[Any], dtype: Any, compute: ComputeName) -> list[Layer]:
    """The `Layer` objects for backward of consecutive layers.

    Args:
        forms: for each layer, the shape of its weight, and whether its pre-activation was saved.
        dtype: PyTorch's type of the gradients.
    """
    made, name = [], str(dtype).removeprefix("torch.")
    for kind, activation, slope, p, (shape, is_kept) in zip(_kinds_of(options[0]), *options, forms, strict=True):
        kind = Saved.PREACTIVATION if is_kept else kind
        made.append(_make_layer((rows, *shape), kind, None, Activation.of(activation, slope), p, compute, name, True))
    return made


def _kinds_of(activations: Sequence[str], *, has_add: bool = False) -> list[Saved]:
    """For each layer the kind of tensor from which backward computes the activation's derivative.

    For ReLU this tensor is the output. If `has_add`, a tensor is added to the last layer's output, and the last layer's
    ReLU needs the pre-activation.
    """
    kinds = {"none": Saved.NOTHING, "relu": Saved.OUTPUT}
    made = [kinds.get(each, Saved.PREACTIVATION) for each in activations]
    if has_add and made[-1] is Saved.OUTPUT:
        made[-1] = Saved.PREACTIVATION
    return made


class LinearLayers(Operator):
    """y = layer(... layer(x)) + add, where layer(x) = dropout(act(x · weightᵀ + bias)).

    The operands are x (..., K), add (..., N), the key of the dropout masks, and the weight and the bias of each layer.
    The outputs besides y are the outputs of the hidden layers, then the pre-activations that backward needs.
    """

    name = "linear"
    options = "str[] activations, float[] slopes, float[] dropouts"
    is_repeatable = True

    def eager(self, operands: Tensors, options: Options, *, training: bool) -> Tensors:
        """See `Operator`. On a GPU the plan of each layer decides which tensor is kept for backward."""
        if not operands[0].is_cuda:
            return super().eager(operands, options, training=training)
        try:
            return (_apply_on_gpu(options, *operands) if training else _infer(options, *operands),)
        except Exception:  # if an operand is wrong, `check` raises an error with the caller's names
            self.check(operands, (*options, training))
            raise

    def check(self, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        x, add, _, *parameters = operands
        check_options(options)
        layers = len(options[0])
        prefixes = [""] if layers == 1 else [f"layers[{i}]." for i in range(layers)]
        names = [f"{prefix}{name}" for prefix in prefixes for name in ("weight", "bias")]
        check_operands({"x": x} | dict(zip(names, parameters, strict=True)) | {"add": add})
        if x.dim() < 2:
            raise ShapeError(f"x has shape {tuple(x.shape)}; accepted are (..., K), of two axes or more")
        width = x.shape[-1]
        for i in range(0, 2 * layers, 2):
            weight, bias = parameters[i : i + 2]
            if weight.dim() != 2 or weight.shape[1] != width:
                found = f"{names[i]} has shape {tuple(weight.shape)}"
                raise ShapeError(f"{found}; it must be (N, {width}), as its input has {width} columns")
            width = weight.shape[0]
            check_shape(names[i + 1], bias, (width,), f"as {names[i]} has {width} rows")
        check_shape("add", add, (*x.shape[:-1], width), "y's shape")

    def outputs(self, operands: Tensors, options: Options) -> list[Tensor]:
        """See `Operator`."""
        x, add, _, *parameters = operands
        *shapes, last = [(*x.shape[:-1], weight.shape[0]) for weight in parameters[::2]]
        if options[-1]:
            pairs = zip([*shapes, last], _kinds_of(options[0], has_add=add is not None), strict=True)
            shapes += [shape for shape, kind in pairs if kind is Saved.PREACTIVATION]
        return [x.new_empty(shape) for shape in (last, *(shapes if options[-1] else ()))]

    def fill(self, outputs: Tensors, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        y, *others = placed(outputs)
        kinds, last = _kinds_of(options[0], has_add=operands[1] is not None), len(options[0]) - 1
        outs, kept = [*(others[:last] or [None] * last), y], iter(others[last:])
        # A layer that keeps no pre-activation z is planned as for inference: a plan for training could keep a mask
        # instead of y.
        zs = [next(kept, None) if kind is Saved.PREACTIVATION else None for kind in kinds]
        x, add, key, *parameters = placed(operands)
        _ascend(options[:3], x, add, key, parameters, list(zip(outs, zs, strict=True)), None)

    def saved(self, operands: Tensors, outputs: Tensors, needs: Needs, options: Options) -> Tensors:
        """See `Operator`: key, the weights, x, the hidden outputs, y, and pre-activations; None for unneeded ones.

        The x of a single layer is not needed if the weight is frozen.
        """
        x, add, key, *parameters = operands
        kinds, count = _kinds_of(options[0], has_add=add is not None), len(options[0])
        kept = iter(outputs[count:])
        zs = [next(kept) if kind is Saved.PREACTIVATION else None for kind in kinds]
        y = outputs[0] if kinds[-1] is Saved.OUTPUT else None
        return key, *parameters[::2], x if needs[3] or count > 1 else None, *outputs[1:count], y, *zs

    def differentiate(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`. The gradient of `add` is dy itself, which a registered operator may not return."""
        dx, _, *others = super().differentiate(dys, saved, (needs[0], False, *needs[2:]), options)
        return [dx, dys[0] if needs[1] else None, *others]

    def gradients(self, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> list[Tensor]:
        """See `Operator`."""
        weights = saved[1 : 1 + len(options[0])]
        made = [weights[0].new_empty((*dys[0].shape[:-1], weights[0].shape[1])) if needs[0] else None, None, None]
        for weight, need_dw, need_db in zip(weights, needs[3::2], needs[4::2], strict=True):
            made.append(torch.empty_like(weight) if need_dw else None)
            made.append(weight.new_empty(weight.shape[:1]) if need_db else None)
        return made

    def fill_gradients(self, made: Tensors, dys: Tensors, saved: Tensors, needs: Needs, options: Options) -> None:
        """See `Operator`."""
        dx, _, _, *others = placed(made)
        count, (dy,), (key, *saved) = len(options[0]), placed(dys), placed(saved)
        weights, (*xs, y), zs = saved[:count], saved[count : 2 * count + 1], saved[2 * count + 1 :]
        forms = tuple([(weight.shape, z is not None) for weight, z in zip(weights, zs, strict=True)])
        layers = _layers_of(options[:3], math.prod(dy.shape[:-1]), forms, dy.dtype, compute_of(dy.dtype))
        triples = zip(layers, (*xs[1:], y), zs, strict=True)
        kept = [output if layer.saved_as is Saved.OUTPUT else z for layer, output, z in triples]
        _descend(dy, xs, weights, kept, layers, key, (needs[0], *needs[3:]), (dx, *others))


def check_options(options: Options) -> None:
    """Raises `ArgumentError` or `KindError` for an unknown activation, or a slope or dropout that is not accepted."""
    for activation, slope, p in zip(*options[:3], strict=True):
        Activation.of(activation, slope)
        probability("dropout", p)


def _ascend(options: Options, x: Any, add: Any, key: Any, parameters: Tensors, buffers: Any, kept: Any) -> Any:
    """Runs layers one after another; returns the last one's output.

    Args:
        buffers: for each layer, buffers for its output and its pre-activation, each or None; None for new outputs.
        kept: None, or three lists that get each layer's `Layer`, output and saved tensor. The layer's plan then decides
            which tensor is saved for backward.
    """
    last, compute = len(options[0]) - 1, compute_of(x.dtype)
    for i, (activation, slope, p) in enumerate(zip(*options, strict=True)):
        out, z = (None, None) if buffers is None else buffers[i]
        arrays = x, parameters[2 * i], parameters[2 * i + 1], out, z, add if i == last else None
        keeps = kept is not None or z is not None
        chosen = activation, slope, p, compute, False, keeps
        x = perform(FORWARD, arrays, chosen, (masks_of(p, i, key), None), None)
        if keeps:
            x, context = x
        if kept is not None:
            layers, outputs, saved = kept
            layers.append(context.layer)
            outputs.append(x)
            saved.append(context.saved)
    return x


def _descend(
    dy: Any,
    xs: Tensors,
    weights: Tensors,
    saved: Tensors,
    layers: Sequence[Layer],
    key: Any,
    needs: Needs,
    outs: Tensors,
) -> list[Any]:
    """The gradients of x and of each layer's weight and bias.

    Backward of each layer also multiplies dx by the activation's derivative of the layer below, and computes that
    layer's bias gradient.

    Args:
        xs: the input of each layer; None for the first if only its shape matters.
        saved: for each layer, the tensor from which its activation's derivative is computed.
        needs, outs: for each gradient, whether it is wanted, and its buffer or None.
    """
    made, last = [None] * len(needs), len(layers) - 1
    for i in range(last, -1, -1):
        at, layer, x, is_last = 1 + 2 * i, layers[i], xs[i], i == last
        if x is None:
            x = scratch(dy, (*dy.shape[:-1], layer.shape[2]))
        below = layers[i - 1] if i and True in needs[:at] else None
        goes_on = below is not None
        wanted = goes_on or (i == 0 and needs[0]), needs[at], is_last and needs[at + 1], goes_on and needs[at - 1]
        buffers = None if i else outs[0], outs[at], outs[at + 1] if is_last else None, None, outs[at - 1] if i else None
        dy, made[at], db, *db_below = perform(
            BACKWARD,
            (dy, x, weights[i], saved[i] if is_last else None, saved[i - 1] if goes_on else None, *buffers),
            (layer, below, not is_last, *wanted, False, True, False),
            (masks_of(layer.dropout, i, key), masks_of(below.dropout, i - 1, key) if below else None),
            None,
        )
        made[at + 1] = db if is_last else made[at + 1]
        if not goes_on:
            break
        (made[at - 1],) = db_below
    made[0] = dy if needs[0] else None
    return made


def scratch(like: Any, shape: tuple[int, ...]) -> Any:
    """An uninitialised array of another array's library, device and element type."""
    return np.empty(shape, like.dtype) if isinstance(like, np.ndarray) else like.new_empty(shape)


class _OnGpu(torch.autograd.Function):
    """An eager call on a GPU. It does little in Python, because Python takes longer than a small layer's kernels."""

    @staticmethod
    def forward(ctx: Any, options: Options, x: Tensor, add: Tensor, key: Tensor, *parameters: Tensor) -> Tensor:
        """y, the output of the last layer."""
        operands, count = (x, add, key, *parameters), len(options[0])
        made, (layers, places) = repeated((_OnGpu, options), operands, lambda: _kept_of(options, operands))
        ctx.layers, ctx.is_tuning = layers, is_tuning()
        kept_x = x if count > 1 or ctx.needs_input_grad[4] else None
        # A hidden layer's output is kept once, as the next layer's input.
        saved = [None if place is None or place < count - 1 else made[place] for place in places]
        ctx.save_for_backward(key, *parameters[::2], kept_x, *made[: count - 1], *saved)
        return made[count - 1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        """The gradients of x, `add` and the parameters."""
        begin_backward("linear", ctx, dy)
        needs, kept = ctx.needs_input_grad, ctx.saved_tensors
        dy = dy.resolve_neg() if dy.is_neg() else dy
        key = ctx.layers, (needs[1], *needs[4:])
        (dx, *of_parameters), _ = repeated(key, (dy, *kept), lambda: (_gradients_of(*key, dy, kept), None))
        return None, dx, dy if needs[2] else None, None, *of_parameters


def _kept_of(options: Options, operands: Tensors) -> tuple[list[Tensor], Any]:
    """Computes y, and returns all tensors that the layers have made, and a description of them.

    The tensors are each layer's output, then the others that backward needs. The description has the `Layer` of each
    layer, and for each layer the index of the tensor that it saves for backward, or None.
    """
    x, add, key, *parameters = placed(operands)
    kept: Any = [], [], []
    _ascend(options, x, add, key, parameters, None, kept)
    layers, made, saved = kept
    places = []
    for each in saved:
        if each is not None and not any(each is other for other in made):
            made.append(each)
        places.append(next((i for i, other in enumerate(made) if other is each), None))
    return made, (tuple(layers), places)


def _gradients_of(layers: tuple[Layer, ...], wanted: Needs, dy: Tensor, kept: Tensors) -> list[Any]:
    """The gradients of x and of each layer's weight and bias, from the tensors that forward has kept."""
    (dy, key, *kept), count = placed((dy, *kept)), len(layers)
    weights, xs = kept[:count], kept[count : 2 * count]
    outs = [None] * (1 + 2 * count)
    for i, weight in enumerate(weights):
        if wanted[1 + 2 * i] and not weight.is_contiguous():
            outs[1 + 2 * i] = torch.empty_like(weight)
    pairs = zip(layers, [*xs[1:], None], kept[2 * count :], strict=True)
    saved = [x if layer.saved_as is Saved.OUTPUT and each is None else each for layer, x, each in pairs]
    return _descend(dy, xs, weights, saved, layers, key, wanted, outs)


_apply_on_gpu: Final = applied(_OnGpu, "linear")


def _infer(options: Options, *operands: Tensor) -> Tensor:
    """Computes y on a GPU without keeping anything for backward."""
    x, add, key, *parameters = placed(operands)
    return _ascend(options, x, add, key, parameters, None, None)


def masks_of(p: float, layer: int, key: Any) -> Philox | None:
    """The `Philox` source of a layer's dropout mask; None if the layer has no dropout."""
    return Philox(0, layer, key.view(np.uint32 if isinstance(key, np.ndarray) else torch.uint32)) if p else None


def plain_backward(dy: Any, x: Any, weight: Any, outs: Tensors, *, accumulate_dx: bool = False) -> None:
    """Computes gradients of a layer without activation and dropout.

    Args:
        outs: the buffers of dx, dw and db; None for those that are not wanted.
        accumulate_dx: whether dx is added to its buffer.
    """
    shape, dtype = (math.prod(x.shape[:-1]), *weight.shape), str(x.dtype).removeprefix("torch.")
    layer = _make_layer(shape, Saved.NOTHING, None, Activation(), 0.0, compute_of(x.dtype), dtype, True)
    wanted = [each is not None for each in outs]
    if True in wanted:
        arrays, options = (dy, x, weight, None, None, *outs, None, None), (layer, None, False, *wanted, False)
        perform(BACKWARD, arrays, (*options, False, True, accumulate_dx), (None, None), None)
