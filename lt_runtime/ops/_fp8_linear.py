"""Linear layers whose products are computed in FP8, and the state of their scales."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lt_runtime import ranges, reference
from lt_runtime.arguments import check_instance
from lt_runtime.arrays.checks import check_shape, check_type
from lt_runtime.arrays.operand import CUPY, HOST, Operand, device_of, library_of, read
from lt_runtime.arrays.transfer import fetch, host_values, host_zeros, replace_all, store
from lt_runtime.errors import AlignmentError, ArgumentError, LayoutError, ShapeError
from lt_runtime.fp8 import FP8, UNIT, Fp8LayerProblem, Fp8Problem, Needs, Precision, Prologue, are_multiples
from lt_runtime.kernels.call import Call
from lt_runtime.kernels.fp8 import ScalesPass
from lt_runtime.layout import packed
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
from lt_runtime.ops.call import New, Operation, PassOperation, PreparedCall, Request, perform, result_spec
from lt_runtime.ops.first_use import before_first_use
from lt_runtime.plans.fp8 import DY, Fp8BackwardPlan, Fp8ForwardPlan, W, X, casts_dz, fp8_kept_spec
from lt_runtime.plans.fp8_rule import NO_MULTIPLE, against_fp8
from lt_runtime.plans.strategies import unchanged
from lt_runtime.problem import Activation, BackwardProblem, Compute, DType, Philox, Saved, Spec, activation_of
from lt_runtime.products.plan import Plan
from lt_runtime.reference.fp8 import (
    AMAX,
    FP8_TYPES,
    INVERSE,
    OVERFLOWS,
    SCALE,
    SLOT_WIDTH,
    amax_of,
    cast_fp8,
    cast_fp8_rows,
    fp8_slots,
    update_fp8_scales,
)
from lt_runtime.reference.products import rows_of

_E4M3: Final = FP8_TYPES["float8_e4m3fn"]
# Indices of a forward call's arrays.
_KEPT, _SLOTS, _HISTORY, _X8, _W8, _CAST = 4, 6, 7, 8, 9, 10
_TENSORS: Final = ("x", "w", "dy")
_OUTPUTS: Final = ("dx", "dw", "db", "dz")
# Index of the first output among the arrays of a backward call.
_FIRST: Final = 5


class FP8State:
    """The scales of one linear layer's tensors x, w and dy, on the device of the layer, for `precision=`.

    With the recipe "delayed" the first forward and the first backward call compute scales from the present tensors.
    Call `update` once a step, after the step's last backward call, to compute the scales of the next step; a captured
    graph may hold the call of `update`. With another recipe every call computes scales from the present tensors;
    "rowwise" leaves slots and history as they are. The first call makes both arrays, on the device of its x.

    Args:
        recipe: types, scales and accumulation.

    Attributes:
        recipe: the argument.
        slots: FP32 (3, 8), a row for x, w and dy: 1 / scale, scale, largest magnitude since the last update, largest
            number of the FP8 type, number of overflows; None before the first call.
        history: FP32 (3, steps), largest magnitudes of the last steps, the latest first; None before the first call.
        calibrated: the rows of `slots` (0 for x, 1 for w, 2 for dy) whose scales have been computed or loaded.
        needs_dx, needs_dw: whether backward will compute dx, and dw; both are True by default, and blocks set both. For
            dx forward makes the transpose of w in FP8, and for dw that of x. The choice by `lt.FP8.fallback` depends on
            `needs_dx` too.
        fallback: why the last forward call computed the layer in its own type; None if it was in FP8.
        kept: the weight in FP8 for inference, see `KeptWeight`; None before the first inference.

    Raises:
        KindError: `recipe` is no `FP8`.
    """

    def __init__(self, recipe: FP8 = FP8()) -> None:  # noqa: B008  # it is frozen
        check_instance("recipe", recipe, FP8, "an lt.FP8")
        self.recipe = recipe
        self.slots: Any = None
        self.history: Any = None
        self.calibrated: set[int] = set()
        self.needs_dx = self.needs_dw = True
        self.fallback: str | None = None
        self.kept: Any = None

    def __repr__(self) -> str:
        return f"FP8State({self.recipe})"

    def update(self, *, skipped: Any = None, stream: Any = None) -> None:
        """Sets the scales for the next step by the largest magnitudes of the last steps, and counts overflows.

        It does nothing with another recipe than "delayed", or before the first call of the layer.

        Args:
            skipped: one uint32 on the device; unless it is 0, scales and history stay.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, CuPy's current stream.
        """
        if self.slots is not None and self.recipe.recipe == "delayed":
            arrays = self.slots, self.history, skipped
            perform(_UPDATE, arrays, (*self.history.shape, self.recipe.headroom), None, stream)

    @property
    def scales(self) -> dict[str, float]:
        """The scales of x, w and dy, by which they are multiplied before they are cast. Waits for the stream."""
        return self._column(SCALE)

    @property
    def overflows(self) -> dict[str, int]:
        """For x, w and dy, how many updates found a saturated, infinite or NaN element. Waits for the stream.

        They are 0 before the first call, and of a layer that stays in its own type.
        """
        counts = dict.fromkeys(_TENSORS, 0.0) if self.slots is None else self._column(OVERFLOWS)
        return {name: int(value) for name, value in counts.items()}

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Copies of the state on the host, from which `load_state_dict` continues bit for bit. Waits for the stream.

        It is empty before the first call.
        """
        if self.slots is None:
            return {}
        arrays = {"slots": self.slots, "history": self.history}
        calibrated = np.isin(np.arange(3), list(self.calibrated))
        return {name: _host(name, array).copy() for name, array in arrays.items()} | {"calibrated": calibrated}

    def load_state_dict(self, state: Mapping[str, Any], *, like: Any = None) -> None:
        """Replaces scales and history by those of a `state_dict`.

        Args:
            like: an array on the device of the layer, needed before the first call of the layer.

        Raises:
            KindError: `state` is no mapping.
            ArgumentError: an entry is missing or unknown, or `like` is needed.
            OperandError: an entry is no array, or is of another recipe.
        """
        check_instance("state", state, Mapping, "a state_dict")
        if state.keys() != {"slots", "history", "calibrated"}:
            raise ArgumentError(f"state has the entries {sorted(state)}; it must have calibrated, history and slots")
        if self.slots is None:
            if like is None:
                raise ArgumentError("like is None, and there was no call that tells the device; pass an array on it")
            arrays_of(self, like)
        writes = []
        for name, array in (("slots", self.slots), ("history", self.history)):
            device = device_of(name, array)
            stream = 0 if device == HOST else library_of(array).current_stream(device)
            operand = read(name, array, stream)
            values = host_values(f"state[{name!r}]", state[name]).astype(np.float32)
            check_shape(f"state[{name!r}]", values.shape, operand.shape, "as the recipe has")
            writes.append((operand, values, stream))
        replace_all(writes)
        self.calibrated = {int(each) for each in np.flatnonzero(state["calibrated"])}

    def _column(self, column: int) -> dict[str, float]:
        if self.slots is None:
            raise ArgumentError("the state has no scales yet: pass it to lt.linear_fwd(..., precision=state) first")
        return dict(zip(_TENSORS, map(float, _host("slots", self.slots)[:, column]), strict=True))


