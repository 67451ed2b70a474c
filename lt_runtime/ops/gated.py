"""Gated activations, such as SwiGLU: y = dropout(act(gate) · value), and the gradients of gate and value."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lt_runtime import reference
from lt_runtime.arguments import flag, shown
from lt_runtime.arrays.checks import check_same, check_shape
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import KindError, ShapeError
from lt_runtime.kernels.gated import GatedPass
from lt_runtime.ops.call import New, PassOperation, PreparedCall, Request, dropouts_of, perform, result_spec
from lt_runtime.problem import Activation, ActivationName, Philox


@dataclass(slots=True, eq=False, repr=False)
class GatedContext:
    """The record of a `gated_fwd` call that `gated_bwd` takes; do not change its attributes.

    Attributes:
        h: the operand, the only array that is kept: backward computes act(gate) again.
        activation: the gate's activation.
        dropout: probability of dropout.
        rng: the source of the dropout mask; None without dropout.
    """

    h: Any
    activation: Activation
    dropout: float
    rng: Philox | None

    def __repr__(self) -> str:
        return f"GatedContext(h={tuple(self.h.shape)}, {self.activation.name}, dropout={self.dropout})"


class _Gated(PassOperation):
    """Base of both passes. A call's options are the activation and the probability of dropout.

    A call's scalars are a pair: the random-number source of the mask, and None. A request's detail is the options.
    """

    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(GatedPass))


class GatedForward(_Gated):
    """y = dropout(act(gate) · value)."""

    names = ("h", "out")
    required = 1

    def read(self, operands: Sequence[Any], options: Any, scalars: tuple[Philox | None, None]) -> Request:
        """See `Operation`."""
        h, out = operands
        activation, negative_slope, p = options
        activation, dropouts = Activation.of(activation, negative_slope), dropouts_of(p, scalars[0])
        dtype, shape, new = h.element_type(), _output_shape(h), dict[int, New]()
        y = result_spec(1, out, shape, h, new)
        problem = dtype, activation, dropouts is not None, (h.spec, y), False
        return Request(problem if y.layout.size else None, (1,), new, (activation, float(p)), dropouts=dropouts)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        h, y = arrays
        activation, p = request.detail
        y[...] = reference.gated_fwd(h, activation, reference.dropout_factors(y.shape, p, scalars[0])).astype(y.dtype)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> tuple[Any, GatedContext]:
        """See `Operation`: y and the context."""
        h, y = arrays
        activation, p = prepared.request.detail
        return y, GatedContext(h, activation, p, scalars[0] if p else None)


class GatedBackward(_Gated):
    """The gradient of h = (gate, value), which may overwrite h."""

    names = ("dy", "h", "out")
    required = 2

    def read(self, operands: Sequence[Any], options: Any, scalars: tuple[Philox | None, None]) -> Request:
        """See `Operation`."""
        dy, h, out = operands
        activation, p, remake_y = options
        dtype, dropouts, new = h.element_type(), dropouts_of(p, scalars[0]), dict[int, New]()
        written = (0, 2) if flag("remake_y", remake_y) else (2,)
        check_same(h, dy)
        check_shape(dy.name, dy.shape, _output_shape(h), "y's shape")
        dh = result_spec(2, out, h.shape, h, new)
        problem = dtype, activation, dropouts is not None, (h.spec, dy.spec, dh), remake_y
        is_empty = dh.layout.size == 0
        return Request(None if is_empty else problem, written, new, options, same=((1, 2),), dropouts=dropouts)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        dy, h, dh = arrays
        activation, p, remake_y = request.detail
        factors = reference.dropout_factors(dy.shape, p, scalars[0])
        y, exact = reference.gated_fwd(h, activation, factors), reference.gated_bwd(dy, h, activation, factors)
        dh[...] = exact.astype(dh.dtype)
        if remake_y:
            dy[...] = y.astype(dy.dtype)


GATED_FORWARD: Final = GatedForward()
GATED_BACKWARD: Final = GatedBackward()


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
        rng: source of the mask, which is that of y's elements in row-major order; needed if `dropout` is not 0.
        out: (..., F) buffer for y.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        y (..., F), of the kind that h is, and the context. The context refers to h, and to an array that is the step of
        `rng`: overwriting one of them before `gated_bwd` makes its result wrong.

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
        dh (..., 2F), of the kind that h is.

    Raises:
        KindError: `ctx` is no context of `gated_fwd`.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    if not isinstance(ctx, GatedContext):
        raise KindError(f"ctx is {shown(ctx)}; it must be the context that gated_fwd returned")
    options = ctx.activation, ctx.dropout, remake_y
    return perform(GATED_BACKWARD, (dy, ctx.h, out), options, (ctx.rng, None), stream)


def _output_shape(h: Operand) -> tuple[int, ...]:
    """The shape of y (..., F) for h (..., 2F).

    Raises:
        ShapeError: h has an odd number of columns, or no axes.
    """
    if not h.shape or h.shape[-1] % 2:
        found = f"{h.name} has shape {h.shape}; its last axis must be even"
        raise ShapeError(f"{found}: the gate's columns, then as many of the value")
    return (*h.shape[:-1], h.shape[-1] // 2)
