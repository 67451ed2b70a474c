"""The operations of a training step, on the host and on a GPU: forward, loss, backward, update, sums of the losses."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from lt_runtime.arrays.operand import CUPY, HOST, read
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.memory import branch, stream_memory
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.kernels.cross_entropy import Labels
from lt_runtime.kernels.losses import TallyPass, TallyState
from lt_runtime.ops.adamw import AdamW
from lt_runtime.problem import Compute, DType
from lt_runtime.ranges import range_of
from lt_runtime.training.ema import EMA
from lt_runtime.training.layers import backward_layer
from lt_runtime.training.losses import Batch, StepLoss, read_batch
from lt_runtime.training.mlp import MLP

if TYPE_CHECKING:
    from lt_runtime.tuner.chain import LayerChain

_STATE: Final = np.dtype(TallyState)
_pass: Final = functools.lru_cache(maxsize=1024)(TallyPass)


class Totals(NamedTuple):
    """Sums over `steps` steps: the losses, the number of rows whose label counts, and of correctly classified rows."""

    steps: int
    loss: float
    rows: int
    correct: int


_NOTHING: Final = Totals(0, 0.0, 0, 0)


class Scores(NamedTuple):
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
            scores: None for a loss without classes. A row is classified correctly if its label is the first class with
                the largest logit.
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
        stream_handle(stream, HOST)  # refuses anything but a stream
        totals, self._totals = self._totals, _NOTHING
        return totals


def _count(scores: Scores) -> tuple[int, int]:
    logits, labels = scores.logits.astype(np.float32), scores.labels
    counts = np.full(labels.shape, True) if scores.ignore_index is None else labels != scores.ignore_index
    right = (logits.argmax(axis=1) == labels) & ~np.isnan(logits).any(axis=1)
    return int(counts.sum()), int((counts & right).sum())


class GpuTally:
    """Sums over steps on one GPU, as `HostTally`; all memory is allocated by the constructor."""

    def __init__(self, device: int, stream: int) -> None:
        self._device, self._unread = device, _NOTHING
        with activated(device):
            self.mean = CUPY.zeros((), np.dtype(np.float32), device, stream)
            self._state = CUPY.zeros((_STATE.itemsize,), np.dtype(np.uint8), device, stream)

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
        """See `HostTally.read`. If a call of the driver fails, the next `read` includes the sums that were not read."""
        with activated(self._device):
            handle, host = stream_handle(stream, self._device), np.zeros(1, _STATE)
            call("cuMemcpyDtoHAsync", host.ctypes.data, self._state.data.ptr, host.nbytes, handle)
            call("cuStreamSynchronize", handle)
            call("cuMemsetD8Async", self._state.data.ptr, 0, self._state.nbytes, handle)
            state = host[0]
            loss = float(state["loss"]) - float(state["rest"])
            read = Totals(int(state["steps"]), loss, int(state["rows"]), int(state["correct"]))
            self._unread = Totals._make(map(operator.add, self._unread, read))
            call("cuStreamSynchronize", handle)  # the next step may use another stream
        totals, self._unread = self._unread, _NOTHING
        return totals


Tally: TypeAlias = HostTally | GpuTally

IGNORE_INDEX: Final = -100


def chains_of(model: MLP, rows: int, *, accumulates: bool) -> list[LayerChain]:
    """The problems of a model's layers in a training step, for the tuner.

    Args:
        rows: number of rows of a micro-batch.
        accumulates: whether a step has several micro-batches: all but the first add to the gradients.
    """
    from lt_runtime.tuner.chain import LayerChain  # imported here, because only tuning needs it

    chain = LayerChain.of_mlp(
        rows,
        model.dims,
        [each.activation for each in model.layers],
        model.dtype,
        Compute(model.compute),
        dropout=[each.dropout > 0 for each in model.layers],
        bias=[each.bias is not None for each in model.layers],
    )
    return [chain, chain.accumulating] if accumulates else [chain]


class StepBody:
    """One step: the checks of its batch, and its operations in the order in which they run.

    Args:
        rows: the number of rows of every batch; None for any number.
        parts: the number of micro-batches. All have the same size; the gradients are those of the mean of their losses.
        ema: the averages to update after the optimizer; None if there are no averages.
    """

    def __init__(
        self, model: MLP, optimizer: AdamW, loss: StepLoss, *, rows: int | None, parts: int, ema: EMA | None = None
    ) -> None:
        self.model, self.optimizer, self.loss, self.ema = model, optimizer, loss, ema
        self.rows, self.parts = rows, parts

    def read(self, batch: Sequence[Any], stream: int) -> Batch:
        """Reads and checks the arrays of a batch; see `read_batch`."""
        return read_batch(self.model, batch, self.loss, self.rows, self.parts, stream)

    def run(self, parts: Sequence[tuple[Any, ...]], tally: Tally, stream: Any, *, updates: bool = True) -> None:
        """Runs a step.

        Args:
            parts: inputs, targets and, if given, row weights of each micro-batch.
            tally: receives the losses.
            stream: a handle on a GPU, None on the host.
            updates: whether the optimizer and the averages are updated.
        """
        for i, part in enumerate(parts):
            self._run_part(part, i, tally, stream)
        if updates:
            with range_of("optimizer"):
                self.optimizer.step(stream=stream)
            if self.ema is not None:
                with range_of("ema"):
                    self.ema.update(stream=stream)

    def _run_part(self, part: tuple[Any, ...], index: int, tally: Tally, stream: Any) -> None:
        (x, target, *weights), model, loss, scaler = part, self.model, self.loss, self.optimizer.scaler
        narrow = model.narrow if model.narrow.take(x, backward=True) else None
        scale, share, first = None if scaler is None else scaler.scale, 1.0 / self.parts, index == 0
        if narrow is not None and not weights and loss.elementwise is not None:
            with range_of("backward"):
                number = narrow.loss_and_backward(
                    x, target, loss.elementwise, scale=scale, share=share, accumulate=not first, stream=stream
                )
            with range_of("loss"):
                tally.add(number, None, share, first=first, stream=stream)
            return
        contexts: list[Any] = []
        with range_of("forward"):
            if narrow is not None:
                outputs = narrow.outputs(x, stream)
            else:
                step = self.optimizer.steps
                outputs, contexts = model.forward(x, step, micro_batch=index, copy_step=False, stream=stream)
        with range_of("loss"):
            # The gradient is written over the outputs if neither a tally of classes nor the last layer's derivative
            # reads them later.
            is_read_later = loss.classifies or (contexts and contexts[-1].saved is outputs)
            scaling = {"row_weights": weights[0] if weights else None, "grad_scale": scale, "share": share}
            out = None if is_read_later else outputs
            value, gradient = loss.compute(outputs, target, **scaling, out_gradient=out, stream=stream)
        scores = Scores(outputs, target, IGNORE_INDEX) if loss.classifies else None
        del outputs, out  # From here on, each array is freed after its last use, so that later arrays get its memory.
        device = model.device.ordinal
        # No later operation of the step reads the tally: on a GPU it is updated on a second stream, concurrently.
        concurrent = contextlib.nullcontext() if device is None else branch(stream_memory(device, stream))
        with concurrent as memory:
            with range_of("loss"):
                tally.add(value, scores, share, first=first, stream=memory and memory.stream)
            with range_of("backward"):
                if narrow is not None:
                    narrow.backward(x, gradient, accumulate=not first, stream=stream)
                while contexts:
                    options = {"accumulate": not first, "need_dx": False, "stream": stream}
                    gradient = backward_layer(model.layers, gradient, contexts, **options)
                    contexts.pop()
                    if contexts:
                        contexts[-1].y = None  # no later work reads y: other arrays may reuse its memory
