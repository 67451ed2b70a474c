"""What a linear layer's forward pass adds to the driver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from lt_runtime import reference
from lt_runtime.arrays import Library, Operand, check_same, check_shape
from lt_runtime.errors import ShapeError
from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.layout import Order, packed
from lt_runtime.ops._context import Layer, LinearContext
from lt_runtime.ops.call import Known, New, Operation, Reading
from lt_runtime.problem import Activation, Compute, DType, ForwardProblem, Philox, Saved, Spec, check_dropout

_BITS = 8  # of a byte
_Y, _KEPT = 3, 4  # places among the arrays


class ForwardOptions(NamedTuple):
    """The options of `linear_fwd` that a call's course depends on; `inference` for `linear`, which keeps nothing."""

    activation: str | Activation
    negative_slope: float
    dropout: float
    compute: str
    propagate_nan: bool
    inference: bool


@dataclass(frozen=True, slots=True)
class _Forward:
    """What a forward call needs again.

    Attributes:
        keeps: whether backward takes the derivative from the array that is kept, be it the caller's.
    """

    layer: Layer
    keeps: bool


class LinearForward(Operation):
    """y = dropout(act(x · wᵀ + bias)) and what backward needs; a call's extra is where dropout's mask comes from."""

    names = ("x", "w", "bias", "out", "out_z")
    required = 2

    def read(self, operands: Sequence[Operand | None], asked: Any, extras: Philox | None) -> Reading:
        """See `Operation`."""
        options = ForwardOptions(*asked)
        x, w, bias, out, out_z = operands
        assert x is not None
        assert w is not None
        activation = as_activation(options.activation, options.negative_slope)
        has_dropout = check_dropout(options.dropout, extras) is not None
        dtype = DType.parse("x", x.dtype)
        compute = Compute.parse(options.compute, dtype)
        check_same(x, w, *(each for each in (bias, out, out_z) if each is not None))
        m, n, k = problem_shape(x, w, bias)
        for each in (out, out_z):
            if each is not None:
                check_shape(each.name, each.shape, (m, n), "the result's shape")
        y = Spec(packed(m, n)) if out is None else out.spec
        problem = ForwardProblem(
            dtype,
            compute,
            activation,
            x.spec,
            w.spec,
            y,
            bias.alignment if bias else None,
            out_z.spec if out_z else None,
            has_dropout,
            options.propagate_nan,
            not options.inference,
        )
        layer = Layer((m, n, k), Saved.NOTHING, None, activation, options.dropout, options.compute, bias is not None)
        new = {} if out is not None else {_Y: New((m, n), dtype.numpy, x.library)}
        return Reading(problem, (_Y, _KEPT), new, _Forward(layer, keeps=False))

    def settle(self, reading: Reading, plan: Any, operands: Sequence[Operand | None]) -> Reading:
        """See `Operation`: the plan decides what is kept, and how that lies."""
        x, *_, out_z = operands
        assert x is not None
        if plan is None:
            return self._settle_on_host(reading, x.library, given=out_z is not None)
        saved, kept = plan.strategy.saved, plan.kept_spec
        keeps = saved in (Saved.PREACTIVATION, Saved.MASK)
        layout = kept.layout if keeps and kept is not None else None
        layer = replace(reading.detail.layer, saved_as=saved, saved_layout=layout)
        makes = kept is not None and out_z is None
        new: Mapping[int, New] = {_KEPT: _new_kept(reading.problem, saved, kept, x.library)} if makes else {}
        return reading._replace(new={**reading.new, **new}, detail=_Forward(layer, keeps))

    def _settle_on_host(self, reading: Reading, library: Library, *, given: bool) -> Reading:
        """On the host the pre-activation is kept whatever the activation is."""
        problem, layer = reading.problem, reading.detail.layer
        if not problem.backward:
            return reading
        keeps = problem.activation.name != "none"
        layer = replace(layer, saved_as=Saved.PREACTIVATION if keeps else Saved.NOTHING)
        new = {} if given else {_KEPT: New(layer.shape[:2], problem.dtype.numpy, library)}
        return reading._replace(new={**reading.new, **new}, detail=_Forward(layer, keeps))

    def is_bindable(self, reading: Reading) -> bool:
        """See `Operation`: dropout's masks are others each time."""
        return not reading.problem.dropout

    def call(self, known: Known, addresses: tuple[int, ...], extras: Philox | None, stream: int) -> Call:
        """See `Operation`."""
        p = known.reading.detail.layer.dropout
        if not p:
            return Call(addresses, stream)
        return Call(addresses, stream, dropouts=(DropoutState.of(p, extras, known.device, stream), None))

    def on_host(self, reading: Reading, arrays: Sequence[Any], extras: Philox | None) -> None:
        """See `Operation`."""
        x, w, bias, y, z = arrays
        layer, dtype = reading.detail.layer, reading.problem.dtype.numpy
        factors = reference.dropout_factors(layer.shape[:2], layer.dropout, extras)
        exact_y, exact_z = reference.linear_fwd(x, w, bias, layer.activation, factors)
        y[...] = exact_y.astype(dtype)
        if z is not None:
            z[...] = exact_z.astype(dtype)

    def result(self, known: Known, arrays: Sequence[Any], extras: Philox | None) -> tuple[Any, LinearContext]:
        """See `Operation`."""
        x, w, _, y, kept = arrays
        detail = known.reading.detail
        layer = detail.layer
        rng = extras if layer.dropout else None
        if not detail.keeps:
            return y, LinearContext(layer, x, w, y if layer.saved_as is Saved.OUTPUT else None, kept, rng)
        return y, LinearContext(layer, x, w, kept, None if layer.saved_as is Saved.MASK else kept, rng)


