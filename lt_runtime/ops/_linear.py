"""Forward and backward of a linear layer as operations; `LinearContext` holds the tensors kept for backward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple, Self

import numpy as np

from lt_runtime import reference
from lt_runtime.arguments import flag
from lt_runtime.arrays.checks import check_same, check_shape
from lt_runtime.arrays.operand import Operand
from lt_runtime.errors import ArgumentError, ShapeError
from lt_runtime.layout import Layout, Order, packed
from lt_runtime.ops.call import New, Operation, PreparedCall, Request, dropouts_of, result_spec
from lt_runtime.plans.strategies import unchanged
from lt_runtime.problem import Activation, BackwardProblem, Compute, Derivative, ForwardProblem, Philox, Saved, Spec
from lt_runtime.reference.products import rows_of

# Bits of a byte; a mask's layout counts bits.
_BITS: Final = 8
# Indices among the arrays of a forward call: of y, of the tensor saved for backward, and of `add`.
_Y, _KEPT, _ADDEND = 3, 4, 5
# Index of the first output among the arrays of a backward call, after dy, x, w and two saved tensors.
FIRST_OUTPUT: Final = 5
_OUTPUTS: Final = ("dx", "dw", "db", "dz", "db_below")

Sources = tuple[Philox | None, Philox | None]
"""Random-number sources of the dropout masks of a layer and of the layer below."""


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """The part of a `LinearContext` that all calls with one `PreparedCall` share; compared by identity.

    Attributes:
        shape: (M, N, K).
        saved_as: kind of the saved array; a mask is bytes (M, N/8 rounded up to a multiple of 16).
        saved_layout: layout of a saved array that forward has allocated, in bits for a mask; None if the layout follows
            from the array's own strides.
        activation, dropout, compute: the options of the forward call.
        dtype: NumPy's name of the operands' type.
        has_bias: whether the layer has a bias.
    """

    shape: tuple[int, int, int]
    saved_as: Saved
    saved_layout: Layout | None
    activation: Activation
    dropout: float
    compute: str
    dtype: str
    has_bias: bool


@dataclass(slots=True, eq=False, repr=False)
class LinearContext:
    """The record of a `linear_fwd` call that `linear_bwd` takes; do not change its attributes.

    Attributes:
        layer: the layer's sizes and options.
        x, w: the operands; their transposes in FP8 if `state` is not None, None for one that no gradient needs.
        saved: the array that the activation's derivative is computed from; None if there is none.
        preactivation: x · wᵀ + bias (..., N) if it was saved for backward or requested; None otherwise.
        rng: the source of the dropout mask; None without dropout.
        y: the layer's output, kept so that `linear_bwd` can tell whether it is another layer's x.
        state: the `FP8State` of a layer whose products are computed in FP8; None otherwise.
        cast_slots: copy of the state's slots of x and w, with the scales by which they were cast.
        x8: x (M, K) in FP8 if the call was asked for it; None otherwise.
    """

    layer: Layer
    x: Any
    w: Any
    saved: Any
    preactivation: Any
    rng: Philox | None
    y: Any
    state: Any = None
    cast_slots: Any = None
    x8: Any = None

    def __repr__(self) -> str:
        (m, n, k), layer = self.shape, self.layer
        return f"LinearContext(M={m}, N={n}, K={k}, {layer.dtype}, {layer.activation.name}, dropout={layer.dropout})"

    @property
    def shape(self) -> tuple[int, int, int]:
        """(M, N, K)."""
        return self.layer.shape

    @property
    def activation(self) -> Activation:
        """The layer's activation."""
        return self.layer.activation

    @property
    def dropout(self) -> float:
        """Probability of dropout in the layer."""
        return self.layer.dropout


