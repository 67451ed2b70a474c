"""Linear layers whose products are computed in FP8."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from lt_runtime import reference
from lt_runtime.arguments import check_instance
from lt_runtime.arrays.checks import check_shape, check_type
from lt_runtime.arrays.operand import Operand
from lt_runtime.arrays.transfer import writes
from lt_runtime.errors import ArgumentError
from lt_runtime.fp8 import Fp8Problem, Precision, Prologue
from lt_runtime.layout import packed
from lt_runtime.ops._gated import GatedContext
from lt_runtime.ops._linear import (
    FIRST_OUTPUT,
    FORWARD,
    BackwardOptions,
    LinearBackward,
    LinearContext,
    LinearForward,
    LinearGradients,
    context_of,
    write_gradients,
)
from lt_runtime.ops.call import New, Operation, PreparedCall, Request, perform
from lt_runtime.ops.first_use import before_first_use
from lt_runtime.ops.fp8.choice import Candidate, choose
from lt_runtime.ops.fp8.gradients import CastGradient
from lt_runtime.ops.fp8.product_rules import check_address, check_strides
from lt_runtime.ops.fp8.state import FP8State, arrays_of, must_calibrate
from lt_runtime.plans.fp8 import DY, Fp8BackwardPlan, Fp8ForwardPlan, W, X, casts_dz, fp8_kept_spec
from lt_runtime.problem import Activation, ForwardProblem, Philox, Saved, Spec, type_name
from lt_runtime.products.plan import Plan
from lt_runtime.reference.fp8 import FP8_TYPES, SLOT_WIDTH
from lt_runtime.reference.fp8_layer import after_prologue, cast_tensor, given_tensor, represented
from lt_runtime.reference.products import rows_of

_E4M3: Final = FP8_TYPES["float8_e4m3fn"]
# Indices of a forward call's arrays.
_KEPT, _SLOTS, _HISTORY, _X8, _W8, _CAST, _GIVEN_X8 = 4, 6, 7, 8, 9, 10, 12


def _check_products(*operands: Operand | None) -> None:
    """Checks matrices that an FP8 product reads as C or writes as D.

    Raises:
        LayoutError: the rows, or columns, are not a multiple of 16 elements apart.
        AlignmentError: the address is not a multiple of 16 bytes.
    """
    for each in operands:
        if each is not None:
            check_strides(each, each.spec, "precision")
            check_address(each, "precision")


def _plan(_: Operation, request: Request, device: int, stream: int) -> Plan:
    """See `Operation`. If tuning is on, the plan's products are measured first, and the plan uses the results."""
    make = Fp8ForwardPlan if isinstance(request.problem.layer, ForwardProblem) else Fp8BackwardPlan
    plan = make(request.problem, device)
    changes = [before_first_use(each.problem, device, lambda: stream) for each in plan.products.values()]
    return make(request.problem, device) if any(changes) else plan


