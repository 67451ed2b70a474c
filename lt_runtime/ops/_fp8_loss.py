"""Losses of the outputs of a layer in FP8, with the gradient in FP8 as the layer's backward pass reads it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from lt_runtime.arrays.checks import check_same, check_shape
from lt_runtime.arrays.operand import read
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.fp8 import LossCastPass, moves_tiles
from lt_runtime.kernels.losses import ElementwiseLoss
from lt_runtime.ops._fp8_linear import CastGradient
from lt_runtime.ops._fp8_state import FP8State
from lt_runtime.ops.call import New, PassOperation, PreparedCall, Request, perform
from lt_runtime.plans.fp8 import DY
from lt_runtime.problem import DType
from lt_runtime.reference.fp8 import AMAX, FP8_TYPES, SCALE, SLOT_WIDTH

_LOSS, _SUMS, _GRADIENT, _ROWS, _TRANSPOSED, _SLOTS = range(3, 9)  # Indices of the results among a call's arrays.
_WORD: Final = 4  # Bytes of an FP32 number.


class CastLoss(PassOperation):
    """See `cast_loss`. A call's scalars are those of a `LossOperation`. The gradient is cast if there are slots.

    A call's options are the name of the FP8 type, the loss, and whether the sums are added to the values of `db`.
    """

    names = ("prediction", "target", "grad_scale", "loss", "db", "gradient", "rows", "transposed", "slots", "tally")
    required = 2
    is_scaled = True
    make_pass = staticmethod(functools.cache(LossCastPass))

    def read(self, operands: Sequence[Any], options: Any, scalars: tuple[float, bool]) -> Request:
        """See `Operation`."""
        scores, target, *_, slots, _ = operands
        check_shape(target.name, target.shape, scores.shape, f"the shape of {scores.name}")
        check_same(scores, target)
        dtype, library, (m, n) = scores.element_type(), scores.library, scores.layout.shape
        new = {_LOSS: New((), np.dtype(np.float32), library)}
        if slots is None:
            new[_GRADIENT] = New(scores.shape, dtype.numpy, library)
        else:
            cast = FP8_TYPES[options[0]], library
            new |= {_ROWS: New(scores.shape, *cast), _TRANSPOSED: New((n, m), *cast)}
        return Request((dtype, scores.spec, target.spec, *options), tuple(range(_LOSS, _SLOTS + 2)), new)

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Any, stream: int) -> Call:
        """See `Operation`."""
        scores, target, scale, loss, db, gradient, rows, transposed, slots, tally = addresses
        slot = slots + _WORD * SLOT_WIDTH * DY
        of_cast = (slot + _WORD * SCALE, slot + _WORD * AMAX) if slots else (0, 0)
        of_pass = scores, target, gradient, loss, db, rows, transposed, *of_cast
        return Call.of_loss(of_pass, stream, scalars, scale, tally)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> tuple[Any, Any]:
        """See `Operation`."""
        loss, _, gradient, rows, transposed, slots, _ = arrays[_LOSS:]
        return loss, gradient if slots is None else CastGradient(rows, transposed)


_CAST_LOSS: Final = CastLoss()


def casts_loss(state: FP8State, target: Any) -> bool:
    """Whether `cast_loss` can be used for a loss of a layer's outputs; the layer has just run forward.

    Args:
        state: the scales of the layer.
        target: the targets of the loss; they must be BF16.
    """
    is_delayed = state.slots is not None and state.recipe.recipe == "delayed"
    reads_both = state.fallback is None and state.needs_dx and state.needs_dw
    spec = read("target", target, 0).spec
    return is_delayed and reads_both and moves_tiles((DType.BFLOAT16, spec), out=None, transposed=None)


def cast_loss(
    state: FP8State,
    loss: ElementwiseLoss,
    db: Any,
    accumulate: bool,
    prediction: Any,
    target: Any,
    *,
    share: float,
    **options: Any,
) -> tuple[Any, Any]:
    """A loss on a GPU, and its gradient in FP8 for the layer that made the prediction, with the layer's bias gradient.

    If the layer has not found the scale of its gradients yet, the gradient is returned in BF16.

    Args:
        state: the scales of the layer; `casts_loss` must be True for them.
        loss: the loss function, without weights.
        db: (N,) buffer of the bias gradient, or None.
        accumulate: whether the bias gradient is added to the values in `db`.
        prediction: (..., N), BF16. target: (..., N), same type.
        share: as for `mse_loss`.
        options: stream, and grad_scale (None or an array, not a number), as for `mse_loss`; out_loss, a `Tallied`;
            others have no effect.

    Returns:
        The loss, and a `CastGradient` or an array.
    """
    slots = state.slots if DY in state.calibrated else None
    tally, first = options["out_loss"]
    arrays = prediction, target, options["grad_scale"], None, db, None, None, None, slots, tally
    how = state.recipe.dtypes[DY].value, loss, accumulate
    made: tuple[Any, Any] = perform(_CAST_LOSS, arrays, how, (share, first), options["stream"])
    return made
