"""The scales of a linear layer whose products are computed in FP8, and their update once a step."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from lt_runtime.arguments import check_instance
from lt_runtime.arrays.checks import check_shape, check_type
from lt_runtime.arrays.operand import HOST, device_of, library_of
from lt_runtime.arrays.transfer import array_of, fetch, host_access, host_values, replace_all, writes
from lt_runtime.errors import ArgumentError, CaptureError, OperandError, ShapeError
from lt_runtime.fp8 import FP8
from lt_runtime.gpu.streams import is_captured
from lt_runtime.kernels.fp8 import MOST_LAYERS, ScalesPass
from lt_runtime.ops.call import PassOperation, Request, perform
from lt_runtime.reference.fp8 import LARGEST_NUMBER, OVERFLOWS, SCALE, fp8_slots, update_fp8_scales

_TENSORS: Final = ("x", "w", "dy")


class FP8State:
    """The scales of one linear layer's tensors x, w and dy, on the device of the layer, for `precision=`.

    With the recipe "delayed" the first forward and the first backward call compute scales from the present tensors.
    Call `update` once a step, after the step's last backward call, to compute the scales of the next step; a captured
    graph may hold the call of `update`. With another recipe every call computes scales from the present tensors;
    "rowwise" leaves `slots` and `history` as they are. The first call makes both arrays, on the device of its x.

    Args:
        recipe: types, scales and accumulation.

    Attributes:
        recipe: the argument.
        slots: FP32 (3, 8), a row for x, w and dy: 1 / scale, scale, largest magnitude since the last update, largest
            number of the FP8 type, number of overflows; None before the first call. After the graph of an
            `lt.TrainStep` the row of w has the largest magnitude of the updated weight.
        history: FP32 (3, steps), largest magnitudes of the last steps, the latest first; None before the first call.
        calibrated: the rows of `slots` (0 for x, 1 for w, 2 for dy) whose scales have been computed or loaded.
        needs_dx, needs_dw: whether backward will compute dx, and dw; both are True by default, and blocks set both. For
            dx forward makes the transpose of w in FP8, and for dw the transpose of x. The choice by
            `lt.FP8.fallback` depends on `needs_dx` too.
        fallback: why the last forward call computed the layer in its own type; None if it was in FP8.
        kept: the weight in FP8 for inference, see `KeptWeight`; None before the first inference.
        copies: while a training step runs that keeps the weight in FP8, the weight and its transpose, which is None
            where no dx is computed; see `Fp8Weights`. Otherwise None: forward casts the weight.
        is_written: whether an optimizer's update writes the weight in FP8, so that the next training steps do not cast
            it. The choice by `lt.FP8.fallback` depends on it.
        changes: number of changes of the scales, and of changes that the capture of a graph has recorded. A copy of a
            weight in FP8 is stale if this number has grown since the copy was made.

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
        self.copies: tuple[Any, Any] | None = None
        self.is_written = False
        self.changes = 0

    def __repr__(self) -> str:
        return f"FP8State({self.recipe})"

    def update(self, *, skipped: Any = None, stream: Any = None) -> None:
        """Sets the scales for the next step by the largest magnitudes of the last steps, and counts overflows.

        The method does nothing with another recipe than "delayed", or before the layer's first call.

        Args:
            skipped: one uint32 on the device; unless it is 0, scales and history stay.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, CuPy's current stream.
        """
        update_scales([self], skipped=skipped, stream=stream)

    @property
    def scales(self) -> dict[str, float]:
        """The scales of x, w and dy, by which they are multiplied before they are cast. Waits for the stream.

        Raises:
            CaptureError: the current stream is being captured.
        """
        return self._column(SCALE)

    @property
    def overflows(self) -> dict[str, int]:
        """For x, w and dy, how many updates found a saturated, infinite or NaN element. Waits for the stream.

        The counts are 0 before the layer's first call, and stay 0 for a layer that computes in its own type, and with
        "rowwise", where each scale is found from the values that it serves, so that none is saturated.
        """
        counts = dict.fromkeys(_TENSORS, 0.0) if self.slots is None else self._column(OVERFLOWS)
        return {name: int(value) for name, value in counts.items()}

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Copies of the state on the host, from which `load_state_dict` continues bit for bit. Waits for the stream.

        The mapping is empty before the layer's first call.
        """
        if self.slots is None:
            return {}
        arrays = {"slots": self.slots, "history": self.history}
        copies = {name: fetch(*host_access(name, array)).copy() for name, array in arrays.items()}
        return {**copies, "calibrated": np.isin(np.arange(len(_TENSORS)), [*self.calibrated])}

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
        if self.slots is None and like is None:
            raise ArgumentError("like is None, and there was no call that tells the device; pass an array on it")
        calibrated, found = np.asarray(state["calibrated"]), dict[str, NDArray[np.float32]]()
        check_shape("state['calibrated']", calibrated.shape, (len(_TENSORS),), "one for each of x, w and dy")
        for name, initial in initial_arrays(self.recipe).items():
            found[name] = host_values(f"state[{name!r}]", state[name]).astype(np.float32)
            check_shape(f"state[{name!r}]", found[name].shape, initial.shape, "as the recipe has")
        if not has_types(self.recipe, found["slots"]):
            raise OperandError(f"state['slots'] has scales of other FP8 types than those of {self.recipe}")
        held = zip(found.values(), map(host_access, found, arrays_of(self, like)), strict=True)
        self.changes += 1
        replace_all([(operand, values, stream) for values, (operand, stream) in held])
        self.calibrated = {int(each) for each in np.flatnonzero(calibrated)}

    def _column(self, column: int) -> dict[str, float]:
        if self.slots is None:
            raise ArgumentError("the state has no scales yet: pass it to lt.linear_fwd(..., precision=state) first")
        return dict(zip(_TENSORS, map(float, fetch(*host_access("slots", self.slots))[:, column]), strict=True))


def arrays_of(state: FP8State, x: Any) -> tuple[Any, Any]:
    """Slots and history of a state. The first call makes them on the device of x, and waits for the copies."""
    if state.slots is None:
        device = device_of("x", x)
        stream = 0 if device == HOST else library_of(x).current_stream(device)
        if device != HOST and is_captured(stream):
            found = f"stream {stream:#x} is being captured, and the layer's scales are made in its first call"
            raise CaptureError(f"{found}; run the layer once before the capture")
        initial = initial_arrays(state.recipe).values()
        state.slots, state.history = [array_of(each, device, stream) for each in initial]
    return state.slots, state.history


def initial_arrays(recipe: FP8) -> dict[str, NDArray[np.float32]]:
    """Slots and history of a layer that has not run yet."""
    slots = fp8_slots([each.value for each in recipe.dtypes])
    return {"slots": slots, "history": np.zeros((len(slots), recipe.steps), np.float32)}


def has_types(recipe: FP8, slots: NDArray[np.float32]) -> bool:
    """Whether slots (3, 8) are of tensors of a recipe's FP8 types."""
    own = initial_arrays(recipe)["slots"][:, LARGEST_NUMBER]
    return np.array_equal(slots[:, LARGEST_NUMBER], own)


