"""`LinearBackward`: the backward pass of a linear layer as an operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, Self

import numpy as np

from lt_runtime import reference
from lt_runtime.arguments import flag
from lt_runtime.arrays.checks import check_same, check_shape
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ArgumentError, ShapeError
from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.layout import packed
from lt_runtime.ops._context import Layer
from lt_runtime.ops.call import PreparedCall
from lt_runtime.ops.operation import New, Operation, Request
from lt_runtime.plans.strategies import unchanged
from lt_runtime.problem import BackwardProblem, Compute, Derivative, Philox, Spec

_FIRST_OUTPUT: Final = 5  # index of the first output among the arrays, after dy, x, w and two saved tensors
_OUTPUTS: Final = ("dx", "dw", "db", "dz", "db_below")


class LinearGradients(NamedTuple):
    """dx (M, K), dw (N, K) and db (N,); None where a gradient was not requested."""

    dx: Any
    dw: Any
    db: Any


class ChainedGradients(NamedTuple):
    """dz_below (M, K), the gradient before the activation of the layer below; dw (N, K), db (N,); that layer's db (K,).

    A gradient that was not requested is None.
    """

    dz_below: Any
    dw: Any
    db: Any
    db_below: Any


class BackwardOptions(NamedTuple):
    """The options of `linear_bwd` that a plan depends on.

    Attributes:
        layer: the layer that the gradient is taken through.
        below: the layer below, if dx is taken through its activation as well; None otherwise.
        before_activation: dy has been taken through the layer's activation already.
        require_same: x must be the y of the layer below; `linear_bwd` has checked that.
    """

    layer: Layer
    below: Layer | None
    before_activation: bool
    need_dx: bool
    need_dw: bool
    need_db: bool
    need_db_below: bool
    accumulate: bool
    require_same: bool

    @classmethod
    def of(cls, options: Sequence[Any]) -> Self:
        """Checks the caller's options, given in the order of the fields; `KindError` for a flag that is no bool."""
        layer, below, *flags = options
        return cls(layer, below, *map(flag, cls._fields[2:], flags))


Sources = tuple[Philox | None, Philox | None]
"""The sources of the dropout masks of the layer and of the layer below."""


