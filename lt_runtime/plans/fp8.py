"""The plans of a linear layer whose products are computed in FP8: casts, products, and the passes of any layer."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Final

from lt_runtime.epilogue import Epilogue
from lt_runtime.fp8 import FP8, Fp8Problem, Precision, Prologue
from lt_runtime.gpu.driver import call as driver_call
from lt_runtime.gpu.memory import StreamMemory, aligned
from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.kernels.epilogue import BackwardPass, ForwardPass
from lt_runtime.kernels.fp8 import CastPass, CastRowsPass, Function, ScalesPass, moves_tiles
from lt_runtime.kernels.tiling import VECTOR_BYTES
from lt_runtime.layout import packed
from lt_runtime.plans.strategies import dz_spec
from lt_runtime.problem import Activation, BackwardProblem, Compute, DType, ForwardProblem, MatmulProblem, Spec
from lt_runtime.products.methods import known_algorithm
from lt_runtime.products.plan import Plan
from lt_runtime.reference.fp8 import AMAX, INVERSE, SCALE, SLOT_WIDTH

X, W, DY = range(3)
"""Rows of x, w and dy in the slots (the scales, see `SLOT_WIDTH`) and in the history of largest magnitudes."""
_WORD: Final = 4  # bytes of an FP32 number
SLOT: Final = _WORD * SLOT_WIDTH
"""Bytes of a tensor's slot: its scale, 1 / scale, largest magnitude and counters; see `INVERSE`."""
INVERSE_AT, SCALE_AT, AMAX_AT = (_WORD * column for column in (INVERSE, SCALE, AMAX))
"""Distances in bytes from a tensor's slot to its 1 / scale, its scale, and its largest magnitude."""
_SCALES: Final = ("scale_a", "scale_b")


class Cast:
    """Casts a tensor of a layer to FP8, row-major and transposed, with its scale in the layer's `FP8State.slots`.

    With the recipe "rowwise" each row of either result has a scale of its own instead; the function is then not
    applied.

    Args:
        row: the tensor's row in the slots and in the history of largest magnitudes.
        function: applied to the source before the cast, see `CastPass`; None for the identity. The source of a gated
            prologue is the left half of h. With a derivative the tensor is dz, and the source is dy.
        out, transposed: whether to make the row-major result, and whether to make the transpose.
        accumulate: whether the bias gradient is added to the present values of its buffer.

    Attributes:
        partial_bytes: bytes of scratch memory for the bias gradient's partial sums.
    """

    def __init__(
        self,
        dtype: DType,
        precision: Precision,
        device: int,
        source: Spec,
        row: int,
        function: Function | None = None,
        *,
        out: bool = True,
        transposed: bool,
        accumulate: bool = False,
    ) -> None:
        recipe, (rows, cols) = precision.recipe, source.layout.shape
        results = Spec(packed(rows, cols)) if out else None, Spec(packed(cols, rows)) if transposed else None
        to, self.partial_bytes = recipe.dtypes[row].value, 0
        self._cast: CastPass | CastRowsPass
        if recipe.by_rows:
            self._cast = CastRowsPass(dtype, to, source, *results, device)
        else:
            self._cast = CastPass(dtype, to, source, *results, device, function or Prologue(), accumulate=accumulate)
            self.partial_bytes = self._cast.partial_bytes
        self._scales = ScalesPass(1, recipe.steps, recipe.margin, 1, device) if precision.calibrates else None
        self._slot, self._past = SLOT * row, _WORD * recipe.steps * row
        self._by_rows, self._collects = recipe.by_rows, recipe.recipe == "delayed"

    def put(
        self,
        operands: tuple[int, ...],
        state: tuple[int, int],
        memory: StreamMemory,
        dropout: DropoutState | None = None,
    ) -> None:
        """Launches the cast on the stream of `memory`.

        Args:
            operands: addresses of the source and both results, then of the saved tensor, the bias gradient and its
                partial sums, which only a cast with a derivative reads.
            state: addresses of the slots and the history; with scales for rows, of two vectors, which get 1 / scale of
                each row of both results.
        """
        x, out, transposed, saved, db, partial = operands
        if self._by_rows:
            self._cast.launch(Call((x, out, transposed, *state), memory.stream), memory)
            return
        slot, dropouts = state[0] + self._slot, (dropout, None)
        amax = slot + AMAX_AT
        if self._scales is not None:
            # The old scale was chosen for earlier values. It is set to 0, so that the update counts no overflow where
            # the present values exceed what the old scale allowed. Without results the cast only finds the maximum.
            driver_call("cuMemsetD32Async", slot + SCALE_AT, 0, 1, memory.stream)
            self._cast.launch(Call((x, 0, 0, 0, amax, saved, 0, 0), memory.stream, dropouts=dropouts), memory)
            self._scales.launch(Call((slot, state[1] + self._past, 0), memory.stream), memory)
        addresses = x, slot + SCALE_AT, out, transposed, amax if self._collects else 0, saved, db, partial
        self._cast.launch(Call(addresses, memory.stream, dropouts=dropouts), memory)


