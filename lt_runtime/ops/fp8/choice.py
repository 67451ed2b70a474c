"""The choice between FP8 and the layers' own type for consecutive linear layers."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, Self

from lt_runtime import ranges
from lt_runtime.arrays.operand import HOST, device_of, library_of
from lt_runtime.fp8 import FP8, Fp8ChainProblem, are_multiples
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.ops.first_use import before_first_use
from lt_runtime.ops.fp8.state import FP8State
from lt_runtime.plans.fp8_rule import NO_MULTIPLE, against_fp8
from lt_runtime.problem import Compute, DType, activation_of

_MOST: Final = 4
"""Largest number of layers whose precision is decided together: while they are measured all are in memory."""


class Candidate(NamedTuple):
    """The inputs to the choice of a layer's precision: FP8 state (or None), N and K of the weight, and the options."""

    state: FP8State | None
    outputs: int
    inputs: int
    has_bias: bool
    activation: Any
    compute: Any

    @classmethod
    def of(cls, state: FP8State | None, w: Any, bias: Any, activation: Any, compute: Any) -> Self:
        """Makes the candidate for a layer from its arrays; N and K are 0 if w is no matrix, which the layer refuses."""
        outputs, inputs = w.shape if len(getattr(w, "shape", ())) == 2 else (0, 0)
        return cls(state, outputs, inputs, bias is not None, activation, compute)


def choose(x: Any, layers: Sequence[Candidate], *, stream: Any = None) -> None:
    """Sets `fallback` of the states of consecutive layers: why a layer is in its own type, or None if it is in FP8.

    Args:
        x: the first layer's inputs (..., K). If it is no array of two axes or more, the layers' own checks raise the
            error when they run.
        stream: nothing is measured while this stream is being captured; None for the current stream of x's library.
    """
    rows = rows_of(x)
    device = device_of("x", x) if rows else HOST

    def handle() -> int:
        return stream_handle(stream, device, library_of(x).current_stream)

    found = reasons(layers, rows, getattr(x, "dtype", None), device, handle)
    for layer, reason in zip(layers, found, strict=True):
        if layer.state is not None:
            layer.state.fallback = reason


def fits(x: Any, w: Any) -> bool:
    """Whether the tensor cores can multiply a layer's matrices in FP8: M, N and K are positive multiples of 16."""
    return are_multiples(rows_of(x), *w.shape)


def rows_of(x: Any) -> int:
    """M, the product of all axes of x but the last; 0 if x is no array of two axes or more."""
    shape = getattr(x, "shape", ())
    return math.prod(shape[:-1]) if len(shape) > 1 else 0


def reasons(
    layers: Sequence[Candidate], rows: int, dtype: Any, device: int, stream: Callable[[], int]
) -> Iterator[str | None]:
    """For each layer why it is in its own type, None if it is in FP8; tells `ranges.watchers` of what is decided.

    Up to `_MOST` consecutive layers that have the same recipe, and whose sizes allow FP8, are decided together.
    """

    def common(layer: Candidate) -> tuple[FP8 | None, bool, Any]:
        recipe = None if layer.state is None else layer.state.recipe
        return recipe, are_multiples(rows, layer.outputs, layer.inputs), layer.compute

    for (recipe, fits, _), group in itertools.groupby(layers, common):
        same = [*group]
        for part in (same[start : start + _MOST] for start in range(0, len(same), _MOST)):
            reason = None if fits else NO_MULTIPLE
            if recipe and device != HOST and (ranges.watchers or (recipe.fallback and fits)):
                reason = _reason(part, rows, dtype, device, stream)
            yield from [reason] * len(part)


def _reason(layers: Sequence[Candidate], rows: int, dtype: Any, device: int, stream: Callable[[], int]) -> str | None:
    """Why layers that are decided together run in their own type; None if they run in FP8."""
    first, kind = layers[0], DType.parse("x", dtype)
    assert first.state is not None
    written = tuple(each.state is not None and each.state.is_written for each in layers)
    problem = Fp8ChainProblem(
        kind,
        Compute.parse(first.compute, kind),
        rows,
        (first.inputs, *(each.outputs for each in layers)),
        tuple(activation_of("activation", each.activation) for each in layers),
        tuple(each.has_bias for each in layers),
        first.state.needs_dx,
        _timed(first.state.recipe),
        written if any(written) else (),
    )
    if ranges.watchers:
        ranges.tell(problem)
    if problem.is_open:
        before_first_use(problem, device, stream)
    return against_fp8(problem, device)


@functools.cache
def _timed(recipe: FP8) -> FP8:
    """The recipe with defaults for the fields that have no influence on times: equal times need one measurement."""
    return replace(recipe, history=FP8().history, headroom=FP8().headroom)