class LinearBackward(Operation):
    """The gradients of a linear layer; a call's scalars are its `Sources`."""

    names = (
        *("dy", "x", "w", "the saved tensor", "the saved tensor below"),
        *(f"out_{name}" for name in _OUTPUTS),
    )
    required = 3

    def read(self, operands: Sequence[Any], options: Any, scalars: Sources) -> Request:
        """See `Operation`."""
        options = BackwardOptions.of(options)
        dy, x, w, saved, saved_below, *outputs = operands
        layer, below = options.layer, options.below
        given = dict(zip(_OUTPUTS, outputs, strict=True))
        wanted = _wanted(options, given)
        check_same(x, dy, w)
        m, n, k = layer.shape
        check_shape(dy.name, dy.shape, (m, n), "y's shape")
        shapes = {"dx": (m, k), "dw": (n, k), "db": (n,), "dz": (m, n), "db_below": (k,)}
        dtype = x.element_type()
        new, specs = {}, {}
        for name in filter(wanted.get, _OUTPUTS):
            shape, out = shapes[name], given[name]
            if out is None:
                new[_place(name)] = New(shape, dtype.numpy, x.library)
                specs[name] = Spec(packed(*shape) if len(shape) == 2 else packed(1, *shape))
            else:
                check_shape(out.name, out.shape, shape, "the result's shape")
                check_same(x, out)
                specs[name] = out.spec
        own = _derivative(layer, saved, specs.get("db"))
        problem = BackwardProblem(
            dtype,
            Compute.parse(layer.compute, dtype),
            x.spec,
            w.spec,
            dy.spec,
            unchanged(own.db) if options.before_activation else own,
            specs.get("dx"),
            specs.get("dw"),
            specs.get("dz"),
            options.accumulate,
            None if below is None else _derivative(below, saved_below, specs.get("db_below")),
        )
        return Request(problem, tuple(map(_place, _OUTPUTS)), new, options)

    def is_bindable(self, request: Request) -> bool:
        """See `Operation`: a call with dropout is not, because its masks change."""
        return _dropouts(request.detail) == (0, 0)

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Sources, stream: int) -> Call:
        """See `Operation`."""
        own, below = _dropouts(prepared.request.detail)
        if not (own or below):
            return Call(addresses, stream)
        states = [
            DropoutState.of(p, rng, prepared.device, stream) for p, rng in zip((own, below), scalars, strict=True)
        ]
        return Call(addresses, stream, dropouts=(states[0], states[1]))

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Sources) -> None:
        """See `Operation`."""
        dy, x, w, saved, saved_below, *outputs = arrays
        options: BackwardOptions = request.detail
        layer, below = options.layer, options.below
        if options.before_activation:
            exact = reference.linear_bwd(dy, x, w, dy)
        else:
            z = dy if saved is None else saved  # without a saved tensor the derivative is 1, and z is not read
            exact = reference.linear_bwd(dy, x, w, z, layer.activation, _factors(layer, scalars[0]))
        values: dict[str, Any] = exact._asdict()
        if below is not None:
            z = exact.dx if saved_below is None else saved_below
            values["dx"] = reference.through_activation(exact.dx, z, below.activation, _factors(below, scalars[1]))
            values["db_below"] = values["dx"].sum(axis=0)
        for name, out in zip(_OUTPUTS, outputs, strict=True):
            if out is not None:
                kept = out.astype(np.float64) if options.accumulate and name in ("dw", "db", "db_below") else 0.0
                out[...] = (values[name] + kept).astype(out.dtype)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> LinearGradients | ChainedGradients:
        """See `Operation`."""
        _, _, _, _, _, dx, dw, db, _, db_below = arrays
        if prepared.request.detail.below is None:
            return LinearGradients(dx, dw, db)
        return ChainedGradients(dx, dw, db, db_below)


def _place(name: str) -> int:
    return _FIRST_OUTPUT + _OUTPUTS.index(name)


def _wanted(options: BackwardOptions, given: Mapping[str, Operand | None]) -> dict[str, bool]:
    """Which gradients are made. There is no option for dz, which is made if there is a buffer for it.

    Raises:
        ArgumentError, ShapeError: the options contradict each other.
    """
    layer, below = options.layer, options.below
    if below is not None:
        if not options.need_dx:
            raise ArgumentError("need_dx is False, but through asks for the gradient of x; pass need_dx=True")
        y, x = below.shape[:2], layer.shape[::2]
        if y != x:
            raise ShapeError(f"through is a layer with y of shape {y}; it must be {x}, as x of this layer")
    has_dz = given["dz"] is not None
    wanted = {"dx": options.need_dx, "dw": options.need_dw, "db": options.need_db, "dz": has_dz}
    wanted["db_below"] = options.need_db_below
    if options.accumulate:
        missing = [f"out_{name}" for name in ("dw", "db", "db_below") if wanted[name] and given[name] is None]
        if missing:
            raise ArgumentError(f"accumulate=True needs {' and '.join(missing)}, to add to")
    return wanted


def _dropouts(options: BackwardOptions) -> tuple[float, float]:
    """Dropout probabilities of the layer and of the layer below, 0 if the gradient is not taken through it."""
    own = 0 if options.before_activation else options.layer.dropout
    return own, 0 if options.below is None else options.below.dropout


def _derivative(layer: Layer, saved: Operand | None, db: Spec | None) -> Derivative:
    spec = saved.spec if saved else None
    if saved and layer.saved_layout:  # the strides of an array with one row have no meaning
        spec = Spec(layer.saved_layout, saved.alignment)
    return Derivative(layer.activation, layer.saved_as, spec, None if db is None else db.alignment, layer.dropout > 0)


def _factors(layer: Layer, rng: Philox | None) -> Any:
    return reference.dropout_factors(layer.shape[:2], layer.dropout, rng)
