"""`LinearContext`: the tensors and options that a linear layer's backward pass needs from its forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lt_runtime.layout import Layout
from lt_runtime.problem import Activation, Philox, Saved, type_name


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The part of a context that is the same for all calls with one `PreparedCall`; compared by identity.

    Attributes:
        shape: (M, N, K).
        saved_as: kind of the saved array; a mask is bytes (M, N/8 rounded up to a multiple of 16).
        saved_layout: layout of a saved array that forward has made, a mask's in bits; None if the array's own strides
            are to be read.
        activation, dropout, compute: the options of the forward call.
        has_bias: whether the layer has a bias.
    """

    shape: tuple[int, int, int]
    saved_as: Saved
    saved_layout: Layout | None
    activation: Activation
    dropout: float
    compute: str
    has_bias: bool


@dataclass(slots=True, eq=False, repr=False)
class LinearContext:
    """The result of a `linear_fwd` call that `linear_bwd` takes; its attributes are to be read only.

    Attributes:
        layer: the layer's sizes and options.
        x, w: the operands.
        saved: the array that the activation's derivative is computed from; None if there is none.
        preactivation: x · wᵀ + bias (M, N) where it was kept or asked for; None otherwise.
        rng: the source of the dropout mask; None without dropout.
        y: the layer's output, kept so that `linear_bwd` can tell whether it is another layer's x.
    """

    layer: Layer
    x: Any
    w: Any
    saved: Any
    preactivation: Any
    rng: Philox | None
    y: Any

    def __repr__(self) -> str:
        (m, n, k), kind = self.shape, type_name(getattr(self.x, "dtype", "of unknown type"))
        return f"LinearContext(M={m}, N={n}, K={k}, {kind}, {self.layer.activation.name}, dropout={self.dropout})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.layer.shape

    @property
    def saved_as(self) -> Saved:
        """Kind of the tensor in `saved`: mask, output or pre-activation."""
        return self.layer.saved_as

    @property
    def dropout(self) -> float:
        """Probability of dropout in the layer."""
        return self.layer.dropout

    @property
    def has_bias(self) -> bool:
        """Whether the layer has a bias."""
        return self.layer.has_bias
