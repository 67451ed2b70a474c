"""A linear layer: y = dropout(act(x · wᵀ + bias)), and its gradients."""

from __future__ import annotations

import operator
from typing import Any, NamedTuple, overload

from lt_runtime.arrays import Signature, on_host, signature_of
from lt_runtime.errors import ArgumentError, ShapeError
from lt_runtime.ops import _linear_gpu_backward, _linear_gpu_forward, _linear_host
from lt_runtime.ops._linear_types import Gradients, LinearContext, Options, Source, Wanted
from lt_runtime.ops._place import check_dropout
from lt_runtime.problem import Activation, Philox


class LinearGradients(NamedTuple):
    """dx (M, K), dw (N, K) and db (N,); None where a gradient was not asked for."""

    dx: Any
    dw: Any
    db: Any


class ChainedGradients(NamedTuple):
    """dz_below (M, K), the gradient before the activation of the layer below; dw (N, K), db (N,); that layer's db (K,).

    None where a gradient was not asked for.
    """

    dz_below: Any
    dw: Any
    db: Any
    db_below: Any


def linear_fwd(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    activation: str | Activation = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    rng: Philox | None = None,
    compute: str = "float32",
    propagate_nan: bool = False,
    out: Any = None,
    out_z: Any = None,
    stream: Any = None,
) -> tuple[Any, LinearContext]:
    """y = dropout(act(x · wᵀ + bias)), keeping what `linear_bwd` needs.

    NumPy arrays run the reference in float64; arrays on a GPU run there, on one stream, without synchronising.
    Any operand, outputs included, may be row- or column-major with any leading dimension: `w.T` serves weights
    that are stored (inputs, outputs).

    Args:
        x: (M, K), float32, float16 or bfloat16.
        w: (N, K), same type; so are `bias` and every output.
        bias: (N,), or None.
        activation: a name of `lt.ACTIVATIONS`, or an `Activation`.
        negative_slope: of `leaky_relu`.
        dropout: probability in [0, 1) with which an element of y is zeroed; the others are scaled up.
        rng: where the mask comes from; needed if `dropout` is not 0.
        compute: "float32", or "tf32" to round FP32 operands for the tensor cores.
        propagate_nan: rule out cuBLASLt's ReLU, which turns NaN into 0.
        out: (M, N) buffer for y.
        out_z: (M, N) buffer for the pre-activation x · wᵀ + bias; with both buffers nothing is allocated.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; CuPy's current stream if None.

    Returns:
        y (M, N), of the kind that x is, and the context. The context may refer to x, w and y: overwriting one of
        them before `linear_bwd` makes its result wrong.

    Raises:
        ArgumentError: an unknown activation or compute type, or `dropout` outside [0, 1) or without `rng`.
        OperandError: shapes, types, devices or layouts that do not fit; outputs that share memory with inputs.
        CaptureError: the stream is being captured and these shapes have never run.
        GpuError: the driver, the compiler or cuBLASLt failed.
    """
    arrays = (x, w, bias, out, out_z)
    given = (bias is None, out is None, out_z is None)
    signature = signature_of(arrays, (activation, negative_slope, dropout, compute, propagate_nan, given))
    made = None if signature is None else _linear_gpu_forward.forward_again(signature, arrays, rng, stream)
    if made is not None:
        return made
    options = options_of(activation, negative_slope, dropout, rng, compute, propagate_nan)
    if on_host({"x": x, "w": w}, {"bias": bias, "out": out, "out_z": out_z}):
        return _linear_host.forward(x, w, bias, options, out, out_z)
    return _linear_gpu_forward.forward(arrays, options, stream, signature)


