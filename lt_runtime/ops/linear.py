"""A linear layer: y = dropout(act(x · wᵀ + bias)) + add, and its gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, Unpack, overload

from lt_runtime.arguments import flag, shown
from lt_runtime.arrays.checks import is_same_matrix
from lt_runtime.errors import ArgumentError, KindError
from lt_runtime.ops._linear import BACKWARD, FORWARD, BackwardOptions, ChainedGradients, LinearContext, LinearGradients
from lt_runtime.ops.call import perform
from lt_runtime.problem import Activation, ActivationName, ComputeName, Philox

if TYPE_CHECKING:
    from lt_runtime.ops.fp8.state import FP8State


def linear_fwd(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    activation: ActivationName | Activation = "none",
    negative_slope: float = 0.01,
    dropout: float = 0.0,
    rng: Philox | None = None,
    compute: ComputeName = "float32",
    propagate_nan: bool = False,
    precision: FP8State | None = None,
    add: Any = None,
    out: Any = None,
    out_z: Any = None,
    stream: Any = None,
) -> tuple[Any, LinearContext]:
    """y = dropout(act(x · wᵀ + bias)) + add, and a context for `linear_bwd`.

    NumPy arrays run the reference in float64; arrays on a GPU run there, on one stream, without synchronising.
    Any operand, outputs included, may be row- or column-major with any leading dimension: `w.T` serves weights
    that are stored (inputs, outputs). x has one or more leading axes "...", whose product is M. They are read as the
    rows of a matrix without a copy, so that the rows must be evenly spaced in memory.

    Products accumulate in FP32. A 16-bit y is rounded once, with one exception: if our kernel applies only activation
    or dropout, it reads a pre-activation that is rounded to 16 bits, as in PyTorch. The reference rounds each result
    once.

    Args:
        x: (..., K), float32, float16 or bfloat16.
        w: (N, K), same type; so are `bias` and every output.
        bias: (N,), or None.
        activation: a name of `lt.ACTIVATIONS`, or an `Activation`. "gelu" is GELU's tanh form, as in GPT-2; "gelu_erf"
            is the exact form.
        negative_slope: of `leaky_relu`.
        dropout: probability in [0, 1) with which an element of y is zeroed, rounded to a multiple of 2^-16; the others
            are scaled up by 1 / (1 - dropout).
        rng: source of the mask; needed if `dropout` is not 0.
        compute: "float32", or "tf32" to round FP32 operands for the tensor cores.
        propagate_nan: rule out cuBLASLt's ReLU, which turns NaN into 0 and takes 1 for the derivative at exactly 0. If
            False, the derivative at exactly 0 is 0 or 1, depending on the plan.
        precision: the `lt.FP8State` of this layer: x and w, and dy in `linear_bwd`, are cast to FP8 and multiplied so,
            and the context keeps x and w in FP8. It has no effect unless M, N and K are multiples of 16.
        add: (..., N), such as the input of a residual block; its gradient is dy. Without activation and dropout the
            product may add it: a 16-bit product is then rounded before the addition.
        out: (..., N) buffer for y; may be `add` itself, which y then overwrites.
        out_z: (..., N) buffer for the pre-activation x · wᵀ + bias; with both buffers nothing is allocated.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        y (..., N) and the context. y is an array of x's library, which is NumPy, PyTorch or, for all other arrays,
        CuPy. The context may refer to x, w and y, and to an array that is the step of `rng`: overwriting one of these
        arrays before `linear_bwd` makes the results of `linear_bwd` wrong.

    Raises:
        ArgumentError: an unknown activation or compute type; `dropout` outside [0, 1), positive but rounded to 0, or
            without `rng`.
        OperandError: shapes, types, devices or layouts that do not fit; outputs that share memory with inputs.
        CaptureError: the stream is being captured and these shapes have never run.
        GpuError: the driver, the compiler or cuBLASLt failed.
    """
    options = (activation, negative_slope, dropout, compute, propagate_nan, True)
    if precision is not None:
        from lt_runtime.ops.fp8.linear import LinearCall, forward

        return forward(precision, LinearCall((x, w, bias, out, out_z, add), options, rng, stream))
    made: tuple[Any, LinearContext] = perform(FORWARD, (x, w, bias, out, out_z, add), options, (rng, None), stream)
    return made


def linear(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    activation: ActivationName | Activation = "none",
    negative_slope: float = 0.01,
    compute: ComputeName = "float32",
    propagate_nan: bool = False,
    add: Any = None,
    out: Any = None,
    stream: Any = None,
) -> Any:
    """y = act(x · wᵀ + bias) + add, for inference: without a context.

    Rounding, arguments and errors are those of `linear_fwd`.

    Args:
        x: (..., K). w: (N, K). bias: (N,), or None.
        add: (..., N), or None.
        out: (..., N) buffer for y; may be `add` itself.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        y (..., N), of the kind and type that x is.
    """
    options = (activation, negative_slope, 0.0, compute, propagate_nan, False)
    return perform(FORWARD, (x, w, bias, out, None, add), options, (None, None), stream)


class _BackwardKeywords(TypedDict, total=False):
    """All keywords of `linear_bwd` except `through`; `through` decides the type of the result."""

    need_dx: bool
    need_dw: bool
    need_db: bool
    accumulate: bool
    accumulate_dx: bool
    before_activation: bool
    require_same: bool
    need_db_below: bool
    out_dx: Any
    out_dw: Any
    out_db: Any
    out_dz: Any
    out_db_below: Any
    stream: Any


@overload
def linear_bwd(
    dy: Any, ctx: LinearContext, *, through: None = None, **options: Unpack[_BackwardKeywords]
) -> LinearGradients: ...


@overload
def linear_bwd(
    dy: Any, ctx: LinearContext, *, through: LinearContext, **options: Unpack[_BackwardKeywords]
) -> ChainedGradients: ...


def linear_bwd(
    dy: Any,
    ctx: LinearContext,
    *,
    need_dx: bool = True,
    need_dw: bool = True,
    need_db: bool = True,
    accumulate: bool = False,
    accumulate_dx: bool = False,
    before_activation: bool = False,
    through: LinearContext | None = None,
    require_same: bool = True,
    need_db_below: bool = True,
    out_dx: Any = None,
    out_dw: Any = None,
    out_db: Any = None,
    out_dz: Any = None,
    out_db_below: Any = None,
    stream: Any = None,
) -> Any:
    """Gradients of the `linear_fwd` call that returned `ctx`.

    In a chain of layers each call can do the elementwise part of the next call: with `through`, the gradient of the
    input is taken through the activation and the dropout of the layer below as well, in the product's epilogue or in a
    kernel, whichever was measured to be faster. The next call takes the result with `before_activation=True`::

        dz, dw2, db2, db1 = lt.linear_bwd(dy, ctx2, through=ctx1)
        dx, dw1, _ = lt.linear_bwd(dz, ctx1, before_activation=True, need_db=False)

    On a GPU all sums are computed in FP32. Results of 16-bit types are rounded as follows. The gradient dz with respect
    to the pre-activation is rounded before dx and dw are computed from it. db is rounded once, with `accumulate` after
    the addition. dw is rounded once; with `accumulate`, cuBLASLt may round the product before the addition, and rounds
    the sum after it. The same holds for dx with `accumulate_dx`. With `through`, dx may be rounded before it is taken
    through the layer below.

    Args:
        dy: (..., N), of x's type as all gradients are: the gradient with respect to y; with `before_activation`, with
            respect to the pre-activation.
        need_dx, need_dw, need_db: which gradients to make. There is no db for a layer without bias.
        accumulate: add dw, db and db_below to the values in their buffers.
        accumulate_dx: add dx to the values in `out_dx`, such as the gradient that a residual connection brings; not
            with `through`.
        before_activation: dy is already the gradient before this layer's activation and dropout.
        through: the context of the layer below, whose y is this layer's x: the same memory, type, rows and strides.
            Both contexts keep that array alive. If that layer has an `add`, the gradient of `add` is dx before the
            activation, which is not returned.
        require_same: whether `through` is checked to be that layer's context. Pass False only if x is a copy of its y.
        need_db_below: with `through`, whether to make that layer's bias gradient.
        out_dx: (..., K) buffer, for dz_below with `through`. out_dw: (N, K). out_db: (N,). out_db_below: (K,).
        out_dz: (..., N) buffer for the gradient with respect to the pre-activation; scratch memory if None.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. Forward's
            work must be ordered before it.

    Returns:
        Named tuples: `LinearGradients` (dx, dw, db), or with `through` `ChainedGradients` (dz_below, dw, db, db_below);
        None for gradients that were not asked for.

    Raises:
        KindError: `ctx` or `through` is no context.
        ArgumentError: `accumulate` or `accumulate_dx` without the buffers to add to; `through` without dx, with
            `accumulate_dx`, or for a layer in FP8; `through` is of a layer whose y is not this layer's x.
        ShapeError: the y of the layer of `through` has another shape than this layer's x.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    if not isinstance(ctx, LinearContext):
        raise KindError(f"ctx is {shown(ctx)}; it must be the context that linear_fwd returned")
    if through is not None and not isinstance(through, LinearContext):
        raise KindError(f"through is {shown(through)}; it must be None, or a context that linear_fwd returned")
    layer = ctx.layer
    if ctx.state is not None and through is not None:
        raise ArgumentError("through is given, and ctx has a precision, which excludes through; drop it")
    below, saved_below, rng_below, below_has_bias = None, None, None, False
    if through is not None:
        if through.y is not ctx.x:
            _check_below(ctx, through, require_same)
        below, saved_below, rng_below = through.layer, through.saved, through.rng
        below_has_bias = below.has_bias
    need_db, need_db_below = layer.has_bias and need_db, below_has_bias and need_db_below
    needs = need_dx, need_dw, need_db, need_db_below
    options = (layer, below, before_activation, *needs, accumulate, require_same, accumulate_dx)
    try:
        saved = None if before_activation else ctx.saved
        outputs = out_dx if need_dx else None, out_dw if need_dw else None, out_db if need_db else None
        if ctx.state is not None:
            from lt_runtime.ops.fp8.linear import backward

            return backward(dy, ctx, saved, (*outputs, out_dz), options, stream)
        arrays = dy, ctx.x, ctx.w, saved, saved_below, *outputs, out_dz, out_db_below if need_db_below else None
    except Exception:  # a flag could be an array, which has no truth value
        BackwardOptions.of(options)
        raise
    return perform(BACKWARD, arrays, options, (ctx.rng, rng_below), stream)


def _check_below(ctx: LinearContext, through: LinearContext, require_same: bool) -> None:
    """Raises `ArgumentError` if the layer's x is not the same matrix as the y of the layer below.

    The shapes of the two layers are compared when the backward call is read.
    """
    has_shape = through.shape[:2] == ctx.shape[::2]
    if flag("require_same", require_same) and has_shape and not is_same_matrix(ctx.x, through.y):
        found = "through is the context of a layer whose y is not the x of ctx"
        why = "the gradient would be taken through an activation that did not make x"
        mend = "pass the context of the layer that made x, or no through"
        raise ArgumentError(f"{found}: {why}; {mend}. If x is a copy of that y, pass require_same=False")
