"""A linear layer: y = dropout(act(x · wᵀ + bias)), and its gradients."""

from __future__ import annotations

from typing import Any, NamedTuple

from lt_runtime.arrays import on_host
from lt_runtime.errors import ArgumentError
from lt_runtime.ops import _linear_gpu, _linear_host
from lt_runtime.ops._linear_types import Gradients, LinearContext, Options, Wanted
from lt_runtime.ops._place import check_dropout
from lt_runtime.problem import Activation, Philox


class LinearGradients(NamedTuple):
    """dx (M, K), dw (N, K) and db (N,); None where a gradient was not asked for."""

    dx: Any
    dw: Any
    db: Any


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
    options = _options(activation, negative_slope, dropout, rng, compute, propagate_nan)
    host = on_host({"x": x, "w": w}, {"bias": bias, "out": out, "out_z": out_z})
    run = _linear_host.forward if host else _linear_gpu.forward
    return run(x, w, bias, options, out, out_z, stream)


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
    options = _options(activation, negative_slope, 0.0, None, compute, propagate_nan, inference=True)
    host = on_host({"x": x, "w": w}, {"bias": bias, "out": out})
    run = _linear_host.forward if host else _linear_gpu.forward
    return run(x, w, bias, options, out, None, stream)[0]


def linear_bwd(
    dy: Any,
    ctx: LinearContext,
    *,
    need_dx: bool = True,
    need_dw: bool = True,
    need_db: bool = True,
    accumulate: bool = False,
    out_dx: Any = None,
    out_dw: Any = None,
    out_db: Any = None,
    out_dz: Any = None,
    stream: Any = None,
) -> LinearGradients:
    """Gradients of the `linear_fwd` call that returned `ctx`.

    Args:
        dy: (M, N), the gradient with respect to y.
        need_dx, need_dw, need_db: which gradients to make. There is no db for a layer without bias.
        accumulate: add dw and db to what `out_dw` and `out_db` hold; dx is overwritten all the same.
        out_dx: (M, K) buffer. out_dw: (N, K). out_db: (N,).
        out_dz: (M, N) buffer for the gradient with respect to the pre-activation; scratch memory if None.
        stream: as in `linear_fwd`; it must come after forward's.

    Returns:
        (dx, dw, db), None for those not asked for.

    Raises:
        ArgumentError: `accumulate` without the buffers to add to.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    wanted = Wanted(need_dx, need_dw, need_db and ctx.has_bias, accumulate)
    if accumulate and ((wanted.dw and out_dw is None) or (wanted.db and out_db is None)):
        raise ArgumentError("accumulate=True needs out_dw and out_db, the buffers to add to")
    outputs = Gradients(
        out_dx if wanted.dx else None,
        out_dw if wanted.dw else None,
        out_db if wanted.db else None,
        out_dz,
    )
    named = {f"out_{name}": array for name, array in outputs._asdict().items()}
    host = on_host({"dy": dy, "x": ctx.x}, named)
    run = _linear_host.backward if host else _linear_gpu.backward
    return LinearGradients(*run(dy, ctx, wanted, outputs, stream)[:3])


def _options(
    activation: str | Activation,
    negative_slope: float,
    dropout: float,
    rng: Philox | None,
    compute: str,
    propagate_nan: bool,
    *,
    inference: bool = False,
) -> Options:
    if not isinstance(activation, Activation):
        activation = Activation(activation, negative_slope)
    return Options(activation, dropout, check_dropout(dropout, rng), compute, propagate_nan, inference)
