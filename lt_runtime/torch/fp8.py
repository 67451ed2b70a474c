"""Linear layers and gated blocks of modules whose products are computed in FP8, and their scales."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import torch

from lt_runtime.arrays.operand import HOST, device_of
from lt_runtime.errors import DeviceError, LtError
from lt_runtime.fp8 import FP8
from lt_runtime.nn.linear import scales_of
from lt_runtime.ops._gated import GatedContext
from lt_runtime.ops._linear import Layer, LinearContext
from lt_runtime.ops.first_use import is_tuning
from lt_runtime.ops.fp8.choice import Candidate, choose, fits
from lt_runtime.ops.fp8.gradients import casts_gate, gated_bwd_in_fp8, halves
from lt_runtime.ops.fp8.linear import LinearCall, applies_prologue, forward_of_several
from lt_runtime.ops.fp8.state import FP8State
from lt_runtime.ops.gated import gated_bwd, gated_fwd
from lt_runtime.ops.linear import linear_bwd
from lt_runtime.problem import Activation, Philox
from lt_runtime.torch import fp8_steps
from lt_runtime.torch.functional import GATED, LINEAR, cast, draw_key, linear_layers
from lt_runtime.torch.gated import gate_of
from lt_runtime.torch.linear import masks_of, scratch
from lt_runtime.torch.operators import Needs, Operator, Options, applied, begin_backward, is_compiling, is_eager
from lt_runtime.torch.tensors import Tensor, Tensors, as_tensor, as_tensors, placed

Precision: TypeAlias = "Literal['fp8'] | FP8 | None"

_ENTRIES: Final = {name: f"fp8_{name}" for name in ("slots", "history", "calibrated")}
"""Keys of a layer's scales in a state_dict."""
_PLAIN: Final = "none", 0.01, 0.0
_COMMON: Final = "float32", False, True
"""Last options of each `LinearCall` here: compute type, `propagate_nan`, and whether backward follows."""


def set_precision(layer: Any, precision: Precision) -> None:
    """Sets the `scales` of a layer with `weight` and `bias`, and lets its state_dict carry them.

    Args:
        precision: None, "fp8" or an `lt.FP8`.

    Raises:
        KindError, ArgumentError: see `scales_of`.
    """
    scales, is_first = scales_of(precision), "scales" not in vars(layer)
    layer.scales = scales
    if is_first:
        # torch.distributed.checkpoint reads an attribute for each key of a state_dict, but ignores its value.
        vars(layer).update(dict.fromkeys(_ENTRIES.values()))
        layer.register_state_dict_post_hook(_save)
        layer.register_load_state_dict_pre_hook(_load)


def chain(
    operator: Operator, layers: Sequence[Any], x: Tensor, parameters: Tensors, options: Options, add: Tensor = None
) -> Tensor:
    """Computes `linear_layers`; those of the modules `layers` that have FP8 scales run in FP8.

    A layer runs in its own type if no gradient will be computed, if its tensors are meta or fake tensors, if they are
    float64, or if FP8 was not chosen for it. In the last two cases `scales.fallback` gives the reason. All layers of a
    gated block run in their own type if one of them has no scales, or sizes that are no multiples of 16.
    """
    for each in layers:
        if _scales(each) is not None:
            if operator is GATED and None in map(_scales, layers):
                break  # torch.compile can trace this call, unlike one in FP8
            return _with_scales(operator, layers, x, parameters, options, add)
    return linear_layers(x, parameters, options, add, operator)


def _scales(layer: Any) -> FP8State | None:
    """The scales of a layer, which has no attribute `scales` if it has never been in FP8.

    Code compiled for a layer without the attribute would also run layers in FP8 if it read the layer's `vars`: only
    `getattr` makes torch.compile guard that the attribute is absent. Uncompiled, `getattr` takes 1 µs to find that out.
    """
    return getattr(layer, "scales", None) if is_compiling() else vars(layer).get("scales")