class LinearInference(LinearForward):
    """The same, of which the caller gets y alone."""

    def result(self, known: Known, arrays: Sequence[Any], extras: Any) -> Any:
        """See `Operation`."""
        return arrays[_Y]


def as_activation(activation: str | Activation, negative_slope: float = 0.01) -> Activation:
    """The activation of that name; `ArgumentError` if there is none."""
    return activation if isinstance(activation, Activation) else Activation(activation, negative_slope)


def problem_shape(x: Operand, w: Operand, bias: Operand | None) -> tuple[int, int, int]:
    """(M, N, K) of a layer.

    Raises:
        ShapeError: the shapes do not fit.
        LayoutError: the bias is not contiguous.
    """
    for each in (x, w):
        if len(each.shape) != 2:
            raise ShapeError(f"{each.name} has shape {each.shape}; accepted are matrices, two axes")
    if x.shape[1] != w.shape[1]:
        raise ShapeError(
            f"{w.name} has shape {w.shape}; its second axis must be {x.shape[1]}, as in {x.name} of shape {x.shape}"
        )
    outputs = w.shape[0]
    if bias is not None:
        if bias.shape != (outputs,):
            why = f"as {w.name} of shape {w.shape} has {outputs} outputs"
            raise ShapeError(f"{bias.name} has shape {bias.shape}; it must be ({outputs},), {why}")
        bias.check_vector()
    return x.shape[0], outputs, x.shape[1]


def _new_kept(problem: ForwardProblem, saved: Saved, spec: Spec, library: Library) -> New:
    """The array for what forward keeps besides y, as the plan wants it to lie."""
    layout = spec.layout
    is_row = layout.order is Order.ROW
    lines, length = layout.shape if is_row else (layout.cols, layout.rows)
    if saved is Saved.MASK:
        return New((lines, layout.leading_dimension // _BITS), np.dtype(np.uint8), library)
    if is_row:
        view = None if length == layout.leading_dimension else (lambda padded: padded[:, :length])
    else:
        view = lambda padded: padded[:, :length].T  # noqa: E731  # one of three
    return New((lines, layout.leading_dimension), problem.dtype.numpy, library, view)