class Fp8ForwardPlan(Plan):
    """The plan of a layer's forward pass with its product in FP8: two casts, the product, perhaps an epilogue pass.

    A call has the addresses of `ForwardProblem.operands`, then of the layer's slots (scales) and its history of largest
    magnitudes, then of three arrays for backward: the transposes of x and of w in FP8, and a copy of the slots of x and
    w, with the scales of their casts. If each row has a scale, the third array has instead the reciprocals (2, K) of
    the scales of the transposes' rows. The three arrays are absent without backward, and a transpose that no gradient
    needs is absent too. The next address is of w in FP8, if the call is given it: w and its transpose were then cast
    with the scale in the slot. The last two are of x in FP8, if the call returns it or is given it, and of the slots of
    the layer that has cast it: x's row of these slots replaces x's row of this layer's slots, and the transpose of x
    was then cast too.

    The first dropout mask of a call is for y, the second for the prologue.

    Args:
        problem: a forward pass. If it has a prologue, x is BF16, `moves_tiles` holds for x, and each tensor has one
            scale.

    Attributes:
        problem: the layer's forward problem, without the precision.

    Raises:
        GpuError: the GPU does not multiply FP8 matrices.
    """

    def __init__(self, problem: Fp8Problem, device: int) -> None:
        layer, precision = problem.layer, problem.precision
        assert isinstance(layer, ForwardProblem)
        self.problem, self.device = layer, device
        recipe, dtype, (rows, cols) = precision.recipe, layer.dtype, layer.y.layout.shape
        self._by_rows, cast = recipe.by_rows, functools.partial(Cast, dtype, precision, device)
        self._x = self._w = None
        if not precision.has_x8:
            self._x = cast(layer.x, X, precision.prologue, transposed=layer.backward and precision.needs_dw)
        if not precision.has_w8:
            self._w = cast(layer.w, W, transposed=layer.backward and precision.needs_dx)
        self.kept_spec = fp8_kept_spec(layer)
        keeps_product = self.kept_spec is not None
        # An FP8 product takes a bias of BF16, or of D's type if D has 16 bits.
        self._adds_bias = layer.bias is not None and dtype.itemsize == 2 and layer.bias >= VECTOR_BYTES
        pass_adds = layer.bias is not None and not self._adds_bias
        has_pass = any((keeps_product, pass_adds, layer.dropout, layer.addend, layer.activation != Activation()))
        # The product must not overwrite y before the pass has read an addend, because y may be the addend's memory.
        self._is_apart = layer.addend is not None and not keeps_product
        apart = Spec(packed(rows, cols, order=layer.y.layout.order))
        d = self.kept_spec or (apart if self._is_apart else layer.y)
        x8, w8 = (Spec(packed(*each.layout.shape)) for each in (layer.x, layer.w))
        matrices, is_fast = (x8, w8.transposed, d), recipe.fast_accumulation != "never"
        product = _product(recipe, recipe.dtypes[X], dtype, matrices, fast=is_fast)
        if self._adds_bias and layer.bias:
            product = replace(product, epilogue=Epilogue.BIAS, bias_alignment=layer.bias)
        self._product = known_algorithm(product, device)
        self.products = {"y": self._product}
        self._pass = ForwardPass(layer, product, self.kept_spec if pass_adds else None, device) if has_pass else None
        # Scratch memory, in order: 1 / scale of each row of x, and of w; x and w in FP8; the product.
        casts_x, casts_w = not (precision.has_x8 or precision.returns_x8), not precision.has_w8
        sizes = (
            *(self._by_rows * _WORD * each for each in (rows, cols)),
            *(casts_x * x8.layout.size, casts_w * w8.layout.size, self._is_apart * dtype.itemsize * d.layout.size),
        )
        *self._offsets, self._scratch_bytes = itertools.accumulate(map(aligned, sizes), initial=0)

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.scratch(self._scratch_bytes)
        self._product.reserve(memory)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        x, w, bias, y, kept, addend, slots, history, x_transposed, w_transposed, *others = call.addresses
        cast_slots, w8, given_x8, slots_of_x = others
        scratch = memory.scratch(self._scratch_bytes)
        row_scales, column_scales, own_x8, own_w8, apart = self._offsets
        x8, w8 = given_x8 or scratch + own_x8, w8 or scratch + own_w8
        if self._by_rows:
            inverses = scratch + row_scales, scratch + column_scales
            of_x, of_w = (inverses[0], cast_slots), (inverses[1], cast_slots + _WORD * self.problem.x.layout.cols)
        else:
            inverses = slots + SLOT * X + INVERSE_AT, slots + SLOT * W + INVERSE_AT
            of_x = of_w = slots, history
        if self._x is None:
            driver_call("cuMemcpyDtoDAsync", slots + SLOT * X, slots_of_x + SLOT * X, SLOT, memory.stream)
        else:
            self._x.put((x, x8, x_transposed, 0, 0, 0), of_x, memory, call.dropouts[1])
        if self._w is not None:
            self._w.put((w, w8, w_transposed, 0, 0, 0), of_w, memory)
        product = scratch + apart if self._is_apart else kept or y
        vector = bias if self._adds_bias else 0
        self._product.put(Call((x8, w8, 0, vector, 0, product, *inverses), memory.stream), memory)
        if self._pass is not None:
            self._pass.launch(product, bias, y, kept, addend, call.dropouts[0], memory.stream)
        if cast_slots and not self._by_rows:
            driver_call("cuMemcpyDtoDAsync", cast_slots, slots, 2 * SLOT, memory.stream)