def _host(name: str, array: Any) -> NDArray[Any]:
    """The values of one of the state's arrays, once the current stream has computed them."""
    device = device_of(name, array)
    stream = 0 if device == HOST else CUPY.current_stream(device)
    return fetch(read(name, array, stream), stream)


def arrays_of(state: FP8State, x: Any) -> tuple[Any, Any]:
    """Slots and history of a state. The first call makes them on the device of x, and waits for the copies."""
    if state.slots is not None:
        return state.slots, state.history
    device = device_of("x", x)
    slots = fp8_slots([each.value for each in state.recipe.dtypes])
    steps = state.recipe.history if state.recipe.recipe == "delayed" else 1
    made = []
    for values in (slots, np.zeros((len(slots), steps), np.float32)):
        if device == HOST:
            array = host_zeros(values.size, values.dtype).reshape(values.shape)
            array[...] = values
        else:
            stream = CUPY.current_stream(device)
            array = CUPY.empty(values.shape, values.dtype, device, stream)
            store(read("the scales", array, stream), values, stream)
        made.append(array)
    state.slots, state.history = made
    return state.slots, state.history


def precision_of(state: FP8State, *rows: int) -> Precision:
    """The `Precision` of a call that casts the tensors of the given rows.

    The call computes scales first if one of these tensors has none yet, with the recipe "current" always, and with
    "rowwise" never.
    """
    is_found = state.recipe.recipe != "current" and state.calibrated.issuperset(rows)
    return Precision(state.recipe, not (is_found or state.recipe.by_rows))


