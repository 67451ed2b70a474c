"""Dropout on its own."""

from __future__ import annotations

import functools
from typing import Any, Final

import numpy as np

from lt_runtime.arrays import Operand, on_host
from lt_runtime.gpu.devices import activated
from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.dropout import DropoutPass
from lt_runtime.ops._place import Place, check_dropout, host_dropout, host_output
from lt_runtime.problem import DType, Philox, Spec

_pass: Final = functools.lru_cache(maxsize=1024)(DropoutPass)


def dropout(x: Any, p: float, rng: Philox | None = None, *, out: Any = None, stream: Any = None) -> Any:
    """y = mask · scale · x: each element is zeroed with probability `p`, the others are scaled up by 1 / (1 - p).

    Backward is the same call on dy: the mask is computed again from `rng`, never stored. y is rounded once.

    Args:
        x: any shape, float32, float16 or bfloat16; a matrix may lie in any layout, other arrays must be row-major
            without gaps. The mask of an array is that of its elements in row-major order.
        p: in [0, 1). It is rounded to a multiple of 2^-16.
        rng: where the mask comes from; needed if `p` is not 0.
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
    philox = check_dropout(p, rng)
    if on_host({"x": x}, {"out": out}):
        return _on_host(x, p, philox, out)
    place = Place.of("x", x, stream)
    with activated(place.device):
        operand = place.read("x", x)
        in_place = out is x
        target = operand if in_place else place.output("out", out, operand.shape, operand, (operand,))
        # With p = 0 everything is kept, at scale 1: the pass is a copy.
        state = place.dropout(p, rng) or DropoutState(65536, Philox())
        spec = _spec(operand)
        if spec.layout.size:
            dropout_pass = _pass(DType.parse("x", operand.dtype), spec, _spec(target), place.device)
            dropout_pass.run(operand.address, target.address, state, place.stream)
        return place.result(out, target, operand)


def _on_host(x: np.ndarray[Any, Any], p: float, rng: Philox | None, out: Any) -> Any:
    dtype = DType.parse("x", x.dtype)
    y = host_output("out", out, x.shape, dtype, {} if out is x else {"x": x})
    factors = host_dropout(x.shape, p, rng)
    with np.errstate(all="ignore"):  # overflow and NaN are results here, as they are on a GPU
        y[...] = (x.astype(np.float64) * (1.0 if factors is None else factors)).astype(dtype.numpy)
    return y


def _spec(operand: Operand) -> Spec:
    """A matrix as it lies; anything else as one row."""
    layout = operand.layout if len(operand.shape) == 2 else operand.flat_layout
    return Spec(layout, operand.alignment)
