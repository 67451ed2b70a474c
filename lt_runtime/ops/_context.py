"""What a linear layer's forward pass leaves for its backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lt_runtime.layout import Layout
from lt_runtime.problem import Activation, Philox, Saved, type_name


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """What all forward calls of one layer that look the same have in common; compared by identity.

    Attributes:
        shape: (M, N, K).
        saved_as: what the saved array is; a mask is bytes (M, N/8 rounded up to a multiple of 16).
        saved_layout: how the saved array lies where forward has decided that, a mask in bits; None where its strides
            say it.
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


@dataclass(slots=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        (m, n, k), kind = self.shape, type_name(getattr(self.x, "dtype", "of unknown type"))
        return f"LinearContext(M={m}, N={n}, K={k}, {kind}, {self.layer.activation.name}, dropout={self.dropout})"

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
