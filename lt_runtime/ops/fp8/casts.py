"""`lt.cast_fp8`: casts an array to FP8, both row-major and transposed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, ClassVar, Final, Literal

import numpy as np

from lt_runtime import reference
from lt_runtime.arguments import flag
from lt_runtime.arrays.checks import check_one_float32, check_weights
from lt_runtime.errors import ArgumentError, DTypeError, ShapeError
from lt_runtime.kernels.fp8 import CastPass, CastRowsPass
from lt_runtime.ops.call import New, PassOperation, PreparedCall, Request, perform, result_spec
from lt_runtime.problem import DType, type_name
from lt_runtime.reference.fp8 import FP8_TYPES
from lt_runtime.reference.products import rows_of


class _Cast(PassOperation):
    """Base of both casts. A call's options are the FP8 type, whether x is wanted in it, and whether its transpose is.

    Attributes:
        results: where the results are among the arrays: x in FP8, its transpose, and perhaps the scales of both.
    """

    required = 1
    results: ClassVar[slice]

    def request(self, operands: Sequence[Any], options: Any, nothing: str) -> Request:
        """The part of the request that both casts share.

        Raises:
            DTypeError: the options name no FP8 type.
            ArgumentError: no result is wanted, and `nothing`, the message of the error, is not empty.
        """
        x, (out, transposed, *_), new = operands[0], operands[self.results], dict[int, New]()
        if not x.shape:
            raise ShapeError("x has shape (); accepted are (..., N), rows of N columns")
        scalar, dtype, spec = x.element_type(), type_name(options[0]), x.spec
        wanted = [*map(flag, ("need_out", "need_transposed"), options[1:])]
        if dtype not in FP8_TYPES:
            raise DTypeError(f"dtype is {dtype}; accepted are {' and '.join(FP8_TYPES)}")
        if nothing and not any(wanted):
            raise ArgumentError(nothing)
        asked = zip((out, transposed), (x.shape, spec.layout.shape[::-1]), wanted, strict=True)
        specs = [
            result_spec(place, each, shape, x, new, DType(dtype)) if is_wanted else None
            for place, (each, shape, is_wanted) in enumerate(asked, self.results.start)
        ]
        written = tuple(range(self.results.start, len(self.names)))
        return Request((scalar, dtype, spec, *specs), written, new, (dtype, wanted))

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> tuple[Any, ...]:
        """See `Operation`: the results, with None for those that were not asked for."""
        _, wanted = prepared.request.detail
        results = zip(arrays[self.results], 2 * wanted, strict=False)
        return tuple(each if is_wanted else None for each, is_wanted in results)


class CastFp8(_Cast):
    """x · scale in FP8, its transpose, and the largest |x|."""

    names = ("x", "scale", "out", "out_transposed", "amax")
    results = slice(2, 4)
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(CastPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: None) -> Request:
        """See `Operation`."""
        x, scale, _, _, amax = operands
        nothing = "need_out and need_transposed are False and amax is None; ask for one of them" if amax is None else ""
        request = self.request(operands, options, nothing)
        for each in (scale, amax):
            if each is not None:
                check_one_float32(each)
        return request if x.spec.layout.size else request._replace(problem=None)

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
            amax[...] = reference.amax_of(x, amax)


class CastFp8Rows(_Cast):
    """x and its transpose in FP8, with 1 / scale of each of their rows."""

    names = ("x", "out", "out_transposed", "out_scales", "out_transposed_scales")
    results = slice(1, 5)
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(CastRowsPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: None) -> Request:
        """See `Operation`."""
        x, _, _, *scales = operands
        request = self.request(operands, options, "need_out and need_transposed are False; ask for one of them")
        if 0 in x.shape:
            raise ShapeError(f"x has shape {x.shape}; accepted are (..., N), rows of N columns, at least one of either")
        (_, wanted), new = request.detail, {**request.new}
        for place, (each, length, is_wanted) in enumerate(zip(scales, x.spec.layout.shape, wanted, strict=True), 3):
            if is_wanted and each is None:
                new[place] = New((length,), np.dtype(np.float32), x.library)
            elif is_wanted:
                check_weights(each, (length,), "a number for each row of the result")
        return request._replace(new=new)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: None) -> None:
        """See `Operation`."""
        x, *results = arrays
        dtype, wanted = request.detail
        sources = rows_of(x), rows_of(x).T
        for source, out, scales, is_wanted in zip(sources, results[:2], results[2:], wanted, strict=True):
            if is_wanted:
                cast, scales[...] = reference.cast_fp8_rows(source, dtype)
                out[...] = cast.reshape(out.shape)


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
        The pair of both results, arrays of x's library as in `linear_fwd`; None for a result that was not asked for.

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
        x in FP8, its transpose, and the reciprocals of the scales of both, arrays of x's library as in `linear_fwd`;
        None for results that were not asked for.

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
