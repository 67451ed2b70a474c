"""Dropout on its own."""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

from lt_runtime.arrays import Operand, on_host
from lt_runtime.gpu.devices import activated
from lt_runtime.kernels.call import DropoutState
from lt_runtime.kernels.kernel import OCTET, get_kernel
from lt_runtime.kernels.params import SCALAR, DropoutParams, Matrix
from lt_runtime.kernels.tiling import access_macros, are_aligned, sweep, wave_of
from lt_runtime.layout import Order, packed
from lt_runtime.ops._place import Place, check_dropout, host_dropout, host_output
from lt_runtime.problem import DType, Philox, Spec

_ROW: Final = 2048  # elements: a block's
_BLOCKS: Final = 6  # that a multiprocessor shall hold
_WAVES: Final = 4


def dropout(x: Any, p: float, rng: Philox | None = None, *, out: Any = None, stream: Any = None) -> Any:
    """y = mask · scale · x: each element is zeroed with probability `p`, the others are scaled up by 1 / (1 - p).

    Backward is the same call on dy: the mask is computed again from `rng`, never stored.

    Args:
        x: any shape; a matrix may lie in any layout, other arrays must be row-major without gaps. The mask of an
            array is that of its elements in row-major order.
        p: in [0, 1).
        rng: where the mask comes from; needed if `p` is not 0.
        out: buffer like x; may be x itself.
        stream: as in `linear_fwd`.

    Returns:
        y, of the kind and shape of x.

    Raises:
        ArgumentError: `p` is outside [0, 1), or not 0 without `rng`.
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
        _launch(operand, target, state, place)
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


def _folded(spec: Spec) -> Spec:
    """Row-major elements without gaps, as a matrix of rows that suit the kernel, or else one: its index is the same."""
    size = spec.layout.size
    cols = math.gcd(size, _ROW)
    return Spec(packed(size // cols, cols) if cols >= OCTET else packed(1, size), spec.alignment)


def _launch(source: Operand, target: Operand, state: DropoutState, place: Place) -> None:
    specs = [_spec(source), _spec(target)]
    if not specs[0].layout.size:
        return
    if all(spec.layout.order is Order.ROW and spec.layout.extent == spec.layout.size for spec in specs):
        specs = [_folded(spec) for spec in specs]
    dtype, layout = DType.parse("x", source.dtype), specs[0].layout
    params = DropoutParams(
        in_=Matrix.at(source.address, layout),
        out=Matrix.at(target.address, specs[1].layout),
        rows=layout.rows,
        cols=layout.cols,
        dropout=state.block(),
    )
    macros = ("SCALAR", SCALAR[dtype]), *access_macros(are_aligned(dtype, *specs), _BLOCKS)
    wave = None if dtype is DType.FLOAT32 else _WAVES * wave_of(place.device, _BLOCKS)
    get_kernel("dropout", macros, place.device).prepare(*sweep(layout, wave), params, place.stream)()
