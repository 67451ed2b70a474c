"""How a layer is split between cuBLASLt's epilogues and our kernels, as data.

What there is to choose, and what of it a problem allows. Which is fastest changes with shape, type and version of the
library: that is measured, or taken from `priors`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.tile_matmul import is_preferred
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import Activation, BackwardProblem, Derivative, DType, ForwardProblem, Saved, Spec

_MASK_BITS: Final = 128  # cuBLASLt's granularity of a mask's rows
_AUX_ELEMENTS: Final = 8  # and of a pre-activation's
_VECTOR_BYTES: Final = 16
_FUSED_ELEMENTS: Final = 1 << 20  # of an FP32 output whose rows are no whole vectors, at most


class MadeBy(enum.Enum):
    """Who makes a part of backward: nobody, since it is not wanted; our kernel; or an epilogue of cuBLASLt's."""

    NOBODY = "nobody"
    KERNEL = "kernel"
    EPILOGUE = "epilogue"


@dataclass(frozen=True, slots=True)
class ForwardStrategy:
    """How forward is split. What the epilogue leaves of bias, activation and dropout is left to our kernel.

    Attributes:
        epilogue: what cuBLASLt applies to the product.
        saved: what is kept for backward.
    """

    epilogue: Epilogue
    saved: Saved


@dataclass(frozen=True, slots=True)
class BackwardStrategy:
    """How backward is split. Our kernel always takes dy to dz, as no product comes before.

    Attributes:
        db: who makes the bias gradient: our kernel, with dz or alone, or the product of the weight gradient.
        derivative: who takes dx through the layer below: our kernel, in place, or the product itself.
        db_below: who makes that layer's bias gradient: our kernel, with the derivative or alone, or the product.
        beside: in a graph, the weight gradient is made in a branch beside the input gradient, and with it a bias
            gradient that nothing else comes of. Outside of one, events cost the host more than the GPU gains.
    """

    db: MadeBy = MadeBy.NOBODY
    derivative: MadeBy = MadeBy.NOBODY
    db_below: MadeBy = MadeBy.NOBODY
    dw_concurrent: bool = False


def forward_strategies(problem: ForwardProblem) -> Iterator[ForwardStrategy]:
    """What a problem allows, first what leaves our kernel the least; the library may refuse all but the last."""
    name, saved = problem.activation.name, _saved_by_kernel(problem)
    suffix = "_bias" if problem.bias is not None else ""
    if _fits_library(problem):
        if _activation_fuses(problem):
            if saved is not Saved.PREACTIVATION and problem.preactivation is None:
                yield ForwardStrategy(Epilogue(f"{name}{suffix}"), saved)
            if aux := _saved_by_library(problem):
                yield ForwardStrategy(Epilogue(f"{name}_aux{suffix}"), aux)
        if suffix:
            yield ForwardStrategy(Epilogue.BIAS, saved)
    yield ForwardStrategy(Epilogue.NONE, saved)


def _fits_library(problem: ForwardProblem) -> bool:
    """Its vectors run along the contiguous axis of the output; without inputs there is no product at all.

    A bias that the library is known to get wrong, as one of too little alignment, the plan of the product refuses.
    """
    targets = (problem.y, problem.preactivation or problem.y)
    return problem.x.layout.cols > 0 and all(spec.layout.order is Order.ROW for spec in targets)


def _activation_fuses(problem: ForwardProblem) -> bool:
    if problem.dropout:
        return False
    return problem.activation.name == "gelu" or (problem.activation.name == "relu" and not problem.propagate_nan)


def _saved_by_kernel(problem: ForwardProblem) -> Saved:
    """The output where the derivative follows from it.

    ReLU's does so under dropout as well: where an element was dropped the gradient is zero whatever the derivative,
    and where it was kept the scale leaves the sign.
    """
    name = problem.activation.name
    if name == "none" or not problem.backward:
        return Saved.NOTHING
    if name == "relu" or (name in ("sigmoid", "tanh") and not problem.dropout):
        return Saved.OUTPUT
    return Saved.PREACTIVATION


def _saved_by_library(problem: ForwardProblem) -> Saved | None:
    """What the epilogue with an auxiliary output is of use for; None if for nothing."""
    kept = problem.preactivation
    is_ours = is_preferred(problem.dtype, problem.x, problem.w.transposed, problem.y)
    fits = _fits_aux(kept or Spec(_preactivation(problem)), _AUX_ELEMENTS, is_ours=is_ours)
    if kept is not None and not fits:
        return None
    if problem.activation.name == "gelu":
        if problem.backward:
            return Saved.PREACTIVATION if fits else None
        return Saved.NOTHING if kept is not None else None
    return Saved.MASK if problem.backward and kept is None else None


def _fits_aux(spec: Spec, step: int, *, is_ours: bool) -> bool:
    """Whether the library can write or read an auxiliary matrix there; or whether our kernel can, if it is asked."""
    layout, is_whole = spec.layout, spec.alignment >= _VECTOR_BYTES
    return layout.order is Order.ROW and (is_ours or (is_whole and layout.leading_dimension % step == 0))