def _product(recipe: FP8, a: DType, result: DType, matrices: tuple[Spec, Spec, Spec], *, fast: bool) -> MatmulProblem:
    """A product A · B = D of matrices in FP8 with a scale each, or with a scale for each row; B is in E4M3."""
    plain = MatmulProblem(a, result, Compute.FLOAT32, *matrices, scales=_SCALES, fast_accumulation=fast)
    e4m3 = DType.FLOAT8_E4M3FN
    return replace(plain, b_dtype=None if a is e4m3 else e4m3, scale_vectors=recipe.by_rows)


def fp8_kept_spec(problem: ForwardProblem) -> Spec | None:
    """The spec of the pre-activation that forward stores: the caller's, or one for backward; None if none is stored."""
    is_read = problem.backward and problem.activation != Activation()
    return problem.preactivation or (Spec(packed(*problem.y.layout.shape)) if is_read else None)


def casts_dz(problem: BackwardProblem, precision: Precision) -> bool:
    """Whether dz is cast before it is rounded to the layer's type, provided that the operands allow vector loads.

    dz is cast before it is rounded if the caller does not want dz itself, the layer's type is BF16, and each tensor has
    one scale. One pass then computes dz, casts dz, and computes the bias gradient. Without vector loads another pass
    computes and rounds dz before the cast.
    """
    wants_product = problem.dx is not None or problem.dw is not None
    is_possible = problem.dtype is DType.BFLOAT16 and not precision.recipe.by_rows
    return problem.dz is None and is_possible and wants_product


