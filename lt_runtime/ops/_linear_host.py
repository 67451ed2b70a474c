"""A linear layer over NumPy arrays: the reference, rounded once to the operands' type."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arrays import check_shape
from lt_runtime.errors import DTypeError
from lt_runtime.ops._linear_types import Gradients, Layer, LinearContext, Options, Source, Wanted, problem_shape
from lt_runtime.ops._place import host_dropout, host_output
from lt_runtime.problem import Compute, DType, Saved

Array = NDArray[Any]


def _check_types(dtype: DType, arrays: dict[str, Array | None]) -> None:
    for name, array in arrays.items():
        if array is not None and array.dtype != dtype.numpy:
            raise DTypeError(f"{name} is {array.dtype.name} but x is {dtype.value}; types must be equal")


def forward(
    x: Array, w: Array, bias: Array | None, options: Options, out: Array | None, out_z: Array | None
) -> tuple[Array, LinearContext]:
    """See `linear_fwd`."""
    dtype = DType.parse("x", x.dtype)
    Compute.parse(options.compute, dtype)
    _check_types(dtype, {"w": w, "bias": bias})
    m, n, k = problem_shape(x.shape, w.shape, None if bias is None else bias.shape)
    inputs = {"x": x, "w": w, "bias": bias}
    y = host_output("out", out, (m, n), dtype, inputs)
    z = host_output("out_z", out_z, (m, n), dtype, {**inputs, "out": out})
    factors = host_dropout((m, n), options.dropout, options.rng)
    with np.errstate(all="ignore"):  # overflow and NaN are results here, as they are on a GPU
        exact_y, exact_z = reference.linear_fwd(x, w, bias, options.activation, factors)
        y[...], z[...] = exact_y.astype(dtype.numpy), exact_z.astype(dtype.numpy)
    saved_as = Saved.NOTHING if options.activation.name == "none" else Saved.PREACTIVATION
    has_bias = bias is not None
    layer = Layer((m, n, k), saved_as, None, options.activation, options.dropout, options.compute, has_bias)
    return y, LinearContext(layer, x, w, z, z, options.rng)


def backward(dy: Array, source: Source, wanted: Wanted, outputs: Gradients) -> Gradients:
    """See `linear_bwd`."""
    ctx, below = source.layer, source.below
    dtype = DType.parse("x", ctx.x.dtype)
    _check_types(dtype, {"dy": dy})
    check_shape("dy", dy.shape, source.shapes["dz"], "y's shape")
    buffers = _buffers(dy, source, wanted, outputs)
    with np.errstate(all="ignore"):
        exact = _exact(dy, ctx, source.before_activation)
        values: dict[str, Any] = exact._asdict()
        if below is not None:
            values["dx"] = reference.through_activation(exact.dx, below.saved, below.layer.activation, _factors(below))
            values["db_below"] = values["dx"].sum(axis=0)
        for name, buffer in buffers.items():
            kept = buffer.astype(np.float64) if wanted.accumulate and name in ("dw", "db", "db_below") else 0.0
            buffer[...] = (values[name] + kept).astype(dtype.numpy)
    return Gradients(*(buffers.get(name) for name in Gradients._fields))


def _exact(dy: Array, ctx: LinearContext, before_activation: bool) -> reference.LinearGradients:
    if before_activation:
        return reference.linear_bwd(dy, ctx.x, ctx.w, dy)
    return reference.linear_bwd(dy, ctx.x, ctx.w, ctx.saved, ctx.layer.activation, _factors(ctx))


def _factors(ctx: LinearContext) -> NDArray[np.float64] | None:
    return host_dropout(ctx.shape[:2], ctx.dropout, ctx.rng)


def _buffers(dy: Array, source: Source, wanted: Wanted, outputs: Gradients) -> dict[str, Array]:
    ctx = source.layer
    dtype = DType.parse("x", ctx.x.dtype)
    inputs: dict[str, Array | None] = {"dy": dy, "x": ctx.x, "w": ctx.w, "the saved tensor": ctx.saved}
    if source.below is not None:
        inputs["the saved tensor below"] = source.below.saved
    buffers = {}
    for name, shape in source.shapes.items():
        if getattr(wanted, name, outputs.dz is not None):
            buffers[name] = host_output(f"out_{name}", getattr(outputs, name), shape, dtype, inputs)
            inputs[f"out_{name}"] = buffers[name]
    return buffers
