"""LayerNorm and RMSNorm of the rows of an array, optionally after adding a residual, and their gradients."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from lt_runtime import reference
from lt_runtime.arguments import flag, not_negative, shown
from lt_runtime.arrays.checks import check_same, check_shape
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ArgumentError, DTypeError, KindError, ShapeError
from lt_runtime.kernels.norm import Norm, NormBackwardPass, NormForwardPass
from lt_runtime.ops.call import New, PassOperation, PreparedCall, Request, perform, result_spec
from lt_runtime.problem import DType
from lt_runtime.reference.products import rows_of

# Indices among the arrays of a forward call: x, the residual to add, and the results.
_X, _ADD, _Y, _SUM, _MEAN, _RSTD = 0, 3, 4, 5, 6, 7
# Indices among the arrays of a backward call: dy, the array that is added to dx, and the results.
_DY, _DX_ADD, _DX, _DWEIGHT, _DBIAS = 0, 5, 6, 7, 8


@dataclass(slots=True, eq=False, repr=False)
class NormContext:
    """The record of a `layer_norm_fwd` or `rms_norm_fwd` call that its backward takes; do not change its attributes.

    Attributes:
        x: the array (..., N) that was normalised: the call's x, or with `add` the sum.
        weight: (N,).
        mean: (rows,) FP32 means of the rows; None for RMSNorm.
        rstd: (rows,) FP32 1 / √(variance + eps) of the rows; for RMSNorm 1 / √(mean square + eps).
        has_bias: whether the call had a bias.
    """

    x: Any
    weight: Any
    mean: Any
    rstd: Any
    has_bias: bool

    def __repr__(self) -> str:
        kind = "rms_norm" if self.mean is None else "layer_norm"
        return f"NormContext({kind}, x of shape {tuple(self.x.shape)}, {'bias' if self.has_bias else 'no bias'})"


class LayerNormGradients(NamedTuple):
    """dx (..., N), dweight (N,) and dbias (N,); None for a gradient that was not requested."""

    dx: Any
    dweight: Any
    dbias: Any


class RMSNormGradients(NamedTuple):
    """dx (..., N) and dweight (N,); None for a gradient that was not requested."""

    dx: Any
    dweight: Any


class NormForward(PassOperation):
    """y = normalised rows · weight + bias, and a context for backward.

    A call's options are a pair: whether the mean of a row is subtracted, as in LayerNorm, and eps.
    """

    names = ("x", "weight", "bias", "add", "out", "out_sum", "out_mean", "out_rstd")
    required = 2
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(NormForwardPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: None) -> Request:
        """See `Operation`."""
        x, weight, bias, add, out, total, mean, rstd = operands
        if not x.shape:
            raise ShapeError("x has shape (); accepted are (..., N), rows of N columns")
        (has_mean, eps), dtype, spec = options, x.element_type(), x.spec
        eps = not_negative("eps", eps)
        rows, cols = spec.layout.shape
        vectors = [each for each in (weight, bias) if each is not None]
        norm = Norm(dtype, _check_vectors(x, cols, *vectors), has_mean)
        _check_alike(x, add)
        if add is None and total is not None:
            raise ArgumentError(f"out_sum has shape {total.shape}, but add is None; pass add=, or no out_sum")
        new: dict[int, New] = {}
        y = result_spec(_Y, out, x.shape, x, new)
        of_sum = None if add is None else result_spec(_SUM, total, x.shape, x, new)
        statistics = ((_MEAN, mean), (_RSTD, rstd)) if has_mean else ((_RSTD, rstd),)
        for place, each in statistics:
            result_spec(place, each, (rows,), x, new, DType.FLOAT32)
        alignment = min(each.alignment for each in vectors)
        of_add = None if add is None else add.spec
        problem = (norm, (spec, of_add, of_sum, y), alignment, eps) if spec.layout.size else None
        same = tuple((operand, result) for operand in (_X, _ADD) for result in (_Y, _SUM))
        return Request(problem, (_Y, _SUM, _MEAN, _RSTD), new, eps, same)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: None) -> None:
        """See `Operation`."""
        x, weight, bias, add, y, total, mean, rstd = arrays
        if request.problem is None:
            return
        if add is not None:
            total[...] = (x.astype(np.float64) + add.astype(np.float64)).astype(total.dtype)
            x = total
        if mean is not None:
            exact = reference.layer_norm_fwd(rows_of(x), weight, bias, eps=request.detail)
            mean[...] = exact.mean
        else:
            exact = reference.rms_norm_fwd(rows_of(x), weight, eps=request.detail)
        y[...], rstd[...] = exact.y.astype(y.dtype).reshape(y.shape), exact.rstd

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: None) -> tuple[Any, NormContext]:
        """See `Operation`."""
        x, weight, bias, add, y, total, mean, rstd = arrays
        return y, NormContext(x if add is None else total, weight, mean, rstd, bias is not None)


class BackwardOptions(NamedTuple):
    """The options of a backward call; `has_mean` tells LayerNorm from RMSNorm."""

    has_mean: bool
    accumulate: bool
    need_dx: bool
    need_dweight: bool
    need_dbias: bool


class NormBackward(PassOperation):
    """The gradients of a normalisation; a call's options are those of `BackwardOptions`."""

    names = ("dy", "x", "weight", "mean", "rstd", "add", "out_dx", "out_dweight", "out_dbias")
    required = 3
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(NormBackwardPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: None) -> Request:
        """See `Operation`."""
        dy, x, weight, _, _, add, *outputs = operands
        options = BackwardOptions(*map(flag, BackwardOptions._fields, options))
        spec, wanted = x.spec, dict(zip(range(_DX, _DBIAS + 1), options[2:], strict=True))
        _check_alike(x, dy, add)
        if add is not None and not options.need_dx:
            raise ArgumentError(f"add has shape {add.shape}, but need_dx is False; pass need_dx=True, or no add")
        given = dict(zip(wanted, outputs, strict=True))
        missing = [self.names[place] for place in (_DWEIGHT, _DBIAS) if wanted[place] and given[place] is None]
        if options.accumulate and missing:
            raise ArgumentError(f"accumulate=True needs {' and '.join(missing)}, to add to")
        new: dict[int, New] = {}
        dx = result_spec(_DX, given[_DX], x.shape, x, new) if wanted[_DX] else None
        for place in (_DWEIGHT, _DBIAS):
            if wanted[place]:
                result_spec(place, given[place], weight.shape, weight, new)
        norm = Norm(x.element_type(), weight.element_type(), options.has_mean)
        sums, of_add = wanted[_DWEIGHT] or wanted[_DBIAS], None if add is None else add.spec
        problem = (norm, (dy.spec, spec, of_add, dx), weight.alignment, sums, options.accumulate)
        has_work = spec.layout.cols and (sums or (dx and spec.layout.rows))
        same = ((_DY, _DX), (_DX_ADD, _DX))
        return Request(problem if has_work else None, (_DX, _DWEIGHT, _DBIAS), new, options, same)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: None) -> None:
        """See `Operation`."""
        dy, x, weight, mean, rstd, add, dx, *of_vectors = arrays
        if request.problem is None:
            return
        exact = reference.norm_bwd(rows_of(dy), rows_of(x), weight, mean, rstd)
        if dx is not None:
            gradient = exact.dx.reshape(dx.shape) + (0.0 if add is None else add.astype(np.float64))
            dx[...] = gradient.astype(dx.dtype)
        for out, value in zip(of_vectors, exact[1:], strict=True):
            if out is not None:
                kept = out.astype(np.float64) if request.detail.accumulate else 0.0
                out[...] = (value + kept).astype(out.dtype)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: None) -> Any:
        """See `Operation`."""
        gradients = LayerNormGradients(*arrays[_DX:])
        return gradients if prepared.request.detail.has_mean else RMSNormGradients(*gradients[:2])


