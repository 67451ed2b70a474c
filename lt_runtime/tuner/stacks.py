"""Layers in a row, as `lt.MLP` has them, as the problems that a training step of theirs asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from lt_runtime.errors import ArgumentError
from lt_runtime.layout import packed
from lt_runtime.plans.strategies import forward_strategies, kept_spec, unchanged
from lt_runtime.problem import (
    Activation,
    BackwardProblem,
    Compute,
    Derivative,
    DType,
    ForwardProblem,
    MatmulProblem,
    Saved,
    Spec,
)

_ALIGNMENT: Final = 256  # of what the array libraries allocate, at least
_LINEAR: Final = Activation()


@dataclass(frozen=True, slots=True)
class Stack:
    """Linear layers of which each reads what the one before has written; every matrix is row-major, without gaps.

    Attributes:
        rows: M of every layer.
        dims: inputs of the first layer, then outputs of each.
        activation, dropout: of all layers but the last.
        final_activation: of the last.
        bias: whether the layers have one.
        input_gradient: whether the first layer's dx is wanted; that of the others always is.
        chained: whether a layer's backward takes dx through the layer below, or leaves that to the layer below itself.

    Raises:
        ArgumentError: fewer than two dims, or one of them, or `rows`, is not a positive integer.
    """

    rows: int
    dims: tuple[int, ...]
    activation: Activation
    dtype: DType
    compute: Compute
    dropout: bool = False
    bias: bool = True
    final_activation: Activation = _LINEAR
    input_gradient: bool = False
    propagate_nan: bool = False
    chained: bool = True

    def __post_init__(self) -> None:
        if len(self.dims) < 2:
            raise ArgumentError(
                f"dims is {list(self.dims)}; accepted are two or more: inputs, then outputs of each layer"
            )
        for name, value in (("rows", self.rows), *(("dims", each) for each in self.dims)):
            if type(value) is not int or value < 1:
                raise ArgumentError(f"{name} has {value!r}; accepted are integers of at least 1")

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.dims) - 1

    def forward(self, index: int) -> ForwardProblem:
        """The forward pass of one layer, which is to be followed by backward."""
        inputs, outputs = self.dims[index : index + 2]
        is_last = index == len(self) - 1
        return ForwardProblem(
            self.dtype,
            self.compute,
            self.final_activation if is_last else self.activation,
            x=_spec(self.rows, inputs),
            w=_spec(outputs, inputs),
            y=_spec(self.rows, outputs),
            bias=_ALIGNMENT if self.bias else None,
            dropout=self.dropout and not is_last,
            propagate_nan=self.propagate_nan,
            backward=True,
        )

    def backward(self, index: int, saved: Sequence[Saved] | None = None) -> BackwardProblem:
        """The backward pass of one layer.

        Args:
            saved: what each layer's forward keeps; as the plainest of its strategies does, if left out.
        """
        forward = self.forward(index)
        is_taken_above = self.chained and index < len(self) - 1
        has_dx = index > 0 or self.input_gradient
        return BackwardProblem(
            self.dtype,
            self.compute,
            forward.x,
            forward.w,
            forward.y,
            own=unchanged(db=None) if is_taken_above else self._derivative(index, saved),
            dx=forward.x if has_dx else None,
            dw=forward.w,
            through=self._derivative(index - 1, saved) if self.chained and index > 0 else None,
        )

    def problems(self) -> list[ForwardProblem | BackwardProblem | MatmulProblem]:
        """Those of all layers in the order in which they run, none twice."""
        layers = range(len(self))
        return list(dict.fromkeys([*map(self.forward, layers), *map(self.backward, reversed(layers))]))

    def _derivative(self, index: int, saved: Sequence[Saved] | None) -> Derivative:
        return derivative_of(self.forward(index), saved[index] if saved is not None else None)


def derivative_of(problem: ForwardProblem, saved: Saved | None = None) -> Derivative:
    """What takes a gradient back through a layer's activation and dropout, its bias gradient included.

    Args:
        saved: what forward keeps; as the plainest of its strategies does, if left out.
    """
    if saved is None:
        *_, plainest = forward_strategies(problem)
        saved = plainest.saved
    spec = problem.y if saved is Saved.OUTPUT else kept_spec(problem, saved)
    saved_spec = None if saved is Saved.NOTHING else spec
    db = None if problem.bias is None else _ALIGNMENT
    return Derivative(problem.activation, saved, saved_spec, db, problem.dropout)


def plain_backward(problem: ForwardProblem) -> BackwardProblem:
    """The backward pass that `lt.linear_bwd` makes of a layer when every gradient is wanted."""
    dx, dw = (_spec(*each.layout.shape) for each in (problem.x, problem.w))
    dy, own = _spec(*problem.y.layout.shape), derivative_of(problem)
    return BackwardProblem(problem.dtype, problem.compute, problem.x, problem.w, dy, own, dx, dw)


def _spec(rows: int, cols: int) -> Spec:
    return Spec(packed(rows, cols), _ALIGNMENT)
