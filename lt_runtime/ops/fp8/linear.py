"""Linear layers whose products are computed in FP8."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime import reference
from lt_runtime.arguments import check_instance
from lt_runtime.arrays.checks import check_shape, check_type
from lt_runtime.arrays.operand import HOST, Operand
from lt_runtime.arrays.transfer import writes
from lt_runtime.errors import AlignmentError, ArgumentError, LayoutError
from lt_runtime.fp8 import UNIT, Fp8Problem, Needs, Precision, Prologue
from lt_runtime.layout import packed
from lt_runtime.ops._gated import GatedContext
from lt_runtime.ops._linear import (
    FORWARD,
    BackwardOptions,
    LinearBackward,
    LinearContext,
    LinearForward,
    LinearGradients,
    context_of,
    derivative_of,
    wanted_gradients,
)
from lt_runtime.ops.call import New, Operation, PreparedCall, Request, perform, result_spec
from lt_runtime.ops.first_use import before_first_use
from lt_runtime.ops.fp8.choice import Candidate, choose
from lt_runtime.ops.fp8.gradients import CastGradient
from lt_runtime.ops.fp8.state import FP8State, arrays_of, precision_of
from lt_runtime.plans.fp8 import DY, Fp8BackwardPlan, Fp8ForwardPlan, W, X, casts_dz, fp8_kept_spec
from lt_runtime.plans.strategies import unchanged
from lt_runtime.problem import Activation, BackwardProblem, Compute, Philox, Saved, Spec, type_name
from lt_runtime.products.plan import Plan
from lt_runtime.reference.fp8 import (
    AMAX,
    FP8_TYPES,
    INVERSE,
    SCALE,
    SLOT_WIDTH,
    amax_of,
    cast_fp8,
    cast_fp8_rows,
    update_fp8_scales,
)
from lt_runtime.reference.products import rows_of

_E4M3: Final = FP8_TYPES["float8_e4m3fn"]
# Indices of a forward call's arrays.
_KEPT, _SLOTS, _HISTORY, _X8, _W8, _CAST, _GIVEN_X8 = 4, 6, 7, 8, 9, 10, 12
_OUTPUTS: Final = ("dx", "dw", "db", "dz")
# Index of the first output among the arrays of a backward call.
_FIRST: Final = 5


def _cast_on_host(
    x: NDArray[Any], row: int, precision: Precision, slots: Any, history: Any
) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[Any]]:
    """Returns x rounded to FP8, its transpose in FP8, and the tensor's slot, a copy of its scales.

    With "rowwise" 1 / scale of the transpose's rows takes the place of the slot. If `precision.calibrates`, the scale
    in the slot is first computed from x; see `Cast` and `RowCast`.
    """
    recipe, slot = precision.recipe, slots[row]
    dtype, is_current = recipe.dtypes[row].value, recipe.recipe == "current"
    if recipe.by_rows:
        cast, scales = cast_fp8_rows(x, dtype)
        return cast.astype(np.float64) * scales[:, None], *cast_fp8_rows(x.T, dtype)
    if precision.calibrates:
        slot[SCALE], slot[AMAX] = 0, np.maximum(slot[AMAX], amax_of(x))
        update_fp8_scales(slots[row : row + 1], history[row : row + 1], 1.0 if is_current else recipe.headroom)
    if not is_current:
        slot[AMAX] = amax_of(np.array([slot[AMAX], amax_of(x)]))
    cast = cast_fp8(x, slot[SCALE], dtype)
    return cast.astype(np.float64) * slot[INVERSE], cast.T, slot


def _exact(transposed: NDArray[Any], scales: NDArray[Any], precision: Precision) -> NDArray[np.float64]:
    """The values that a transpose in FP8 represents; `transposed` and `scales` are results of `_cast_on_host`."""
    factors: NDArray[np.float64] = scales[:, None] if precision.recipe.by_rows else scales[INVERSE : INVERSE + 1]
    return transposed.astype(np.float64) * factors


def _through(prologue: Prologue, x: NDArray[Any], rng: Philox | None) -> NDArray[Any]:
    """dropout(act(x)), or dropout(act(gate) · value) with x = (gate, value), rounded to FP32."""
    if prologue.gated:
        y = reference.gated_fwd(x, prologue.activation)
    else:
        y = reference.activate(x.astype(np.float64), prologue.activation)
    factors = reference.dropout_factors(y.shape, prologue.dropout, rng)
    return (y if factors is None else y * factors).astype(np.float32)


def _check_products(*operands: Operand | None) -> None:
    """Checks matrices that an FP8 product reads as C or writes as D.

    Raises:
        LayoutError: the rows, or columns, are not a multiple of 16 elements apart.
        AlignmentError: the address is not a multiple of 16 bytes.
    """
    for each in operands:
        if each is None:
            continue
        if each.layout.leading_dimension % UNIT:
            found = f"{each.name} has strides {each.strides}"
            raise LayoutError(f"{found}; with precision those above 1 must be multiples of {UNIT}")
        if each.device != HOST and each.alignment < UNIT:
            found = f"{each.name} is at {each.address:#x}"
            raise AlignmentError(f"{found}; with precision it must be a multiple of {UNIT} bytes")


class Fp8Forward(LinearForward):
    """`LinearForward` with the product in FP8.

    The last four options of a call are its `Precision`; the `Prologue` that the cast of x applies, whose dropout mask
    the call's second random generator draws; the `Needs` of backward; and whether activation and dropout are left to
    the next layer's prologue. In that case y is the pre-activation, and is saved for backward.
    """

    names = (*LinearForward.names, "slots", "history", "x8", "w8", "cast_slots", "w8_given", "x8_given", "slots_of_x")

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        *of_layer, precision, prologue, needs, defers = options
        x, _, _, y, z, _ = operands[:_SLOTS]
        if prologue.gated:
            x = replace(x, shape=(*x.shape[:-1], x.shape[-1] // 2))  # the gate, the left half of each row
        request = super().read((x, *operands[1:_SLOTS]), of_layer, scalars)
        _check_products(y, z)
        (m, n, k), new, layer = request.detail.shape, {**request.new}, request.problem
        if layer.backward:
            width = k if precision.recipe.by_rows else SLOT_WIDTH
            new[_CAST] = New((2, width), np.dtype(np.float32), x.library)
            kept = (needs.dw and not precision.has_x8, _X8, m), (needs.dx and not precision.has_w8, _W8, n)
            new |= {place: New((k, size), _E4M3, x.library) for is_read, place, size in kept if is_read}
        if needs.x8:
            new[_GIVEN_X8] = New((m, k), _E4M3, x.library)
        dropouts = request.detail.dropout, prologue.dropout
        if defers:
            layer, dropouts = replace(layer, activation=Activation(), dropout=False), (0.0, prologue.dropout)
        return request._replace(
            problem=Fp8Problem(layer, precision, prologue, needs),
            written=(_SLOTS, _HISTORY, *new, *request.written),
            new=new,
            dropouts=dropouts if any(dropouts) else None,
        )

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """See `Operation`."""
        problem = request.problem
        given = problem.layer, problem.precision, problem.prologue, problem.needs
        return _measured(lambda: Fp8ForwardPlan(*given, device), device)

    def with_saved(self, request: Request, plan: Any, operands: Sequence[Any]) -> Request:
        """See `Operation`: the pre-activation is saved if there is an activation."""
        problem, layer = request.problem.layer, request.detail
        kept = fp8_kept_spec(problem)
        if layer.activation.name != "none":
            saved = kept or problem.y  # if the next layer applies the activation, y is the pre-activation
            layer = replace(layer, saved_as=Saved.PREACTIVATION, saved_layout=saved.layout)
        if kept is None:
            return request._replace(detail=layer)
        x, shape = operands[0], (*operands[0].shape[:-1], problem.y.layout.cols)
        new = {} if operands[_KEPT] is not None else {_KEPT: New(shape, problem.dtype.numpy, x.library)}
        return request._replace(new={**request.new, **new}, detail=layer)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        x, w, bias, y, z, add, slots, history, x8, w8, cast_slots, given_w8, given_x8, slots_of_x = arrays
        problem, precision, drops = request.problem.layer, request.problem.precision, request.problem.layer.dropout
        if precision.has_x8:
            slots[X] = slots_of_x[X]
            of_x = given_x8.astype(np.float64) * slots[X, INVERSE], given_x8.T, slots[X]
        else:
            source = _through(request.problem.prologue, rows_of(x), scalars[1])
            of_x = _cast_on_host(source, X, precision, slots, history)
        if precision.has_w8:
            of_w = given_w8.astype(np.float64) * slots[W, INVERSE], given_w8.T, slots[W]
        else:
            of_w = _cast_on_host(w, W, precision, slots, history)
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
    """Computes the gradients of a layer that `Fp8Forward` ran. A call's last option is the `Precision`."""

    names = (
        "dy",
        "cast_slots",
        "x8",
        "w8",
        "the saved tensor",
        *(f"out_{name}" for name in _OUTPUTS),
        "slots",
        "history",
    )
    required = 2

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        *of_layer, precision = options
        given = BackwardOptions.of(of_layer)
        dy, _, x8, w8, saved, *outputs, _, _ = operands
        layer = given.layer
        (m, n, k), dtype = layer.shape, dy.element_type()
        check_type(dy, layer.dtype)
        shape = (*dy.shape[:-1], n)
        check_shape("dy", (dy.layout.rows, dy.shape[-1]), (m, n), "y's rows and columns")
        buffers = dict(zip(_OUTPUTS, outputs, strict=True))
        wanted = wanted_gradients(given, {**buffers, "db_below": None})
        for name, kept in (("dx", w8), ("dw", x8)):
            if wanted[name] and kept is None:
                found = f"need_{name} is True, but needs_{name} of the precision was False when linear_fwd was called"
                raise ArgumentError(f"{found}, which kept no operand for it; set it to True before")
        shapes = {"dx": (*dy.shape[:-1], k), "dw": (n, k), "db": (n,), "dz": shape}
        new: dict[int, New] = {}
        places = [(place, name) for place, name in enumerate(_OUTPUTS, _FIRST) if wanted[name]]
        specs = {name: result_spec(place, buffers[name], shapes[name], dy, new) for place, name in places}
        _check_products(buffers["dx"], buffers["dw"])
        own = derivative_of(layer, saved, specs.get("db"))
        own = unchanged(own.db) if given.before_activation else own
        x, w = (Spec(packed(*size)) for size in ((m, k), (n, k)))
        results = specs.get("dx"), specs.get("dw"), specs.get("dz")
        adds = given.accumulate_dx and given.need_dx
        kinds = dtype, Compute.FLOAT32
        problem = BackwardProblem(*kinds, x, w, dy.spec, own, *results, given.accumulate, None, adds)
        drops = not given.before_activation and layer.dropout > 0
        written = (*range(_FIRST, len(self.names) - 2), len(self.names) - 2, len(self.names) - 1)
        dropouts = (layer.dropout, 0.0) if drops else None
        return Request(Fp8Problem(problem, precision), written, new, given, dropouts=dropouts)

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """See `Operation`."""
        problem = request.problem
        return _measured(lambda: Fp8BackwardPlan(problem.layer, problem.precision, device), device)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        dy, cast_slots, x8, w8, saved, dx, dw, db, dz, _, _ = arrays
        options, problem, precision = request.detail, request.problem.layer, request.problem.precision
        exact = rows_of(dy).astype(np.float64)
        if not (options.before_activation or problem.output_derivative.is_identity):
            z, layer = exact if saved is None else rows_of(saved), options.layer
            factors = reference.dropout_factors(layer.shape[:2], layer.dropout, scalars[0])
            exact = reference.through_activation(exact, z, layer.activation, factors)
        rounded = exact.astype(dy.dtype)
        results = {"db": (db, exact.sum(axis=0)), "dz": (dz, rounded)}
        if dx is not None or dw is not None:
            source = exact.astype(np.float32) if casts_dz(problem, precision) else rounded
            cast, transposed, scales = self.cast_on_host(source, precision, arrays)
            turned = _exact(transposed, scales, precision)
            for name, out, left, kept, row in (("dx", dx, cast, w8, W), ("dw", dw, turned, x8, X)):
                if out is not None:
                    results[name] = out, left @ _exact(kept, cast_slots[row], precision).T
        for name, (out, values) in results.items():
            if out is not None:
                adds = options.accumulate_dx if name == "dx" else options.accumulate and name != "dz"
                out[...] = (values.reshape(out.shape) + (out.astype(np.float64) if adds else 0.0)).astype(out.dtype)

    def cast_on_host(self, dz: NDArray[Any], precision: Precision, arrays: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Returns dz, its transpose and its scales as `_cast_on_host` does; `arrays` are those of the call."""
        return _cast_on_host(dz, DY, precision, *arrays[-2:])

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> LinearGradients:
        """See `Operation`."""
        return LinearGradients(*arrays[_FIRST : _FIRST + 3])


class Fp8CastBackward(Fp8Backward):
    """`Fp8Backward` for a dy that is in FP8 already (a `CastGradient`).

    A call gets the transpose of dy in the argument that otherwise is the saved tensor.
    """

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        dy, *kept, _ = operands[:_FIRST]
        given = replace(dy, dtype=options[0].dtype), *kept, None, *operands[_FIRST:]
        return super().read(given, options, scalars)

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """See `Operation`."""
        problem = request.problem
        return _measured(lambda: Fp8BackwardPlan(problem.layer, problem.precision, device, is_cast=True), device)

    def cast_on_host(self, dz: NDArray[Any], precision: Precision, arrays: Sequence[Any]) -> tuple[Any, Any, Any]:
        """See `Fp8Backward`."""
        slot, transposed = arrays[-2][DY], arrays[_FIRST - 1]
        return transposed.T.astype(np.float64) * slot[INVERSE], transposed, slot


def _measured(make: Callable[[], Plan], device: int) -> Plan:
    """Makes a plan. If tuning is on, the plan's products are measured first, and the plan uses the results."""
    plan = make()
    for each in plan.products.values():
        before_first_use(each.problem, device)
    return make()


_FORWARD: Final = Fp8Forward()
_BACKWARD: Final = Fp8Backward()
_CAST_BACKWARD: Final = Fp8CastBackward()


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
    """`linear_fwd` with its product in FP8, unless the layer alone is in its own type, see `choose`.

    Raises:
        KindError: `state` is no `FP8State`.
    """
    check_instance("precision", state, FP8State, "None or an lt.FP8State")
    (x, w, bias, *_), (activation, _, _, compute, *_) = given.arrays, given.options
    outputs, inputs = w.shape if len(getattr(w, "shape", ())) == 2 else (0, 0)
    choose(x, [Candidate(state, outputs, inputs, bias is not None, activation, compute)])
    y, context, _ = forward_of_several(state, None, given)
    return y, context


def forward_of_several(
    state: FP8State | None,
    following: FP8State | None,
    given: LinearCall,
    below: LinearContext | GatedContext | None = None,
) -> tuple[Any, LinearContext, LinearContext | None]:
    """One of consecutive layers for which `choose` has been called: y and the context.

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
    state: FP8State, given: LinearCall, *, below: LinearContext | GatedContext | None = None, defers: bool = False
) -> tuple[Any, LinearContext]:
    """y and the context of a layer whose product is computed in FP8.

    Args:
        below: the context of the layer or gate below if it has deferred its activation and dropout: x is then the
            layer's pre-activation or the gate's h, and the cast of x applies both. This saves writing and reading the
            output of the layer or gate.
        defers: whether to leave activation and dropout to the next layer, as `below`.
    """
    precision, w8, w8_transposed = precision_of(state, X, W), None, None
    if precision.calibrates:
        writes.latest = None
        state.changes += 1
    elif state.copies is not None and (state.copies[1] is not None or not state.needs_dx):
        precision, (w8, w8_transposed) = replace(precision, has_w8=True), state.copies
    x8_transposed = x8 = slots_of_x = None
    if given.same_x is not None:
        precision = replace(precision, has_x8=True)
        x8_transposed, x8, slots_of_x = given.same_x.x, given.same_x.x8, given.same_x.state.slots
    arrays = *given.arrays, *arrays_of(state, given.arrays[0]), x8_transposed, w8_transposed, None, w8, x8, slots_of_x
    prologue = Prologue()
    if below is not None:
        prologue = Prologue(below.activation, below.dropout, isinstance(below, GatedContext))
    how = precision, prologue, Needs(state.needs_dx, state.needs_dw, given.keeps_x8), defers
    rngs = given.rng, below and below.rng
    y, context = perform(_FORWARD, arrays, (*given.options, *how), rngs, given.stream)
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
    operation: Operation = _BACKWARD
    if isinstance(dy, CastGradient):
        operation, (dy, saved) = _CAST_BACKWARD, dy
    arrays = dy, ctx.cast_slots, ctx.x, ctx.w, saved, *outputs, *arrays_of(ctx.state, dy)
    made: LinearGradients = perform(operation, arrays, (*options, precision_of(ctx.state, DY)), (ctx.rng, None), stream)
    if made.dx is not None or made.dw is not None:
        ctx.state.calibrated |= {DY}
    return made
