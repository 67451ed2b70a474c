"""Steps of optimizers on a GPU that also write weights in FP8, or that begin with a part of the parameters."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from lt_runtime import ranges
from lt_runtime.gpu.driver import call
from lt_runtime.kernels.optimizer import Fp8Copy
from lt_runtime.ops.optimizers.gpu_state import GpuState
from lt_runtime.ops.optimizers.optimizer import Optimizer


class StepWithCopies:
    """The step of an optimizer on a GPU that also writes copies of weights in FP8, for the products of the next step.

    Args:
        copies: maps the number of a parameter in the optimizer to its FP8 copy.
        stream: the kernels' tables are copied on this stream, and the host waits for it.
    """

    def __init__(self, optimizer: Optimizer, copies: Mapping[int, Fp8Copy], stream: int) -> None:
        state, self._kept = optimizer._state, list[Any]()
        assert isinstance(state, GpuState)
        self._optimizer, self._state = optimizer, state
        self._updates = state.updates_with(copies, stream, self._kept)
        call("cuStreamSynchronize", stream)

    def __call__(self, set_scales: Callable[[], None], *, stream: Any) -> None:
        """See `Optimizer.step`; `set_scales` sets the copies' scales once it is known whether the step is skipped."""
        ranges.tell(self._optimizer)
        self._optimizer.check_arrays()
        self._state.step(stream, self._updates, set_scales)


class StepInParts:
    """The step of an optimizer on a GPU in two parts, of which the first one reads only some of the gradients.

    The optimizer must need neither the norm nor the finiteness of all gradients.

    Args:
        first: numbers of the parameters that the first part updates.
        stream: the kernels' tables are copied on this stream, and the host waits for it.
    """

    def __init__(self, optimizer: Optimizer, first: Collection[int], stream: int) -> None:
        state, self._kept = optimizer._state, list[Any]()
        assert isinstance(state, GpuState)
        self._optimizer, self._state = optimizer, state
        others = {*range(len(optimizer.parameters))} - {*first}
        self._first = state.updates_with({}, stream, self._kept, others, advances=False)
        self._second = state.updates_with({}, stream, self._kept, first)
        call("cuStreamSynchronize", stream)

    def begin(self, stream: int) -> None:
        """Puts the update of the first parameters on a stream."""
        for launches in self._first:
            launches[stream][1]()

    def __call__(self, *, stream: Any) -> None:
        """Puts the update of all other parameters on a stream, see `Optimizer.step`."""
        ranges.tell(self._optimizer)
        self._optimizer.check_arrays()
        self._state.step(stream, self._second)
