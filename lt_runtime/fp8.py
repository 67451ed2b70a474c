"""The recipe of FP8 training, as data: types, scales and accumulation of the products of linear layers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lt_runtime.arguments import flag, integer, number, one_of, shown
from lt_runtime.errors import ArgumentError
from lt_runtime.problem import LATER, Activation, BackwardProblem, Compute, DType, ForwardProblem

MOST_STEPS = 1024  # of the history
UNIT = 16
"""M, N, K and leading dimensions of products in FP8 are multiples of this many elements, addresses of this many bytes.

Addresses of scales must be multiples of 16 bytes too: cuBLASLt 12.9 to 13.1 refuses other addresses (cuBLAS release
notes, issue 5728938).
"""


@dataclass(frozen=True, slots=True)
class FP8:
    """How a linear layer's three products are computed in FP8. Inputs and weights are cast to E4M3.

    Every tensor has one scale, a power of two. The recipe "delayed" casts with a scale from the largest magnitudes of
    the last `history` steps, in one read of the tensor: a tensor that grows by more than `headroom` from one step to
    the next is saturated, and such steps are counted. The recipe "current" reads each tensor twice, and casts with a
    scale from its own largest magnitude. The recipe "rowwise" does so too, but with a scale for each row of an operand,
    along the axis over which the product sums: rows of different magnitudes keep their accuracy. It needs a GPU of
    compute capability 9.0; nothing saturates, and no overflows are counted.

    Attributes:
        recipe: "delayed", "current" or "rowwise".
        gradients: type of the gradients of outputs: "e5m2", or "e4m3" with one bit more of mantissa and less range.
        history: steps whose largest magnitudes decide a delayed scale, in [1, 1024].
        headroom: at least 1; a delayed scale leaves room for this multiple of the largest magnitude.
        fast_accumulation: which products are summed with about 14 bits, which is faster: "always", "forward" or
            "never". Training loses nothing by it in the comparisons of `docs/fp8.md`.
        fallback: whether layers on a GPU are computed in their own type where FP8 is slower, as measured or else as
            expected, or where the GPU lacks scales for rows; `FP8State.fallback` tells why. `precision="fp8"` of a
            model asks for it.

    Raises:
        ArgumentError: an attribute has a value that is not described above.
    """

    recipe: Literal["delayed", "current", "rowwise"] = "delayed"
    gradients: Literal["e5m2", "e4m3"] = "e5m2"
    history: int = 16
    headroom: float = 2.0
    fast_accumulation: Literal["always", "forward", "never"] = "always"
    fallback: bool = False

    def __post_init__(self) -> None:
        one_of("recipe", self.recipe, ("delayed", "current", "rowwise"))
        one_of("gradients", self.gradients, ("e5m2", "e4m3"))
        one_of("fast_accumulation", self.fast_accumulation, ("always", "forward", "never"))
        if not 1 <= integer("history", self.history) <= MOST_STEPS:
            raise ArgumentError(f"history is {shown(self.history)}; it must be in [1, {MOST_STEPS}]")
        headroom = number("headroom", self.headroom)
        if not (headroom >= 1.0 and math.isfinite(headroom)):
            raise ArgumentError(f"headroom is {headroom}; it must be finite and at least 1")
        object.__setattr__(self, "headroom", headroom)
        flag("fallback", self.fallback)

    @property
    def by_rows(self) -> bool:
        """Whether each row of an operand has a scale, rather than each tensor."""
        return self.recipe == "rowwise"

    @property
    def steps(self) -> int:
        """Steps whose largest magnitudes are kept: one, unless they decide delayed scales."""
        return self.history if self.recipe == "delayed" else 1

    @property
    def margin(self) -> float:
        """The headroom of delayed scales; 1 for a scale that serves only the values from which it was computed."""
        return self.headroom if self.recipe == "delayed" else 1.0

    @property
    def dtypes(self) -> tuple[DType, DType, DType]:
        """The FP8 types of x, w and dy."""
        gradient = DType.FLOAT8_E5M2 if self.gradients == "e5m2" else DType.FLOAT8_E4M3FN
        return DType.FLOAT8_E4M3FN, DType.FLOAT8_E4M3FN, gradient


class Prologue(NamedTuple):
    """The activation and dropout of the layer below, which a layer's cast of its inputs x applies before it casts.

    The cast computes dropout(act(x)), where x is the pre-activation of the layer below. The default leaves x as it is.

    Attributes:
        dropout: probability with which an element is dropped.
        gated: whether the cast computes dropout(act(gate) · value) of the two halves of h = (gate, value), which takes
            the place of x.
    """

    activation: Activation = Activation()
    dropout: float = 0.0
    gated: bool = False


class Precision(NamedTuple):
    """A layer's FP8 recipe, how a call gets the layer's tensors in FP8, and which of them forward keeps or returns.

    Attributes:
        calibrates: whether the call computes the tensors' scales before it casts the tensors.
        prologue: the function that forward's cast of x applies; None for the identity.
        defers: whether forward leaves activation and dropout to the prologue of the next layer; y is then the
            pre-activation.
        has_w8: whether forward is given the weight in FP8.
        has_x8: whether forward is given the inputs in FP8, of another layer that reads the same x.
        needs_dx, needs_dw: which gradients backward will compute: forward keeps the transpose of w in FP8 for dx, that
            of x for dw.
        returns_x8: whether forward returns x in FP8 as well, for another layer that reads the same x.
        has_dy8: whether backward is given dy in FP8.
    """

    recipe: FP8
    calibrates: bool
    prologue: Prologue | None = None
    defers: bool = False
    has_w8: bool = False
    has_x8: bool = False
    needs_dx: bool = True
    needs_dw: bool = True
    returns_x8: bool = False
    has_dy8: bool = False


@dataclass(frozen=True, slots=True)
class Fp8Problem:
    """A layer's forward or backward pass in FP8. The plan cache has plans for its products, none for the pass itself.

    Attributes:
        layer: the pass that is computed; without activation and dropout if `precision.defers`.
    """

    layer: ForwardProblem | BackwardProblem
    precision: Precision


@dataclass(frozen=True, slots=True)
class Fp8ChainProblem:
    """The choice between FP8 and the layers' own type, for forward and backward of consecutive linear layers.

    If the choice is open, a measurement of both types decides it. The measurement has packed matrices and no dropout,
    and computes the gradients of all weights and biases.

    Attributes:
        dtype: the layers' own type.
        rows: M of each layer.
        dims: inputs of the first layer, then outputs of each.
        activations, biases: the activation of each layer, and whether it has a bias.
        dx: whether backward computes the gradient with respect to the inputs of the first layer.
        recipe: the recipe of the products in FP8.
        written: for each layer, whether an optimizer's update writes the weight in FP8, so that forward does not cast
            it; empty if forward casts every weight.
    """

    dtype: DType
    compute: Compute
    rows: int
    dims: tuple[int, ...]
    activations: tuple[Activation, ...]
    biases: tuple[bool, ...]
    dx: bool
    recipe: FP8
    written: tuple[bool, ...] = field(default=(), metadata=LATER)

    @property
    def fits(self) -> bool:
        """Whether the sizes allow products in FP8."""
        return are_multiples(self.rows, *self.dims)

    @property
    def is_open(self) -> bool:
        """Whether both types are possible: the sizes allow FP8, and the recipe's `fallback` allows the own type."""
        return self.fits and self.recipe.fallback


def are_multiples(*sizes: int) -> bool:
    """Whether the tensor cores can multiply matrices of these sizes in FP8: all are positive multiples of `UNIT`."""
    return all(size > 0 and size % UNIT == 0 for size in sizes)
