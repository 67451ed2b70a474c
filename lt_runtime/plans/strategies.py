"""Strategies: how a layer is split between cuBLASLt's epilogues and our kernels, and which splits a problem allows.

The fastest strategy changes with shape, type and version of cuBLASLt: it is measured, or taken from `priors`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from lt_runtime.epilogue import Epilogue
from lt_runtime.kernels.tile_matmul import is_preferred
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.problem import LATER, Activation, BackwardProblem, Derivative, DType, ForwardProblem, Saved, Spec

# cuBLASLt requires the leading dimension of ReLU's mask to be a multiple of this number of bits.
_MASK_BITS: Final = 128
# cuBLASLt requires the leading dimension of a saved pre-activation to be a multiple of this number of elements.
_AUX_ELEMENTS: Final = 8
_VECTOR_BYTES: Final = 16
# For ragged FP32 and TF32 outputs of at most this many elements, cuBLASLt's GELU is preferred to our kernel.
_FUSED_ELEMENTS: Final = 1 << 20


class MadeBy(enum.Enum):
    """Method for a part of a backward pass: our kernel, cuBLASLt's epilogue, or nothing if not requested."""

    NOBODY = "nobody"
    KERNEL = "kernel"
    EPILOGUE = "epilogue"


@dataclass(frozen=True, slots=True)
class ForwardStrategy:
    """How a forward pass is divided between cuBLASLt's product, with its epilogue, and our kernel that follows it.

    Our kernel applies bias, activation, dropout and addend as far as the product does not.

    Attributes:
        epilogue: the epilogue that cuBLASLt applies to the product.
        saved: kind of the tensor that is saved for backward.
        product_adds: whether the product adds the problem's addend, as its β·C.
    """

    epilogue: Epilogue
    saved: Saved
    product_adds: bool = field(default=False, metadata=LATER)


@dataclass(frozen=True, slots=True)
class BackwardStrategy:
    """How a backward pass is split. Our kernel always computes dz, because no product precedes it whose epilogue could.

    Attributes:
        db: method for the bias gradient: our kernel, alone or together with dz, or the epilogue of the product dw.
        derivative: method for multiplying dx by the derivative of the activation of the layer below: our kernel, in
            place, or the epilogue of the product dx.
        db_below: method for the bias gradient of the layer below: our kernel, or the epilogue of the product dx.
        dw_concurrent: whether, in a graph, dw is computed in a branch concurrently with dx; so is the bias gradient, if
            the first pass computes nothing else. Without a graph there is no branch, because recording its events costs
            more host time than the GPU gains.
    """

    db: MadeBy = MadeBy.NOBODY
    derivative: MadeBy = MadeBy.NOBODY
    db_below: MadeBy = MadeBy.NOBODY
    dw_concurrent: bool = False


def forward_strategies(problem: ForwardProblem) -> Iterator[ForwardStrategy]:
    """The allowed strategies, sorted by the work left to our kernel, least first.

    cuBLASLt may refuse any strategy but the last, which has a product without epilogue. Strategies with a bias epilogue
    that cuBLASLt is known to compute wrongly are refused later, by the plan of the product.
    """
    name, saved = problem.activation.name, _saved_by_kernel(problem)
    adds_last = problem.addend is not None  # the epilogue would add C before the activation, the addend comes after it
    suffix = "_bias" if problem.bias is not None else ""
    # cuBLASLt reads the bias and writes the mask along contiguous rows, so that its outputs must be row-major. With K =
    # 0 cuBLASLt is not called, and there is no epilogue.
    is_row_major = all(spec.layout.order is Order.ROW for spec in (problem.y, problem.preactivation or problem.y))
    if is_row_major and problem.x.layout.cols:
        is_fused = name == "gelu" or (name == "relu" and not problem.propagate_nan)
        if is_fused and not problem.dropout and not adds_last:
            if saved is not Saved.PREACTIVATION and problem.preactivation is None:
                yield ForwardStrategy(Epilogue(f"{name}{suffix}"), saved)
            if aux := _saved_by_library(problem):
                yield ForwardStrategy(Epilogue(f"{name}_aux{suffix}"), aux)
        if suffix:
            if _product_may_add(problem):
                yield ForwardStrategy(Epilogue.BIAS, saved, product_adds=True)
            yield ForwardStrategy(Epilogue.BIAS, saved)
    if not suffix and problem.x.layout.cols and _product_may_add(problem):
        yield ForwardStrategy(Epilogue.NONE, saved, product_adds=True)
    yield ForwardStrategy(Epilogue.NONE, saved)


def _product_may_add(problem: ForwardProblem) -> bool:
    """Whether cuBLASLt may add the addend: no activation or dropout, no stored pre-activation, and equal orders."""
    addend, is_linear = problem.addend, problem.activation.name == "none" and not problem.dropout
    is_alike = addend is not None and addend.layout.order is problem.y.layout.order
    return is_alike and is_linear and problem.preactivation is None


def _saved_by_kernel(problem: ForwardProblem) -> Saved:
    """Kind of the tensor that our kernel saves: the output if it determines the derivative, else the pre-activation.

    ReLU's derivative can be computed from the output even under dropout: a dropped element's gradient is zero in any
    case, and the scale of a kept element does not change its sign. With an addend y is not the activation's output.
    """
    name = problem.activation.name
    if name == "none" or not problem.backward:
        return Saved.NOTHING
    if problem.addend is not None:
        return Saved.PREACTIVATION
    if name == "relu" or (name in ("sigmoid", "tanh") and not problem.dropout):
        return Saved.OUTPUT
    return Saved.PREACTIVATION


