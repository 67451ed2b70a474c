"""`lt.dropout`: dropout without a layer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from lt_runtime import reference
from lt_runtime.kernels.epilogue import DropoutPass
from lt_runtime.ops.call import New, PassOperation, Request, dropouts_of, perform, result_spec
from lt_runtime.problem import Philox


class Dropout(PassOperation):
    """y = mask · scale · x.

    A call's option is the probability. Its scalars are a pair: the source of the mask, and None.
    """

    names = ("x", "out")
    required = 1
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(DropoutPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: tuple[Philox | None, None]) -> Request:
        """See `Operation`."""
        x, out = operands
        dropouts = dropouts_of(options, scalars[0])
        dtype, spec = x.element_type(), x.spec
        new: dict[int, New] = {}
        target = result_spec(1, out, x.shape, x, new)
        problem = (dtype, spec, target) if spec.layout.size else None
        return Request(problem, (1,), new, float(options), same=((0, 1),), dropouts=dropouts)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        x, y = arrays
        factors = reference.dropout_factors(x.shape, request.detail, scalars[0])
        y[...] = (x.astype(np.float64) * (1.0 if factors is None else factors)).astype(x.dtype)


DROPOUT: Final = Dropout()


def dropout(x: Any, p: float, rng: Philox | None = None, *, out: Any = None, stream: Any = None) -> Any:
    """y = mask · scale · x: each element is zeroed with probability `p`, the others are scaled up by 1 / (1 - p).

    Backward is the same call on dy: the mask is computed again from `rng`, never stored. y is rounded once.

    Args:
        x: any shape, float32, float16 or bfloat16. All axes but the last are rows, which may lie in any layout with one
            stride from row to row; a vector must be without gaps. The mask of an array is the mask of
            its elements in row-major order.
        p: in [0, 1). It is rounded to a multiple of 2^-16.
        rng: source of the mask; needed if `p` is not 0.
        out: buffer like x; may be x itself.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

    Returns:
        y, of the kind and shape of x.

    Raises:
        ArgumentError: `p` is outside [0, 1), or it is positive and would be rounded to 0, or it is not 0 and there is
            no `rng`.
        OperandError, CaptureError, GpuError: as in `linear_fwd`.
    """
    return perform(DROPOUT, (x, out), p, (rng, None), stream)
