"""Linear layers in a row as one operator, whose backward takes each gradient through the layer below."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch

from lt_runtime import reference
from lt_runtime.errors import OperandError, ShapeError
from lt_runtime.ops._linear import BACKWARD, FORWARD, Layer, LinearContext
from lt_runtime.ops.call import perform
from lt_runtime.ops.linear import linear_bwd
from lt_runtime.problem import Activation, ComputeName, Philox, Saved, probability
from lt_runtime.torch.operators import (
    Operator,
    Options,
    Tensor,
    Tensors,
    as_matrix,
    as_numpy,
    as_rows,
    check_first_derivative,
    check_operands,
    check_shape,
    store,
)

_make_layer: Final = functools.lru_cache(maxsize=1024)(Layer)
"""Makes equal layers one object: the package remembers its calls by the identity of a layer."""


class Form(NamedTuple):
    """The options of one layer, and the kind of the tensor that backward computes its activation's derivative from."""

    activation: Activation
    dropout: float
    saved: Saved


@functools.lru_cache(maxsize=1024)
def forms_of(
    activations: tuple[Any, ...], slopes: tuple[float, ...], dropouts: tuple[float, ...], has_add: bool
) -> tuple[Form, ...]:
    """The forms of layers in a row; `has_add` says whether a tensor is added to the last one's output.

    The output of ReLU determines its derivative, unless a tensor was added to it.

    Raises:
        ArgumentError: an unknown activation or slope, or a probability outside [0, 1).
    """
    chosen = [Activation.of(*each) for each in zip(activations, slopes, strict=True)]
    kinds = {"none": Saved.NOTHING, "relu": Saved.OUTPUT}
    saved = [kinds.get(each.name, Saved.PREACTIVATION) for each in chosen]
    if has_add and saved[-1] is Saved.OUTPUT:
        saved[-1] = Saved.PREACTIVATION
    return tuple(map(Form, chosen, [probability("dropout", p) for p in dropouts], saved))