@torch._disable_dynamo  # type: ignore[untyped-decorator]
def _with_scales(
    operator: Operator, layers: Sequence[Any], x: Tensor, parameters: Tensors, options: Options, add: Tensor
) -> Tensor:
    """Computes `chain` for layers of which some have FP8 scales.

    It is hidden from torch.compile, which cannot trace it: FP8 scales are no operands of an operator.
    """
    x, add, *parameters = cast((x, add, *parameters))
    trains = torch.is_grad_enabled() and torch._C._any_requires_grad(x, add, *parameters)
    # Meta and fake tensors hold no values; the operator refuses sparse ones.
    if not (trains and is_eager((x, add, *parameters)) and x.layout is torch.strided):
        return linear_layers(x, parameters, options, add, operator)
    scaled = [each for each in layers if vars(each).get("scales") is not None]
    if x.dtype is torch.float64:
        for each in scaled:
            each.scales.fallback = "float64 is not cast to FP8"
        return linear_layers(x, parameters, options, add, operator)
    fp8_steps.layers.update(scaled)
    return (_gated_at_once if operator is GATED else _in_parts)(layers, x, parameters, options, add)


def _in_parts(layers: Sequence[Any], x: Tensor, parameters: Tensors, options: Options, add: Tensor) -> Tensor:
    """Divides the layers into runs of layers that are all in FP8 or all not, and computes each run by one operator."""
    states = [vars(each).get("scales") for each in layers]
    _set_needs(states, x.requires_grad, parameters)
    given = zip(states, parameters[::2], parameters[1::2], map(Activation.of, *options[:2]), strict=True)
    _choose(x, [Candidate.of(*each, "float32") for each in given])
    end = 0
    for is_fp8, group in itertools.groupby(states, _is_in_fp8):
        start, end = end, end + len([*group])
        part, of_part = slice(start, end), parameters[2 * start : 2 * end]
        chosen, addend = tuple(each[part] for each in options), add if end == len(layers) else None
        if is_fp8:
            x = _call(_linear, LINEAR, layers[part], chosen, (x, addend, draw_key(x, chosen[2]), *of_part))
        else:
            x = linear_layers(x, of_part, chosen, addend)
    return x


def _set_needs(states: Sequence[FP8State | None], needs_dx: bool, parameters: Tensors) -> None:
    """Tells the states of consecutive layers which gradients backward will compute."""
    for state, weight, bias in zip(states, parameters[::2], parameters[1::2], strict=True):
        if state is not None:
            state.needs_dx, state.needs_dw = needs_dx, weight.requires_grad
        needs_dx |= weight.requires_grad or (bias is not None and bias.requires_grad)


def _choose(x: Tensor, layers: Sequence[Candidate]) -> None:
    with torch.cuda.device_of(x):
        choose(placed([x])[0], layers)


def _is_in_fp8(state: FP8State | None) -> bool:
    return state is not None and state.fallback is None


def _gated_at_once(layers: Sequence[Any], x: Tensor, parameters: Tensors, options: Options, add: Tensor) -> Tensor:
    """Runs a gated block whose three layers all have FP8 scales.

    The function chooses each layer's precision separately. If no layer is in FP8, the operator `GATED` runs the block.
    """
    weights, biases = parameters[::2], parameters[1::2]
    if not (fits(x, weights[0]) and fits(weights[0], weights[2])):
        return linear_layers(x, parameters, options, add, GATED)
    needs_dx = x.requires_grad, x.requires_grad, True
    for each, weight, bias, needed in zip(layers, weights, biases, needs_dx, strict=True):
        each.scales.needs_dx, each.scales.needs_dw = needed, weight.requires_grad
        # The choice of the precision depends on the number of rows, which x and the hidden values have in common.
        _choose(x, [Candidate.of(each.scales, weight, bias, Activation(), "float32")])
    if not any(_is_in_fp8(each.scales) for each in layers):
        return linear_layers(x, parameters, options, add, GATED)
    return _call(_gated, GATED, layers, options, (x, add, draw_key(x, options[2]), *parameters))


def _call(function: Any, of: Operator, layers: Sequence[Any], options: Options, operands: tuple[Any, ...]) -> Tensor:
    """Calls the FP8 autograd function that stands for an operator; errors come from that operator's `check`."""
    x, weights = operands[0], operands[3::2]
    try:
        with torch.cuda.device_of(x):
            for each in layers:
                if "_is_replica" in vars(each):
                    raise DeviceError(
                        "a layer in FP8 runs in torch.nn.DataParallel, whose copies of the layer on several GPUs would "
                        "share its scales; use torch.nn.parallel.DistributedDataParallel"
                    )
                _follow(each.scales, weights[0])
            fp8_steps.read_copies(layers, weights)
            return function([each.scales for each in layers], options, *operands)
    except LtError:
        of.check(operands, options)
        raise
    finally:
        for each in layers:
            each.scales.copies = None


