"""A linear layer's backward pass over arrays on a GPU: operands to problem to plan to launch."""

from __future__ import annotations

import operator
from typing import Any, Final

from lt_runtime.arrays import Operand, Signature, check_same, check_shape
from lt_runtime.errors import ArgumentError
from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.gpu.devices import activated
from lt_runtime.kernels.epilogue import DropoutState
from lt_runtime.layout import packed
from lt_runtime.ops._known_calls import KnownCall, New, RepeatedCall, address_of, note, repeated
from lt_runtime.ops._linear_known import NONE_NEW, KnownBackward
from lt_runtime.ops._linear_types import Gradients, LinearContext, Source, Wanted
from lt_runtime.ops._place import Place
from lt_runtime.plans.backward import BackwardCall
from lt_runtime.plans.cache import age, backward_plan
from lt_runtime.plans.strategies import unchanged
from lt_runtime.problem import BackwardProblem, Compute, Derivative, DType, Spec

_INPUTS: Final = 5  # dy, x, w, and two saved tensors
_PLACES: Final = {name: place for place, name in enumerate(Gradients._fields)}


def backward(
    dy_array: Any, source: Source, wanted: Wanted, outputs: Gradients, stream: Any, signature: Signature | None
) -> Gradients:
    """See `linear_bwd`. The call is remembered by its signature, if it has one."""
    place = Place.of("dy", dy_array, stream)
    with activated(place.device):
        call, addresses, dropouts = _look(place, dy_array, source, wanted, outputs, signature)
        made, fresh = call.fresh(outputs, place.stream)
        call.plan.run(_backward_call(addresses, fresh, *dropouts, place.stream))
        return made


def bind_backward(dy_array: Any, source: Source, wanted: Wanted, outputs: Gradients, stream: Any) -> BoundPlan:
    """See `bind`; arguments as of `backward`."""
    place = Place.of("dy", dy_array, stream)
    with activated(place.device):
        call, addresses, dropouts = _look(place, dy_array, source, wanted, outputs, None)
        for new in call.new:
            name = f"out_{Gradients._fields[new]}"
            raise ArgumentError(f"{name} is None; a bound call makes no arrays: give it a buffer")
        return call.plan.bind(_backward_call(addresses, NONE_NEW, *dropouts, place.stream))


def _look(
    place: Place, dy_array: Any, source: Source, wanted: Wanted, outputs: Gradients, signature: Signature | None
) -> tuple[KnownBackward, tuple[int, ...], tuple[DropoutState | None, DropoutState | None]]:
    """What is made of a call, the addresses of its arrays, and its dropouts, all operands having been checked."""
    since, ctx, under = age(), source.layer, source.below
    dy, x, w = place.read("dy", dy_array), place.read("x", ctx.x), place.read("w", ctx.w)
    check_same(x, dy)
    check_shape("dy", dy.shape, source.shapes["dz"], "y's shape")
    saved = None if source.before_activation else place.read_optional("the saved tensor", ctx.saved)
    below = place.read_optional("the saved tensor below", under.saved) if under else None
    inputs = (dy, x, w, saved, below)
    given = _given(place, x, inputs, source, wanted, outputs)
    new = _new(place, x, source, wanted, outputs)
    dropouts = _dropout(place, source)
    vectors = {name: _vector_alignment(name, given, new) for name in ("db", "db_below")}
    own = unchanged(vectors["db"]) if source.before_activation else _derivative(ctx, saved, vectors["db"])
    through = _derivative(under, below, vectors["db_below"]) if under else None
    problem = _problem(ctx, x, w, dy, own, through, _specs(given, new), wanted)
    plan = backward_plan(problem, place.device, place.stream)
    call = KnownBackward(plan, {_PLACES[name]: each for name, each in new.items()})
    operands = (*inputs, *(given.get(name) for name in Gradients._fields))
    if signature is not None:
        note(signature, KnownCall(call, operands, inputs=_INPUTS), since)
    return call, tuple(map(address_of, operands)), dropouts


def backward_again(signature: Signature, arrays: tuple[Any, ...], source: Source, stream: Any) -> Gradients | None:
    """What `linear_bwd` returns for a call like one made before; None if it is not, or takes another look."""
    known = repeated(signature, stream)
    if known is None:
        return None
    call: KnownBackward = known.call
    made, fresh = call.fresh(arrays[_INPUTS:], known.stream)
    launch = known.bound(fresh)
    if launch is not None:
        launch()
    else:
        _launch_backward(known, fresh, source)
    return made


