"""A linear layer over arrays on a GPU: operands to problem to plan to launch."""

from __future__ import annotations

from typing import Any

import numpy as np

from lt_runtime.arrays import Operand, check_same, check_shape
from lt_runtime.gpu.devices import activated
from lt_runtime.layout import Order
from lt_runtime.ops._linear_types import Gradients, LinearContext, Options, Source, Wanted, problem_shape
from lt_runtime.ops._place import Place
from lt_runtime.planning import BackwardCall, ForwardPlan, backward_plan, forward_plan
from lt_runtime.planning.strategies import unchanged
from lt_runtime.problem import BackwardProblem, Compute, Derivative, DType, ForwardProblem, Saved, Spec

_BITS = 8  # a byte


def _address(operand: Operand | None) -> int:
    return operand.address if operand is not None else 0


def forward(
    x_array: Any, w_array: Any, bias_array: Any, options: Options, out: Any, out_z: Any, stream: Any
) -> tuple[Any, LinearContext]:
    """See `linear_fwd`."""
    place = Place.of("x", x_array, stream)
    with activated(place.device):
        x, w = place.read("x", x_array), place.read("w", w_array)
        bias = place.read_optional("bias", bias_array)
        dtype = DType.parse("x", x.dtype)
        compute = Compute.parse(options.compute, dtype)
        check_same(x, w, *([bias] if bias else []))
        m, n, k = problem_shape(x.shape, w.shape, bias.shape if bias else None)
        if bias:
            bias.check_vector()
        dropout = place.dropout(options.dropout, options.rng)
        y = place.output("out", out, (m, n), x, (x, w, bias))
        z = place.output("out_z", out_z, (m, n), x, (x, w, bias, y)) if out_z is not None else None
        problem = ForwardProblem(
            dtype,
            compute,
            options.activation,
            x.spec,
            w.spec,
            y.spec,
            bias.alignment if bias else None,
            z.spec if z else None,
            dropout is not None,
            options.propagate_nan,
            not options.inference,
        )
        plan = forward_plan(problem, place.device, place.stream)
        kept = z or _new_kept(plan, place, x)
        plan.run(x.address, w.address, _address(bias), y.address, _address(kept), dropout, place.stream)
        result = place.result(out, y, x)
    is_z = z is not None or plan.saved is Saved.PREACTIVATION
    arrays = {Saved.NOTHING: None, Saved.OUTPUT: y.array}
    is_kept = plan.saved not in arrays
    return result, LinearContext(
        (m, n, k),
        x_array,
        w_array,
        arrays.get(plan.saved, kept.array if kept else None),
        plan.saved,
        plan.kept_spec.layout if is_kept and plan.kept_spec else None,
        kept.array if kept and is_z else None,
        options.activation,
        options.dropout,
        options.rng,
        options.compute,
        bias is not None,
    )


def _new_kept(plan: ForwardPlan, place: Place, like: Operand) -> Operand | None:
    """A matrix that lies as the plan wants what it keeps; None if that is none."""
    spec = plan.kept_spec
    if spec is None:
        return None
    layout = spec.layout
    lines, length = layout.shape if layout.order is Order.ROW else (layout.cols, layout.rows)
    if plan.saved is Saved.MASK:
        return place.empty("the mask", (lines, layout.leading_dimension // _BITS), np.dtype(np.uint8), like)
    padded = place.empty("the pre-activation", (lines, layout.leading_dimension), plan.problem.dtype.numpy, like)
    view = padded.array[:, :length]
    return place.read(padded.name, view if layout.order is Order.ROW else view.T)


def backward(dy_array: Any, source: Source, wanted: Wanted, outputs: Gradients, stream: Any) -> Gradients:
    """See `linear_bwd`."""
    place, ctx = Place.of("dy", dy_array, stream), source.layer
    with activated(place.device):
        dy, x, w = place.read("dy", dy_array), place.read("x", ctx.x), place.read("w", ctx.w)
        check_same(x, dy)
        check_shape("dy", dy.shape, source.shapes["dz"], "y's shape")
        saved = None if source.before_activation else place.read_optional("the saved tensor", ctx.saved)
        below = place.read_optional("the saved tensor below", source.below.saved) if source.below else None
        made = _outputs(place, x, (dy, x, w, saved, below), source, wanted, outputs)
        dropout = None if source.before_activation else place.dropout(ctx.dropout, ctx.rng)
        dropout_below = place.dropout(source.below.dropout, source.below.rng) if source.below else None
        db, db_below = made.get("db"), made.get("db_below")
        own = unchanged(_alignment(db)) if source.before_activation else _derivative(ctx, saved, db)
        through = _derivative(source.below, below, db_below) if source.below else None
        plan = backward_plan(_problem(ctx, x, w, dy, own, through, made, wanted), place.device, place.stream)
        addresses = {name: operand.address for name, operand in made.items()}
        plan.run(
            BackwardCall(
                dy.address,
                x.address,
                w.address,
                place.stream,
                _address(saved),
                saved_below=_address(below),
                dropout=dropout,
                dropout_below=dropout_below,
                **addresses,
            )
        )
        return Gradients(
            *(
                place.result(getattr(outputs, name), made[name], x) if name in made else None
                for name in Gradients._fields
            )
        )


def _outputs(
    place: Place, x: Operand, inputs: tuple[Operand | None, ...], source: Source, wanted: Wanted, outputs: Gradients
) -> dict[str, Operand]:
    """The buffers of the gradients that are made, the caller's or new ones."""
    made: dict[str, Operand] = {}
    for name, shape in source.shapes.items():
        if getattr(wanted, name, outputs.dz is not None):
            given = getattr(outputs, name)
            made[name] = place.output(f"out_{name}", given, shape, x, (*inputs, *made.values()))
    return made


def _alignment(vector: Operand | None) -> int | None:
    return vector.alignment if vector else None


def _derivative(ctx: LinearContext, saved: Operand | None, db: Operand | None) -> Derivative:
    spec = saved.spec if saved else None
    if saved and ctx.saved_layout:  # not what the array's strides say: one of a single row may have any
        spec = Spec(ctx.saved_layout, saved.alignment)
    return Derivative(ctx.activation, ctx.saved_as, spec, _alignment(db), ctx.dropout > 0)


def _problem(
    ctx: LinearContext,
    x: Operand,
    w: Operand,
    dy: Operand,
    own: Derivative,
    through: Derivative | None,
    made: dict[str, Operand],
    wanted: Wanted,
) -> BackwardProblem:
    dtype = DType.parse("x", x.dtype)
    specs = {name: made[name].spec for name in ("dx", "dw", "dz") if name in made}
    return BackwardProblem(
        dtype,
        Compute.parse(ctx.compute, dtype),
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
