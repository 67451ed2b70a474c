"""Sums and averages over training steps: of losses and correctly classified rows, and of a model's parameters."""

from __future__ import annotations

import functools
import operator
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from lt_runtime.arguments import Fixed, check_instance, number, shown
from lt_runtime.arrays.operand import CUPY, HOST, read
from lt_runtime.arrays.transfer import arena_size, arena_views, host_zeros
from lt_runtime.errors import ArgumentError, ShapeError
from lt_runtime.gpu.devices import activated
from lt_runtime.gpu.driver import call
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.kernels import optimizer as kernels
from lt_runtime.kernels.cross_entropy import Labels
from lt_runtime.kernels.kernel import Tally as TallyPart
from lt_runtime.kernels.losses import TallyPass, TallyState
from lt_runtime.nn.block import Block
from lt_runtime.nn.mlp import brief
from lt_runtime.ops.losses import Tallied
from lt_runtime.ops.optimizers.parameters import HeldArrays, write_values
from lt_runtime.problem import DType

_STATE: Final = np.dtype(TallyState)
_MEAN: Final = TallyState.mean.offset
_pass: Final = functools.lru_cache(maxsize=1024)(TallyPass)


class Totals(NamedTuple):
    """Sums over a number of steps: losses, rows whose label is not ignored, and correctly classified rows."""

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
    ignore_index: int | None = -100