def linear(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    activation: str | Activation = "none",
    negative_slope: float = 0.01,
    compute: str = "float32",
    propagate_nan: bool = False,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """y = act(x · wᵀ + bias), for inference: nothing is kept. Arguments and errors as in `linear_fwd`."""
    arrays = (x, w, bias, out, None)
    signature = signature_of(arrays, (activation, negative_slope, compute, propagate_nan, bias is None, out is None))
    made = None if signature is None else _linear_gpu_forward.forward_again(signature, arrays, None, stream)
    if made is not None:
        return made[0]
    options = options_of(activation, negative_slope, 0.0, None, compute, propagate_nan, inference=True)
    if on_host({"x": x, "w": w}, {"bias": bias, "out": out}):
        return _linear_host.forward(x, w, bias, options, out, None)[0]
    return _linear_gpu_forward.forward(arrays, options, stream, signature)[0]


@overload
def linear_bwd(
    dy: Any,
    ctx: LinearContext,
    *,
    need_dx: bool = ...,
    need_dw: bool = ...,
    need_db: bool = ...,
    accumulate: bool = ...,
    before_activation: bool = ...,
    through: None = ...,
    out_dx: Any = ...,
    out_dw: Any = ...,
    out_db: Any = ...,
    out_dz: Any = ...,
    stream: Any = ...,
) -> LinearGradients: ...


@overload
def linear_bwd(
    dy: Any,
    ctx: LinearContext,
    *,
    need_dw: bool = ...,
    need_db: bool = ...,
    accumulate: bool = ...,
    before_activation: bool = ...,
    through: LinearContext,
    need_db_below: bool = ...,
    out_dx: Any = ...,
    out_dw: Any = ...,
    out_db: Any = ...,
    out_dz: Any = ...,
    out_db_below: Any = ...,
    stream: Any = ...,
) -> ChainedGradients: ...


def linear_bwd(
    dy: Any,
    ctx: LinearContext,
    *,
    need_dx: bool = True,
    need_dw: bool = True,
    need_db: bool = True,
    accumulate: bool = False,
    before_activation: bool = False,
    through: LinearContext | None = None,
    need_db_below: bool = True,
    out_dx: Any = None,
    out_dw: Any = None,
    out_db: Any = None,
    out_dz: Any = None,
    out_db_below: Any = None,
    stream: Any = None,
) -> LinearGradients | ChainedGradients:
    """Gradients of the `linear_fwd` call that returned `ctx`.

    In a chain of layers each call can do the elementwise part of the next: with `through`, the gradient of the input is
    taken through the activation and the dropout of the layer below as well, wherever that was measured to be the
    cheapest, and what comes back is given to that layer as before its activation::

        dz, dw2, db2, db1 = lt.linear_bwd(dy, ctx2, through=ctx1)
        dx, dw1, _ = lt.linear_bwd(dz, ctx1, before_activation=True, need_db=False)

    Args:
        dy: (M, N), the gradient with respect to y; with `before_activation`, with respect to the pre-activation.
        need_dx, need_dw, need_db: which gradients to make. There is no db for a layer without bias.
        accumulate: add dw, db and db_below to what their buffers hold; dx is overwritten all the same.
        before_activation: dy has been taken through this layer's activation and dropout already.
        through: the context of the layer whose y was this one's x.
        need_db_below: with `through`, whether to make that layer's bias gradient.
        out_dx: (M, K) buffer, for dz_below with `through`. out_dw: (N, K). out_db: (N,). out_db_below: (K,).
        out_dz: (M, N) buffer for the gradient with respect to the pre-activation; scratch memory if None.
        stream: as in `linear_fwd`; it must come after forward's.

    Returns:
        (dx, dw, db), or (dz_below, dw, db, db_below) with `through`; None for those not asked for.

    Raises:
        ArgumentError: `accumulate` without the buffers to add to; `through` without dx.
        ShapeError: `through` is a layer whose y this one's x cannot be.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    source = Source(ctx, through, before_activation)
    buffers = (out_dx, out_dw, out_db, out_dz, out_db_below)
    saved, saved_below = (None if before_activation else ctx.saved), (through.saved if through is not None else None)
    below = through.layer if through is not None else None
    given = (out_dx is None, out_dw is None, out_db is None, out_dz is None, out_db_below is None)
    asked = (ctx.layer, below, before_activation, need_dx, need_dw, need_db, need_db_below, accumulate, given)
    arrays = (dy, ctx.x, ctx.w, saved, saved_below, *buffers)
    signature = signature_of(arrays, asked)
    made = None if signature is None else _linear_gpu_backward.backward_again(signature, arrays, source, stream)
    if made is None:
        wanted = wanted_of(source, need_dx, need_dw, need_db, need_db_below, accumulate)
        made = _look(dy, source, wanted, Gradients(*buffers), stream, signature)
    if through is None:
        return LinearGradients(made.dx, made.dw, made.db)
    return ChainedGradients(made.dx, made.dw, made.db, made.db_below)


def wanted_of(
    source: Source, need_dx: bool, need_dw: bool, need_db: bool, need_db_below: bool, accumulate: bool
) -> Wanted:
    """The gradients that a call of `linear_bwd` asks for.

    Raises:
        ArgumentError, ShapeError: see `linear_bwd`.
    """
    _check_chain(source, need_dx)
    below_has_bias = source.below is not None and source.below.has_bias
    return Wanted(need_dx, need_dw, need_db and source.layer.has_bias, need_db_below and below_has_bias, accumulate)


def _look(
    dy: Any, source: Source, wanted: Wanted, buffers: Gradients, stream: Any, signature: Signature | None
) -> Gradients:
    """Makes a backward call that is not known yet."""
    outputs = of_use(buffers, wanted)
    named = {f"out_{name}": array for name, array in outputs._asdict().items()}
    if on_host({"dy": dy, "x": source.layer.x}, named):
        return _linear_host.backward(dy, source, wanted, outputs)
    # A buffer that is of no use is in the signature, but not among what is looked at.
    are_all_looked_at = all(map(operator.is_, outputs, buffers))
    return _linear_gpu_backward.backward(dy, source, wanted, outputs, stream, signature if are_all_looked_at else None)


def of_use(buffers: Gradients, wanted: Wanted) -> Gradients:
    """The buffers for gradients that are wanted.

    Raises:
        ArgumentError: one is missing, to add to.
    """
    outputs = Gradients(*(array if getattr(wanted, name, True) else None for name, array in buffers._asdict().items()))
    _check_accumulation(wanted, outputs)
    return outputs


def _check_chain(source: Source, need_dx: bool) -> None:
    below = source.below
    if below is None:
        return
    if not need_dx:
        raise ArgumentError("need_dx is False, but through asks for the gradient of x; pass need_dx=True")
    y, x = below.shape[:2], source.layer.shape[::2]
    if y != x:
        raise ShapeError(f"through is a layer with y of shape {y}; it must be {x}, as x of this layer")


def _check_accumulation(wanted: Wanted, outputs: Gradients) -> None:
    names = ("dw", "db", "db_below")
    missing = [f"out_{name}" for name in names if getattr(wanted, name) and getattr(outputs, name) is None]
    if wanted.accumulate and missing:
        raise ArgumentError(f"accumulate=True needs {' and '.join(missing)}, to add to")


def options_of(
    activation: str | Activation,
    negative_slope: float,
    dropout: float,
    rng: Philox | None,
    compute: str,
    propagate_nan: bool,
    *,
    inference: bool = False,
) -> Options:
    """The options of a call of `linear_fwd`, or of `linear` with `inference`.

    Raises:
        ArgumentError: see `linear_fwd`.
    """
    if not isinstance(activation, Activation):
        activation = Activation(activation, negative_slope)
    return Options(activation, dropout, check_dropout(dropout, rng), compute, propagate_nan, inference)
