"""Calls of a linear layer whose operands have been found to be sound: made with any others that look the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Generic, TypeVar

import numpy as np

from lt_runtime.arrays import Library, Operand, Signature, are_apart
from lt_runtime.gpu.direct import is_current
from lt_runtime.layout import Order
from lt_runtime.ops._linear_types import Gradients, Layer, LinearContext
from lt_runtime.planning import BackwardCall, BackwardPlan, DropoutState, ForwardPlan, recall
from lt_runtime.problem import Philox, Saved

_BITS = 8  # of a byte
_Known = TypeVar("_Known")


@dataclass(frozen=True, slots=True)
class New:
    """An array that a call makes for itself.

    Attributes:
        shape: of the memory, row-major.
        view: what of it is the array; None for all.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    library: Library
    device: int
    view: Callable[[Any], Any] | None = None

    def make(self, stream: int) -> tuple[Any, int]:
        """The array, its memory ordered with a stream, and its address."""
        array = self.library.empty(self.shape, self.dtype, self.device, stream)
        address = self.library.address(array)
        return (array if self.view is None else self.view(array)), address


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
    """

    plan: ForwardPlan
    layer: Layer
    library: Library
    y: New | None
    kept: New | None

    def run(
        self,
        arrays: tuple[Any, ...],
        addresses: tuple[int, ...],
        rng: Philox | None,
        dropout: DropoutState | None,
        stream: int,
    ) -> tuple[Any, LinearContext]:
        """Makes the call.

        Args:
            arrays: x, w, bias, y and the pre-activation; None where the caller brings none.
            addresses: theirs; 0 where there is none.
        """
        x, w, bias, y, kept = addresses
        *_, out, preactivation = arrays
        saved = None
        if self.y is not None:
            out, y = self.y.make(stream)
        if self.kept is not None:
            preactivation, kept = self.kept.make(stream)
        self.plan.run(x, w, bias, y, kept, dropout, stream)
        saved_as = self.layer.saved_as
        if saved_as is Saved.OUTPUT:
            saved = out
        elif saved_as is not Saved.NOTHING:
            saved = preactivation
        if saved_as is Saved.MASK:
            preactivation = None
        result = out if self.y is None else self.library.export(out, stream)
        return result, LinearContext(self.layer, arrays[0], arrays[1], saved, preactivation, rng)


@dataclass(frozen=True, slots=True)
class KnownBackward:
    """A backward call.

    Attributes:
        new: what is made of the gradients, by their names, where the caller brings no buffer.
    """

    plan: BackwardPlan
    library: Library
    new: dict[str, New]

    def run(
        self,
        arrays: tuple[Any, ...],
        addresses: tuple[int, ...],
        dropout: DropoutState | None,
        dropout_below: DropoutState | None,
        stream: int,
    ) -> Gradients:
        """Makes the call.

        Args:
            arrays: dy, x, w, what was saved of this layer and of the one below, and the gradients; None where the
                caller brings none.
            addresses: theirs; 0 where there is none.
        """
        dy, x, w, saved, saved_below, *at = addresses
        gradients = list(arrays[-len(at) :])
        for name, new in self.new.items():
            place = Gradients._fields.index(name)
            array, at[place] = new.make(stream)
            gradients[place] = self.library.export(array, stream)
        dx, dw, db, dz, db_below = at
        self.plan.run(
            BackwardCall(dy, x, w, stream, saved, dx, dw, db, dz, saved_below, db_below, dropout, dropout_below)
        )
        return Gradients(*gradients)


@dataclass(frozen=True, slots=True)
class Again(Generic[_Known]):
    """A call as it is remembered.

    Attributes:
        sizes: bytes that each array spans, absent ones left out. inputs: how many of these are only read.
        spread: from the addresses of those that are present, and a 0, to those of all.
    """

    call: _Known
    sizes: tuple[int, ...]
    inputs: int
    spread: Callable[[tuple[int, ...]], tuple[int, ...]]


def as_again(call: _Known, operands: Sequence[Operand | None], inputs: int) -> Again[_Known]:
    """A call to be remembered.

    Args:
        operands: in the order in which a signature has the arrays. inputs: how many of them are only read.
    """
    present = [operand for operand in operands if operand is not None]
    places = [-1 if operand is None else present.index(operand) for operand in operands]
    sizes = tuple(operand.extent * operand.itemsize for operand in present)
    read = sum(operand is not None for operand in operands[:inputs])
    return Again(call, sizes, read, itemgetter(*places))


def recalled(signature: Signature) -> tuple[Any, tuple[int, ...]] | None:
    """The call like one made before, and all addresses; None if it takes another look.

    That is so, too, if outputs may share memory with other arrays, or if the device is not the thread's current one.
    """
    try:
        again = recall(signature.key)
    except TypeError:  # an argument that is no value
        return None
    addresses = signature.addresses
    if again is None or not are_apart(addresses, again.sizes, again.inputs) or not is_current(again.call.plan.device):
        return None
    return again.call, again.spread((*addresses, 0))
