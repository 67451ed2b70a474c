"""Sums over training steps that stay on their device until they are read: of the loss, and of rows classified right."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from lt_runtime.arrays.libraries import cupy
from lt_runtime.arrays.operand import CUPY, read
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.kernels.cross_entropy import Labels
from lt_runtime.kernels.tally import TallyPass, TallyState
from lt_runtime.problem import DType

_STATE: Final = np.dtype(TallyState)
_AT_ONCE: Final = 256  # states that are allocated, and read, together
_pass: Final = functools.lru_cache(maxsize=1024)(TallyPass)


class Totals(NamedTuple):
    """What has been added up: the loss summed over `steps`, rows whose label counts, and how many were right."""

    steps: int
    loss: float
    rows: int
    correct: int


_NOTHING: Final = Totals(0, 0.0, 0, 0)


@dataclass(frozen=True, slots=True)
class Scores:
    """What a batch was classified by.

    Attributes:
        logits: (M, C). labels: (M,) int32 or int64; of a row that is left out, `ignore_index`.
    """

    logits: Any
    labels: Any
    ignore_index: int | None


class HostTally:
    """Sums of NumPy arrays, and the mean loss of the last step: `mean`, FP32 of shape ()."""

    def __init__(self) -> None:
        self.mean = np.zeros((), np.float32)
        self._totals = _NOTHING

    def add(self, loss: Any, scores: Scores | None, weight: float, *, first: bool, stream: Any) -> None:
        """Adds a part of a step.

        Args:
            loss: FP32 of shape ().
            scores: None for a loss without classes. A row is right if its label's logit is the first of the largest.
            weight: of the part's loss in the step's.
            first: whether it is the step's first part.
            stream: as in `linear_fwd`.
        """
        part = np.float32(weight) * loss
        self.mean[...] = part if first else self.mean + part
        rows, correct = (0, 0) if scores is None else _count(scores)
        old = self._totals
        self._totals = Totals(old.steps + first, old.loss + float(part), old.rows + rows, old.correct + correct)

    def read(self, stream: Any) -> Totals:
        """The sums, which begin anew; waits for the stream."""
        totals, self._totals = self._totals, _NOTHING
        return totals


def _count(scores: Scores) -> tuple[int, int]:
    logits, labels = scores.logits.astype(np.float32), scores.labels
    counts = np.full(labels.shape, True) if scores.ignore_index is None else labels != scores.ignore_index
    right = (logits.argmax(axis=1) == labels) & ~np.isnan(logits).any(axis=1)
    return int(counts.sum()), int((counts & right).sum())


class GpuTally:
    """Does the same as `HostTally` on one GPU; everything that it needs is allocated here."""

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
            places = self.mean.data.ptr, self._state.data.ptr
            _launch(self._device, loss, scores, places, weight=weight, first=first, stream=handle)

    def read(self, stream: Any) -> Totals:
        """See `HostTally.read`. Whatever fails, the next call returns what this one did not."""
        with activated(self._device):
            handle = stream_handle(stream, self._device)
            read = self._copied(handle)
            self._clear(handle)
            self._unread = Totals._make(map(operator.add, self._unread, read))
            call("cuStreamSynchronize", handle)  # the next step may come on another stream
        totals, self._unread = self._unread, _NOTHING
        return totals

    def _copied(self, stream: int) -> Totals:
        host = np.zeros(1, _STATE)
        call("cuMemcpyDtoHAsync", host.ctypes.data, self._state.data.ptr, host.nbytes, stream)
        call("cuStreamSynchronize", stream)
        return _totals(host[0])

    def _clear(self, stream: int) -> None:
        call("cuMemsetD8Async", self._state.data.ptr, 0, self._state.nbytes, stream)


class GpuTallies:
    """Tallies of one GPU, one for each of any number of batches, which are read all at once."""

    def __init__(self, device: int, stream: int) -> None:
        self._device, self._stream = device, stream
        self._states: list[Any] = []
        self._used = 0
        with activated(device):
            self._mean = CUPY.empty((), np.dtype(np.float32), device, stream)

    def add(self, loss: Any, scores: Scores | None) -> None:
        """Makes the next tally, of a batch's loss and scores; see `HostTally.add`."""
        with activated(self._device):
            place = self._used % _AT_ONCE
            if not place:
                states = CUPY.empty((_AT_ONCE * _STATE.itemsize,), np.dtype(np.uint8), self._device, self._stream)
                call("cuMemsetD8Async", states.data.ptr, 0, states.nbytes, self._stream)
                self._states.append(states)
            self._used += 1
            places = self._mean.data.ptr, self._states[-1].data.ptr + place * _STATE.itemsize
            _launch(self._device, loss, scores, places, weight=1.0, first=True, stream=self._stream)

    def read(self) -> list[Totals]:
        """Each batch's sums; waits for the stream once."""
        with activated(self._device):
            call("cuStreamSynchronize", self._stream)
            host = [state for states in self._states for state in cupy().asnumpy(states).view(_STATE)]
        return [_totals(state) for state in host[: self._used]]


def _launch(
    device: int,
    loss: Any,
    scores: Scores | None,
    places: tuple[int, int],
    *,
    weight: float,
    first: bool,
    stream: int,
) -> None:
    """Adds a part of a step to the mean and the sums at two addresses of a GPU, which is current."""
    dtype, layout, logits, labels, kind = DType.FLOAT32, None, 0, 0, Labels()
    if scores is not None:
        operand, classes = read("logits", scores.logits, stream), read("labels", scores.labels, stream)
        dtype, layout, logits = operand.element_type(), operand.layout, operand.address
        labels, kind = classes.address, Labels(classes.dtype == "int64", scores.ignore_index)
    addresses = logits, labels, read("loss", loss, stream).address, *places
    _pass(dtype, layout, kind, device).run(*addresses, weight=weight, first=first, stream=stream)


def _totals(state: Any) -> Totals:
    loss = float(state["loss"]) - float(state["rest"])
    return Totals(int(state["steps"]), loss, int(state["rows"]), int(state["correct"]))


Tally: TypeAlias = HostTally | GpuTally
