"""What a linear layer remembers of its calls: the plan, what they make for themselves, and what they return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from lt_runtime.arrays import Library
from lt_runtime.layout import Order
from lt_runtime.ops._known_calls import New
from lt_runtime.ops._linear_types import Gradients, Layer, LinearContext
from lt_runtime.plans.backward import BackwardPlan
from lt_runtime.plans.forward import ForwardPlan
from lt_runtime.problem import Philox, Saved

_BITS = 8  # of a byte
NONE_NEW: Final = (0,) * len(Gradients._fields)
"""The addresses of new gradients where there are none."""


def new_kept(plan: ForwardPlan, library: Library) -> New | None:
    """What forward keeps besides y, as its plan wants it to lie; None if that is nothing."""
    spec = plan.kept_spec
    if spec is None:
        return None
    layout = spec.layout
    is_row = layout.order is Order.ROW
    lines, length = layout.shape if is_row else (layout.cols, layout.rows)
    if plan.saved is Saved.MASK:
        return New((lines, layout.leading_dimension // _BITS), np.dtype(np.uint8), library, plan.device)
    if is_row:
        view = None if length == layout.leading_dimension else (lambda padded: padded[:, :length])
    else:
        view = lambda padded: padded[:, :length].T  # noqa: E731  # one of three
    return New((lines, layout.leading_dimension), plan.problem.dtype.numpy, library, plan.device, view)


@dataclass(frozen=True, slots=True)
class KnownForward:
    """A forward call.

    Attributes:
        y, kept: what is made where the caller brings no buffer; None where he brings one, or nothing is kept.
        keeps: whether backward takes the derivative from `kept`, be it the caller's.
    """

    plan: ForwardPlan
    keeps: bool
    layer: Layer
    y: New | None
    kept: New | None

    def fresh(self, out: Any, out_z: Any, stream: int) -> tuple[Any, Any, int, int]:
        """y and the matrix that is kept, the caller's or new ones, and the addresses of those that are new, else 0."""
        y_at = kept_at = 0
        if self.y is not None:
            out, y_at = self.y.make(stream)
        if self.kept is not None:
            out_z, kept_at = self.kept.make(stream)
        return out, out_z, y_at, kept_at

    def result(self, x: Any, w: Any, y: Any, kept: Any, rng: Philox | None, stream: int) -> tuple[Any, LinearContext]:
        """What the caller gets."""
        context = LinearContext(self.layer, x, w, kept, kept, rng)
        if not self.keeps:
            context.saved = y if self.layer.saved_as is Saved.OUTPUT else None
        elif self.layer.saved_as is Saved.MASK:
            context.preactivation = None
        return (y if self.y is None else self.y.export(y, stream)), context


@dataclass(frozen=True, slots=True)
class KnownBackward:
    """A backward call.

    Attributes:
        new: what is made of the gradients, by its place among them, where the caller brings no buffer.
    """

    plan: BackwardPlan
    new: dict[int, New]

    def fresh(self, gradients: tuple[Any, ...], stream: int) -> tuple[Gradients, tuple[int, ...]]:
        """The gradients, in the caller's buffers or new ones, and the addresses of those that are new, else 0."""
        if not self.new:
            return Gradients(*gradients), NONE_NEW
        made, at = list(gradients), [0] * len(gradients)
        for place, new in self.new.items():
            array, at[place] = new.make(stream)
            made[place] = new.export(array, stream)
        return Gradients(*made), tuple(at)
