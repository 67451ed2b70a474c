"""What passes between a linear layer's forward, backward, and the two ways of running them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from lt_runtime.errors import ShapeError
from lt_runtime.layout import Layout
from lt_runtime.problem import Activation, Philox, Saved


@dataclass(frozen=True, slots=True)
class Options:
    """Everything about a forward call but its operands; `rng` is None exactly where `dropout` is 0."""

    activation: Activation
    dropout: float
    rng: Philox | None
    compute: str
    propagate_nan: bool
    inference: bool


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """What all calls of one layer's forward that look the same have in common, told apart by identity.

    Attributes:
        shape: (M, N, K).
        saved_as: what the saved array is; a mask is bytes (M, N/8 rounded up to a multiple of 16).
        saved_layout: how it lies where forward has decided that, a mask in bits; None if it lies as any array does.
        activation, dropout, compute: as they were in forward.
        has_bias: whether the layer has a bias.
    """

    shape: tuple[int, int, int]
    saved_as: Saved
    saved_layout: Layout | None
    activation: Activation
    dropout: float
    compute: str
    has_bias: bool


@dataclass(slots=True, eq=False)
class LinearContext:
    """What one `linear_fwd` call leaves for `linear_bwd`; to be read only.

    Attributes:
        layer: what does not depend on the arrays.
        x, w: the operands.
        saved: the array that the activation's derivative is taken from; None if nothing is needed.
        preactivation: x · wᵀ + bias (M, N) where it was kept or asked for; None otherwise.
        rng: as it was in forward.
    """

    layer: Layer
    x: Any
    w: Any
    saved: Any
    preactivation: Any
    rng: Philox | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.layer.shape

    @property
    def saved_as(self) -> Saved:
        """What `saved` is."""
        return self.layer.saved_as

    @property
    def dropout(self) -> float:
        """Its probability."""
        return self.layer.dropout

    @property
    def has_bias(self) -> bool:
        """Whether the layer has a bias."""
        return self.layer.has_bias


class Wanted(NamedTuple):
    """Which gradients are wanted, and whether dw, db and db_below are added to what their buffers hold."""

    dx: bool
    dw: bool
    db: bool
    db_below: bool
    accumulate: bool


class Gradients(NamedTuple):
    """Gradients or buffers for them; None where there is none."""

    dx: Any
    dw: Any
    db: Any
    dz: Any
    db_below: Any


class Source(NamedTuple):
    """What a gradient is the gradient of.

    Attributes:
        layer: the layer that is gone back through.
        below: the one before it, when the gradient is to be taken through its activation too.
        before_activation: the gradient that comes in has been taken through `layer`'s activation already.
    """

    layer: LinearContext
    below: LinearContext | None
    before_activation: bool

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of the gradients, by their names."""
        m, n, k = self.layer.shape
        return {"dx": (m, k), "dw": (n, k), "db": (n,), "dz": (m, n), "db_below": (k,)}


def problem_shape(x: tuple[int, ...], w: tuple[int, ...], bias: tuple[int, ...] | None) -> tuple[int, int, int]:
    """(M, N, K) of a layer.

    Raises:
        ShapeError: the shapes do not fit.
    """
    for name, shape in (("x", x), ("w", w)):
        if len(shape) != 2:
            raise ShapeError(f"{name} has shape {shape}; accepted are matrices, two axes")
    if x[1] != w[1]:
        raise ShapeError(f"w has shape {w}; its second axis must be {x[1]}, as in x of shape {x}")
    if bias is not None and bias != (w[0],):
        raise ShapeError(f"bias has shape {bias}; it must be ({w[0]},), as w of shape {w} has {w[0]} outputs")
    return x[0], w[0], x[1]