class Fp8Forward(LinearForward):
    """`LinearForward` with the product in FP8.

    The last option of a call is its `Precision`. The prologue is the activation and dropout of the layer below, if this
    layer applies them as it casts x; the call's second random generator draws the prologue's mask. If activation and
    dropout are left to the next layer, y is the pre-activation, and is saved for backward.
    """

    names = (*LinearForward.names, "slots", "history", "x8", "w8", "cast_slots", "w8_given", "x8_given", "slots_of_x")

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        *of_layer, precision = options
        x, _, _, y, z, _ = operands[:_SLOTS]
        prologue = precision.prologue or Prologue()
        if prologue.gated:
            x = replace(x, shape=(*x.shape[:-1], x.shape[-1] // 2))  # the gate, the left half of each row
        request = super().read((x, *operands[1:_SLOTS]), of_layer, scalars)
        _check_products(y, z)
        (m, n, k), new, layer, detail = request.detail.shape, {**request.new}, request.problem, request.detail
        if layer.backward:
            width = k if precision.recipe.by_rows else SLOT_WIDTH
            new[_CAST] = New((2, width), np.dtype(np.float32), x.library)
            if precision.needs_dw and not precision.has_x8:
                new[_X8] = New((k, m), _E4M3, x.library)
            if precision.needs_dx and not precision.has_w8:
                new[_W8] = New((k, n), _E4M3, x.library)
        if precision.returns_x8:
            new[_GIVEN_X8] = New((m, k), _E4M3, x.library)
        dropouts = 0.0 if precision.defers else detail.dropout, prologue.dropout
        if precision.defers:
            layer = replace(layer, activation=Activation(), dropout=False)
        if fp8_kept_spec(layer) is not None and z is None:
            new[_KEPT] = New((*x.shape[:-1], n), layer.dtype.numpy, x.library)
        if detail.activation.name != "none":  # if the next layer applies the activation, y is the pre-activation
            detail = replace(detail, saved_as=Saved.PREACTIVATION)
        written = _SLOTS, _HISTORY, *new, *request.written
        problem, same = Fp8Problem(layer, precision), request.same
        return Request(problem, written, new, detail, same, dropouts if any(dropouts) else None)

    plan, with_saved = _plan, Operation.with_saved

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        x, w, bias, y, z, add, slots, history, x8, w8, cast_slots, given_w8, given_x8, slots_of_x = arrays
        problem, precision, drops = request.problem.layer, request.problem.precision, request.problem.layer.dropout
        if precision.has_x8:
            slots[X] = slots_of_x[X]
            of_x = given_tensor(given_x8, slots[X])
        else:
            prologue, source = precision.prologue, rows_of(x)
            source = source if prologue is None else after_prologue(prologue, source, scalars[1])
            of_x = cast_tensor(source, X, precision, slots, history)
        of_w = given_tensor(given_w8, slots[W]) if precision.has_w8 else cast_tensor(w, W, precision, slots, history)
        exact, transposed, scales = zip(of_x, of_w, strict=True)
        kept = (x8, transposed[0]), (w8, transposed[1]), (cast_slots, scales), (given_x8, transposed[0].T)
        for array, values in kept:
            if array is not None:
                array[...] = values
        of_layer = exact[0].reshape(*x.shape[:-1], -1), exact[1], bias, y, z, add
        done = replace(request.detail, activation=problem.activation, dropout=request.detail.dropout * drops)
        super().on_host(request._replace(problem=problem, detail=done), of_layer, scalars)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> Any:
        """See `Operation`: as of `LinearForward`, with the transposes of x and w in FP8 in the place of x and w."""
        *of_layer, _, _, x8, w8, cast_slots, _, given_x8, _ = arrays
        y, ctx = context_of(prepared.request.detail, of_layer, scalars)
        ctx.x, ctx.w, ctx.cast_slots, ctx.x8 = x8, w8, cast_slots, given_x8
        if ctx.saved is None and ctx.layer.saved_as is Saved.PREACTIVATION:  # the next layer applies the activation
            ctx.saved = y
        return y, ctx


class Fp8Backward(LinearBackward):
    """Computes the gradients of a layer that `Fp8Forward` ran. A call's last option is the `Precision`.

    If dy is in FP8 already (a `CastGradient`), a call gets its transpose in the place of the saved tensor.
    """

    names = "dy", "cast_slots", "x8", "w8", LinearBackward.names[3], *LinearBackward.names[5:9], "slots", "history"
    required = 2

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        *of_layer, precision = options
        given = BackwardOptions.of(of_layer)
        dy, _, x8, w8, saved, *outputs, _, _ = operands
        (m, n, k), dtype = given.layer.shape, given.layer.dtype
        if precision.has_dy8:
            dy, saved = replace(dy, dtype=dtype), None
        dy.element_type()
        check_type(dy, dtype)
        check_shape("dy", (dy.layout.rows, dy.shape[-1]), (m, n), "y's rows and columns")
        factors = Spec(packed(m, k)), Spec(packed(n, k))
        request = self.request(given, dy, (saved, None), (*outputs, None), factors, dy)
        for name, kept in (("dx", w8), ("dw", x8)):
            if getattr(request.problem, name) is not None and kept is None:
                found = f"need_{name} is True, but needs_{name} of the precision was False when linear_fwd was called"
                raise ArgumentError(f"{found}, which kept no operand for it; set it to True before")
        _check_products(*outputs[:2])
        return request._replace(problem=Fp8Problem(request.problem, precision))

    plan = _plan

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        dy, cast_slots, x8, w8, saved, *outputs, slots, history = arrays
        options, problem, precision = request.detail, request.problem.layer, request.problem.precision
        exact = rows_of(dy).astype(np.float64)
        if not (options.before_activation or problem.output_derivative.is_identity):
            z, layer = exact if saved is None else rows_of(saved), options.layer
            factors = reference.dropout_factors(layer.shape[:2], layer.dropout, scalars[0])
            exact = reference.through_activation(exact, z, layer.activation, factors)
        values = {"db": exact.sum(axis=0), "dz": exact}
        if problem.dx is not None or problem.dw is not None:
            if precision.has_dy8:
                cast, transposed, scales = given_tensor(saved.T, slots[DY])
            else:
                source = exact.astype(np.float32 if casts_dz(problem, precision) else dy.dtype)
                cast, transposed, scales = cast_tensor(source, DY, precision, slots, history)
            turned = represented(transposed, scales, precision)
            for name, left, kept, row in (("dx", cast, w8, W), ("dw", turned, x8, X)):
                if getattr(problem, name) is not None:
                    values[name] = left @ represented(kept, cast_slots[row], precision).T
        write_gradients(options, values, (*outputs, None))

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> LinearGradients:
        """See `Operation`."""
        return LinearGradients(*arrays[FIRST_OUTPUT : FIRST_OUTPUT + 3])


_FORWARD: Final = Fp8Forward()
_BACKWARD: Final = Fp8Backward()


Below: TypeAlias = LinearContext | GatedContext | None
"""The context of a layer or gate whose activation and dropout the next layer applies when it casts x; or None."""


class LinearCall(NamedTuple):
    """The arguments of a call of the operation `LinearForward`.

    Attributes:
        arrays, options: the operation's.
        rng: source of the dropout mask.
        keeps_x8: whether the context of a layer in FP8 gets x in FP8.
        same_x: the context, with x in FP8, of a layer that has read the same x, and has the same recipe with one scale
            for a tensor; this layer then does not cast x. None to cast it.
    """

    arrays: tuple[Any, ...]
    options: tuple[Any, ...]
    rng: Philox | None
    stream: Any
    keeps_x8: bool = False
    same_x: LinearContext | None = None


def forward(state: FP8State, given: LinearCall) -> tuple[Any, LinearContext]:
    """Runs one `linear_fwd` with its product in FP8, or in the layer's own type if `choose` decides against FP8.

    Raises:
        KindError: `state` is no `FP8State`.
    """
    check_instance("precision", state, FP8State, "None or an lt.FP8State")
    (x, w, bias, *_), (activation, _, _, compute, *_) = given.arrays, given.options
    choose(x, [Candidate.of(state, w, bias, activation, compute)], stream=given.stream)
    y, context, _ = forward_of_several(state, None, given)
    return y, context


def forward_of_several(
    state: FP8State | None, following: FP8State | None, given: LinearCall, below: Below = None
) -> tuple[Any, LinearContext, LinearContext | None]:
    """Runs one of several consecutive layers for which `choose` has been called.

    If this layer and the next one are in FP8, the layer's type is BF16, and each tensor has one scale, y is the
    pre-activation: the next layer applies this layer's activation and dropout when it casts its inputs.

    Args:
        following: the state of the layer that alone reads y; None if there is none. `given` has neither a buffer for y
            nor an addend if there is one.
        below: the third result of this function for the layer before; or, if `applies_prologue` is True, a gate whose
            outputs the layer reads; None otherwise. With a gate, x is the gate's operand h.

    Returns:
        y; the context; and the context again if y is the pre-activation, otherwise None.
    """
    if state is None or state.fallback is not None:
        return *perform(FORWARD, given.arrays, given.options, (given.rng, None), given.stream), None
    defers = applies_prologue(following, given.arrays[0])
    y, context = forward_in_fp8(state, given, below=below, defers=defers)
    return y, context, context if defers else None


def applies_prologue(state: FP8State | None, x: Any) -> bool:
    """Whether a layer for which `choose` has been called can apply an activation to its inputs when it casts them."""
    is_possible = state is not None and state.fallback is None and not state.recipe.by_rows
    return is_possible and type_name(x.dtype) == "bfloat16"


def forward_in_fp8(
    state: FP8State, given: LinearCall, *, below: Below = None, defers: bool = False
) -> tuple[Any, LinearContext]:
    """y and the context of a layer whose product is computed in FP8.

    Args:
        below: the context of the layer or gate below if it has deferred its activation and dropout: x is then the
            layer's pre-activation or the gate's h, and the cast of x applies both. This saves writing and reading the
            output of the layer or gate.
        defers: whether to leave activation and dropout to the next layer, as `below`.
    """
    calibrates, source, (w8, w8_transposed) = must_calibrate(state, X, W), given.same_x, (None, None)
    if calibrates:
        writes.latest = None
        state.changes += 1
    elif state.copies is not None and (state.copies[1] is not None or not state.needs_dx):
        w8, w8_transposed = state.copies
    x8_transposed, x8, slots_of_x = (None, None, None) if source is None else (source.x, source.x8, source.state.slots)
    arrays = *given.arrays, *arrays_of(state, given.arrays[0]), x8_transposed, w8_transposed, None, w8, x8, slots_of_x
    prologue = None if below is None else Prologue(below.activation, below.dropout, isinstance(below, GatedContext))
    has_w8, has_x8, needs = w8 is not None, source is not None, (state.needs_dx, state.needs_dw)
    precision = Precision(state.recipe, calibrates, prologue, defers, has_w8, has_x8, *needs, given.keeps_x8)
    rngs = given.rng, below and below.rng
    y, context = perform(_FORWARD, arrays, (*given.options, precision), rngs, given.stream)
    state.calibrated |= {X, W}
    context.state = state
    return y, context


def backward(
    dy: Any, ctx: LinearContext, saved: Any, outputs: tuple[Any, ...], options: tuple[Any, ...], stream: Any
) -> LinearGradients:
    """`linear_bwd` of a context that `forward` made; `options` are those of the operation `LinearBackward`.

    Args:
        dy: an array; or, for a layer without activation and dropout, a `CastGradient`.
    """
    state, has_dy8 = ctx.state, isinstance(dy, CastGradient)
    if has_dy8:
        dy, saved = dy
    precision = Precision(state.recipe, must_calibrate(state, DY), has_dy8=has_dy8)
    arrays = dy, ctx.cast_slots, ctx.x, ctx.w, saved, *outputs, *arrays_of(state, dy)
    made: LinearGradients = perform(_BACKWARD, arrays, (*options, precision), (ctx.rng, None), stream)
    if made.dx is not None or made.dw is not None:
        state.calibrated |= {DY}
    return made
