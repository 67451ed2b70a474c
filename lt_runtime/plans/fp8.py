"""The plans of a linear layer whose products are computed in FP8: casts, products, and the passes of any layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

from lt_runtime.epilogue import Epilogue
from lt_runtime.fp8 import Needs, Precision, Prologue
from lt_runtime.gpu.driver import call as driver_call
from lt_runtime.gpu.memory import StreamMemory, aligned
from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.kernels.epilogue import BackwardPass, ForwardPass
from lt_runtime.kernels.fp8 import CastGradientPass, CastPass, CastRowsPass, ScalesPass, moves_tiles
from lt_runtime.kernels.tiling import VECTOR_BYTES
from lt_runtime.layout import packed
from lt_runtime.plans.strategies import dz_spec
from lt_runtime.problem import (
    Activation,
    BackwardProblem,
    Compute,
    Derivative,
    DType,
    ForwardProblem,
    MatmulProblem,
    Spec,
)
from lt_runtime.products.methods import known_algorithm
from lt_runtime.products.plan import Plan
from lt_runtime.reference.fp8 import AMAX, INVERSE, SCALE, SLOT_WIDTH

X, W, DY = range(3)
"""Rows of x, w and dy in the slots (the scales, see `SLOT_WIDTH`) and in the history of largest magnitudes."""
_WORD: Final = 4  # bytes of an FP32 number
_SLOT: Final = _WORD * SLOT_WIDTH
_SCALES: Final = ("scale_a", "scale_b")


class Cast:
    """Casts a tensor of a layer to FP8, row-major and transposed, with its scale in the layer's `FP8State.slots`.

    Args:
        row: the tensor's row in the slots and in the history of largest magnitudes.
        out, transposed: whether to make the row-major result, and whether to make the transpose.
        derivative: if not None, the tensor is dz, which the cast computes from dy and the saved tensor, together with
            the bias gradient; see `CastGradientPass`. The source is then dy.
        accumulate: whether the bias gradient is added to the present values of its buffer.
        prologue: the activation and dropout that are applied to the source before the cast; only without a derivative.
            If it is gated, the source is the left half of h.

    Attributes:
        spec, transposed: the specs of the tensor in FP8 and of its transpose.
        partial_bytes: bytes of scratch memory for the bias gradient's partial sums.
    """

    def __init__(
        self,
        dtype: DType,
        source: Spec,
        row: int,
        precision: Precision,
        device: int,
        *,
        out: bool,
        transposed: bool,
        derivative: Derivative | None = None,
        accumulate: bool = False,
        prologue: Prologue = Prologue(),  # noqa: B008  # it is frozen
    ) -> None:
        rows, cols = source.layout.shape
        self.spec, self.transposed = Spec(packed(rows, cols)), Spec(packed(cols, rows))
        self._row, self._recipe = row, precision.recipe
        results = self.spec if out else None, self.transposed if transposed else None
        name = precision.recipe.dtypes[row].value
        self._cast: CastPass | CastGradientPass
        self._amax: CastPass | CastGradientPass | None = None
        if derivative is None:
            options: dict[str, Any] = {"dropout": prologue.dropout > 0, "gated": prologue.gated}
            self._cast = CastPass(dtype, name, source, *results, device, prologue.activation, **options)
            self.partial_bytes = 0
            if precision.calibrates:
                self._amax = CastPass(dtype, name, source, None, None, device, prologue.activation, **options)
        else:
            fused = CastGradientPass(dtype, name, derivative, source, *results, device, accumulate=accumulate)
            self._cast, self.partial_bytes = fused, fused.partial_bytes
            if precision.calibrates:
                self._amax = CastGradientPass(dtype, name, replace(derivative, db=None), source, None, None, device)
        # With the recipe "current" a scale serves only the values that it was computed from: no headroom is needed.
        is_current = precision.recipe.recipe == "current"
        steps, headroom = (1, 1.0) if is_current else (precision.recipe.history, precision.recipe.headroom)
        self._scales = ScalesPass(1, steps, headroom, device) if precision.calibrates else None
        self._steps, self._collects = steps, not is_current

    def put(
        self,
        x: int,
        out: int,
        transposed: int,
        state: tuple[int, int],
        memory: StreamMemory,
        backward: tuple[int, int, int, DropoutState | None] = (0, 0, 0, None),
    ) -> int:
        """Puts the cast on the memory's stream; returns the address of 1 / scale, by which products multiply.

        Args:
            x, out, transposed: addresses.
            state: addresses of the slots and the history.
            backward: addresses of the saved tensor, the bias gradient and its partial sums, for a cast with a
                derivative; and the dropout mask.
        """
        slot, history = state[0] + _SLOT * self._row, state[1] + _WORD * self._steps * self._row
        scale, amax = slot + _WORD * SCALE, slot + _WORD * AMAX
        *of_derivative, dropout = backward
        dropouts = dropout, None
        if self._amax is not None and self._scales is not None:
            # The old scale was chosen for earlier values. It is set to 0, so that the update counts no overflow where
            # the present values exceed what the old scale allowed.
            driver_call("cuMemsetD32Async", scale, 0, 1, memory.stream)
            self._amax.launch(Call((x, 0, 0, 0, amax, *of_derivative), memory.stream, dropouts=dropouts), memory)
            self._scales.launch(Call((slot, history, 0), memory.stream), memory)
        addresses = x, scale, out, transposed, amax if self._collects else 0, *of_derivative
        self._cast.launch(Call(addresses, memory.stream, dropouts=dropouts), memory)
        return _inverse_of(state[0], self._row)


def _inverse_of(slots: int, row: int) -> int:
    """The address of 1 / scale of a tensor."""
    return slots + _SLOT * row + _WORD * INVERSE


class RowCast:
    """Like `Cast` without derivative and prologue, but with a scale for each row and for each row of the transpose."""

    partial_bytes = 0

    def __init__(
        self, dtype: DType, source: Spec, row: int, precision: Precision, device: int, *, out: bool, transposed: bool
    ) -> None:
        rows, cols = source.layout.shape
        self.spec, self.transposed = Spec(packed(rows, cols)), Spec(packed(cols, rows))
        results = self.spec if out else None, self.transposed if transposed else None
        self._cast = CastRowsPass(dtype, precision.recipe.dtypes[row].value, source, *results, device)

    def put(
        self, x: int, out: int, transposed: int, state: tuple[int, int], memory: StreamMemory, backward: object = None
    ) -> int:
        """As `Cast.put`, but `state` has the addresses for 1 / scale of the rows of `out` and of `transposed`."""
        del backward  # a cast with a scale for each row applies neither a derivative nor a mask
        self._cast.launch(Call((x, out, transposed, *state), memory.stream), memory)
        return state[0]


class Fp8ForwardPlan(Plan):
    """The plan of a layer's forward pass with its product in FP8: two casts, the product, perhaps an epilogue pass.

    A call has the addresses of `ForwardProblem.operands`, then of the layer's slots (scales) and its history of largest
    magnitudes, then of three arrays for backward: the transposes of x and of w in FP8, and a copy of the slots of x and
    w, with the scales of their casts. If each row has a scale, the third array has instead the reciprocals (2, K) of
    the scales of the transposes' rows. The three
    arrays are absent without backward, and a transpose that no gradient needs is absent too. The next address is that
    of w in FP8 if the call is given it: w and its transpose were then cast with the scale in the slot. The last two are
    those of x in FP8 if the call returns it or is given it, and of the slots of the layer that has cast it: x's row of
    these slots replaces that of this layer, and the transpose of x was then cast too.

    The two dropout masks of a call are those of y and of the prologue.

    Args:
        prologue: is applied to x before the cast. Unless it is the identity, x is BF16, `moves_tiles` holds for x, and
            each tensor has one scale.

    Raises:
        GpuError: the GPU does not multiply FP8 matrices.
    """

    def __init__(
        self, problem: ForwardProblem, precision: Precision, prologue: Prologue, needs: Needs, device: int
    ) -> None:
        self.problem, self.device = problem, device
        of_x, of_w = (problem.dtype, problem.x, X), (problem.dtype, problem.w, W)
        keeps_x, keeps_w = problem.backward and needs.dw, problem.backward and needs.dx
        self._by_rows = by_rows = precision.recipe.by_rows
        self._x: Cast | RowCast | None = None
        if precision.has_x8:
            assert not by_rows
        elif by_rows:
            self._x = RowCast(*of_x, precision, device, out=True, transposed=keeps_x)
        else:
            self._x = Cast(*of_x, precision, device, out=True, transposed=keeps_x, prologue=prologue)
        make_w = RowCast if by_rows else Cast
        self._w = None if precision.has_w8 else make_w(*of_w, precision, device, out=True, transposed=keeps_w)
        x8, w8 = (Spec(packed(*each.layout.shape)) for each in (problem.x, problem.w))
        in_scratch = not (precision.has_x8 or needs.x8), self._w is not None
        self._bytes = tuple(own * aligned(each.layout.size) for own, each in zip(in_scratch, (x8, w8), strict=True))
        # The bytes of two vectors: 1 / scale of each row of x, and of each row of w.
        self._vector_bytes = tuple(by_rows * aligned(_WORD * each.layout.rows) for each in (problem.x, problem.w))
        self.kept_spec = fp8_kept_spec(problem)
        has_bias, is_16_bits = problem.bias is not None, problem.dtype.itemsize == 2
        # An FP8 product takes a bias of BF16, or of D's type if D has 16 bits.
        self._adds_bias = problem.bias is not None and is_16_bits and problem.bias >= VECTOR_BYTES
        pass_adds = has_bias and not self._adds_bias
        keeps_product = self.kept_spec is not None
        has_pass = keeps_product or pass_adds or problem.dropout or problem.addend is not None
        has_pass |= problem.activation != Activation()
        # The product may not lie in y before the pass has read an addend, because y may be the addend's memory.
        self._is_apart = problem.addend is not None and not keeps_product
        apart = Spec(packed(*problem.y.layout.shape, order=problem.y.layout.order))
        d = self.kept_spec or (apart if self._is_apart else problem.y)
        kinds, is_fast = precision.recipe.dtypes[:2], precision.recipe.fast_accumulation != "never"
        operands = x8, w8.transposed, d
        product = _product(kinds, problem.dtype, *operands, fast=is_fast, vectors=by_rows)
        if self._adds_bias and problem.bias:
            product = replace(product, epilogue=Epilogue.BIAS, bias_alignment=problem.bias)
        self._product = known_algorithm(product, device)
        self.products = {"y": self._product}
        kept = self.kept_spec if pass_adds else None
        self._pass = ForwardPass(problem, product, kept, device) if has_pass else None
        product_bytes = aligned(problem.dtype.itemsize * d.layout.size) if self._is_apart else 0
        self._scratch_bytes = sum(self._vector_bytes) + sum(self._bytes) + product_bytes

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.scratch(self._scratch_bytes)
        self._product.reserve(memory)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        x, w, bias, y, kept, addend, slots, history, x_transposed, w_transposed, *others = call.addresses
        cast_slots, w8, given_x8, slots_of_x = others
        scratch = memory.scratch(self._scratch_bytes)
        after_vectors = scratch + sum(self._vector_bytes)
        x8 = given_x8 or after_vectors
        states = [(slots, history)] * 2
        if self._by_rows:
            kept_scales = cast_slots + _WORD * self.problem.x.layout.cols
            states = [(scratch, cast_slots), (scratch + self._vector_bytes[0], kept_scales)]
        if self._x is None:
            driver_call("cuMemcpyDtoDAsync", slots + _SLOT * X, slots_of_x + _SLOT * X, _SLOT, memory.stream)
            of_x = _inverse_of(slots, X)
        else:
            of_x = self._x.put(x, x8, x_transposed, states[0], memory, (0, 0, 0, call.dropouts[1]))
        if self._w is None:
            of_w = _inverse_of(slots, W)
        else:
            w8 = after_vectors + self._bytes[0]
            of_w = self._w.put(w, w8, w_transposed, states[1], memory)
        inverses = of_x, of_w
        product = after_vectors + sum(self._bytes) if self._is_apart else kept or y
        vector = bias if self._adds_bias else 0
        self._product.put(Call((x8, w8, 0, vector, 0, product, *inverses), memory.stream), memory)
        if self._pass is not None:
            self._pass.launch(product, bias, y, kept, addend, call.dropouts[0], memory.stream)
        if cast_slots and not self._by_rows:
            driver_call("cuMemcpyDtoDAsync", cast_slots, slots, 2 * _SLOT, memory.stream)


def _product(
    kinds: tuple[DType, DType], result: DType, a: Spec, b: Spec, d: Spec, *, fast: bool, vectors: bool
) -> MatmulProblem:
    """A product of matrices of two FP8 types with a scale each, or with `vectors` of scales."""
    other = None if kinds[0] is kinds[1] else kinds[1]
    plain = MatmulProblem(kinds[0], result, Compute.FLOAT32, a, b, d)
    return replace(plain, b_dtype=other, scales=_SCALES, fast_accumulation=fast, scale_vectors=vectors)


def fp8_kept_spec(problem: ForwardProblem) -> Spec | None:
    """The spec of the pre-activation that forward stores: the caller's, or one for backward; None if none is stored."""
    is_read = problem.backward and problem.activation != Activation()
    return problem.preactivation or (Spec(packed(*problem.y.layout.shape)) if is_read else None)