Record: TypeAlias = tuple[Layer, FP8State | None, Philox | None, bool]
"""A record of a layer's call for backward, without the tensors; the bool says whether the weight is contiguous."""


def _keep(records: list[Record], kept: list[Tensor], made: LinearContext, weight: Tensor) -> None:
    """Appends the record and the tensors for a layer's backward."""
    records.append((made.layer, made.state, made.rng, weight.is_contiguous()))
    kept += as_tensors((made.x, made.w, made.cast_slots, made.saved))


def _share_x(gate: FP8State, up: FP8State) -> bool:
    """Whether `up` can read the gate's cast of x, which must make the transpose of x if `up` needs the transpose."""
    is_possible = _is_in_fp8(gate) and _is_in_fp8(up) and gate.recipe == up.recipe and not gate.recipe.by_rows
    return is_possible and (gate.needs_dw or not up.needs_dw)


def _backward(dy: Any, record: Record, kept: Sequence[Any], needs: Needs, **options: Any) -> Any:
    """The gradients of x, weight and bias, None for unneeded ones; `dy` and `kept` must come from `placed`."""
    if True not in needs:
        return None, None, None
    (x8, w8, slots, saved), (layer, state, rng, is_contiguous) = kept, record
    context = LinearContext(layer, x8, w8, saved, None, rng, None, state, slots)
    need_dx, need_dw, need_db = needs
    if need_dw and not is_contiguous:
        options["out_dw"] = scratch(dy, layer.shape[:0:-1]).T
    return linear_bwd(dy, context, need_dx=need_dx, need_dw=need_dw, need_db=need_db, **options)


