"""Inference of linear layers whose products are computed in FP8."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from lt_runtime.arrays.operand import HOST, device_of, library_of
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.nn.kept_weight import KeptWeight, has_kept, keeps_weight
from lt_runtime.ops.add import add as sum_of
from lt_runtime.ops.fp8.casts import cast_fp8
from lt_runtime.ops.fp8.choice import fits
from lt_runtime.ops.fp8.linear import LinearCall, forward_in_fp8
from lt_runtime.ops.fp8.state import FP8State
from lt_runtime.ops.linear import linear
from lt_runtime.ops.matmul import matmul
from lt_runtime.plans.fp8 import W, X
from lt_runtime.plans.fp8_rule import slower_for_inference
from lt_runtime.problem import Compute, DType, type_name
from lt_runtime.products.matmul import lacks_scale_vectors
from lt_runtime.reference.fp8 import INVERSE, SCALE

if TYPE_CHECKING:
    from lt_runtime.ops.optimizers.parameters import Parameter
    from lt_runtime.problem import Activation

_ACTIVATIONS: Final = ("none", "relu", "gelu")
"""The activations that a product in FP8 computes in its epilogue, which has the same name."""
_TYPES: Final = ("bfloat16", "float16")


def fp8_outputs(
    state: FP8State,
    x: Any,
    weight: Parameter,
    bias: Any,
    *,
    activation: Activation,
    compute: Any,
    stream: Any,
    add: Any = None,
    out: Any = None,
) -> Any:
    """act(x · wᵀ + bias) + add for inference, with the product in FP8 where the layer allows it; see `lt.Linear`.

    Training is not disturbed: scales that training has found are read only, and only the recipe "delayed" reads them.

    Args:
        state: the layer's scales.
        out: a buffer for the outputs; with a buffer the layer runs in its own type.
    """
    w, device = weight.data, device_of("x", x)
    # Casts and product must run on one stream, also where x and w are of libraries with different current streams.
    stream = stream_handle(stream, device, library_of(x).current_stream)
    is_fp8 = activation.name in _ACTIVATIONS and type_name(w.dtype) in _TYPES and out is None
    is_fp8 = is_fp8 and type_name(x.dtype) == type_name(w.dtype) and x.shape[-1] == w.shape[1] and fits(x, w)
    keeps = is_fp8 and keeps_weight(state, weight, device, stream)
    if not is_fp8 or (state.recipe.fallback and _is_slower(state, x, w, compute, device, keeps=keeps)):
        return linear(x, w, bias, activation=activation, compute=compute, add=add, out=out, stream=stream)
    if state.recipe.recipe != "delayed" or not state.calibrated.issuperset((X, W)):
        options = activation, activation.negative_slope, 0.0, compute, False, False
        return forward_in_fp8(state, LinearCall((x, w, bias, None, None, add), options, None, stream))[0]
    if keeps and not has_kept(state, weight):
        state.kept = KeptWeight(w, state.slots, stream)
    x8, w8 = _cast(state, X, x, stream), state.kept.w8 if keeps else _cast(state, W, w, stream)
    epilogue: str = activation.name
    if bias is not None:
        epilogue = "bias" if epilogue == "none" else f"{epilogue}_bias"
    scale_a = state.slots[X, INVERSE : INVERSE + 1]
    scale_b = state.kept.inverse if keeps else state.slots[W, INVERSE : INVERSE + 1]
    kinds: Any = {"dtype": type_name(w.dtype), "fast_accumulation": state.recipe.fast_accumulation != "never"}
    rows = x8.reshape(-1, x8.shape[-1])
    y = matmul(rows, w8.T, epilogue=epilogue, bias=bias, scale_a=scale_a, scale_b=scale_b, stream=stream, **kinds)
    y = y.reshape(*x.shape[:-1], w.shape[0])
    return y if add is None else sum_of(add, y, out=y, stream=stream)


def _cast(state: FP8State, row: int, array: Any, stream: Any) -> Any:
    return cast_fp8(array, state.slots[row, SCALE : SCALE + 1], need_transposed=False, stream=stream)[0]


def _is_slower(state: FP8State, x: Any, w: Any, compute: Any, device: int, *, keeps: bool) -> bool:
    """Whether a GPU is expected to compute y more slowly in FP8, or cannot compute it by the recipe.

    Args:
        keeps: whether the call reads the layer's kept FP8 weight, so that it casts only x; see `keeps_weight`.
    """
    kind, sizes = DType.parse("x", x.dtype), (math.prod(x.shape[:-1]), *w.shape)
    options = {"keeps_w": keeps, "is_current": state.recipe.recipe != "delayed"}
    if device != HOST and state.recipe.by_rows and lacks_scale_vectors(device):
        return True
    return device != HOST and slower_for_inference(sizes, kind, Compute.parse(compute, kind), device, **options)
