"""Linear layers of modules whose products are computed in FP8, and their scales."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lt_runtime.arrays.operand import HOST, device_of
from lt_runtime.errors import LtError
from lt_runtime.nn.linear import scales_of
from lt_runtime.ops._fp8_linear import FP8State, fits
from lt_runtime.ops._linear import LinearContext
from lt_runtime.ops.linear import linear_bwd, linear_fwd
from lt_runtime.torch.functional import LINEAR, cast, draw_key, linear_layers
from lt_runtime.torch.linear import compute_of, masks_of
from lt_runtime.torch.operators import Options, applied, begin_backward, is_eager
from lt_runtime.torch.tensors import Tensor, Tensors, as_tensor, placed

_ENTRIES: Final = {name: f"fp8_{name}" for name in ("slots", "history", "calibrated")}
"""Keys of a layer's scales in a state_dict."""
_layers: Final[weakref.WeakSet[Any]] = weakref.WeakSet()
"""Layers that have been called in FP8, whose scales `_update` follows."""


def set_precision(layer: Any, precision: Any) -> None:
    """Sets the `scales` of a layer with `weight` and `bias`, and lets its state_dict carry them.

    Args:
        precision: None, "fp8" or an `lt.FP8`.

    Raises:
        KindError, ArgumentError: see `scales_of`.
    """
    scales, is_first = scales_of(precision), "scales" not in vars(layer)
    layer.scales = scales
    if is_first:
        layer.register_state_dict_post_hook(_save)
        layer.register_load_state_dict_pre_hook(_load)


def chain(layers: Sequence[Any], x: Tensor, parameters: Tensors, options: Options, add: Tensor = None) -> Tensor:
    """`linear_layers`; those of the modules `layers` that have scales run in FP8, one by one.

    A layer runs in its own type if no gradient will be computed, if M, N or K is no multiple of 16, or if its
    tensors hold no values.
    """
    if all(vars(each).get("scales") is None for each in layers):
        return linear_layers(x, parameters, options, add)
    made: Tensor = _one_by_one(layers, x, parameters, options, add)
    return made


def _run_each(layers: Sequence[Any], x: Tensor, parameters: Tensors, options: Options, add: Tensor) -> Tensor:
    for i, layer in enumerate(layers):
        addend = add if i + 1 == len(layers) else None
        x = _run(layer, (x, addend, *parameters[2 * i : 2 * i + 2]), tuple(each[i : i + 1] for each in options))
    return x


_one_by_one: Final[Any] = torch._disable_dynamo(_run_each)
"""`_run_each`, into which torch.compile does not look: scales are no operands of an operator."""


def _run(layer: Any, operands: tuple[Any, ...], options: Options) -> Tensor:
    x, add, weight, bias = cast(operands)
    scales: FP8State | None = vars(layer).get("scales")
    training = torch.is_grad_enabled() and torch._C._any_requires_grad(x, add, weight, bias)
    if scales is None or not (training and fits(x, weight) and is_eager((x, add, weight, bias))):
        return linear_layers(operands[0], operands[2:], options, operands[1])
    _layers.add(layer)
    given = x, add, draw_key(x) if options[2][0] else None, weight, bias
    try:
        with on_device(x):
            _follow(scales, weight)
            return _apply(scales, tuple(each[0] for each in options), *given)
    except LtError:  # `check` raises it with the caller's names of the operands
        LINEAR.check(given, (*options, True))
        raise