def casts_dz(problem: BackwardProblem, precision: Precision) -> bool:
    """Whether dz is cast before it is rounded to the layer's type.

    dz is cast before it is rounded if the caller does not want dz itself, the layer's type is BF16, and each tensor has
    one scale. If the operands also allow vector loads, one pass then computes dz, casts dz, and computes the bias
    gradient.
    """
    wants_product = problem.dx is not None or problem.dw is not None
    is_possible = problem.dtype is DType.BFLOAT16 and not precision.recipe.by_rows
    return problem.dz is None and is_possible and wants_product


class Fp8BackwardPlan(Plan):
    """The plan of a layer's gradients with their products in FP8: a cast of dz, and up to two products.

    If the cast cannot compute dz and the bias gradient (see `casts_dz`), another pass computes them before the cast.

    A call has the addresses of dy, forward's copy of the slots (scales) of x and w, the transposes of x and w in FP8,
    the saved tensor, dx, dw, db and dz, then of the layer's slots and its history of largest magnitudes.

    Args:
        problem: the layer's gradients, without an `input_derivative`; its x and w are not read.
        is_cast: whether dy is dz, and is in FP8 already; its rows may have gaps. A call then has the address of dy in
            FP8 in the place of dy, and that of the transpose in the place of the saved tensor; the plan makes no bias
            gradient.

    Raises:
        GpuError: the GPU does not multiply FP8 matrices.
    """

    def __init__(self, problem: BackwardProblem, precision: Precision, device: int, *, is_cast: bool = False) -> None:
        self.problem, self.device = problem, device
        derivative, recipe, accumulate = problem.output_derivative, precision.recipe, problem.accumulate
        has_work = not derivative.is_identity or derivative.db is not None
        reads = [(problem.dtype, each) for each in (problem.dy, derivative.saved_spec) if each is not None]
        in_cast = has_work and casts_dz(problem, precision) and moves_tiles(*reads, out=None, transposed=None)
        self._makes_dz = not in_cast and (not derivative.is_identity or problem.dz is not None)
        dz = dz_spec(problem) if self._makes_dz else problem.dy
        self._pass = None
        if self._makes_dz or (derivative.db is not None and not in_cast):
            written = dz if self._makes_dz else None
            self._pass = BackwardPass(problem.dtype, derivative, problem.dy, written, device, accumulate=accumulate)
        needs_dx, needs_dw = problem.dx is not None, problem.dw is not None
        self._cast: Cast | RowCast | None = None
        of_dz = problem.dtype, dz, DY, precision, device
        by_rows = recipe.by_rows
        if by_rows:
            self._cast = RowCast(*of_dz, out=needs_dx, transposed=needs_dw)
        elif not is_cast:
            derived = derivative if in_cast else None
            self._cast = Cast(*of_dz, out=needs_dx, transposed=needs_dw, derivative=derived, accumulate=accumulate)
        _, kind, gradient = recipe.dtypes
        (m, k), n = problem.x.layout.shape, problem.w.layout.rows
        out, transposed = problem.dy if is_cast else Spec(packed(m, n)), Spec(packed(n, m))
        kinds, is_fast = (gradient, kind), recipe.fast_accumulation == "always"
        w, x = Spec(packed(k, n)).transposed, Spec(packed(k, m)).transposed
        found = {}
        if problem.dx is not None:
            found["dx"] = _product(kinds, problem.dtype, out, w, problem.dx, fast=is_fast, vectors=by_rows)
        if problem.dw is not None:
            found["dw"] = _product(kinds, problem.dtype, transposed, x, problem.dw, fast=is_fast, vectors=by_rows)
        self._adds = {"dx": problem.accumulate_dx, "dw": problem.accumulate}
        added = {name: replace(each, c=each.d if self._adds[name] else None) for name, each in found.items()}
        self.products = {name: known_algorithm(each, device) for name, each in added.items()}
        keeps_dz = self._makes_dz and problem.dz is None
        self._dz_bytes = aligned(dz.layout.extent * problem.dtype.itemsize) if keeps_dz else 0
        sums = self._pass or self._cast
        self._partial_bytes = aligned(sums.partial_bytes) if sums else 0
        # Bytes of dz in FP8, row-major and transposed.
        self._cast_bytes = (0, 0) if is_cast else (needs_dx * aligned(m * n), needs_dw * aligned(m * n))
        # The bytes of two vectors: 1 / scale of each row of dz, and of each of its columns.
        self._vector_bytes = by_rows * aligned(_WORD * m), by_rows * aligned(_WORD * n)
        # Distance in bytes from the scales of the x that forward kept to those of w.
        self._pitch = _WORD * k if by_rows else _SLOT
        self._scratch_bytes = self._dz_bytes + self._partial_bytes + sum(self._cast_bytes) + sum(self._vector_bytes)

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.scratch(self._scratch_bytes)
        for each in self.products.values():
            each.reserve(memory)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        dy, cast_slots, x_transposed, w_transposed, saved, dx, dw, db, dz, slots, history = call.addresses
        scratch = memory.scratch(self._scratch_bytes)
        partial = scratch + self._dz_bytes
        dz8 = partial + self._partial_bytes
        dz8_transposed = dz8 + self._cast_bytes[0]
        dz = (dz or scratch) if self._makes_dz else dy
        if self._pass is not None:
            self._pass.launch(dy, saved, dz, db, partial, call.dropouts[0], memory)
        if not self.products:
            return
        row_scales = slots + _SLOT * DY + _WORD * INVERSE
        if self._cast is None:
            dz8, dz8_transposed = dy, saved
        else:
            vectors = dz8_transposed + self._cast_bytes[1]
            state = (vectors, vectors + self._vector_bytes[0]) if sum(self._vector_bytes) else (slots, history)
            of_derivative = saved, db, partial, call.dropouts[0]
            row_scales = self._cast.put(dz, dz8, dz8_transposed, state, memory, of_derivative)
        # If dz has one scale for all elements, both products read it at the same address.
        col_scales = row_scales + self._vector_bytes[0]
        operands = {
            "dx": (dz8, w_transposed, dx, W, row_scales),
            "dw": (dz8_transposed, x_transposed, dw, X, col_scales),
        }
        for name, product in self.products.items():
            a, b, d, row, scales = operands[name]
            inverses = scales, cast_slots + self._pitch * row + _WORD * INVERSE
            scalars = 1.0, float(self._adds[name])
            product.put(Call((a, b, d, 0, 0, d, *inverses), memory.stream, scalars), memory)
