"""Gated activations, such as SwiGLU: y = dropout(act(gate) · value), and the gradients of gate and value."""

from __future__ import annotations

from typing import Any

from lt_runtime.arguments import shown
from lt_runtime.errors import KindError
from lt_runtime.ops._gated import GATED_BACKWARD, GATED_FORWARD, GatedContext
from lt_runtime.ops.call import perform
from lt_runtime.problem import Activation, ActivationName, Philox


def gated_fwd(
    h: Any,
    *,
    activation: ActivationName | Activation = "silu",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    rng: Philox | None = None,
    out: Any = None,
    stream: Any = None,
) -> tuple[Any, GatedContext]:
    """y = dropout(act(gate) · value), where h is (gate, value), and a context for `gated_bwd`.

    With "silu" this is SwiGLU, with "gelu" or "gelu_erf" GEGLU, with "relu" ReGLU, with "sigmoid" GLU. It is computed
    in FP32, and y is rounded once.

    Args:
        h: (..., 2F), float32, float16 or bfloat16: the F columns of the gate, then the F columns of the value. All axes
            but the last are rows, which may lie in any layout with one stride from row to row; a vector is one row.
        activation: of the gate: a name of `lt.ACTIVATIONS`, or an `Activation`.
        negative_slope: of `leaky_relu`.
        dropout: probability in [0, 1) with which an element of y is zeroed, rounded to a multiple of 2^-16; the others
            are scaled up by 1 / (1 - dropout).
        rng: source of the mask, which is drawn for y's elements in row-major order; needed if `dropout` is not 0.
        out: (..., F) buffer for y.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        y (..., F), an array of h's library as in `linear_fwd`, and the context. The context refers to h, and to an
        array that is the step of `rng`: overwriting one of these before `gated_bwd` makes the gradient dh wrong.

    Raises:
        ShapeError: h has no even number of columns, or `out` has another shape than y.
        ArgumentError: an unknown activation; `dropout` outside [0, 1), positive but rounded to 0, or without `rng`.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    options = (activation, negative_slope, dropout)
    made: tuple[Any, GatedContext] = perform(GATED_FORWARD, (h, out), options, (rng, None), stream)
    return made


def gated_bwd(dy: Any, ctx: GatedContext, *, remake_y: bool = False, out: Any = None, stream: Any = None) -> Any:
    """The gradient dh of the `gated_fwd` call that returned `ctx`. One pass writes the gradients of gate and value.

    dh is computed in FP32 and rounded once. The dropout mask is computed again from the context's `rng`.

    Args:
        dy: (..., F), of h's type: the gradient of y.
        remake_y: whether y is computed again, with forward's bits, and written over dy. Then y need not be kept between
            forward and backward.
        out: (..., 2F) buffer for dh; may be h itself, whose values are then lost.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. Forward's work must be
            ordered before it.

    Returns:
        dh (..., 2F), an array of h's library.

    Raises:
        KindError: `ctx` is no context of `gated_fwd`.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    if not isinstance(ctx, GatedContext):
        raise KindError(f"ctx is {shown(ctx)}; it must be the context that gated_fwd returned")
    options = ctx.activation, ctx.dropout, remake_y
    return perform(GATED_BACKWARD, (dy, ctx.h, out), options, (ctx.rng, None), stream)