class Fp8BackwardPlan(Plan):
    """The plan of a layer's gradients with their products in FP8: a cast of dz, and up to two products.

    If the cast cannot compute dz and the bias gradient (see `casts_dz`), another pass computes them before the cast.

    A call has the addresses of dy, forward's copy of the slots (scales) of x and w, the transposes of x and w in FP8,
    the saved tensor, dx, dw, db and dz, then of the layer's slots and its history of largest magnitudes.

    With `Precision.has_dy8` dy is dz, and is in FP8 already; its rows may have gaps. A call then has the address of dy
    in FP8 in the place of dy, and the address of its transpose in the place of the saved tensor. The plan then makes
    no bias gradient.

    Args:
        problem: a backward pass, without an `input_derivative`; its x and w are not read.

    Attributes:
        problem: the layer's backward problem, without the precision.

    Raises:
        GpuError: the GPU does not multiply FP8 matrices.
    """

    def __init__(self, problem: Fp8Problem, device: int) -> None:
        layer, precision = problem.layer, problem.precision
        assert isinstance(layer, BackwardProblem)
        self.problem, self.device = layer, device
        derivative, dtype, recipe = layer.output_derivative, layer.dtype, precision.recipe
        has_work = not derivative.is_identity or derivative.db is not None
        reads = [(dtype, each) for each in (layer.dy, derivative.saved_spec) if each is not None]
        in_cast = has_work and casts_dz(layer, precision) and moves_tiles(*reads, out=None, transposed=None)
        self._makes_dz = not in_cast and (not derivative.is_identity or layer.dz is not None)
        dz, options = dz_spec(layer) if self._makes_dz else layer.dy, {"accumulate": layer.accumulate}
        self._pass = None
        if self._makes_dz or (derivative.db is not None and not in_cast):
            self._pass = BackwardPass(dtype, derivative, layer.dy, dz if self._makes_dz else None, device, **options)
        needs_dx, needs_dw = layer.dx is not None, layer.dw is not None
        self._cast = None
        if not precision.has_dy8:
            function = derivative if in_cast else None
            self._cast = Cast(dtype, precision, device, dz, DY, function, out=needs_dx, transposed=needs_dw, **options)
        (m, k), n, is_fast = layer.x.layout.shape, layer.w.layout.rows, recipe.fast_accumulation == "always"
        dy8 = layer.dy if precision.has_dy8 else Spec(packed(m, n))
        matrices = {
            "dx": (dy8, Spec(packed(k, n)).transposed, layer.dx),
            "dw": (Spec(packed(n, m)), Spec(packed(k, m)).transposed, layer.dw),
        }
        self.products, self._betas = {}, {"dx": float(layer.accumulate_dx), "dw": float(layer.accumulate)}
        for name, (a, b, d) in matrices.items():
            if d is not None:
                product = _product(recipe, recipe.dtypes[DY], dtype, (a, b, d), fast=is_fast)
                self.products[name] = known_algorithm(replace(product, c=d if self._betas[name] else None), device)
        # Scratch memory, in order: dz; partial sums of db; dz in FP8 and its transpose; 1 / scale of each row of both.
        keeps_dz, sums, self._by_rows = self._makes_dz and layer.dz is None, self._pass or self._cast, recipe.by_rows
        casts = self._cast is not None
        sizes = (
            *(keeps_dz * dz.layout.extent * dtype.itemsize, sums.partial_bytes if sums else 0),
            *(casts * needs_dx * m * n, casts * needs_dw * m * n),
            *(self._by_rows * _WORD * each for each in (m, n)),
        )
        _, *self._offsets, self._scratch_bytes = itertools.accumulate(map(aligned, sizes), initial=0)
        # Distance in bytes from 1 / scale of x, which lies at the address `cast_slots` in `put`, to 1 / scale of w.
        self._pitch = _WORD * k if self._by_rows else SLOT

    def reserve(self, memory: StreamMemory) -> None:
        """See `Plan`."""
        memory.scratch(self._scratch_bytes)
        for each in self.products.values():
            each.reserve(memory)

    def put(self, call: Call, memory: StreamMemory) -> None:
        """See `Plan`."""
        dy, cast_slots, x_transposed, w_transposed, saved, dx, dw, db, dz, slots, history = call.addresses
        scratch = memory.scratch(self._scratch_bytes)
        partial, dz8, dz8_transposed, row_scales, column_scales = self._offsets
        partial, dz8, dz8_transposed = scratch + partial, scratch + dz8, scratch + dz8_transposed
        dz = (dz or scratch) if self._makes_dz else dy
        if self._pass is not None:
            self._pass.launch(dy, saved, dz, db, partial, call.dropouts[0], memory)
        if not self.products:
            return
        if self._by_rows:
            of_dx, of_dw = state = scratch + row_scales, scratch + column_scales
        else:  # dz has one scale, which both products read at the same address
            of_dx = of_dw = slots + SLOT * DY + INVERSE_AT
            state = slots, history
        if self._cast is None:
            dz8, dz8_transposed = dy, saved
        else:
            self._cast.put((dz, dz8, dz8_transposed, saved, db, partial), state, memory, call.dropouts[0])
        operands = {
            "dx": (dz8, w_transposed, dx, of_dx, cast_slots + self._pitch * W),
            "dw": (dz8_transposed, x_transposed, dw, of_dw, cast_slots + self._pitch * X),
        }
        for name, product in self.products.items():
            a, b, d, *inverses = operands[name]
            product.put(Call((a, b, d, 0, 0, d, *inverses), memory.stream, (1.0, self._betas[name])), memory)
