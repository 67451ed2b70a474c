"""Backward of gated activations whose gate and value come from layers in FP8, with the gradients in FP8."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from lt_runtime import reference
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.fp8 import CastGatedPass
from lt_runtime.ops._fp8_linear import CastGradient
from lt_runtime.ops._fp8_state import FP8State
from lt_runtime.ops._gated import GatedContext
from lt_runtime.ops.call import New, PassOperation, PreparedCall, Request, dropouts_of, perform
from lt_runtime.plans.fp8 import DY
from lt_runtime.problem import Philox, type_name
from lt_runtime.reference.fp8 import AMAX, FP8_TYPES, SCALE, SLOT_WIDTH, amax_of
from lt_runtime.reference.products import rows_of

_ROWS, _TRANSPOSED = 2, 3  # Indices among a call's arrays.
_WORD: Final = 4  # Bytes of an FP32 number.


class CastGated(PassOperation):
    """See `gated_bwd_in_fp8`. A call's options are the name of the FP8 type, the activation and the dropout.

    A call's scalars are those of `GatedBackward`. The slots of the value are absent if they are those of the gate.
    """

    names = ("dy", "h", "rows", "transposed", "slots", "slots_of_value")
    required = 2
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(CastGatedPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: tuple[Philox | None, None]) -> Request:
        """See `Operation`."""
        dy, h, *_ = operands
        kind, activation, p = options
        dropouts, cast, (m, f) = dropouts_of(p, scalars[0]), (FP8_TYPES[kind], h.library), dy.layout.shape
        new = {_ROWS: New(h.shape, *cast), _TRANSPOSED: New((2 * f, m), *cast)}
        problem = kind, activation, dropouts is not None, dy.spec
        return Request(problem, tuple(range(_ROWS, len(self.names))), new, options, dropouts=dropouts)

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """See `Operation`."""
        *arrays, gate, value = addresses
        slots = [each + _WORD * SLOT_WIDTH * DY for each in (gate, value or gate)]
        words = [slot + _WORD * column for slot in slots for column in (SCALE, AMAX)]
        return super().call(prepared, (*arrays, *words), scalars, stream)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: tuple[Philox | None, None]) -> None:
        """See `Operation`."""
        dy, h, rows, transposed, gate, value = arrays
        kind, activation, p = request.detail
        factors = reference.dropout_factors(dy.shape, p, scalars[0])
        dh = reference.gated_bwd(dy, h, activation, factors).astype(h.dtype)
        slots = gate[DY], (gate if value is None else value)[DY]
        cast = []
        for slot, half in zip(slots, np.split(dh, 2, axis=-1), strict=True):
            slot[AMAX] = amax_of(np.array([slot[AMAX], amax_of(half)]))
            cast.append(reference.cast_fp8(half, slot[SCALE], kind))
        rows[...] = np.concatenate(cast, axis=-1)
        transposed[...] = rows_of(rows).T

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> CastGradient:
        """See `Operation`."""
        return CastGradient(arrays[_ROWS], arrays[_TRANSPOSED])


_CAST_GATED: Final = CastGated()


def casts_gate(h: Any, *states: FP8State | None) -> bool:
    """Whether `gated_bwd_in_fp8` can be used for h = (gate, value).

    Args:
        states: the scales of the layers without biases that have just computed h: one for both halves, or two.
    """
    recipes = set()
    for each in states:
        # The kernel writes both orientations.
        if each is None or each.fallback is not None or not (each.needs_dx and each.needs_dw):
            return False
        recipes.add(each.recipe)
    # The kernel writes both halves in one type.
    is_delayed = len(recipes) == 1 and recipes.pop().recipe == "delayed"
    return is_delayed and type_name(h.dtype) == "bfloat16"


def gated_bwd_in_fp8(dy: Any, ctx: GatedContext, *states: FP8State, stream: Any = None) -> CastGradient | None:
    """Computes `gated_bwd` with dh (..., 2F) in FP8, for the layers that have computed h.

    `casts_gate` must have been True. The gradients are rounded to BF16 before the cast, so that their bits equal those
    of a layer that casts the result of `gated_bwd`.

    Args:
        dy: (..., F), BF16.
        states: as for `casts_gate`.

    Returns:
        dh; None if a layer has not found the scale of its gradients yet.
    """
    if not all(DY in each.calibrated for each in states):
        return None
    gate, *value = [each.slots for each in states]
    arrays = dy, ctx.h, None, None, gate, value[0] if value else None
    options = states[0].recipe.dtypes[DY].value, ctx.activation, ctx.dropout
    made: CastGradient = perform(_CAST_GATED, arrays, options, (ctx.rng, None), stream)
    return made


def halves(dh: Any, width: int) -> tuple[Any, Any]:
    """The gradients of gate and value, which have `width` columns each, as views of a result of `gated_bwd_in_fp8`."""
    if not isinstance(dh, CastGradient):
        return dh[..., :width], dh[..., width:]
    gate = CastGradient(dh.rows[..., :width], dh.transposed[:width])
    return gate, CastGradient(dh.rows[..., width:], dh.transposed[width:])
