"""Gradients of the outputs of layers in FP8, written in FP8 by the pass that computes them: a gate's or a loss's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np

from lt_runtime import reference
from lt_runtime.arrays.checks import check_same, check_shape
from lt_runtime.arrays.operand import Operand, read
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.fp8 import CastGatedPass, LossCastPass, moves_tiles
from lt_runtime.kernels.losses import ElementwiseLoss
from lt_runtime.ops._gated import GatedContext
from lt_runtime.ops.call import New, PassOperation, PreparedCall, Request, dropouts_of, perform
from lt_runtime.ops.fp8.state import FP8State
from lt_runtime.plans.fp8 import AMAX_AT, DY, SCALE_AT, SLOT
from lt_runtime.problem import DType, Philox, type_name
from lt_runtime.reference.fp8 import AMAX, FP8_TYPES, SCALE, amax_of
from lt_runtime.reference.products import rows_of

_GATED_ROWS: Final = 2  # Index of the gradient in FP8 among the arrays of `CastGated`; its transpose follows.
_GRADIENT, _LOSS, _LOSS_ROWS = 2, 3, 5  # Indices among the arrays of `CastLoss`.


class CastGradient(NamedTuple):
    """The gradient of a layer's outputs, cast to FP8 with the scale of the layer's state.

    Attributes:
        rows: the gradient (..., N). transposed: its transpose (N, M).
    """

    rows: Any
    transposed: Any


def halves(dh: Any, width: int) -> tuple[Any, Any]:
    """The gradients of gate and value, which have `width` columns each, as views of a result of `gated_bwd_in_fp8`."""
    if not isinstance(dh, CastGradient):
        return dh[..., :width], dh[..., width:]
    gate = CastGradient(dh.rows[..., :width], dh.transposed[:width])
    return gate, CastGradient(dh.rows[..., width:], dh.transposed[width:])


def _new_cast(place: int, kind: str, like: Operand) -> dict[int, New]:
    """New arrays for an array like `like` (..., N) in FP8, at index `place`, and for its transpose (N, M) after it."""
    rows, cols = like.layout.shape
    cast = FP8_TYPES[kind], like.library
    return {place: New(like.shape, *cast), place + 1: New((cols, rows), *cast)}


def _scale_and_amax(slots: int) -> tuple[int, int]:
    """The addresses of dy's scale and largest magnitude, given the address of a layer's slots."""
    slot = slots + SLOT * DY
    return slot + SCALE_AT, slot + AMAX_AT


class CastGated(PassOperation):
    """See `gated_bwd_in_fp8`. A call's options are the name of the FP8 type, the activation and the dropout.

    A call's scalars are those of `GatedBackward`. The slots of the value are absent if the gate has the same ones.
    """

    names = ("dy", "h", "rows", "transposed", "slots", "slots_of_value")
    required = 2
    make_pass = staticmethod(functools.lru_cache(maxsize=1024)(CastGatedPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: tuple[Philox | None, None]) -> Request:
        """See `Operation`."""
        dy, h, *_ = operands
        kind, activation, p = options
        dropouts, new = dropouts_of(p, scalars[0]), _new_cast(_GATED_ROWS, kind, h)
        problem = kind, activation, dropouts is not None, dy.spec
        return Request(problem, tuple(range(_GATED_ROWS, len(self.names))), new, options, dropouts=dropouts)

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """See `Operation`."""
        *arrays, gate, value = addresses
        of_halves = *_scale_and_amax(gate), *_scale_and_amax(value or gate)
        return super().call(prepared, (*arrays, *of_halves), scalars, stream)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: tuple[Philox | None, None]) -> None:
        """See `Operation`."""
        dy, h, rows, transposed, gate, value = arrays
        kind, activation, p = request.detail
        factors = reference.dropout_factors(dy.shape, p, scalars[0])
        dh = reference.gated_bwd(dy, h, activation, factors).astype(h.dtype)
        slots = gate[DY], (gate if value is None else value)[DY]
        for slot, half, out in zip(slots, np.split(dh, 2, axis=-1), np.split(rows, 2, axis=-1), strict=True):
            slot[AMAX] = amax_of(half, slot[AMAX])
            out[...] = reference.cast_fp8(half, slot[SCALE], kind)
        transposed[...] = rows_of(rows).T

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> CastGradient:
        """See `Operation`."""
        return CastGradient(*arrays[_GATED_ROWS : _GATED_ROWS + 2])


_CAST_GATED: Final = CastGated()


def _reads_cast_dy(state: FP8State | None) -> bool:
    """Whether backward of a layer that has just run forward can read dy in FP8, in both orientations."""
    if state is None or state.fallback is not None or state.slots is None:
        return False
    return state.recipe.recipe == "delayed" and state.needs_dx and state.needs_dw


def casts_gate(h: Any, *states: FP8State | None) -> bool:
    """Whether `gated_bwd_in_fp8` can be used for h = (gate, value).

    Args:
        states: the scales of the layers without biases that have just computed h: one for both halves, or two.
    """
    # The kernel writes both halves in one type.
    has_one_recipe = len({each.recipe for each in states if each is not None}) == 1
    return has_one_recipe and all(map(_reads_cast_dy, states)) and type_name(h.dtype) == "bfloat16"


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


class CastLoss(PassOperation):
    """See `cast_loss`. A call's scalars are those of a `LossOperation`. The gradient is cast if there are slots.

    A call's options are the name of the FP8 type, the loss, and whether the sums are added to the values of `db`.
    """

    names = ("prediction", "target", "gradient", "loss", "db", "rows", "transposed", "slots", "tally", "grad_scale")
    required = 2
    is_scaled = True
    make_pass = staticmethod(functools.cache(LossCastPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: tuple[float, bool]) -> Request:
        """See `Operation`."""
        scores, target, *_, slots, _, _ = operands
        check_shape(target.name, target.shape, scores.shape, f"the shape of {scores.name}")
        check_same(scores, target)
        dtype, library = scores.element_type(), scores.library
        new = {_LOSS: New((), np.dtype(np.float32), library)}
        if slots is None:
            new[_GRADIENT] = New(scores.shape, dtype.numpy, library)
        else:
            new |= _new_cast(_LOSS_ROWS, options[0], scores)
        return Request((scores.spec, target.spec, *options), tuple(range(_GRADIENT, len(self.names) - 1)), new)

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """See `Operation`."""
        *of_pass, slots, tally, scale = addresses
        of_cast = _scale_and_amax(slots) if slots else (0, 0)
        return Call.of_loss((*of_pass, *of_cast), stream, scalars, scale, tally)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> tuple[Any, Any]:
        """See `Operation`."""
        gradient, loss, _, rows, transposed, slots, *_ = arrays[_GRADIENT:]
        return loss, gradient if slots is None else CastGradient(rows, transposed)


_CAST_LOSS: Final = CastLoss()


def casts_loss(state: FP8State, target: Any) -> bool:
    """Whether `cast_loss` can be used for a loss of a layer's outputs; the layer has just run forward.

    Args:
        state: the scales of the layer.
        target: the targets of the loss; they must be BF16.
    """
    spec = read("target", target, 0).spec
    return _reads_cast_dy(state) and moves_tiles((DType.BFLOAT16, spec), out=None, transposed=None)


def cast_loss(
    state: FP8State, loss: ElementwiseLoss, db: Any, accumulate: bool, prediction: Any, target: Any, **options: Any
) -> tuple[Any, Any]:
    """A loss on a GPU, and its gradient in FP8 for the layer that made the prediction, with the layer's bias gradient.

    If the layer has not found the scale of its gradients yet, the gradient is returned in BF16.

    Args:
        state: the scales of the layer; `casts_loss` must be True for them.
        loss: the loss function, without weights.
        db: (N,) buffer of the bias gradient, or None.
        accumulate: whether the bias gradient is added to the values in `db`.
        prediction: (..., N), BF16. target: (..., N), same type.
        options: share, stream, and grad_scale (None or an array, not a number), as for `mse_loss`; out_loss, a
            `Tallied`; others have no effect.

    Returns:
        The loss, and a `CastGradient` or an array.
    """
    slots = state.slots if DY in state.calibrated else None
    tally, first = options["out_loss"]
    arrays = prediction, target, None, None, db, None, None, slots, tally, options["grad_scale"]
    how = state.recipe.dtypes[DY].value, loss, accumulate
    made: tuple[Any, Any] = perform(_CAST_LOSS, arrays, how, (options["share"], first), options["stream"])
    return made