def _launch_backward(known: RepeatedCall[KnownBackward], fresh: tuple[int, ...], source: Source) -> None:
    call, stream = known.call, known.stream
    dropout = _dropout(Place(call.plan.device, stream), source)
    operands = _backward_call(known.addresses, fresh, *dropout, stream)
    call.plan.run(operands)
    if dropout == (None, None):
        known.came_with(fresh, lambda: call.plan.bind(operands))


def _backward_call(
    at: tuple[int, ...],
    fresh: tuple[int, ...],
    dropout: DropoutState | None,
    dropout_below: DropoutState | None,
    stream: int,
) -> BackwardCall:
    dy, x, w, saved, saved_below, *given = at
    dx, dw, db, dz, db_below = map(operator.or_, given, fresh)  # one of each pair is 0
    return BackwardCall(dy, x, w, stream, saved, dx, dw, db, dz, saved_below, db_below, dropout, dropout_below)


def _dropout(place: Place, source: Source) -> tuple[DropoutState | None, DropoutState | None]:
    """Of the layer that is gone back through, and of the one below."""
    ctx, below, before_activation = source
    own = None if before_activation or not ctx.dropout else place.dropout(ctx.dropout, ctx.rng)
    return own, place.dropout(below.dropout, below.rng) if below and below.dropout else None


def _is_wanted(name: str, wanted: Wanted, outputs: Gradients) -> bool:
    """Whether a gradient is made; dz, for which there is no such flag, where there is a buffer for it."""
    return bool(getattr(wanted, name, outputs.dz is not None))


def _given(
    place: Place, x: Operand, inputs: tuple[Operand | None, ...], source: Source, wanted: Wanted, outputs: Gradients
) -> dict[str, Operand]:
    """The caller's buffers for the gradients that are made."""
    given: dict[str, Operand] = {}
    for name, shape in source.shapes.items():
        array = getattr(outputs, name)
        if array is not None and _is_wanted(name, wanted, outputs):
            given[name] = place.given(f"out_{name}", array, shape, x, (*inputs, *given.values()))
            if len(shape) == 1:
                given[name].check_vector()
    return given


def _new(place: Place, x: Operand, source: Source, wanted: Wanted, outputs: Gradients) -> dict[str, New]:
    """The gradients that are made, and for which the caller has no buffer."""
    dtype = DType.parse("x", x.dtype).numpy
    return {
        name: New(shape, dtype, x.library, place.device)
        for name, shape in source.shapes.items()
        if getattr(outputs, name) is None and _is_wanted(name, wanted, outputs)
    }


def _vector_alignment(name: str, given: dict[str, Operand], new: dict[str, New]) -> int | None:
    if name in given:
        return given[name].alignment
    return Spec(packed(1, 1)).alignment if name in new else None


def _specs(given: dict[str, Operand], new: dict[str, New]) -> dict[str, Spec]:
    """How the gradients that are matrices lie, by their names."""
    made = {name: Spec(packed(*each.shape)) for name, each in new.items() if len(each.shape) == 2}
    return made | {name: operand.spec for name, operand in given.items() if len(operand.shape) == 2}


def _derivative(ctx: LinearContext, saved: Operand | None, db: int | None) -> Derivative:
    spec = saved.spec if saved else None
    layer = ctx.layer
    if saved and layer.saved_layout:  # not what the array's strides say: one of a single row may have any
        spec = Spec(layer.saved_layout, saved.alignment)
    return Derivative(layer.activation, layer.saved_as, spec, db, layer.dropout > 0)


def _problem(
    ctx: LinearContext,
    x: Operand,
    w: Operand,
    dy: Operand,
    own: Derivative,
    through: Derivative | None,
    specs: dict[str, Spec],
    wanted: Wanted,
) -> BackwardProblem:
    dtype = DType.parse("x", x.dtype)
    return BackwardProblem(
        dtype,
        Compute.parse(ctx.layer.compute, dtype),
        x.spec,
        w.spec,
        dy.spec,
        own,
        specs.get("dx"),
        specs.get("dw"),
        specs.get("dz"),
        wanted.accumulate,
        through,
    )