def _saved_by_library(problem: ForwardProblem) -> Saved | None:
    """Kind of the tensor that an epilogue with an auxiliary output would save; None if the epilogue cannot be used."""
    kept = problem.preactivation
    if problem.activation.name == "relu":
        return Saved.MASK if problem.backward and kept is None else None
    is_ours = is_preferred(problem.dtype, problem.x, problem.w.transposed, problem.y)
    if not _fits_aux(kept or Spec(_preactivation(problem)), _AUX_ELEMENTS, is_ours=is_ours):
        return None
    return Saved.PREACTIVATION if problem.backward else Saved.NOTHING if kept is not None else None


def _fits_aux(spec: Spec, step: int, *, is_ours: bool) -> bool:
    """Whether the product can write or read an auxiliary matrix with a spec.

    The matrix must be row-major. cuBLASLt also requires 16-byte alignment and a leading dimension that is a multiple of
    `step`; our product kernel, which `is_ours` selects, does not.
    """
    layout, is_whole = spec.layout, spec.alignment >= _VECTOR_BYTES
    return layout.order is Order.ROW and (is_ours or (is_whole and layout.leading_dimension % step == 0))


def kept_spec(problem: ForwardProblem, saved: Saved) -> Spec | None:
    """Spec of the matrix that forward writes besides y; None if it writes only y.

    A buffer of the caller keeps its layout. In a new array rows are padded to a multiple of the size that cuBLASLt
    requires, which also lets our kernels move 16 bytes at once, or are packed like the rows of y; see `_preactivation`.
    """
    if problem.preactivation is not None:
        return problem.preactivation
    if saved is Saved.MASK:
        return Spec(_padded(problem.y.layout, _MASK_BITS))
    return Spec(_preactivation(problem)) if saved is Saved.PREACTIVATION else None


def _preactivation(problem: ForwardProblem) -> Layout:
    """Layout of a new pre-activation.

    Rows are packed if y is packed and ragged, and cuBLASLt's GELU epilogue would be refused or slow; otherwise they are
    padded. Our kernels use 16-byte accesses for a packed matrix even if its rows are ragged. For ragged rows
    cuBLASLt's 16-bit epilogue is refused, see `MatmulPlan`, and its TF32 epilogue is slow: on an H200 (13.1) 541x619
    takes 7.0 µs with the epilogue and 6.4 with our kernel, 1078x2049 23.2 and 19.2, 13830x221 31 and 19.
    """
    y, padded = problem.y.layout, _padded(problem.y.layout, _AUX_ELEMENTS)
    is_whole = y.leading_dimension * problem.dtype.itemsize % _VECTOR_BYTES == 0
    is_fused = problem.dtype is DType.FLOAT32 and y.size <= _FUSED_ELEMENTS
    return padded if is_whole or is_fused or y.extent > y.size else y


def _padded(layout: Layout, step: int) -> Layout:
    """A layout of the same shape and order with a leading dimension that is a multiple of `step` elements."""
    length = layout.cols if layout.order is Order.ROW else layout.rows
    return Layout(layout.rows, layout.cols, layout.order, max(-(-length // step), 1) * step)


def backward_strategies(problem: BackwardProblem) -> Iterator[BackwardStrategy]:
    """The backward strategies that a problem allows.

    The first strategy has no epilogue, so that it works whenever cuBLASLt accepts the plain products.
    """
    branches = (False, True) if problem.dx is not None and problem.dw is not None else (False,)
    for dw_concurrent, below, db in itertools.product(branches, _makers_below(problem), _makers_of_db(problem)):
        yield BackwardStrategy(db, *below, dw_concurrent)


def _makers_of_db(problem: BackwardProblem) -> Iterator[MadeBy]:
    if problem.output_derivative.db is None:
        yield MadeBy.NOBODY
        return
    yield MadeBy.KERNEL
    # cuBLASLt's epilogue overwrites the bias gradient, and needs a row-major dz. If the product dw is empty, cuBLASLt
    # is not called, and the bias gradient would stay unwritten.
    is_row_major = problem.dw is not None and problem.dw.layout.order is dz_spec(problem).layout.order is Order.ROW
    if is_row_major and not problem.accumulate and _multiplies(problem):
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
    """Whether the products have something to multiply: dy, x and w have elements."""
    return all(spec.layout.size for spec in (problem.dy, problem.x, problem.w))


def _derivative_fuses(problem: BackwardProblem, below: Derivative) -> bool:
    is_ours = is_preferred(problem.dtype, problem.dy, problem.w, problem.x)
    fusable = {("relu", Saved.MASK): _MASK_BITS, ("gelu", Saved.PREACTIVATION): _AUX_ELEMENTS}
    step, spec = fusable.get((below.activation.name, below.saved)), below.saved_spec
    if step is None or spec is None or below.dropout:
        return False
    return _fits_aux(spec, step, is_ours=is_ours and below.saved is Saved.PREACTIVATION)


def dz_spec(problem: BackwardProblem) -> Spec:
    """Spec of dz: the caller's buffer, or dy if dz equals dy, or else a new matrix with rows padded to 16 bytes.

    Padded rows let the products of dx and dw use tensor cores for every N.
    """
    if problem.dz is not None:
        return problem.dz
    if problem.output_derivative.is_identity:
        return problem.dy
    return Spec(_padded(packed(*problem.dy.layout.shape), _VECTOR_BYTES // problem.dtype.itemsize))


def unchanged(db: int | None) -> Derivative:
    """The `Derivative` of a layer without activation and dropout; `db` is the bias gradient's alignment, or None."""
    return Derivative(Activation(), Saved.NOTHING, None, db)
