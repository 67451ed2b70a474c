"""`lt.add`: the sum of two arrays, such as a residual connection."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from lt_runtime.arrays.checks import check_same, check_shape
from lt_runtime.kernels.add import AddPass
from lt_runtime.ops.call import New, PassOperation, Request, perform, result_spec


class Add(PassOperation):
    """The sum of two arrays; a call has neither options nor scalars."""

    names = ("a", "b", "out")
    required = 2
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(AddPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        a, b, out = operands
        dtype, new = a.element_type(), dict[int, New]()
        check_same(a, b)
        check_shape(b.name, b.shape, a.shape, "a's shape, because nothing is broadcast")
        specs = a.spec, b.spec, result_spec(2, out, a.shape, a, new)
        problem = (dtype, *specs) if specs[0].layout.size else None
        return Request(problem, (2,), new, same=((0, 2), (1, 2)))

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        a, b, out = arrays
        out[...] = (a.astype(np.float64) + b.astype(np.float64)).astype(out.dtype)


ADD: Final = Add()


def add(a: Any, b: Any, *, out: Any = None, stream: Any = None) -> Any:
    """The sum a + b, such as a residual connection. It is computed in FP32 and rounded once.

    Backward needs no computation: the gradient of both operands is that of the sum.

    Args:
        a: any shape, float32, float16 or bfloat16. All axes but the last are rows, which may lie in any layout with one
            stride from row to row; a vector must be without gaps.
        b: array of a's shape and type, in a layout of its own.
        out: buffer like a. It may be `a` or `b` itself.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        The sum, an array of the library of `a` as in `linear_fwd`.

    Raises:
        ShapeError: `b` or `out` has another shape than `a`.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    return perform(ADD, (a, b, out), None, None, stream)