class LinearForward(Operation):
    """y = dropout(act(x · wᵀ + bias)) + add and, for training, a context for backward.

    The options of a call are the options of `linear_fwd`, followed by a flag: whether tensors are saved for backward.
    The scalars of a call are `Sources`. The detail of a request is a `Layer`.
    """

    names: ClassVar[tuple[str, ...]] = ("x", "w", "bias", "out", "out_z", "add")
    required = 2

    def read(self, operands: Sequence[Any], options: Any, scalars: Sources) -> Request:
        """See `Operation`."""
        activation, negative_slope, dropout, compute, propagate_nan, backward = options
        x, w, bias, out, out_z, add = operands
        activation = Activation.of(activation, negative_slope)
        dropouts = dropouts_of(dropout, scalars[0])
        has_dropout, propagate_nan = dropouts is not None, flag("propagate_nan", propagate_nan)
        dtype = x.element_type()
        check_same(x, w, *(each for each in (bias, out, out_z, add) if each is not None))
        m, n, k = _shape(x, w, bias)
        new: dict[int, New] = {}
        shape = (*x.shape[:-1], n)
        y = result_spec(_Y, out, shape, x, new)
        z = None if out_z is None else result_spec(_KEPT, out_z, shape, x, new)
        if add is not None:
            check_shape(add.name, add.shape, shape, "y's shape")
        kinds = dtype, Compute.parse(compute, dtype), activation
        bias_alignment, addend = bias.alignment if bias else None, add.spec if add else None
        options = bias_alignment, z, has_dropout, propagate_nan, backward, addend
        problem = ForwardProblem(*kinds, x.spec, w.spec, y, *options)
        layer = Layer((m, n, k), Saved.NOTHING, None, activation, float(dropout), compute, x.dtype, bias is not None)
        return Request(problem, (_Y, _KEPT), new, layer, same=((_ADDEND, _Y),), dropouts=dropouts)

    def with_saved(self, request: Request, plan: Any, operands: Sequence[Any]) -> Request:
        """See `Operation`: the plan's strategy decides the kind and layout of the tensor that is saved."""
        x, _, _, _, out_z, _ = operands
        problem, layer = request.problem, request.detail
        if plan is not None:
            saved, kept = plan.strategy.saved, plan.kept_spec
        elif problem.backward:  # on the host the pre-activation is saved for every activation
            saved = Saved.NOTHING if problem.activation.name == "none" else Saved.PREACTIVATION
            kept = problem.preactivation or Spec(packed(*layer.shape[:2]))
        else:
            return request
        layout = kept.layout if saved in (Saved.PREACTIVATION, Saved.MASK) else None
        layer = replace(layer, saved_as=saved, saved_layout=layout)
        makes = kept is not None and out_z is None
        new = {_KEPT: _new_kept(problem, saved, kept.layout, x)} if makes else {}
        return request._replace(new={**request.new, **new}, detail=layer)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Sources) -> None:
        """See `Operation`."""
        x, w, bias, y, z, add = arrays
        layer, dtype = request.detail, request.problem.dtype.numpy
        factors = reference.dropout_factors(layer.shape[:2], layer.dropout, scalars[0])
        exact_y, exact_z = reference.linear_fwd(rows_of(x), w, bias, layer.activation, factors, rows_of(add))
        y[...] = exact_y.astype(dtype).reshape(y.shape)
        if z is not None:
            z[...] = exact_z.astype(dtype).reshape(z.shape)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Sources) -> Any:
        """See `Operation`. Returns y and the `LinearContext`; for inference only y."""
        request = prepared.request
        if not request.problem.backward:
            return arrays[_Y]
        return context_of(request.detail, arrays, scalars)


def context_of(layer: Layer, arrays: Sequence[Any], scalars: Sources) -> tuple[Any, LinearContext]:
    """Returns y and the context of a forward call, made from the call's arrays."""
    x, w, _, y, kept, _ = arrays
    saved_as, rng = layer.saved_as, scalars[0] if layer.dropout else None
    if saved_as is Saved.MASK:
        return y, LinearContext(layer, x, w, kept, None, rng, y)
    saved = kept if saved_as is Saved.PREACTIVATION else y if saved_as is Saved.OUTPUT else None
    return y, LinearContext(layer, x, w, saved, kept, rng, y)


def _shape(x: Operand, w: Operand, bias: Operand | None) -> tuple[int, int, int]:
    """(M, N, K) of a layer.

    Raises:
        ShapeError: the shapes do not fit.
        LayoutError: x is not rows with one stride, or the bias is not contiguous.
    """
    rows, inputs = x.layout.shape
    if len(w.shape) != 2:
        raise ShapeError(f"{w.name} has shape {w.shape}; accepted are matrices, two axes")
    if inputs != w.shape[1]:
        why = f"as in {x.name} of shape {x.shape}"
        raise ShapeError(f"{w.name} has shape {w.shape}; its second axis must be {inputs}, {why}")
    outputs = w.shape[0]
    if bias is not None:
        if bias.shape != (outputs,):
            why = f"as {w.name} of shape {w.shape} has {outputs} outputs"
            raise ShapeError(f"{bias.name} has shape {bias.shape}; it must be ({outputs},), {why}")
        bias.check_packed()
    return rows, outputs, inputs