def fits(x: Any, w: Any) -> bool:
    """Whether the tensor cores can multiply a layer's matrices in FP8: M, N and K are positive multiples of 16."""
    return are_multiples(*_sizes(x, w))


def _sizes(x: Any, w: Any) -> tuple[int, int, int]:
    """M, N and K; zeros if x or w is no matrix: the layer then runs in its own type, whose checks raise the error."""
    try:
        *rows, _ = x.shape
        outputs, inputs = w.shape
        return math.prod(rows), outputs, inputs
    except (AttributeError, TypeError, ValueError):
        return 0, 0, 0


def reason_against(state: FP8State, x: Any, w: Any, bias: Any, activation: Any, compute: Any) -> str | None:
    """Why a layer is computed in its own type; None if its products are to be computed in FP8.

    Args:
        x: inputs of the layer, or of the layer below it, whose rows are as many. The number of columns is not read.
    """
    sizes = _sizes(x, w)
    device = device_of("x", x) if any(sizes) else HOST
    options = activation, compute, bias is not None
    return reason_for(state, sizes, getattr(x, "dtype", None), *options, device)


def reason_for(
    state: FP8State,
    sizes: tuple[int, int, int],
    dtype: Any,
    activation: Any,
    compute: Any,
    has_bias: bool,
    device: int,
) -> str | None:
    """`reason_against` for a layer of the given M, N and K; passes the `Fp8LayerProblem` to `ranges.watchers`."""
    reason = None if are_multiples(*sizes) else NO_MULTIPLE
    if device == HOST or not (ranges.watchers or (state.recipe.fallback and reason is None)):
        return reason
    kind, recipe = DType.parse("x", dtype), _timed(state.recipe)
    types, function = (kind, Compute.parse(compute, kind)), activation_of("activation", activation)
    problem = Fp8LayerProblem(*types, *sizes, function, has_bias, state.needs_dx, recipe)
    if ranges.watchers:
        ranges.tell(problem)
    if problem.is_open:
        before_first_use(problem, device)
    return against_fp8(problem, device)


@functools.cache
def _timed(recipe: FP8) -> FP8:
    """The recipe with defaults for the fields that have no influence on times: equal times need one measurement."""
    return replace(recipe, history=FP8().history, headroom=FP8().headroom)


class _Update(PassOperation):
    """The scales of a layer's tensors for the next step; a call's options are those of `ScalesPass`."""

    names = ("slots", "history", "skipped")
    required = 2

    class Launched:
        """The launches of a prepared call, which need a `ScalesPass` and no scratch memory."""

        scratch_bytes = 0

        def __init__(self, tensors: int, length: int, headroom: float, device: int) -> None:
            self._pass = ScalesPass(tensors, length, headroom, device)

        def launch(self, call: Call, memory: Any) -> None:
            """See `Pass`."""
            slots, history, skipped = call.addresses
            self._pass.launch(slots, history, skipped, memory)

    make_pass = Launched

    def read(self, operands: Sequence[Any], options: Any, scalars: None) -> Request:
        """See `Operation`."""
        _, _, skipped = operands
        if skipped is not None:
            check_type(skipped, "uint32")
            if skipped.shape not in ((), (1,)):
                raise ShapeError(f"skipped has shape {skipped.shape}; accepted are () and (1,)")
        return Request(options, (0, 1), {})

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: None) -> None:
        """See `Operation`."""
        slots, history, skipped = arrays
        update_fp8_scales(slots, history, request.problem[2], skip=skipped is not None and bool(skipped.item()))