class LinearLayers(Operator):
    """y = layer(... layer(x)) + add, where layer(x) = dropout(act(x · weightᵀ + bias)).

    The operands are x (..., K), add (..., N), the key of the dropout masks, and the weight and the bias of each layer.
    The outputs besides y are the outputs of the hidden layers, then the pre-activations that backward needs.
    """

    name = "linear"
    tensors = "Tensor x, Tensor? add, Tensor? key, Tensor?[] parameters"
    options = "str[] activations, float[] slopes, float[] dropouts"

    def eager(self, operands: Tensors, options: Options, *, training: bool) -> Tensors:
        """See `Operator`. On a GPU the plan of each layer decides which tensor is kept for backward."""
        if not operands[0].is_cuda:
            return super().eager(operands, options, training=training)
        try:
            return (_apply_on_gpu(options, *operands) if training else _infer(options, *operands),)
        except OperandError:  # the package has other names for the operands
            self.check(operands, (*options, training))
            raise

    def check(self, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        x, add, _, *parameters = operands
        layers = len(forms_of(*options[:3], add is not None))
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
        shapes = [(*x.shape[:-1], weight.shape[0]) for weight in parameters[::2]]
        if options[-1]:
            forms = forms_of(*options[:3], add is not None)
            shapes += [shape for shape, form in zip(shapes, forms, strict=True) if form.saved is Saved.PREACTIVATION]
        return [x.new_empty(shapes[i]) for i in _outputs_first(len(shapes), len(parameters) // 2, options[-1])]

    def fill(self, outputs: Tensors, operands: Tensors, options: Options) -> None:
        """See `Operator`."""
        x, add, key, *parameters = operands
        forms = forms_of(*options[:3], add is not None)
        last = len(forms) - 1
        hidden, kept = (outputs[1 : last + 1], iter(outputs[last + 1 :])) if options[-1] else ((), iter(()))
        apply = _forward_on_gpu if x.is_cuda else _forward_on_host
        for i, form in enumerate(forms):
            weight, bias = parameters[2 * i : 2 * i + 2]
            z = next(kept, None) if form.saved is Saved.PREACTIVATION else None
            y = outputs[0] if i == last else hidden[i] if hidden else x.new_empty((*x.shape[:-1], weight.shape[0]))
            apply(as_rows(x), weight, bias, y, z, add if i == last else None, form, masks_of(form.dropout, i, key))
            x = y

    def saved(self, operands: Tensors, outputs: Tensors, needs: Sequence[bool], options: Options) -> Tensors:
        """See `Operator`: x, key, the weights, the hidden outputs, y if it is needed, and pre-activations or None.

        The x of a single layer is not kept if the weight is frozen.
        """
        x, add, key, *parameters = operands
        forms = forms_of(*options[:3], add is not None)
        layers, kept = len(forms), iter(outputs[len(forms) :])
        zs = [next(kept) if form.saved is Saved.PREACTIVATION else None for form in forms]
        y = outputs[0] if forms[-1].saved is Saved.OUTPUT else None
        return x if needs[3] else None, key, *parameters[::2], *outputs[1:layers], y, *zs

    def differentiate(self, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options) -> list[Tensor]:
        """See `Operator`. The gradient of `add` is dy itself, which the operator may not return."""
        made = super().differentiate(dys, saved, (needs[0], False, *needs[2:]), options)
        made[1] = dys[0] if needs[1] else None
        return made

    def gradients(self, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options) -> list[Tensor]:
        """See `Operator`."""
        weights = saved[2 : 2 + len(options[0])]
        made = [weights[0].new_empty((*dys[0].shape[:-1], weights[0].shape[1]))] if needs[0] else []
        for i, weight in enumerate(weights):
            made += [torch.empty_like(weight)] if needs[3 + 2 * i] else []
            made += [weight.new_empty(weight.shape[:1])] if needs[4 + 2 * i] else []
        return made

    def fill_gradients(
        self, made: Tensors, dys: Tensors, saved: Tensors, needs: Sequence[bool], options: Options
    ) -> None:
        """See `Operator`. Each layer's backward computes the gradient of the layer below before its activation."""
        last, (dy,), gradients = len(options[0]) - 1, dys, iter(made)
        dx, _, _, *wanted = [next(gradients) if need else None for need in needs]
        contexts = _contexts(dy, saved, wanted[1::2], options)
        apply = _backward_on_gpu if dy.is_cuda else _backward_on_host
        for i in range(last, -1, -1):
            goes_on = i > 0 and (dx is not None or any(each is not None for each in wanted[: 2 * i]))
            outs = (
                None if i else dx,
                wanted[2 * i],
                wanted[-1] if i == last else None,
                wanted[2 * i - 1] if goes_on else None,
            )
            if goes_on or any(each is not None for each in outs):
                dy = apply(dy, contexts[i], contexts[i - 1] if goes_on else None, i < last, outs)
            if not goes_on:
                break


class _OnGpu(torch.autograd.Function):
    """An eager call on a GPU, in as few steps as possible: they take longer than a small layer's kernels."""

    @staticmethod
    def forward(ctx: Any, options: Options, x: Tensor, add: Tensor, key: Tensor, *parameters: Tensor) -> Tensor:
        """y, the output of the last layer."""
        y, last, compute = as_rows(x), len(options[0]) - 1, compute_of(x.dtype)
        kept, ctx.layers = [x if last or ctx.needs_input_grad[4] else None, key], []
        for i, (activation, slope, p) in enumerate(zip(*options, strict=True)):
            arrays = y, parameters[2 * i], parameters[2 * i + 1], None, None, add if i == last else None
            call = (activation, slope, p, compute, False, True), (masks_of(p, i, key) if p else None, None), None
            y, context = perform(FORWARD, arrays, *call)
            kept += parameters[2 * i], context.saved, None if i == last else y
            ctx.layers.append(context.layer)
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        """The gradients of x, `add` and the parameters."""
        check_first_derivative("linear")
        layers, needs, (x, key, *kept) = ctx.layers, ctx.needs_input_grad, ctx.saved_tensors
        made: list[Tensor] = [None, None, dy if needs[2] else None, None] + [None] * (2 * len(layers))
        dy, last = as_rows(dy), len(layers) - 1
        for i in range(last, -1, -1):
            layer, weight, at, is_last = layers[i], kept[3 * i], 4 + 2 * i, i == last
            if i:
                y_below = kept[3 * i - 1]
            else:  # x is not kept if the weight is frozen: then only its shape matters
                y_below = dy.new_empty((*dy.shape[:-1], layer.shape[2])) if x is None else as_rows(x)
            below = layers[i - 1] if i and (needs[1] or True in needs[4:at]) else None
            wanted = below is not None or (i == 0 and needs[1]), needs[at], is_last and needs[at + 1]
            out_dw = None if weight.is_contiguous() else torch.empty_like(weight)
            saved = kept[3 * i + 1] if is_last else None, None if below is None else kept[3 * i - 2]
            dy, made[at], db, *db_below = perform(
                BACKWARD,
                (dy, y_below, weight, *saved, None, out_dw if wanted[1] else None, None, None, None),
                (layer, below, not is_last, *wanted, below is not None and needs[at - 1], False, True, False),
                (_masks(layer, i, key), None if below is None else _masks(below, i - 1, key)),
                None,
            )
            made[at + 1] = db if is_last else made[at + 1]
            if below is None:
                break
            (made[at - 1],) = db_below
        made[1] = dy if needs[1] else None
        return tuple(made)


def _masks(layer: Layer, place: int, key: Tensor) -> Philox | None:
    return masks_of(layer.dropout, place, key) if layer.dropout else None


_apply_on_gpu: Final = super(torch.autograd.Function, _OnGpu).apply
"""`_OnGpu.apply` without its search for tensors of `torch.func`, which have been refused: that takes 5 µs."""


def _infer(options: Options, x: Tensor, add: Tensor, key: Tensor, *parameters: Tensor) -> Tensor:
    """y on a GPU, where nothing is kept for backward."""
    x, last, compute = as_rows(x), len(options[0]) - 1, compute_of(x.dtype)
    for i, (activation, slope, p) in enumerate(zip(*options, strict=True)):
        arrays = x, *parameters[2 * i : 2 * i + 2], None, None, add if i == last else None
        x = perform(FORWARD, arrays, (activation, slope, p, compute, False, False), (masks_of(p, i, key), None), None)
    return x


def _outputs_first(count: int, layers: int, training: bool) -> list[int]:
    """The order of outputs: the last layer's, then the hidden layers', then the pre-activations."""
    return [layers - 1, *range(layers - 1), *range(layers, count)] if training else [layers - 1]


def masks_of(p: float, layer: int, key: Tensor) -> Philox | None:
    """The source of a layer's dropout mask; None without dropout."""
    if not p:
        return None
    step = key.view(torch.uint32)
    return Philox(0, layer, step if key.is_cuda else as_numpy(step))


def compute_of(dtype: Any) -> ComputeName:
    """How products are computed: FP32 ones as PyTorch's setting says."""
    is_tf32 = dtype is torch.float32 and torch._C._get_fp32_precision_getter("cuda", "matmul") == "tf32"
    return "tf32" if is_tf32 else "float32"


_compute = compute_of


def _forward_on_gpu(
    x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, z: Tensor, add: Tensor, form: Form, rng: Philox | None
) -> None:
    # The forward problem is one for training only if it keeps a pre-activation: otherwise its plan could keep a mask.
    options = form.activation, 0.01, form.dropout, compute_of(x.dtype), False, z is not None
    perform(FORWARD, (x, weight, bias, y, z, add), options, (rng, None), None)


def _forward_on_host(
    x: Tensor, weight: Tensor, bias: Tensor, y: Tensor, z: Tensor, add: Tensor, form: Form, rng: Philox | None
) -> None:
    factors = reference.dropout_factors(as_matrix(y).shape, form.dropout, rng)
    exact = reference.linear_fwd(
        as_matrix(x), as_numpy(weight), as_numpy(bias), form.activation, factors, as_matrix(add)
    )
    store(y, exact[0])
    store(z, exact[1])


def _contexts(dy: Tensor, saved: Tensors, dbs: Tensors, options: Options) -> list[LinearContext]:
    """The contexts of the layers for backward, made of the tensors that `LinearLayers.saved` chose."""
    forms = forms_of(*options[:3], False)
    count = len(forms)
    x, key, weights, ys, zs = saved[0], saved[1], saved[2 : 2 + count], saved[2 + count : -count], saved[-count:]
    if x is None:  # the gradient of the weight is not wanted: only the shape of x matters
        x = dy.new_empty((*dy.shape[:-1], weights[0].shape[1]))
    dtype, compute, contexts = str(dy.dtype).removeprefix("torch."), compute_of(dy.dtype), []
    for i, (form, weight, y, z, db) in enumerate(zip(forms, weights, ys, zs, dbs, strict=True)):
        shape = math.prod(x.shape[:-1]), *weight.shape
        kind = form.saved if z is None else Saved.PREACTIVATION
        layer = _make_layer(shape, kind, None, form.activation, form.dropout, compute, dtype, db is not None)
        kept, rng = y if kind is Saved.OUTPUT else z, masks_of(form.dropout, i, key)
        contexts.append(LinearContext(layer, as_rows(x), weight, kept, z, rng, y))
        x = y
    return contexts


def plain_context(x: Tensor, weight: Tensor, *, has_bias: bool) -> LinearContext:
    """The context of a layer without activation and dropout."""
    shape, dtype = (math.prod(x.shape[:-1]), *weight.shape), str(x.dtype).removeprefix("torch.")
    layer = _make_layer(shape, Saved.NOTHING, None, Activation(), 0.0, compute_of(x.dtype), dtype, has_bias)
    return LinearContext(layer, x, weight, None, None, None, None)


def _backward_on_gpu(
    dy: Tensor, context: LinearContext, below: LinearContext | None, before_activation: bool, outs: Tensors
) -> Tensor:
    dx, dw, db, db_below = outs
    buffers = {"out_dx": dx, "out_dw": dw, "out_db": db, "out_db_below": db_below}
    needs = {f"need_{name[4:]}": each is not None for name, each in buffers.items()}
    needs["need_dx"] |= below is not None
    made = linear_bwd(dy, context, through=below, before_activation=before_activation, **buffers, **needs)
    return made[0]


def _backward_on_host(
    dy: Tensor, context: LinearContext, below: LinearContext | None, before_activation: bool, outs: Tensors
) -> Tensor:
    dx, dw, db, db_below = outs
    exact_dy, x, weight, layer = as_matrix(dy), as_matrix(context.x), as_numpy(context.w), context.layer
    if before_activation:
        exact = reference.linear_bwd(exact_dy, x, weight, exact_dy)
    else:
        z = exact_dy if context.saved is None else as_matrix(context.saved)
        factors = reference.dropout_factors(z.shape, layer.dropout, context.rng)
        exact = reference.linear_bwd(exact_dy, x, weight, z, layer.activation, factors)
    store(dw, exact.dw)
    store(db, exact.db)
    if below is None:
        store(dx, exact.dx)
        return None
    z = exact.dx if below.saved is None else as_matrix(below.saved)
    factors = reference.dropout_factors(z.shape, below.layer.dropout, below.rng)
    exact_dz, dz = (
        reference.through_activation(exact.dx, z, below.layer.activation, factors),
        torch.empty_like(context.x),
    )
    store(dz, exact_dz)
    store(db_below, exact_dz.sum(axis=0))
    return dz
