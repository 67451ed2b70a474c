"""A layer's weight in FP8, which inference on a GPU keeps between calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lt_runtime.arrays.copies import follow
from lt_runtime.arrays.operand import CUPY, HOST, Operand, read
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import is_captured
from lt_runtime.ops.fp8.casts import cast_fp8
from lt_runtime.plans.fp8 import W
from lt_runtime.reference.fp8 import INVERSE, SCALE, SLOT_WIDTH

if TYPE_CHECKING:
    from lt_runtime.ops.fp8.state import FP8State
    from lt_runtime.ops.optimizers.parameters import Parameter


class KeptWeight:
    """A copy in FP8 of a weight on a GPU, together with the scale of the cast; see `Copy`.

    Args:
        slots: the `slots` of the layer's `FP8State`, which have the scale of w.
        stream: the stream that makes the copy. The host waits for the copy, because later calls may use any stream.

    Attributes:
        sources: the weight and the slots; see `Copy`.
        w: the weight; None after `drop`.
        w8, inverse: the weight in FP8, and 1 / scale, an FP32 array (1,). The state's own scale may change in training,
            while a graph goes on reading this copy.
        is_captured: whether a captured graph reads the copy.
    """

    def __init__(self, w: Any, slots: Any, stream: int) -> None:
        self.sources: tuple[Operand, ...] = (read("w", w, stream), read("the scales", slots, stream))
        self._device = self.sources[0].device
        self.w, self.w8, self.is_captured = w, None, False
        self._slot, self._state_slot = CUPY.empty((SLOT_WIDTH,), np.dtype(np.float32), self._device, stream), slots[W]
        self.inverse = self._slot[INVERSE : INVERSE + 1]
        follow(self)
        self.renew(stream)
        with activated(self._device):
            call("cuStreamSynchronize", stream)

    def __reduce__(self) -> tuple[Any, ...]:
        """Leaves the FP8 copy of a weight out of copies and pickles of a model, where nothing would renew it."""
        return type(None), ()

    def renew(self, stream: int) -> None:
        """See `Copy`."""
        with activated(self._device):
            call("cuMemcpyDtoDAsync", self._slot.data.ptr, self._state_slot.data.ptr, self._slot.nbytes, stream)
        scale = self._slot[SCALE : SCALE + 1]
        self.w8, _ = cast_fp8(self.w, scale, out=self.w8, need_transposed=False, stream=stream)

    def drop(self) -> bool:
        """See `Copy`."""
        if not self.is_captured:
            self.w, self.w8, self.sources = None, None, ()
        return not self.is_captured


def has_kept(state: FP8State, weight: Parameter) -> bool:
    """Whether `state` holds an FP8 copy of this weight; False if the weight is another array than the one copied."""
    return state.kept is not None and state.kept.w is weight.data


def keeps_weight(state: FP8State, weight: Parameter, device: int, stream: int) -> bool:
    """Whether a call of inference on a stream reads a kept weight; the layer's first such call has to make it.

    A weight that an optimizer updates is cast in each call: the package does not notice when a captured graph updates
    the weight, and a kept copy would be stale. A call that is being captured makes no kept weight, because calls before
    the graph's first launch would read memory that has not been written.
    """
    if device == HOST or weight.owner.is_trained or state.recipe.recipe != "delayed":
        return False
    captures = is_captured(stream)
    if has_kept(state, weight):
        state.kept.is_captured |= captures
        return True
    return not captures