def _cast_on_host(
    x: NDArray[Any], row: int, precision: Precision, slots: Any, history: Any
) -> tuple[NDArray[np.float64], NDArray[Any], NDArray[Any]]:
    """x rounded to FP8, its transpose in FP8, and the slot; with "rowwise" 1 / scale of the transpose's rows instead.

    If the call calibrates, it first computes the scale in the slot from x; see `Cast` and `RowCast`.
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
    """dropout(act(x)), rounded to FP32."""
    y = reference.activate(x.astype(np.float64), prologue.activation)
    factors = reference.dropout_factors(x.shape, prologue.dropout, rng)
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

    names = (*LinearForward.names, "slots", "history", "x8", "w8", "cast_slots")

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        *of_layer, precision, prologue, needs, defers = options
        request = super().read(operands[:_SLOTS], of_layer, scalars)
        x, _, _, y, z, _ = operands[:_SLOTS]
        _check_products(y, z)
        (m, n, k), new, layer = request.detail.shape, {**request.new}, request.problem
        if layer.backward:
            width = k if precision.recipe.by_rows else SLOT_WIDTH
            new[_CAST] = New((2, width), np.dtype(np.float32), x.library)
            kept = ((needs.dw, _X8, m), (needs.dx, _W8, n))
            new |= {place: New((k, size), _E4M3, x.library) for is_read, place, size in kept if is_read}
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
            saved = kept or problem.y  # with a deferred activation y is the pre-activation
            layer = replace(layer, saved_as=Saved.PREACTIVATION, saved_layout=saved.layout)
        if kept is None:
            return request._replace(detail=layer)
        x, shape = operands[0], (*operands[0].shape[:-1], problem.y.layout.cols)
        new = {} if operands[_KEPT] is not None else {_KEPT: New(shape, problem.dtype.numpy, x.library)}
        return request._replace(new={**request.new, **new}, detail=layer)

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: Any) -> None:
        """See `Operation`."""
        x, w, bias, y, z, add, slots, history, x8, w8, cast_slots = arrays
        problem, precision, drops = request.problem.layer, request.problem.precision, request.problem.layer.dropout
        sources = ((X, _through(request.problem.prologue, rows_of(x), scalars[1])), (W, w))
        cast = [_cast_on_host(each, row, precision, slots, history) for row, each in sources]
        exact, transposed, scales = zip(*cast, strict=True)
        for kept, values in ((x8, transposed[0]), (w8, transposed[1]), (cast_slots, scales)):
            if kept is not None:
                kept[...] = values
        of_layer = exact[0].reshape(x.shape), exact[1], bias, y, z, add
        done = replace(request.detail, activation=problem.activation, dropout=request.detail.dropout * drops)
        super().on_host(request._replace(problem=problem, detail=done), of_layer, scalars)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> Any:
        """See `Operation`: as of `LinearForward`, with the transposes of x and w in FP8 in the place of x and w."""
        *of_layer, _, _, x8, w8, cast_slots = arrays
        y, ctx = context_of(prepared.request.detail, of_layer, scalars)
        ctx.x, ctx.w, ctx.cast_slots = x8, w8, cast_slots
        if ctx.saved is None and ctx.layer.saved_as is Saved.PREACTIVATION:  # the activation is deferred
            ctx.saved = y
        return y, ctx


class Fp8Backward(LinearBackward):
    """`LinearBackward` of a layer by `Fp8Forward`; the last option is the `Precision`."""

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
        dy, cast_slots, x8, w8, saved, dx, dw, db, dz, slots, history = arrays
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
            cast, transposed, scales = _cast_on_host(source, DY, precision, slots, history)
            turned = _exact(transposed, scales, precision)
            for name, out, left, kept, row in (("dx", dx, cast, w8, W), ("dw", dw, turned, x8, X)):
                if out is not None:
                    results[name] = out, left @ _exact(kept, cast_slots[row], precision).T
        for name, (out, values) in results.items():
            if out is not None:
                adds = options.accumulate_dx if name == "dx" else options.accumulate and name != "dz"
                out[...] = (values.reshape(out.shape) + (out.astype(np.float64) if adds else 0.0)).astype(out.dtype)

    def result(self, prepared: PreparedCall, arrays: Sequence[Any], scalars: Any) -> LinearGradients:
        """See `Operation`."""
        return LinearGradients(*arrays[_FIRST : _FIRST + 3])


class CastGradient(NamedTuple):
    """The gradient of a layer's outputs, cast to FP8 with the scale of the layer's state.

    Attributes:
        rows: the gradient (..., N). transposed: its transpose (N, M).
    """

    rows: Any
    transposed: Any


class Fp8CastBackward(Fp8Backward):
    """`Fp8Backward` for a `CastGradient`: its transpose is the call's argument in the place of the saved tensor."""

    def read(self, operands: Sequence[Any], options: Any, scalars: Any) -> Request:
        """See `Operation`."""
        dy, *kept, _ = operands[:_FIRST]
        given = replace(dy, dtype=options[0].dtype), *kept, None, *operands[_FIRST:]
        return super().read(given, options, scalars)

    def plan(self, request: Request, device: int, stream: int) -> Plan:
        """See `Operation`."""
        problem = request.problem
        return _measured(lambda: Fp8BackwardPlan(problem.layer, problem.precision, device, is_cast=True), device)


