"""`LinearForward` and `LinearInference`: the forward pass of a linear layer as an operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lt_runtime import reference
from lt_runtime.arguments import flag
from lt_runtime.arrays.checks import check_same, check_shape
from lt_runtime.arrays.libraries import Library
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ShapeError
from lt_runtime.kernels.call import Call, DropoutState
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.ops._context import Layer, LinearContext
from lt_runtime.ops.call import PreparedCall
from lt_runtime.ops.operation import New, Operation, Request
from lt_runtime.problem import Activation, Compute, ForwardProblem, Philox, Saved, Spec, check_dropout

_BITS = 8  # of a byte
_Y, _KEPT = 3, 4  # places among the arrays


class LinearForward(Operation):
    """y = dropout(act(x · wᵀ + bias)), and a context for backward.

    A call's options are those of `linear_fwd`, then whether anything is kept for backward; its scalar is the source of
    the dropout mask. A request's detail is the `Layer`.
    """

    names = ("x", "w", "bias", "out", "out_z")
    required = 2

    def read(self, operands: Sequence[Any], options: Any, scalars: Philox | None) -> Request:
        """See `Operation`."""
        activation, negative_slope, dropout, compute, propagate_nan, backward = options
        x, w, bias, out, out_z = operands
        activation = Activation.of(activation, negative_slope)
        has_dropout = check_dropout(dropout, scalars) is not None
        dropout, propagate_nan = float(dropout), flag("propagate_nan", propagate_nan)
        dtype = x.element_type()
        check_same(x, w, *(each for each in (bias, out, out_z) if each is not None))
        m, n, k = _shape(x, w, bias)
        for each in (out, out_z):
            if each is not None:
                check_shape(each.name, each.shape, (m, n), "the result's shape")
        y = Spec(packed(m, n)) if out is None else out.spec
        problem = ForwardProblem(
            dtype,
            Compute.parse(compute, dtype),
            activation,
            x.spec,
            w.spec,
            y,
            bias.alignment if bias else None,
            out_z.spec if out_z else None,
            has_dropout,
            propagate_nan,
            backward,
        )
        layer = Layer((m, n, k), Saved.NOTHING, None, activation, dropout, compute, bias is not None)
        new = {} if out is not None else {_Y: New((m, n), dtype.numpy, x.library)}
        return Request(problem, (_Y, _KEPT), new, layer)

    def with_saved(self, request: Request, plan: Any, operands: Sequence[Any]) -> Request:
        """See `Operation`: the plan's strategy decides the kind and layout of the tensor that is saved."""
        x, *_, out_z = operands
        problem, layer = request.problem, request.detail
        if plan is not None:
            saved, kept = plan.strategy.saved, plan.kept_spec
        elif problem.backward:  # on the host the pre-activation is kept for every activation
            saved = Saved.NOTHING if problem.activation.name == "none" else Saved.PREACTIVATION
            kept = problem.preactivation or Spec(packed(*layer.shape[:2]))
        else:
            return request
        layout = kept.layout if saved in (Saved.PREACTIVATION, Saved.MASK) else None
        layer = replace(layer, saved_as=saved, saved_layout=layout)
        makes = kept is not None and out_z is None
        new = {_KEPT: _new_kept(problem, saved, kept.layout, x.library)} if makes else {}
        return request._replace(new={**request.new, **new}, detail=layer)

    def is_bindable(self, request: Request) -> bool:
        """See `Operation`: a call with dropout is not, because its mask changes."""
        return not request.problem.dropout

    def call(self, prepared: PreparedCall, addresses: tuple[int, ...], scalars: Philox | None, stream: int) -> Call:
        """See `Operation`."""
        p = prepared.request.detail.dropout
        if not p:
            return Call(addresses, stream)
        return Call(addresses, stream, dropouts=(DropoutState.of(p, scalars, prepared.device, stream), None))

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Philox | None) -> None:
        """See `Operation`."""
        x, w, bias, y, z = arrays
        layer, dtype = request.detail, request.problem.dtype.numpy
        factors = reference.dropout_factors(layer.shape[:2], layer.dropout, scalars)
        exact_y, exact_z = reference.linear_fwd(x, w, bias, layer.activation, factors)
        y[...] = exact_y.astype(dtype)
        if z is not None:
            z[...] = exact_z.astype(dtype)

    def result(
        self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Philox | None
    ) -> tuple[Any, LinearContext]:
        """See `Operation`."""
        x, w, _, y, kept = arrays
        layer: Layer = prepared.request.detail
        saved_as = layer.saved_as
        rng = scalars if layer.dropout else None
        if saved_as is Saved.MASK:
            return y, LinearContext(layer, x, w, kept, None, rng, y)
        saved = kept if saved_as is Saved.PREACTIVATION else y if saved_as is Saved.OUTPUT else None
        return y, LinearContext(layer, x, w, saved, kept, rng, y)


class LinearInference(LinearForward):
    """The forward pass without a context; the caller gets y alone."""

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> Any:
        """See `Operation`."""
        return arrays[_Y]


def _shape(x: Operand, w: Operand, bias: Operand | None) -> tuple[int, int, int]:
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
        bias.check_packed()
    return x.shape[0], outputs, x.shape[1]


def _new_kept(problem: ForwardProblem, saved: Saved, layout: Layout, library: Library) -> New:
    """The array that forward saves besides y, in the layout of the plan."""
    is_row = layout.order is Order.ROW
    lines, length = layout.shape if is_row else (layout.cols, layout.rows)
    if saved is Saved.MASK:
        return New((lines, layout.leading_dimension // _BITS), np.dtype(np.uint8), library)
    if is_row:
        view = None if length == layout.leading_dimension else (lambda padded: padded[:, :length])
    else:
        view = lambda padded: padded[:, :length].T  # noqa: E731  # one of three
    return New((lines, layout.leading_dimension), problem.dtype.numpy, library, view)