def scores_of(logits: Any, labels: Any) -> Scores:
    """The `Scores` of logits (..., C) and labels (...,), with all leading axes joined."""
    if len(logits.shape) == 2:
        return Scores(logits, labels)
    return Scores(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


class HostTally:
    """Adds up losses and correctly classified rows over steps, on NumPy arrays.

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
        self._totals = Totals._make(map(operator.add, self._totals, (first, float(part), rows, correct)))

    def read(self, stream: Any) -> Totals:
        """Returns the sums and resets them to zero; waits for the stream."""
        stream_handle(stream, HOST)  # raises for an argument that is not a stream
        totals, self._totals = self._totals, _NOTHING
        return totals


def _count(scores: Scores) -> tuple[int, int]:
    logits, labels = scores.logits.astype(np.float32), scores.labels
    counts = np.full(labels.shape, True) if scores.ignore_index is None else labels != scores.ignore_index
    right = (logits.argmax(axis=1) == labels) & ~np.isnan(logits).any(axis=1)
    return int(counts.sum()), int((counts & right).sum())


class GpuTally:
    """Like `HostTally`, on one GPU. The constructor allocates all memory."""

    def __init__(self, device: int, stream: int) -> None:
        self._device, self._unread = device, _NOTHING
        with activated(device):
            self._state = CUPY.zeros((_STATE.itemsize,), np.dtype(np.uint8), device, stream)
            self.mean = self._state[_MEAN : _MEAN + 4].view(np.float32).reshape(())

    def add(self, loss: Any, scores: Scores | None, weight: float, *, first: bool, stream: Any) -> None:
        """See `HostTally.add`. Makes one kernel launch."""
        with activated(self._device):
            handle = stream_handle(stream, self._device)
            dtype, layout, logits, labels, kind = DType.FLOAT32, None, 0, 0, Labels()
            if scores is not None:
                operand, classes = read("logits", scores.logits, handle), read("labels", scores.labels, handle)
                dtype, layout, logits = operand.element_type(), operand.layout, operand.address
                labels, kind = classes.address, Labels(classes.dtype == "int64", scores.ignore_index)
            tally = TallyPart(self._state.data.ptr, weight, first)
            at_loss = read("loss", loss, handle).address
            _pass(dtype, layout, kind, self._device).launch(logits, labels, at_loss, tally, handle)

    def part(self, *, first: bool) -> Tallied:
        """The argument `out_loss` of a loss whose own kernel adds to the sums, as `add` does; `share` is the weight."""
        return Tallied(self._state, first)

    def read(self, stream: Any) -> Totals:
        """See `HostTally.read`. If a driver call fails, no sums are lost: the next `read` returns them."""
        with activated(self._device):
            handle, host = stream_handle(stream, self._device), np.zeros(1, _STATE)
            call("cuMemcpyDtoHAsync", host.ctypes.data, self._state.data.ptr, host.nbytes, handle)
            call("cuStreamSynchronize", handle)
            call("cuMemsetD8Async", self._state.data.ptr, 0, _MEAN, handle)
            state = host[0]
            loss = float(state["loss"]) - float(state["rest"])
            read = Totals(int(state["steps"]), loss, int(state["rows"]), int(state["correct"]))
            self._unread = Totals._make(map(operator.add, self._unread, read))
            call("cuStreamSynchronize", handle)  # the next step may use another stream, and needs sums of zero
        totals, self._unread = self._unread, _NOTHING
        return totals


Tally: TypeAlias = HostTally | GpuTally


class EMA(Fixed):
    """An exponential moving average of a model's parameters (Polyak averaging): a ← decay·a + (1 - decay)·θ.

    θ is a parameter's master copy if it has one, otherwise its value. The averages are FP32; their first values are θ.
    `lt.TrainStep(..., ema=ema)` updates them after the optimizer, in the step's graph; your own loop calls `update`.
    An update is one launch. In a step that the optimizer skips, the averages are updated with the unchanged θ.

    To save the averages, save the arrays of `averages`; to load them, write into these arrays: `average[...] = saved`.

    Args:
        model: an `MLP` or another `Block`. If the optimizer makes the master copies, make the optimizer first.
        decay: in [0, 1); the averages are over about the last 1 / (1 - decay) updates.

    Attributes:
        model, decay: as given.
        averages: maps the names of the parameters to FP32 arrays of the parameters' shapes on the model's device.

    Raises:
        ArgumentError: `decay` is out of its range.
    """

    def __init__(self, model: Block, decay: float = 0.999) -> None:
        check_instance("model", model, Block, "an lt.MLP or another lt.Block")
        self.model: Final = model
        self.decay: Final = number("decay", decay)
        if not 0.0 <= self.decay < 1.0:
            raise ArgumentError(f"decay is {self.decay}; it must be in [0, 1)")
        parameters = model.parameters()
        self._held = HeldArrays(parameters, "the EMA")
        self._values = [each.data if each.master is None else each.master for each in parameters]
        shapes = [tuple(value.shape) for value in self._values]
        averages = arena_views(model.device.asarray(host_zeros(arena_size(shapes, 4), np.dtype(np.float32))), shapes)
        self.averages: Final = dict(zip((each.name for each in parameters), averages, strict=True))
        if model.device.ordinal is not None:
            self._prepare(model.device.ordinal)
            self._is_uncopied = True
        self._average(1.0, None)
        model.device.synchronize()  # later updates may use any stream, and need initialised averages
        self._is_made = True

    def __repr__(self) -> str:
        return f"EMA({brief(self.model)}, decay={self.decay})"

    def update(self, *, stream: Any = None) -> None:
        """Updates the averages from the parameters' present values.

        Args:
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, CuPy's current stream.

        Raises:
            OperandError: an array of a parameter has been replaced since the averages were made.
            GpuError: the driver failed.
        """
        self.check_arrays()
        self._average(1.0 - self.decay, stream)

    def copy_to(self, model: Block) -> None:
        """Writes the averages into a model's parameters, rounded to its type, and into their master copies.

        Waits for the GPU.

        Args:
            model: a model with the same layers, of any type and on any device; may be the averaged model itself.

        Raises:
            ShapeError: the model's parameters have other names or shapes than those of the averaged model.
        """
        check_instance("model", model, Block, "an lt.MLP or another lt.Block")
        shapes = [{each.name: tuple(each.data.shape) for each in of.parameters()} for of in (model, self.model)]
        if shapes[0] != shapes[1]:
            raise ShapeError(f"model has the parameters {shown(shapes[0])}; the averages are of {shown(shapes[1])}")
        self.model.device.synchronize()
        averages = map(self.model.device.to_host, self.averages.values())
        write_values([*zip(model.parameters(), averages, strict=True)])

    def check_arrays(self) -> None:
        """Raises `OperandError` if an array of a parameter has been replaced since the averages were made."""
        self._held.check()

    def _prepare(self, device: int) -> None:
        """Prepares the launch that updates the averages, with its table of addresses."""
        with activated(device):
            stream, entries = stream_handle(None, device), []
            for average, value in zip(self.averages.values(), self._values, strict=True):
                operand = read("value", value, stream)
                operand.check_packed()
                of_value = operand.address, operand.element_type()
                arrays = {"average": (average.data.ptr, DType.FLOAT32), "value": of_value}
                entries.append(kernels.Tensor(average.size, arrays))
            table = kernels.ema_table(entries)
            self._table = CUPY.empty((table.nbytes,), np.dtype(np.uint8), device, stream)
            call("cuMemcpyHtoDAsync", self._table.data.ptr, table.ctypes.data, table.nbytes, stream)
            params = kernels.EMA.params(self._table.data.ptr)
            self._launches = kernels.launches_by_row(kernels.EMA, params, len(table), device)

    def _average(self, weight: float, stream: Any) -> None:
        """Updates the averages from the parameters' present values; `weight` is 1 - decay."""
        device = self.model.device.ordinal
        if device is not None:
            with activated(device):
                params, launch = self._launches[stream_handle(stream, device)]
                params.weight = weight
                launch()
            return
        stream_handle(stream, HOST)
        for average, value in zip(self.averages.values(), self._values, strict=True):
            average += np.float32(weight) * (value.astype(np.float32) - average)
