"""A linear layer's forward pass over arrays on a GPU: operands to problem to plan to launch."""

from __future__ import annotations

from typing import Any, Final

from lt_runtime.arrays import Signature, check_same
from lt_runtime.errors import ArgumentError
from lt_runtime.gpu.bound import BoundPlan
from lt_runtime.gpu.devices import activated
from lt_runtime.kernels.epilogue import DropoutState
from lt_runtime.layout import packed
from lt_runtime.ops._known_calls import KnownCall, New, RepeatedCall, address_of, note, repeated
from lt_runtime.ops._linear_known import KnownForward, new_kept
from lt_runtime.ops._linear_types import Layer, LinearContext, Options, problem_shape
from lt_runtime.ops._place import Place
from lt_runtime.plans.cache import age, forward_plan
from lt_runtime.problem import Compute, DType, ForwardProblem, Philox, Saved, Spec

_INPUTS: Final = 3  # x, w, bias


def forward(
    arrays: tuple[Any, ...], options: Options, stream: Any, signature: Signature | None
) -> tuple[Any, LinearContext]:
    """See `linear_fwd`. The call is remembered by its signature, if it has one.

    Args:
        arrays: x, w, bias, out and out_z.
    """
    place = Place.of("x", arrays[0], stream)
    with activated(place.device):
        call, (at_x, at_w, at_bias, at_y, at_z), dropout = _look(place, arrays, options, signature)
        x, w, _, out, out_z = arrays
        y, kept, new_y_at, new_z_at = call.fresh(out, out_z, place.stream)
        call.plan.run(at_x, at_w, at_bias, at_y or new_y_at, at_z or new_z_at, dropout, place.stream)
        return call.result(x, w, y, kept, options.rng, place.stream)


def bind_forward(arrays: tuple[Any, ...], options: Options, stream: Any) -> BoundPlan:
    """See `bind`; arguments as of `forward`."""
    place = Place.of("x", arrays[0], stream)
    with activated(place.device):
        call, (x, w, bias, y, z), dropout = _look(place, arrays, options, None)
        for name, new in (("out", call.y), ("out_z", call.kept)):
            if new is not None:
                raise ArgumentError(f"{name} is None; a bound call makes no arrays: give it a buffer")
        return call.plan.bind(x, w, bias, y, z, dropout, place.stream)


def _look(
    place: Place, arrays: tuple[Any, ...], options: Options, signature: Signature | None
) -> tuple[KnownForward, tuple[int, ...], DropoutState | None]:
    """What is made of a call, the addresses of its arrays, and its dropout, all operands having been checked."""
    since, (x_array, w_array, bias_array, out, out_z) = age(), arrays
    x, w = place.read("x", x_array), place.read("w", w_array)
    bias = place.read_optional("bias", bias_array)
    dtype = DType.parse("x", x.dtype)
    compute = Compute.parse(options.compute, dtype)
    check_same(x, w, *([bias] if bias else []))
    m, n, k = problem_shape(x.shape, w.shape, bias.shape if bias else None)
    if bias:
        bias.check_vector()
    dropout = place.dropout(options.dropout, options.rng)
    y = None if out is None else place.given("out", out, (m, n), x, (x, w, bias))
    z = None if out_z is None else place.given("out_z", out_z, (m, n), x, (x, w, bias, y))
    problem = ForwardProblem(
        dtype,
        compute,
        options.activation,
        x.spec,
        w.spec,
        y.spec if y else Spec(packed(m, n)),
        bias.alignment if bias else None,
        z.spec if z else None,
        dropout is not None,
        options.propagate_nan,
        not options.inference,
    )
    plan = forward_plan(problem, place.device, place.stream)
    new_y = None if y else New((m, n), dtype.numpy, x.library, place.device)
    new_z = None if z else new_kept(plan, x.library)
    keeps = plan.saved in (Saved.PREACTIVATION, Saved.MASK)
    layout = plan.kept_spec.layout if keeps and plan.kept_spec is not None else None
    has_bias = bias is not None
    layer = Layer((m, n, k), plan.saved, layout, options.activation, options.dropout, options.compute, has_bias)
    call = KnownForward(plan, keeps, layer, new_y, new_z)
    operands = (x, w, bias, y, z)
    if signature is not None:
        note(signature, KnownCall(call, operands, inputs=_INPUTS), since)
    return call, tuple(map(address_of, operands)), dropout


def forward_again(
    signature: Signature, arrays: tuple[Any, ...], rng: Philox | None, stream: Any
) -> tuple[Any, LinearContext] | None:
    """What `linear_fwd` returns for a call like one made before; None if it is not, or takes another look."""
    known = repeated(signature, stream)
    if known is None:
        return None
    call: KnownForward = known.call
    x, w, _, out, out_z = arrays
    y, kept, y_at, kept_at = call.fresh(out, out_z, known.stream)
    fresh = (y_at, kept_at)
    launch = known.bound(fresh)
    if launch is not None:
        launch()
    else:
        _launch_forward(known, fresh, rng)
    return call.result(x, w, y, kept, rng if call.layer.dropout else None, known.stream)


def _launch_forward(known: RepeatedCall[KnownForward], fresh: tuple[int, ...], rng: Philox | None) -> None:
    call, stream = known.call, known.stream
    x, w, bias, y, kept = known.addresses
    y, kept = y or fresh[0], kept or fresh[1]
    p = call.layer.dropout
    dropout = Place(call.plan.device, stream).dropout(p, rng) if p else None
    call.plan.run(x, w, bias, y, kept, dropout, stream)
    if not p:  # dropout's masks are others each time
        known.came_with(fresh, lambda: call.plan.bind(x, w, bias, y, kept, None, stream))
