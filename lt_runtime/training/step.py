"""A training step: what a caller hands over, what is refused, and what comes back."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from lt_runtime.arguments import Fixed, check_instance, flag, integer, one_of, shown
from lt_runtime.arrays.operand import HOST, device_of, on_host
from lt_runtime.errors import ArgumentError, ShapeError
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.ops._adamw_parameters import HeldArrays, changes
from lt_runtime.ops.adamw import AdamW
from lt_runtime.training.body import LOSSES, StepBody
from lt_runtime.training.ema import EMA
from lt_runtime.training.mlp import MLP
from lt_runtime.training.tally import HostTally, Tally


class Metrics(NamedTuple):
    """Means over the steps since they were last read.

    Attributes:
        loss: NaN if there were no steps.
        accuracy: the share of rows whose label has the largest logit, before each step's update; NaN if no row counted,
            None for a loss without classes.
    """

    steps: int
    loss: float
    accuracy: float | None


class TrainStep(Fixed):
    """Trains a model by one batch a call.

    On a GPU the whole step is one CUDA graph. The first batch of each size is rehearsed without the update, which makes
    the plans from what has been tuned until then; then the graph is captured, and it is launched for this batch and for
    every later one. Batches are copied into buffers that stay. The step's number, the learning rate, the loss scale and
    dropout's masks advance on the device. No call waits for the GPU, and only the first of a size allocates memory.

    With `graph=False` the same operations are launched one by one, each in a range of its own, and give the same
    results bit by bit. Models on the host always run so.

    Args:
        model: an `MLP`.
        optimizer: over the model's parameters, or over some of them, which freezes the others. Its settings may change
            between steps, see `lt.AdamW`. Dropout's masks are drawn for the optimizer's step, so that each step has its
            own. If the optimizer has a scaler, it scales the loss's gradient.
        loss: "cross_entropy" (labels (M,) int32 or int64; rows labelled -100 are left out) or "mse" (targets shaped as
            the outputs).
        batch_size: rows of every batch. None takes batches of any size; each size has a graph of its own, of which the
            eight most recently used are kept.
        graph: whether to capture.
        accumulate: micro-batches that a batch is cut into. The activations of only one micro-batch are in memory
            at a time. The gradients are added up, and the loss is the mean of the micro-batches' losses.
        ema: an `lt.EMA` of the model, which is updated after the optimizer, in the same graph.

    Raises:
        ArgumentError: an unknown loss, numbers that are not positive or do not divide the batch, an optimizer with a
            parameter that is not the model's, or an EMA of another model.
        OperandError: an array of a parameter was replaced after the optimizer or the EMA was made.
    """

    def __init__(
        self,
        model: MLP,
        optimizer: AdamW,
        *,
        loss: str = "cross_entropy",
        batch_size: int | None = None,
        graph: bool = True,
        accumulate: int = 1,
        ema: EMA | None = None,
    ) -> None:
        check_instance("model", model, MLP, "an lt.MLP")
        check_instance("optimizer", optimizer, AdamW, "an lt.AdamW")
        one_of("loss", loss, LOSSES)
        graph, accumulate = flag("graph", graph), integer("accumulate", accumulate)
        batch_size = None if batch_size is None else integer("batch_size", batch_size)
        for name, value in (("batch_size", batch_size), ("accumulate", accumulate)):
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is {shown(value)}; it must be positive")
        if batch_size is not None and batch_size % accumulate:
            raise ArgumentError(f"batch_size is {batch_size}; it must be a multiple of accumulate ({accumulate})")
        _check_optimizer(optimizer, model)
        _check_ema(ema, model)
        self.model, self.optimizer, self.batch_size, self.accumulate = model, optimizer, batch_size, accumulate
        self.ema, self._held = ema, HeldArrays(model.parameters(), "this step")
        self._body = StepBody(model, optimizer, loss, ema)
        self._gpu: GpuStep | None = None
        self._tally: Tally = HostTally()
        if model.device.ordinal is not None:
            from lt_runtime.training.captured import GpuStep

            self._gpu = GpuStep(self._body, model.device.ordinal, accumulate, graph=graph)
            self._tally = self._gpu.tally
        self._is_made = True

    def __call__(self, x: Any, target: Any, *, stream: Any = None) -> Any:
        """Updates the model from one batch.

        Args:
            x: (batch_size, inputs), of the model's type and on its device; on a GPU with contiguous rows.
            target: labels or targets, depending on the loss.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

        Returns:
            The loss before the update, shape () and FP32, on the model's device. Reading it waits for the step. On a
            GPU the next step overwrites it.

        Raises:
            ShapeError: x is not a batch of the expected shape.
            OperandError: another type or device; an array of the model's parameters has been replaced; or, where
                `lt.AdamW` checks it, data are not the rounding of their master copy.
            CaptureError: the stream is being captured, and `graph` is set.
            GpuError: no memory, or another failure. The model's values and the optimizer are as they were; without a
                graph only the averages may lack an update.
        """
        if changes.latest is not self._held.seen:
            self._held.check()
        if self._gpu is None:
            on_host({"the model": self.model.layers[0].weight.data, "x": x, "target": target})
            self._check(x)
            _check_host_stream(stream)
            self._body.run(self._cut(x, target), self._tally, None)
            return self._tally.mean.copy()
        if not self._gpu.repeat(x, target, stream):
            device_of("x", x)  # refuses what is no array
            self._check(x)
            self._gpu.run(x, target, stream)
        return self._tally.mean

    def metrics(self, *, stream: Any = None) -> Metrics:
        """Means over the steps since the last call.

        Args:
            stream: the one that the steps are on, which is waited for. If None, it is the current stream of the library
                that the batches come from, as for the steps.
        """
        if self._gpu is None:
            _check_host_stream(stream)
        totals = self._tally.read(stream) if self._gpu is None else self._gpu.totals(stream)
        loss = totals.loss / totals.steps if totals.steps else math.nan
        accuracy = totals.correct / totals.rows if totals.rows else math.nan
        return Metrics(totals.steps, loss, accuracy if self._body.classifies else None)

    def _check(self, x: Any) -> None:
        inputs, rows = self.model.dims[0], self.batch_size
        shape = tuple(getattr(x, "shape", (rows, inputs)))  # what has no shape is refused when it is read
        if rows is not None and shape != (rows, inputs):
            other = "; lt.TrainStep(..., batch_size=None) takes batches of any size" if shape[1:] == (inputs,) else ""
            raise ShapeError(f"x has shape {shape}; this step was made for {(rows, inputs)}{other}")
        if rows is None and (len(shape) != 2 or shape[1] != inputs or not shape[0] or shape[0] % self.accumulate):
            multiple = f"a multiple of {self.accumulate}" if self.accumulate > 1 else "at least one"
            raise ShapeError(f"x has shape {shape}; accepted are (M, {inputs}), M {multiple}")

    def _cut(self, x: Any, target: Any) -> list[tuple[Any, Any]]:
        """The micro-batches of NumPy arrays."""
        if self.accumulate == 1:
            return [(x, target)]
        rows = x.shape[0]
        if getattr(target, "shape", ())[:1] != (rows,):
            raise ShapeError(f"target has shape {getattr(target, 'shape', None)}; it must have {rows} rows")
        size = rows // self.accumulate
        return [(x[i : i + size], target[i : i + size]) for i in range(0, rows, size)]


def _check_optimizer(optimizer: AdamW, model: MLP) -> None:
    """Refuses an optimizer of which a parameter is not the model's: its updates would not train the model."""
    known = {(id(each.data), id(each.grad)) for each in model.parameters()}
    for parameter in optimizer.parameters:
        if (id(parameter.data), id(parameter.grad)) not in known:
            raise ArgumentError(
                f"the optimizer has {parameter.name}, which is no parameter of the model; make it with "
                "model.parameters(), or with some of them to train only those"
            )
    optimizer.check_arrays()


def _check_ema(ema: EMA | None, model: MLP) -> None:
    if ema is None:
        return
    check_instance("ema", ema, EMA, "None or an lt.EMA")
    if ema.model is not model:
        raise ArgumentError("ema averages another model; make it with lt.EMA(model)")
    ema.check_arrays()


def _check_host_stream(stream: Any) -> None:
    """Refuses what is no stream; the host uses none."""
    if stream is not None:
        stream_handle(stream, HOST)