def kept_spec(problem: ForwardProblem, saved: Saved) -> Spec | None:
    """How the matrix lies that forward writes besides y; None if there is none.

    Rows of its own choice are padded to what cuBLASLt asks for, which lets our kernels move 16 bytes at a time as well,
    or lie as those of y do; see `_preactivation`.
    """
    if problem.preactivation is not None:
        return problem.preactivation
    if saved is Saved.MASK:
        return Spec(_padded(problem.y.layout, _MASK_BITS))
    if saved is Saved.PREACTIVATION:
        return Spec(_preactivation(problem))
    return None


def _preactivation(problem: ForwardProblem) -> Layout:
    """Without gaps if y has none, its rows are no whole vectors, and cuBLASLt's GELU is not asked for or slow.

    Our kernels then move whole vectors all the same. A 16-bit epilogue would be inaccurate, see `MatmulPlan`. In TF32,
    on an H200 (13.1), 541x619 takes 7.0 µs with it and 6.4 with our kernel, 1078x2049 23.2 and 19.2, 13830x221 31 and
    19.
    """
    y, padded = problem.y.layout, _padded(problem.y.layout, _AUX_ELEMENTS)
    is_whole = y.leading_dimension * problem.dtype.itemsize % _VECTOR_BYTES == 0
    is_fused = problem.dtype is DType.FLOAT32 and y.size <= _FUSED_ELEMENTS
    return padded if is_whole or is_fused or y.extent > y.size else y


def _padded(layout: Layout, step: int) -> Layout:
    """The shape and order of a layout, its lines a multiple of `step` elements apart."""
    length = layout.cols if layout.order is Order.ROW else layout.rows
    return Layout(layout.rows, layout.cols, layout.order, max(-(-length // step), 1) * step)


def backward_strategies(problem: BackwardProblem) -> Iterator[BackwardStrategy]:
    """What a problem allows; the first, with our kernels alone, works wherever plain products do."""
    two_products = problem.dx is not None and problem.dw is not None
    ways = itertools.product((False, True)[: 1 + two_products], _makers_below(problem), _makers_of_db(problem))
    for dw_concurrent, (derivative, db_below), db in ways:
        yield BackwardStrategy(db, derivative, db_below, dw_concurrent)


def _makers_of_db(problem: BackwardProblem) -> Iterator[MadeBy]:
    if problem.output_derivative.db is None:
        yield MadeBy.NOBODY
        return
    yield MadeBy.KERNEL
    # The library overwrites, and reads dz as it lies: with its rows contiguous. It is not called where there is nothing
    # to multiply, and the sum would stay unwritten.
    writes = problem.dw is not None and problem.dw.layout.order is Order.ROW and _multiplies(problem)
    if writes and not problem.accumulate and dz_spec(problem).layout.order is Order.ROW:
        yield MadeBy.EPILOGUE


def _makers_below(problem: BackwardProblem) -> Iterator[tuple[MadeBy, MadeBy]]:
    below = problem.input_derivative
    if below is None or problem.dx is None:
        yield MadeBy.NOBODY, MadeBy.NOBODY
        return
    db = MadeBy.KERNEL if below.db is not None else MadeBy.NOBODY
    yield (MadeBy.NOBODY if below.is_identity else MadeBy.KERNEL), db
    if _derivative_fuses(problem, below) and problem.dx.layout.order is Order.ROW and _multiplies(problem):
        yield MadeBy.EPILOGUE, db
        if below.db is not None and not problem.accumulate:
            yield MadeBy.EPILOGUE, MadeBy.EPILOGUE


def _multiplies(problem: BackwardProblem) -> bool:
    """Whether dy, x and w have any elements."""
    return all(spec.layout.size for spec in (problem.dy, problem.x, problem.w))


def _derivative_fuses(problem: BackwardProblem, below: Derivative) -> bool:
    is_ours = is_preferred(problem.dtype, problem.dy, problem.w, problem.x)
    fusable = {("relu", Saved.MASK): _MASK_BITS, ("gelu", Saved.PREACTIVATION): _AUX_ELEMENTS}
    step, spec = fusable.get((below.activation.name, below.saved)), below.saved_spec
    if step is None or spec is None or below.dropout:
        return False
    return _fits_aux(spec, step, is_ours=is_ours and below.saved is Saved.PREACTIVATION)


def dz_spec(problem: BackwardProblem) -> Spec:
    """How dz lies: as asked, as dy where they are the same, or with rows padded to 16 bytes.

    That keeps both products on the tensor cores, whatever N is.
    """
    if problem.dz is not None:
        return problem.dz
    if problem.output_derivative.is_identity:
        return problem.dy
    return Spec(_padded(packed(*problem.dy.layout.shape), _VECTOR_BYTES // problem.dtype.itemsize))


def unchanged(db: int | None) -> Derivative:
    """That of a layer without activation and dropout: where only a bias gradient is to be made, if that."""
    return Derivative(Activation(), Saved.NOTHING, None, db)