def on_device(tensor: Tensor) -> Any:
    """A context in which a tensor's GPU is PyTorch's current one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()


class _Fp8Linear(torch.autograd.Function):
    """One layer in FP8: y = dropout(act(x · weightᵀ + bias)) + add."""

    @staticmethod
    def forward(
        ctx: Any, scales: FP8State, options: Options, x: Tensor, add: Tensor, key: Tensor, weight: Tensor, bias: Tensor
    ) -> Tensor:
        """y (..., N)."""
        activation, slope, p = options
        x, add, keys, w, bias = placed((x, add, key, weight, bias))
        chosen: Any = {"activation": activation, "negative_slope": slope, "dropout": p, "rng": masks_of(p, 0, keys)}
        y, made = linear_fwd(x, w, bias, add=add, precision=scales, compute=compute_of(x.dtype), **chosen)
        ctx.layer, ctx.scales, ctx.is_contiguous = made.layer, scales, weight.is_contiguous()
        kept = made.x, made.w, made.cast_slots, made.saved
        ctx.save_for_backward(key, *[each if each is None else as_tensor(each) for each in kept])
        return as_tensor(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """The gradients of x, `add`, weight and bias."""
        begin_backward("linear")
        needs = ctx.needs_input_grad
        (like,), (key, x8, w8, slots, saved) = placed([dy]), placed(ctx.saved_tensors)
        layer: Any = ctx.layer
        context = LinearContext(layer, x8, w8, saved, None, masks_of(layer.dropout, 0, key), None, ctx.scales, slots)
        wanted: Any = dict(zip(("need_dx", "need_dw", "need_db"), (needs[2], needs[5], needs[6]), strict=True))
        if needs[5] and not ctx.is_contiguous:
            wanted["out_dw"] = placed([dy.new_empty(layer.shape[:0:-1]).t()])[0]
        made = linear_bwd(like, context, **wanted) if any(wanted.values()) else (None, None, None)
        dx, dw, db = (each if each is None else as_tensor(each) for each in made)
        return None, None, dx, dy if needs[3] else None, None, dw, db


_apply: Final = applied(_Fp8Linear, "linear_fp8")


def _follow(scales: FP8State, weight: Tensor) -> None:
    """Moves scales that exist to the device of the weight."""
    if scales.slots is None or device_of("scales", scales.slots) == weight.get_device():
        return
    state = scales.state_dict()
    scales.slots = scales.history = None
    scales.load_state_dict(state, like=placed([weight])[0])


def _update(optimizer: Any, *_: Any) -> None:
    """Sets the scales for the next step after the step of the optimizer that trains the layer.

    A layer whose parameters are all frozen follows every optimizer. The update is skipped by the flag `found_inf` of
    `GradScaler`, where the optimizer gets it.
    """
    if not _layers:
        return
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    found: Any = getattr(optimizer, "found_inf", None)
    for layer in [*_layers]:
        trained = [id(each) for each in (layer.weight, layer.bias) if each is not None and each.requires_grad]
        scales: FP8State | None = layer.scales
        if scales is None or scales.slots is None or (trained and trained[0] not in held):
            continue
        device = device_of("scales", scales.slots)
        if device == HOST:
            scales.update(skipped=None if found is None else np.array([bool(found)], np.uint32))
            continue
        with torch.cuda.device(device):
            # The bits of 0.0 are 0, those of 1.0 are not.
            skipped = None if found is None else found.to(device).view(torch.uint32)
            scales.update(skipped=skipped, stream=torch.cuda.current_stream())


register_optimizer_step_post_hook(_update)


def _save(layer: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Adds a layer's scales to its state_dict, as tensors on the CPU."""
    if layer.scales is not None:
        _wait_for(layer.scales)
        state = layer.scales.state_dict()
        state_dict |= {prefix + _ENTRIES[name]: torch.from_numpy(each) for name, each in state.items()}


def _load(layer: Any, state_dict: dict[str, Any], prefix: str, _: Any, *others: Any) -> None:
    """Takes a layer's scales from a state_dict, which may be without; a layer without FP8 ignores them."""
    keys = {name: prefix + key for name, key in _ENTRIES.items()}
    state = {name: state_dict.pop(key).cpu().numpy() for name, key in keys.items() if key in state_dict}
    if layer.scales is None or not state:
        return
    _wait_for(layer.scales)
    try:
        layer.scales.load_state_dict(state, like=np.empty(0, np.float32))  # `_follow` moves new ones
    except LtError as error:
        others[-1].append(f"{prefix}scales: {error}")  # the list of errors that PyTorch raises


def _wait_for(scales: FP8State) -> None:
    """Waits until PyTorch's streams have computed the scales, because they are read on CuPy's stream."""
    if scales.slots is not None and (device := device_of("scales", scales.slots)) != HOST:
        torch.cuda.synchronize(device)
