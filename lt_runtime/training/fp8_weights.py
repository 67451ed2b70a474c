"""Copies in FP8 of linear layers' weights, which an optimizer's update writes for the products of the next step."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from lt_runtime.arrays.operand import CUPY, library_of, read
from lt_runtime.gpu.driver import call
from lt_runtime.kernels.optimizer import FP8_COLUMNS, Fp8Copy
from lt_runtime.kernels.tiling import VECTOR_BYTES
from lt_runtime.ops.fp8.casts import cast_fp8
from lt_runtime.ops.fp8.state import FP8State
from lt_runtime.ops.optimizers.optimizer import Optimizer
from lt_runtime.ops.optimizers.parameters import Parameter
from lt_runtime.ops.optimizers.steps import StepWithCopies
from lt_runtime.plans.fp8 import W
from lt_runtime.reference.fp8 import AMAX, FP8_TYPES, SCALE

_E4M3: Final = FP8_TYPES["float8_e4m3fn"]


def can_write(state: FP8State) -> bool:
    """Whether an update can now write, in FP8, a weight for which `is_suited` holds.

    The layer's last call must have been in FP8, and the weight must have a scale.
    """
    return state.fallback is None and W in state.calibrated


def is_suited(state: FP8State, shape: Sequence[int], arrays: Sequence[Any]) -> bool:
    """Whether an optimizer's update can write a layer's weight in FP8, if the layer is in FP8.

    Args:
        shape: rows and columns of the weight as it lies in memory.
        arrays: the arrays that the update reads and writes; None for an absent one.
    """
    return state.recipe.recipe == "delayed" and shape[1] % FP8_COLUMNS == 0 and are_aligned(arrays)


def are_aligned(arrays: Sequence[Any]) -> bool:
    """Whether all arrays, except absent ones (None), lie at multiples of 16 bytes."""
    return all(library_of(each).address(each) % VECTOR_BYTES == 0 for each in arrays if each is not None)


def entry_of(state: FP8State, out: Any, transposed: Any) -> Fp8Copy:
    """A weight's FP8 copy as an entry in the table of the update's kernel; `transposed` may be None."""
    arrays = out, transposed, *_scale_and_amax(state)
    return Fp8Copy(tuple(out.shape), *[0 if each is None else read("fp8", each, 0).address for each in arrays])


def cast_weight(state: FP8State, weight: Any, out: Any, transposed: Any, *, stream: int | None) -> None:
    """Casts a weight with its present scale, and finds its largest magnitude; `transposed` may be None."""
    scale, amax = _scale_and_amax(state)
    if isinstance(amax, np.ndarray):
        amax[...] = 0
    else:
        call("cuMemsetD32Async", amax.data.ptr, 0, 1, stream)
    results = {"out": out, "out_transposed": transposed, "need_transposed": transposed is not None}
    cast_fp8(weight, scale, amax=amax, **results, stream=stream)


def _scale_and_amax(state: FP8State) -> tuple[Any, Any]:
    """The weight's scale and its largest magnitude since the last update, each an array (1,)."""
    return state.slots[W, SCALE : SCALE + 1], state.slots[W, AMAX : AMAX + 1]


def suited_layers(
    optimizer: Optimizer, layers: Sequence[tuple[FP8State | None, Parameter]]
) -> list[tuple[FP8State, Parameter]]:
    """The layers whose weights an update can write in FP8, see `is_suited`.

    All other layers in FP8 cast their weight in each forward: layers that share a weight, layers whose weight is not
    trained, and layers with a recipe, a number of columns or an alignment that the kernel does not take.

    Args:
        layers: the state and the weight of each layer of a model.
    """
    trained = {id(each) for each in optimizer.parameters}
    users = collections.Counter(id(weight) for _, weight in layers)
    return [
        (state, weight)
        for state, weight in layers
        if state is not None
        and id(weight) in trained
        and users[id(weight)] == 1
        # The update also reads and writes the optimizer's moments, which are always aligned.
        and is_suited(state, weight.data.shape, (weight.data, weight.grad, weight.master))
    ]


class Fp8Weights:
    """FP8 copies of weights, with transposes where dx is computed, and the optimizer step that keeps them up to date.

    A copy is the cast of the weight that the layer's next forward would make: with the scale of the next step, which is
    therefore set before the update. `remake` makes the copies at first, and again if anything but `step` has changed a
    weight or a scale.

    Args:
        layers: the state and the weight of each layer, for which `is_suited` and `can_write` hold.
        stream: handle of the stream in whose order the copies are allocated.

    Attributes:
        step: see `StepWithCopies`.
        writer: the object in `writes.latest` after a launch of a graph that updates the copies.
    """

    def __init__(
        self, optimizer: Optimizer, layers: Sequence[tuple[FP8State, Parameter]], device: int, stream: int
    ) -> None:
        numbers = {id(parameter): i for i, parameter in enumerate(optimizer.parameters)}
        self.writer = object()
        self._copied, copies = list[tuple[FP8State, Parameter, tuple[Any, Any]]](), dict[int, Fp8Copy]()
        for state, weight in layers:
            rows, cols = weight.data.shape
            out = CUPY.empty((rows, cols), _E4M3, device, stream)
            transposed = CUPY.empty((cols, rows), _E4M3, device, stream) if state.needs_dx else None
            self._copied.append((state, weight, (out, transposed)))
            copies[numbers[id(weight)]] = entry_of(state, out, transposed)
        self.step = StepWithCopies(optimizer, copies, stream)

    @property
    def are_read(self) -> bool:
        """Whether the last forward pass of every layer was in FP8."""
        return all(state.fallback is None for state, *_ in self._copied)

    def remake(self, stream: int) -> None:
        """Casts all weights with their present scales, and finds their largest magnitudes."""
        for state, weight, copies in self._copied:
            cast_weight(state, weight.data, *copies, stream=stream)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Within the block, the layers' forward reads the copies instead of casting the weights."""
        for state, _, copies in self._copied:
            state.copies = copies
        try:
            yield
        finally:
            for state, *_ in self._copied:
                state.copies = None
