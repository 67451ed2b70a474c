"""Gated activations forward and backward as operations; `GatedContext` holds the tensors kept for backward."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from lt_runtime import reference
from lt_runtime.arguments import flag
from lt_runtime.arrays.checks import check_same, check_shape
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ShapeError
from lt_runtime.kernels.gated import GatedPass
from lt_runtime.ops.call import New, PassOperation, PreparedCall, Request, dropouts_of, result_spec
from lt_runtime.problem import Activation, Philox


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


def _output_shape(h: Operand) -> tuple[int, ...]:
    """The shape of y (..., F) for h (..., 2F).

    Raises:
        ShapeError: h has an odd number of columns, or no axes.
    """
    if not h.shape or h.shape[-1] % 2:
        found = f"{h.name} has shape {h.shape}; its last axis must be even"
        raise ShapeError(f"{found}: the gate's columns, then as many of the value")
    return (*h.shape[:-1], h.shape[-1] // 2)


GATED_FORWARD: Final = GatedForward()
GATED_BACKWARD: Final = GatedBackward()