def _check_alike(x: Operand, *others: Operand | None) -> None:
    """Raises `ShapeError` or `DTypeError` unless all other arrays have the shape and type of x."""
    for each in others:
        if each is not None:
            check_shape(each.name, each.shape, x.shape, "x's shape")
            check_same(x, each)


def _check_vectors(x: Operand, cols: int, weight: Operand, *bias: Operand) -> DType:
    """The type of weight and bias.

    Raises:
        DTypeError: the type is neither x's nor FP32, or weight and bias have different types.
        ShapeError, LayoutError: weight or bias is no vector without gaps, with an element for each column of x.
    """
    if weight.dtype not in (x.dtype, "float32"):
        raise DTypeError(f"weight is {weight.dtype} but {x.name} is {x.dtype}; accepted are {x.dtype} and float32")
    check_same(weight, *bias)
    for each in (weight, *bias):
        check_shape(each.name, each.shape, (cols,), f"an element for each column of {x.name}")
        each.check_packed()
    return weight.element_type()


_FORWARD: Final = NormForward()
_BACKWARD: Final = NormBackward()


def layer_norm_fwd(
    x: Any,
    weight: Any,
    bias: Any = None,
    *,
    eps: float = 1e-5,
    add: Any = None,
    out: Any = None,
    out_sum: Any = None,
    out_mean: Any = None,
    out_rstd: Any = None,
    stream: Any = None,
) -> tuple[Any, NormContext]:
    """y = (x - mean) / √(variance + eps) · weight + bias, row by row, and a context for `layer_norm_bwd`.

    A row runs along the last axis of x; its variance divides by N, as PyTorch's `layer_norm`. Statistics and arithmetic
    are FP32, and y is rounded once. On NumPy arrays both are float64.

    Args:
        x: (..., N), float32, float16 or bfloat16. A matrix may lie in any layout; the leading axes of other arrays must
            be rows at equal distances.
        weight: (N,), of x's type or float32. bias: (N,), of weight's type, or None.
        eps: finite and not negative.
        add: (..., N), of x's type: a residual. The sum x + add is rounded to x's type and normalised in place of x.
        out: (..., N) buffer for y; may be x or `add` itself. Backward reads the array that was normalised: without
            `add`, writing y over x makes the gradients wrong.
        out_sum: (..., N) buffer for the sum; may be x or `add` itself.
        out_mean, out_rstd: (rows,) FP32 buffers for the statistics; with all buffers nothing is allocated.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        y (..., N), an array of x's library as in `linear_fwd`, and the context. The context's `x` is the array that was
        normalised: with `add`, the sum.

    Raises:
        ArgumentError: eps is negative or not finite; `out_sum` without `add`.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    arrays = x, weight, bias, add, out, out_sum, out_mean, out_rstd
    made: tuple[Any, NormContext] = perform(_FORWARD, arrays, (True, eps), None, stream)
    return made


def rms_norm_fwd(
    x: Any,
    weight: Any,
    *,
    eps: float = 1e-6,
    add: Any = None,
    out: Any = None,
    out_sum: Any = None,
    out_rstd: Any = None,
    stream: Any = None,
) -> tuple[Any, NormContext]:
    """y = x / √(mean square + eps) · weight, row by row, and a context for `rms_norm_bwd`.

    Args:
        x, weight, eps, add, out, out_sum, out_rstd, stream: as in `layer_norm_fwd`, and so are rounding and errors.

    Returns:
        y (..., N), an array of x's library as in `linear_fwd`, and the context. The context's `x` is the array that was
        normalised: with `add`, the sum.
    """
    arrays = x, weight, None, add, out, out_sum, None, out_rstd
    made: tuple[Any, NormContext] = perform(_FORWARD, arrays, (False, eps), None, stream)
    return made


def layer_norm_bwd(
    dy: Any,
    ctx: NormContext,
    *,
    add: Any = None,
    accumulate: bool = False,
    need_dx: bool = True,
    need_dweight: bool = True,
    need_dbias: bool = True,
    out_dx: Any = None,
    out_dweight: Any = None,
    out_dbias: Any = None,
    stream: Any = None,
) -> LayerNormGradients:
    """Gradients of the `layer_norm_fwd` call that returned `ctx`.

    Its x, its `add` and their sum all have the gradient dx.

    All sums are FP32, in an order that depends only on shapes and GPU. Each gradient is rounded once: dx after `add`
    has been added, and with `accumulate` dweight and dbias after their buffers' values have been added.

    Args:
        dy: (..., N), of x's type: the gradient with respect to y.
        add: (..., N), of x's type: added to dx, as the gradient that reaches the sum past the normalisation.
        accumulate: add dweight and dbias to the values in their buffers; dx is always overwritten.
        need_dx, need_dweight, need_dbias: which gradients to make. There is no dbias without a bias.
        out_dx: (..., N) buffer, of x's type; may be dy or `add` itself.
        out_dweight, out_dbias: (N,) buffers, of weight's type.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. Forward's
            work must be ordered before it.

    Returns:
        A named tuple (dx, dweight, dbias); None for gradients that were not asked for.

    Raises:
        KindError: `ctx` is no context of `layer_norm_fwd`.
        ArgumentError: `accumulate` without the buffers to add to; `add` without dx.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    outputs, options = (out_dx, out_dweight, out_dbias), (True, accumulate, need_dx, need_dweight, need_dbias)
    made: LayerNormGradients = _backward(dy, ctx, add, outputs, options, stream)
    return made


