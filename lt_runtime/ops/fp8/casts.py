"""`lt.cast_fp8`: casts an array to FP8, both row-major and transposed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np

from lt_runtime import reference
from lt_runtime.arguments import flag
from lt_runtime.arrays.checks import check_device, check_one_float32, check_shape, check_type, check_weights
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ArgumentError, DTypeError, ShapeError
from lt_runtime.kernels.fp8 import CastPass, CastRowsPass
from lt_runtime.layout import packed
from lt_runtime.ops.call import New, PassOperation, PreparedCall, Request, perform
from lt_runtime.problem import Spec, type_name
from lt_runtime.reference.fp8 import FP8_TYPES
from lt_runtime.reference.products import rows_of

_SCALE, _OUT, _TRANSPOSED, _AMAX = 1, 2, 3, 4  # indices among the arrays of a call


class CastFp8(PassOperation):
    """x · scale in FP8, its transpose, and the largest |x|.

    A call's options are the FP8 type, and which of the two results are wanted.
    """

    names = ("x", "scale", "out", "out_transposed", "amax")
    required = 1
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(CastPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: None) -> Request:
        """See `Operation`."""
        x, scale, out, transposed, amax = operands
        if not x.shape:
            raise ShapeError("x has shape (); accepted are (..., N), rows of N columns")
        scalar, spec, new = x.element_type(), x.spec, dict[int, New]()
        dtype, *wanted = type_name(options[0]), *map(flag, ("need_out", "need_transposed"), options[1:])
        nothing = "need_out and need_transposed are False and amax is None; ask for one of them"
        _check_options(dtype, any(wanted) or amax is not None, nothing)
        for each in (scale, amax):
            if each is not None:
                check_one_float32(each)
                check_device(x, each)
        rows, cols = spec.layout.shape
        shapes = ((_OUT, out, x.shape), (_TRANSPOSED, transposed, (cols, rows)))
        specs = [
            _result_spec(place, each, shape, dtype, x, new) if is_wanted else None
            for (place, each, shape), is_wanted in zip(shapes, wanted, strict=True)
        ]
        problem = (scalar, dtype, spec, *specs) if spec.layout.size else None
        return Request(problem, (_OUT, _TRANSPOSED, _AMAX), new, (dtype, wanted))

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: None) -> None:
        """See `Operation`."""
        x, scale, out, transposed, amax = arrays
        dtype, (need_out, need_transposed) = request.detail
        cast = reference.cast_fp8(x, 1.0 if scale is None else scale.reshape(()), dtype)
        if need_out:
            out[...] = cast
        if need_transposed:
            transposed[...] = rows_of(cast).T
        if amax is not None:
            amax[...] = reference.amax_of(np.array([amax.reshape(()), reference.amax_of(x)]))

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: None) -> tuple[Any, Any]:
        """See `Operation`."""
        _, (need_out, need_transposed) = prepared.request.detail
        return arrays[_OUT] if need_out else None, arrays[_TRANSPOSED] if need_transposed else None


def _check_options(dtype: str, is_asked: bool, nothing: str) -> None:
    """Raises `DTypeError` unless the type is an FP8 type, and `ArgumentError(nothing)` if no result is asked for."""
    if dtype not in FP8_TYPES:
        raise DTypeError(f"dtype is {dtype}; accepted are {' and '.join(FP8_TYPES)}")
    if not is_asked:
        raise ArgumentError(nothing)


def _result_spec(
    place: int, out: Operand | None, shape: tuple[int, ...], dtype: str, x: Operand, new: dict[int, New]
) -> Spec:
    """The spec of an FP8 result: of its buffer, which is checked, or of a new packed array, which is added to `new`."""
    if out is None:
        new[place] = New(shape, FP8_TYPES[dtype], x.library)
        return Spec(packed(math.prod(shape[:-1]), shape[-1]))
    check_shape(out.name, out.shape, shape, "the result's shape")
    check_type(out, dtype)
    check_device(x, out)
    return out.spec


class CastFp8Rows(PassOperation):
    """x and its transpose in FP8, with 1 / scale of each of their rows; a call's options are those of `CastFp8`."""

    names = ("x", "out", "out_transposed", "out_scales", "out_transposed_scales")
    required = 1
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(CastRowsPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: None) -> Request:
        """See `Operation`."""
        x, *buffers = operands
        scalar = x.element_type()
        if 0 in (x.shape or (0,)):
            raise ShapeError(f"x has shape {x.shape}; accepted are (..., N), rows of N columns, at least one of either")
        spec, new = x.spec, dict[int, New]()
        dtype, *wanted = type_name(options[0]), *map(flag, ("need_out", "need_transposed"), options[1:])
        _check_options(dtype, any(wanted), "need_out and need_transposed are False; ask for one of them")
        rows, cols = spec.layout.shape
        shapes = x.shape, (cols, rows)
        specs = [
            _result_spec(place, buffers[place - 1], shape, dtype, x, new) if is_wanted else None
            for place, shape, is_wanted in zip((1, 2), shapes, wanted, strict=True)
        ]
        for place, length, is_wanted in zip((3, 4), (rows, cols), wanted, strict=True):
            if buffers[place - 1] is None and is_wanted:
                new[place] = New((length,), np.dtype(np.float32), x.library)
            elif is_wanted:
                check_weights(buffers[place - 1], (length,), "a number for each row of the result")
                check_device(x, buffers[place - 1])
        return Request((scalar, dtype, spec, *specs), (1, 2, 3, 4), new, (dtype, wanted))

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: None) -> None:
        """See `Operation`."""
        x, *results = arrays
        dtype, wanted = request.detail
        for source, out, scales, is_wanted in zip(
            (rows_of(x), rows_of(x).T), results[:2], results[2:], wanted, strict=True
        ):
            if is_wanted:
                cast, scales[...] = reference.cast_fp8_rows(source, dtype)
                out[...] = cast.reshape(out.shape)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: None) -> tuple[Any, ...]:
        """See `Operation`."""
        _, wanted = prepared.request.detail
        return tuple(each if is_wanted else None for each, is_wanted in zip(arrays[1:], 2 * wanted, strict=True))


