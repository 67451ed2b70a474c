"""Sums of the loss and of rightly classified rows over training steps, kept on the device until they are read."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from lt_runtime.arrays.operand import CUPY, read
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.kernels.cross_entropy import Labels
from lt_runtime.kernels.tally import TallyPass, TallyState
from lt_runtime.problem import DType

_STATE: Final = np.dtype(TallyState)
_pass: Final = functools.lru_cache(maxsize=1024)(TallyPass)


class Totals(NamedTuple):
    """The loss summed over `steps`, the number of rows whose label counts, and of rows classified right."""

    steps: int
    loss: float
    rows: int
    correct: int


_NOTHING: Final = Totals(0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class Scores:
    """The logits and labels of a batch.

    Attributes:
        logits: (M, C).
        labels: (M,) int32 or int64. Rows with the label `ignore_index` do not count.
    """

    logits: Any
    labels: Any
    ignore_index: int | None


class HostTally:
    """Sums over steps on NumPy arrays.

    Attributes:
        mean: the loss of the last step, FP32 of shape ().
    """

    def __init__(self) -> None:
        self.mean = np.zeros((), np.float32)
        self._totals = _NOTHING

    def add(self, loss: Any, scores: Scores | None, weight: float, *, first: bool, stream: Any) -> None:
        """Adds a micro-batch of a step.

        Args:
            loss: FP32 of shape ().
            scores: None for a loss without classes. A row is right if its label's logit is the first of the largest.
            weight: factor of the micro-batch's loss in the step's loss.
            first: whether it is the step's first micro-batch.
            stream: None, or a GPU's stream as in `linear_fwd`.
        """
        part = np.float32(weight) * loss
        self.mean[...] = part if first else self.mean + part
        rows, correct = (0, 0) if scores is None else _count(scores)
        old = self._totals
        self._totals = Totals(old.steps + first, old.loss + float(part), old.rows + rows, old.correct + correct)

    def read(self, stream: Any) -> Totals:
        """Returns the sums and starts new ones; waits for the stream."""
        totals, self._totals = self._totals, _NOTHING
        return totals


def _count(scores: Scores) -> tuple[int, int]:
    logits, labels = scores.logits.astype(np.float32), scores.labels
    counts = np.full(labels.shape, True) if scores.ignore_index is None else labels != scores.ignore_index
    right = (logits.argmax(axis=1) == labels) & ~np.isnan(logits).any(axis=1)
    return int(counts.sum()), int((counts & right).sum())


class GpuTally:
    """Sums over steps on one GPU, as `HostTally`; all memory is allocated when this is made."""

    def __init__(self, device: int, stream: int) -> None:
        self._device, self._unread = device, _NOTHING
        with activated(device):
            self.mean = CUPY.empty((), np.dtype(np.float32), device, stream)
            self._state = CUPY.empty((_STATE.itemsize,), np.dtype(np.uint8), device, stream)
            call("cuMemsetD32Async", self.mean.data.ptr, 0, 1, stream)
            self._clear(stream)

    def add(self, loss: Any, scores: Scores | None, weight: float, *, first: bool, stream: Any) -> None:
        """See `HostTally.add`; one launch."""
        with activated(self._device):
            handle = stream_handle(stream, self._device)
            dtype, layout, logits, labels, kind = DType.FLOAT32, None, 0, 0, Labels()
            if scores is not None:
                operand, classes = read("logits", scores.logits, handle), read("labels", scores.labels, handle)
                dtype, layout, logits = operand.element_type(), operand.layout, operand.address
                labels, kind = classes.address, Labels(classes.dtype == "int64", scores.ignore_index)
            addresses = logits, labels, read("loss", loss, handle).address, self.mean.data.ptr, self._state.data.ptr
            _pass(dtype, layout, kind, self._device).run(*addresses, weight=weight, first=first, stream=handle)

    def read(self, stream: Any) -> Totals:
        """See `HostTally.read`. If a call of the driver fails, the next `read` returns these sums too."""
        with activated(self._device):
            handle, host = stream_handle(stream, self._device), np.zeros(1, _STATE)
            call("cuMemcpyDtoHAsync", host.ctypes.data, self._state.data.ptr, host.nbytes, handle)
            call("cuStreamSynchronize", handle)
            self._clear(handle)
            state = host[0]
            loss = float(state["loss"]) - float(state["rest"])
            read = Totals(int(state["steps"]), loss, int(state["rows"]), int(state["correct"]))
            self._unread = Totals._make(map(operator.add, self._unread, read))
            call("cuStreamSynchronize", handle)  # the next step may use another stream
        totals, self._unread = self._unread, _NOTHING
        return totals

    def _clear(self, stream: int) -> None:
        call("cuMemsetD8Async", self._state.data.ptr, 0, self._state.nbytes, stream)


Tally: TypeAlias = HostTally | GpuTally