def rms_norm_bwd(
    dy: Any,
    ctx: NormContext,
    *,
    add: Any = None,
    accumulate: bool = False,
    need_dx: bool = True,
    need_dweight: bool = True,
    out_dx: Any = None,
    out_dweight: Any = None,
    stream: Any = None,
) -> RMSNormGradients:
    """Gradients of the `rms_norm_fwd` call that returned `ctx`.

    Its x, its `add` and their sum all have the gradient dx.

    Args:
        dy, ctx, add, accumulate, need_dx, need_dweight, out_dx, out_dweight, stream: as in `layer_norm_bwd`, and so are
            rounding and errors.

    Returns:
        A named tuple (dx, dweight); None for gradients that were not asked for.
    """
    outputs, options = (out_dx, out_dweight, None), (False, accumulate, need_dx, need_dweight, False)
    made: RMSNormGradients = _backward(dy, ctx, add, outputs, options, stream)
    return made


def _backward(dy: Any, ctx: Any, add: Any, outputs: tuple[Any, ...], options: tuple[Any, ...], stream: Any) -> Any:
    """Runs a backward call.

    Args:
        outputs: buffers for dx, dweight and dbias. options: in the order of `BackwardOptions`.
    """
    if not isinstance(ctx, NormContext) or (ctx.mean is not None) != options[0]:
        maker = "layer_norm_fwd" if options[0] else "rms_norm_fwd"
        raise KindError(f"ctx is {shown(ctx)}; it must be the context that {maker} returned")
    if not ctx.has_bias:
        options = (*options[:-1], False)
    try:
        outputs = tuple([out if need else None for out, need in zip(outputs, options[2:], strict=True)])
    except Exception:  # a flag could be an array, which has no truth value
        BackwardOptions(*map(flag, BackwardOptions._fields, options))
        raise
    return perform(_BACKWARD, (dy, ctx.x, ctx.weight, ctx.mean, ctx.rstd, add, *outputs), options, None, stream)