CAST_FP8: Final = CastFp8()
_CAST_ROWS: Final = CastFp8Rows()


def cast_fp8(
    x: Any,
    scale: Any = None,
    *,
    dtype: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn",
    out: Any = None,
    out_transposed: Any = None,
    amax: Any = None,
    need_out: bool = True,
    need_transposed: bool = True,
    stream: Any = None,
) -> tuple[Any, Any]:
    """Casts x · scale to FP8, row-major and transposed, and finds the largest |x|, all in one read of x.

    Products in FP8 read both operands along the axis that they sum over, so that training needs many matrices in both
    orientations. The product is computed in FP32, rounded to nearest even and saturated: numbers beyond the type's
    largest become ±448 in E4M3 and ±57344 in E5M2, which `amax` tells. Infinite elements and NaN become NaN.

    Args:
        x: (..., N), float32, float16 or bfloat16. A matrix may lie in any layout; the leading axes of other arrays must
            be rows at equal distances.
        scale: one FP32 number on x's device, of shape () or (1,), which is read when the pass runs; None for 1.
        dtype: the FP8 type: its name, or the type of `ml_dtypes` or PyTorch.
        out: (..., N) buffer for x in FP8, of type `dtype`.
        out_transposed: (N, rows) buffer for the transpose, of type `dtype`.
        amax: one FP32 number on x's device. It becomes the maximum of its value and of all |x|, without the scale;
            infinity counts as larger than every number, and NaN as larger than infinity.
        need_out, need_transposed: which results to make. With neither, x is only read for `amax`.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        The pair of both results, of the kind that x is; None for a result that was not asked for.

    Raises:
        DTypeError: `dtype` is no FP8 type, or a buffer has another type.
        ShapeError: a buffer has another shape than its result; `scale` or `amax` is more than one number.
        ArgumentError: nothing is asked for.
        GpuError: the GPU's compute capability is below 8.9.
        OperandError, CaptureError: as in `linear_fwd`.
    """
    arrays = x, scale, out, out_transposed, amax
    made: tuple[Any, Any] = perform(CAST_FP8, arrays, (dtype, need_out, need_transposed), None, stream)
    return made


def cast_fp8_rows(
    x: Any,
    *,
    dtype: Literal["float8_e4m3fn", "float8_e5m2"] = "float8_e4m3fn",
    out: Any = None,
    out_transposed: Any = None,
    out_scales: Any = None,
    out_transposed_scales: Any = None,
    need_out: bool = True,
    need_transposed: bool = True,
    stream: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """Casts x to FP8 with a scale for each row, and its transpose with a scale for each of the transpose's rows.

    So rows of different magnitudes keep their accuracy, in products that multiply by `scale_a` and `scale_b` of
    `lt.matmul`. A row is cast by the largest power of two by which none of its elements exceeds the type's largest
    number, at most 2^126. Infinite elements and NaN become NaN. On a GPU x is read twice.

    Args:
        x: (..., N), float32, float16 or bfloat16, not empty. A matrix may lie in any layout; the leading axes of other
            arrays must be rows at equal distances.
        dtype: the FP8 type: its name, or the type of `ml_dtypes` or PyTorch.
        out: (..., N) buffer for x in FP8, of type `dtype`.
        out_transposed: (N, rows) buffer for the transpose, of type `dtype`.
        out_scales, out_transposed_scales: FP32 buffers (rows,) and (N,) for the reciprocal of each row's scale, by
            which products multiply: a power of two.
        need_out, need_transposed: which results to make.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        x in FP8, its transpose, and the reciprocals of the scales of both, of the kind that x is; None for results that
        were not asked for.

    Raises:
        DTypeError: `dtype` is no FP8 type, or a buffer has another type.
        ShapeError: x is empty, or a buffer has another shape than its result.
        ArgumentError: nothing is asked for.
        GpuError: the GPU's compute capability is below 8.9.
        OperandError, CaptureError: as in `linear_fwd`.
    """
    arrays = x, out, out_transposed, out_scales, out_transposed_scales
    made: tuple[Any, Any, Any, Any] = perform(_CAST_ROWS, arrays, (dtype, need_out, need_transposed), None, stream)
    return made