def must_calibrate(state: FP8State, *rows: int) -> bool:
    """Whether a call that casts some of a layer's tensors has to compute their scales first.

    It has to if one of these tensors has no scale yet, with the recipe "current" always, and with "rowwise" never.

    Args:
        rows: the rows of `FP8State.slots` for the tensors that are cast: 0 for x, 1 for w, 2 for dy.
    """
    is_found = state.recipe.recipe != "current" and state.calibrated.issuperset(rows)
    return not (is_found or state.recipe.by_rows)


def update_scales(states: Iterable[FP8State], *, skipped: Any = None, stream: Any = None) -> None:
    """Does what `FP8State.update` does for several layers, by one kernel for up to `MOST_LAYERS` of the same recipe."""
    alike = dict[FP8, list[FP8State]]()
    for state in states:
        if state.slots is not None and state.recipe.recipe == "delayed":
            alike.setdefault(state.recipe, []).append(state)
            state.changes += 1
            writes.latest = None
    for recipe, same in alike.items():
        for start in range(0, len(same), MOST_LAYERS):
            part = same[start : start + MOST_LAYERS]
            arrays = [array for each in part for array in (each.slots, each.history)]
            options = *part[0].history.shape, recipe.headroom, len(part)
            perform(_update_of(len(part)), (*arrays, skipped), options, None, stream)


class _Update(PassOperation):
    """The scales of layers' tensors for the next step; a call's options are those of `ScalesPass`."""

    make_pass = ScalesPass

    def read(self, operands: Sequence[Any], options: Any, scalars: None) -> Request:
        """See `Operation`."""
        skipped = operands[-1]
        if skipped is not None:
            check_type(skipped, "uint32")
            if skipped.shape not in ((), (1,)):
                raise ShapeError(f"skipped has shape {skipped.shape}; accepted are () and (1,)")
        return Request(options, tuple(range(self.required)), {})

    def on_host(self, request: Request, arrays: Sequence[Any], scalars: None) -> None:
        """See `Operation`."""
        *pairs, skipped = arrays
        skip = skipped is not None and bool(skipped.item())
        for slots, history in zip(pairs[::2], pairs[1::2], strict=True):
            update_fp8_scales(slots, history, request.problem[2], skip=skip)


@functools.cache
def _update_of(layers: int) -> _Update:
    """The update of a number of layers."""

    class Update(_Update):
        names = (*("slots", "history") * layers, "skipped")
        required = 2 * layers

    return Update()