def _measured(make: Callable[[], Plan], device: int) -> Plan:
    """Makes a plan. If tuning is on, the plan's products are measured first, and the plan uses the results."""
    plan = make()
    for each in plan.products.values():
        before_first_use(each.problem, device)
    return make()


_FORWARD: Final = Fp8Forward()
_BACKWARD: Final = Fp8Backward()
_CAST_BACKWARD: Final = Fp8CastBackward()
_UPDATE: Final = _Update()


def forward(
    state: FP8State,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    rng: Philox | None,
    stream: Any,
    *,
    below: LinearContext | None = None,
    defers: bool = False,
) -> tuple[Any, LinearContext]:
    """`linear_fwd` with its product in FP8, unless there is a `reason_against`.

    Args:
        arrays, options: those of a call of the operation `LinearForward`.
        below: the context of the layer below if that layer has deferred its activation and dropout: x is then its
            pre-activation, and the cast of x applies both. This saves writing and reading the layer's output.
        defers: whether to leave activation and dropout to the next layer, as `below`: y is then the pre-activation. x
            is BF16, and there is neither a buffer for y nor an addend.

    Raises:
        KindError: `state` is no `FP8State`.
    """
    check_instance("precision", state, FP8State, "None or an lt.FP8State")
    (x, w, bias, *_), (activation, _, _, compute, *_) = arrays, options
    # If the layer below has deferred its activation, only FP8 can apply it: the choice is not made again, because a
    # measurement in another thread may have changed the choice since.
    state.fallback = None if below else reason_against(state, x, w, bias, activation, compute)
    if state.fallback is not None:
        plain: tuple[Any, LinearContext] = perform(FORWARD, arrays, options, (rng, None), stream)
        return plain
    return forward_in_fp8(state, arrays, options, rng, stream, below=below, defers=defers)


def forward_in_fp8(
    state: FP8State,
    arrays: tuple[Any, ...],
    options: tuple[Any, ...],
    rng: Philox | None,
    stream: Any,
    *,
    below: LinearContext | None = None,
    defers: bool = False,
) -> tuple[Any, LinearContext]:
    """`forward` of a layer whose products are to be computed in FP8."""
    x = arrays[0]
    given = *arrays, *arrays_of(state, x), None, None, None
    prologue = Prologue() if below is None else Prologue(below.layer.activation, below.layer.dropout)
    how = precision_of(state, X, W), prologue, Needs(state.needs_dx, state.needs_dw), defers
    y, ctx = perform(_FORWARD, given, (*options, *how), (rng, below and below.rng), stream)
    state.calibrated |= {X, W}
    ctx.state = state
    return y, ctx


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
