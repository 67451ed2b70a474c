"""A linear layer over arrays on a GPU: operands to problem to plan to launch."""

from __future__ import annotations

from typing import Any

from lt_runtime.arrays import Operand, check_same, check_shape
from lt_runtime.gpu.devices import activated
from lt_runtime.ops._linear_types import Gradients, LinearContext, Options, Wanted, problem_shape
from lt_runtime.ops._place import Place
from lt_runtime.planning import backward_plan, forward_plan, saved_for
from lt_runtime.problem import BackwardProblem, Compute, DType, ForwardProblem, Saved


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
        m, n, _ = problem_shape(x.shape, w.shape, bias.shape if bias else None)
        if bias:
            bias.check_vector()
        dropout = place.dropout(options.dropout, options.rng)
        saved_as = Saved.NOTHING if options.inference else saved_for(options.activation, dropout is not None)
        y = place.output("out", out, (m, n), x, (x, w, bias))
        keep = out_z is not None or saved_as is Saved.PREACTIVATION
        z = place.output("out_z", out_z, (m, n), x, (x, w, bias, y)) if keep else None
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
        )
        plan = forward_plan(problem, place.device, place.stream)
        plan.run(x.address, w.address, _address(bias), y.address, _address(z), dropout, place.stream)
        result = place.result(out, y, x)
    preactivation = z.array if z else None
    saved = {Saved.NOTHING: None, Saved.OUTPUT: y.array, Saved.PREACTIVATION: preactivation}[saved_as]
    return result, LinearContext(
        x_array,
        w_array,
        saved,
        saved_as,
        preactivation,
        options.activation,
        options.dropout,
        options.rng,
        options.compute,
        bias is not None,
    )


def backward(dy_array: Any, ctx: LinearContext, wanted: Wanted, outputs: Gradients, stream: Any) -> Gradients:
    """See `linear_bwd`."""
    place = Place.of("dy", dy_array, stream)
    with activated(place.device):
        dy, x, w = place.read("dy", dy_array), place.read("x", ctx.x), place.read("w", ctx.w)
        saved = place.read_optional("the saved tensor", ctx.saved)
        check_same(x, dy)
        (m, k), n = x.shape, w.shape[0]
        check_shape("dy", dy.shape, (m, n), "y's shape")
        inputs = (dy, x, w, saved)
        shapes = {"dx": (m, k), "dw": (n, k), "db": (n,), "dz": (m, n)}
        made: dict[str, Operand] = {}
        for name, shape in shapes.items():
            if getattr(wanted, name, outputs.dz is not None):
                given = getattr(outputs, name)
                made[name] = place.output(f"out_{name}", given, shape, x, (*inputs, *made.values()))
        dropout = place.dropout(ctx.dropout, ctx.rng)
        problem = _problem(ctx, x, w, dy, saved, made, wanted)
        plan = backward_plan(problem, place.device, place.stream)
        dx, dw, db, dz = (_address(made.get(name)) for name in Gradients._fields)
        plan.run(dy.address, x.address, w.address, _address(saved), dx, dw, db, dz, dropout, place.stream)
        return Gradients(
            *(
                place.result(getattr(outputs, name), made[name], x) if name in made else None
                for name in Gradients._fields
            )
        )


def _problem(
    ctx: LinearContext,
    x: Operand,
    w: Operand,
    dy: Operand,
    saved: Operand | None,
    made: dict[str, Operand],
    wanted: Wanted,
) -> BackwardProblem:
    dtype = DType.parse("x", x.dtype)
    specs = {name: operand.spec for name, operand in made.items() if name != "db"}
    return BackwardProblem(
        dtype,
        Compute.parse(ctx.compute, dtype),
        ctx.activation,
        x.spec,
        w.spec,
        dy.spec,
        ctx.saved_as,
        saved.spec if saved else None,
        specs.get("dx"),
        specs.get("dw"),
        wanted.db,
        specs.get("dz"),
        ctx.dropout > 0,
        wanted.accumulate,
    )