class _Fp8Layers(torch.autograd.Function):
    """Consecutive layers in FP8: y = layer(... layer(x)) + add, where layer(x) = dropout(act(x · weightᵀ + bias))."""

    @staticmethod
    def forward(ctx: Any, states: Any, options: Options, x: Tensor, add: Tensor, key: Tensor, *given: Tensor) -> Tensor:
        """y (..., N)."""
        (y, addend, keys), ctx.records, kept, below = placed((x, add, key)), [], list[Tensor](), None
        for i, (state, following, *form) in enumerate(zip(states, [*states[1:], None], *options, strict=True)):
            arrays = y, *placed(given[2 * i : 2 * i + 2]), None, None, addend if following is None else None
            call = LinearCall(arrays, (*form, *_COMMON), masks_of(form[-1], i, keys), None)
            y, made, below = forward_of_several(state, following, call, below)
            _keep(ctx.records, kept, made, given[2 * i])
        ctx.is_tuning = is_tuning()
        ctx.save_for_backward(*kept)
        return as_tensor(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """The gradients of x, `add`, weights and biases."""
        begin_backward("linear", ctx, dy)
        _, _, of_x, of_add, _, *needs = ctx.needs_input_grad
        dx, *kept = placed([dy, *ctx.saved_tensors])
        found: list[Any] = [None] * len(needs)
        for i in range(len(ctx.records) - 1, -1, -1):
            at = 2 * i
            wanted = of_x or True in needs[:at], *needs[at : at + 2]
            dx, *found[at : at + 2] = _backward(dx, ctx.records[i], kept[4 * i : 4 * i + 4], wanted)
            if dx is None:
                break
        return None, None, as_tensor(dx), dy if of_add else None, None, *as_tensors(found)


class _Fp8Gated(torch.autograd.Function):
    """A gated block: y = dropout(act(x · gateᵀ) ∘ (x · upᵀ)) · downᵀ + add."""

    @staticmethod
    def forward(ctx: Any, scales: Any, options: Options, x: Tensor, add: Tensor, key: Tensor, *given: Tensor) -> Tensor:
        """y (..., N)."""
        (gate, gate_bias, up, up_bias, down, down_bias), width = given, len(given[0])
        x, add, keys, h = placed((x, add, key, x.new_empty((*x.shape[:-1], 2 * width))))
        ctx.records, kept, ctx.gate = [], [as_tensor(h)], gate_of(options, keys)
        common, shares, source = ((*_PLAIN, *_COMMON), None, None), _share_x(*scales[:2]), None
        halves_of_h = (gate, gate_bias, h[..., :width]), (up, up_bias, h[..., width:])
        for state, (weight, bias, out) in zip(scales, halves_of_h, strict=False):
            arrays = x, *placed((weight, bias)), out, None, None
            call = LinearCall(arrays, *common, keeps_x8=shares and source is None, same_x=source)
            _, made, _ = forward_of_several(state, None, call)
            source = made if shares else None
            _keep(ctx.records, kept, made, weight)
        del source, made, call  # frees row-major x in FP8: backward reads its transpose only
        below, a = None, h
        if applies_prologue(scales[2], h):
            below = GatedContext(h, *ctx.gate)
        else:
            (activation, *_), (slope, *_), (_, p, _) = options
            a, _ = gated_fwd(h, activation=activation, negative_slope=slope, dropout=p, rng=masks_of(p, 0, keys))
        arrays = a, *placed((down, down_bias)), None, None, add
        y, made, _ = forward_of_several(scales[2], None, LinearCall(arrays, *common), below)
        _keep(ctx.records, kept, made, down)
        # `gated_bwd_in_fp8` computes no bias gradients, and `_backward` needs contiguous weights to take its result.
        is_plain = gate_bias is None and up_bias is None and gate.is_contiguous() and up.is_contiguous()
        ctx.casts = is_plain and casts_gate(h, *scales[:2])
        ctx.is_tuning = is_tuning()
        ctx.save_for_backward(*kept)
        return as_tensor(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """The gradients of x, `add`, the weights and the biases."""
        begin_backward("gated", ctx, dy)
        _, _, of_x, of_add, _, *needs = ctx.needs_input_grad
        like, h, *kept = placed([dy, *ctx.saved_tensors])
        gate, up, down = ctx.records
        of_hidden = of_x or True in needs[:4]
        da, *of_down = _backward(like, down, kept[8:], (of_hidden, *needs[4:]))
        dx, of_gate, of_up = None, [None] * 2, [None] * 2
        if of_hidden:
            context = GatedContext(h, *ctx.gate)
            cast = gated_bwd_in_fp8(da, context, gate[1], up[1]) if ctx.casts else None
            dgate, dup = halves(gated_bwd(da, context) if cast is None else cast, h.shape[-1] // 2)
            dx, *of_gate = _backward(dgate, gate, kept[:4], (of_x, *needs[:2]))
            adds: Any = {"out_dx": dx, "accumulate_dx": True} if of_x else {}
            _, *of_up = _backward(dup, up, kept[4:8], (of_x, *needs[2:4]), **adds)
        dx, *of_layers = as_tensors((dx, *of_gate, *of_up, *of_down))
        return None, None, dx, dy if of_add else None, None, *of_layers


_linear: Final = applied(_Fp8Layers, "linear_fp8")
_gated: Final = applied(_Fp8Gated, "gated_fp8")


def _follow(scales: FP8State, weight: Tensor) -> None:
    """Moves a layer's scales, if they have been made, to the device of its weight."""
    if scales.slots is None or device_of("scales", scales.slots) == weight.get_device():
        return
    _wait_for(scales)
    state = scales.state_dict()
    scales.slots = scales.history = None
    scales.load_state_dict(state, like=placed([weight])[0])


def _save(layer: Any, state_dict: dict[str, Any], prefix: str, _: Any) -> None:
    """Adds a layer's scales to its state_dict, as tensors on the CPU."""
    if layer.scales is not None:
        _wait_for(layer.scales)
        state = layer.scales.state_dict()
        state_dict |= {prefix + _ENTRIES[name]: torch.from_numpy(each) for name, each in state.items()}


def _load(layer: Any, state_dict: dict[str, Any], prefix: str, _: Any, *others: Any) -> None:
    """Loads a layer's scales from a state_dict if it has them; a layer without FP8 ignores them."""
    keys = {name: prefix + key for name, key in _ENTRIES.items()}
    state = {name: state_dict.pop(key).cpu().numpy() for name, key in keys.items() if key in state_dict}
    if layer.scales is None or not state:
        return
    _wait_for(layer.scales)
    try:
        # `_follow` later moves new scales to the weight's device.
        layer.scales.load_state_dict(state, like=np.empty(0, np.float32))
    except LtError as error:
        # The hook's last argument is the list of messages that load_state_dict raises as one error.
        others[-1].append(f"{prefix}scales: {error}")


def _wait_for(scales: FP8State) -> None:
    """Waits until PyTorch's streams have computed the scales, because they are read on CuPy's stream."""
    if scales.slots is not None and (device := device_of("scales", scales.slots)) != HOST:
        torch.cuda.synchronize(device)