def _new_kept(problem: ForwardProblem, saved: Saved, layout: Layout, x: Operand) -> New:
    """Makes the array for the tensor that forward saves besides y, in the layout that the plan decides.

    A pre-activation has the leading axes of x; a mask is a matrix.
    """
    is_row, axes = layout.order is Order.ROW, x.shape[:-1]
    lines, length = layout.shape if is_row else (layout.cols, layout.rows)
    if saved is Saved.MASK:
        return New((lines, layout.leading_dimension // _BITS), np.dtype(np.uint8), x.library)
    if is_row:
        view = None if length == layout.leading_dimension else (lambda padded: padded[..., :length])
        return New((*axes, layout.leading_dimension), problem.dtype.numpy, x.library, view)
    of_columns = lambda padded: padded[:, :length].T.reshape(*axes, lines)  # noqa: E731
    return New((lines, layout.leading_dimension), problem.dtype.numpy, x.library, of_columns)


class LinearGradients(NamedTuple):
    """dx (..., K), dw (N, K) and db (N,); None where a gradient was not requested."""

    dx: Any
    dw: Any
    db: Any


class ChainedGradients(NamedTuple):
    """dz_below (..., K), dw (N, K), db (N,) and db_below (K,); None for a gradient that was not requested.

    `dz_below` is the gradient with respect to the pre-activation of the layer below, and `db_below` the bias gradient
    of the layer below.
    """

    dz_below: Any
    dw: Any
    db: Any
    db_below: Any


class BackwardOptions(NamedTuple):
    """The options of `linear_bwd` that a plan depends on.

    Attributes:
        layer: the layer whose gradients are computed.
        below: the layer below, if dx is multiplied by the derivative of its activation as well; None otherwise.
        before_activation: dy is the gradient with respect to the pre-activation rather than to y.
        require_same: x must be the y of the layer below, which `linear_bwd` has checked.
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
    accumulate_dx: bool

    @classmethod
    def of(cls, options: Sequence[Any]) -> Self:
        """Checks the caller's options, given in the order of the fields; `KindError` for a flag that is no bool."""
        layer, below, *flags = options
        return cls(layer, below, *map(flag, cls._fields[2:], flags))


class LinearBackward(Operation):
    """The gradients of a linear layer; a call's scalars are its `Sources`."""

    names: ClassVar[tuple[str, ...]] = (
        "dy",
        "x",
        "w",
        "the saved tensor",
        "the saved tensor below",
        *(f"out_{name}" for name in _OUTPUTS),
    )
    required = 3

    def read(self, operands: Sequence[Any], options: Any, scalars: Sources) -> Request:
        """See `Operation`."""
        given = BackwardOptions.of(options)
        dy, x, w, saved, saved_below, *outputs = operands
        check_same(x, dy, w)
        check_shape(dy.name, dy.shape, (*x.shape[:-1], given.layer.shape[1]), "y's shape")
        return self.request(given, dy, (saved, saved_below), outputs, (x.spec, w.spec), x)

    def request(
        self,
        options: BackwardOptions,
        dy: Operand,
        saved: Sequence[Operand | None],
        outputs: Sequence[Operand | None],
        factors: tuple[Spec, Spec],
        like: Operand,
    ) -> Request:
        """The `Request` of a backward call whose dy, x and w have been checked.

        Args:
            saved: the tensor that this layer's forward saved, and the one that the forward of the layer below saved.
            outputs: the caller's buffers, in the order of the gradients' names.
            factors: the specs of x and of w.
            like: an operand with the gradients' type, device and library.
        """
        layer, below = options.layer, options.below
        given = dict(zip(_OUTPUTS, outputs, strict=True))
        wanted, dtype, (_, n, k) = wanted_gradients(options, given), dy.element_type(), layer.shape
        shapes = {"dx": (*dy.shape[:-1], k), "dw": (n, k), "db": (n,), "dz": dy.shape, "db_below": (k,)}
        new: dict[int, New] = {}
        specs = {
            name: result_spec(place, given[name], shapes[name], like, new)
            for place, name in enumerate(_OUTPUTS, FIRST_OUTPUT)
            if wanted[name]
        }
        own = derivative_of(layer, saved[0], specs.get("db"))
        own = unchanged(own.db) if options.before_activation else own
        of_below = None if below is None else derivative_of(below, saved[1], specs.get("db_below"))
        results = specs.get("dx"), specs.get("dw"), specs.get("dz")
        kinds, adds_to_dx = (dtype, Compute.parse(layer.compute, dtype)), options.accumulate_dx and options.need_dx
        problem = BackwardProblem(*kinds, *factors, dy.spec, own, *results, options.accumulate, of_below, adds_to_dx)
        dropouts = 0.0 if options.before_activation else layer.dropout, 0.0 if below is None else below.dropout
        written = tuple(range(FIRST_OUTPUT, len(self.names)))
        return Request(problem, written, new, options, dropouts=dropouts if any(dropouts) else None)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Sources) -> None:
        """See `Operation`."""
        dy, x, w, saved, saved_below, *outputs = arrays
        dy, x, saved, saved_below = map(rows_of, (dy, x, saved, saved_below))
        options: BackwardOptions = request.detail
        layer, below = options.layer, options.below
        if options.before_activation:
            exact = reference.linear_bwd(dy, x, w, dy)
        else:
            # without a saved tensor the derivative is 1 for any z, so that dy can stand in for z
            z = dy if saved is None else saved
            exact = reference.linear_bwd(dy, x, w, z, layer.activation, _factors(layer, scalars[0]))
        values: dict[str, Any] = exact._asdict()
        if below is not None:
            z = exact.dx if saved_below is None else saved_below
            values["dx"] = reference.through_activation(exact.dx, z, below.activation, _factors(below, scalars[1]))
            values["db_below"] = values["dx"].sum(axis=0)
        write_gradients(options, values, outputs)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> LinearGradients | ChainedGradients:
        """See `Operation`."""
        _, _, _, _, _, dx, dw, db, _, db_below = arrays
        if prepared.request.detail.below is None:
            return LinearGradients(dx, dw, db)
        return ChainedGradients(dx, dw, db, db_below)


def write_gradients(options: BackwardOptions, values: Mapping[str, Any], outputs: Sequence[Any]) -> None:
    """Stores NumPy gradients in the caller's buffers, or adds them to the buffers.

    Args:
        outputs: a buffer or None for each name of `_OUTPUTS`, in that order.
    """
    for name, out in zip(_OUTPUTS, outputs, strict=True):
        if out is not None:
            adds = options.accumulate_dx if name == "dx" else options.accumulate and name != "dz"
            kept = out.astype(np.float64) if adds else 0.0
            out[...] = (values[name].reshape(out.shape) + kept).astype(out.dtype)


def wanted_gradients(options: BackwardOptions, given: Mapping[str, Operand | None]) -> dict[str, bool]:
    """Maps the name of each gradient to whether it is computed.

    dz is computed as a result if the caller gives a buffer for it.

    Raises:
        ArgumentError, ShapeError: the options contradict each other.
    """
    layer, below = options.layer, options.below
    if below is not None:
        if not options.need_dx:
            raise ArgumentError("need_dx is False, but through asks for the gradient of x; pass need_dx=True")
        if options.accumulate_dx:
            why = "the activation's derivative would multiply the values in out_dx as well"
            mend = "pass accumulate_dx=False, or no through"
            raise ArgumentError(f"accumulate_dx is True and through is given: {why}; {mend}")
        y, x = below.shape[:2], layer.shape[::2]
        if y != x:
            raise ShapeError(f"through is a layer with y of shape {y}; it must be {x}, as x of this layer")
    flags = options.need_dx, options.need_dw, options.need_db, given["dz"] is not None, options.need_db_below
    wanted = dict(zip(_OUTPUTS, flags, strict=True))
    for option, names in (("accumulate", ("dw", "db", "db_below")), ("accumulate_dx", ("dx",))):
        missing = [f"out_{name}" for name in names if wanted[name] and given[name] is None]
        if missing and getattr(options, option):
            raise ArgumentError(f"{option}=True needs {' and '.join(missing)}, to add to")
    return wanted


FORWARD: Final = LinearForward()
BACKWARD: Final = LinearBackward()


def derivative_of(layer: Layer, saved: Operand | None, db: Spec | None) -> Derivative:
    spec = saved.spec if saved else None
    # An array that forward has allocated: its strides do not determine the layout if it has a single row.
    if saved and layer.saved_layout:
        spec = Spec(layer.saved_layout, saved.alignment)
    return Derivative(layer.activation, layer.saved_as, spec, None if db is None else db.alignment, layer.dropout > 0)


def _factors(layer: Layer, rng: Philox | None) -> Any:
    return reference.dropout_factors(layer.shape[:2], layer.dropout, rng)
