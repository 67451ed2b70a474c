"""`lt.cast_fp8`: casts an array to FP8, both row-major and transposed."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np

from lt_runtime import reference
from lt_runtime.arguments import flag
from lt_runtime.arrays.checks import check_device, check_one_float32, check_shape, check_type
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ArgumentError, DTypeError, ShapeError
from lt_runtime.kernels.fp8 import CastPass
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
        if dtype not in FP8_TYPES:
            raise DTypeError(f"dtype is {dtype}; accepted are {' and '.join(FP8_TYPES)}")
        if not (any(wanted) or amax):
            raise ArgumentError("need_out and need_transposed are False and amax is None; ask for one of them")
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


CAST_FP8: Final = CastFp8()


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
    """x · scale in FP8, as x lies and transposed, and the largest |x|: all in one read of x.

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
