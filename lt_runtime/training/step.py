"""`TrainStep` and `evaluate`: options, checks of batches, and results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np

from lt_runtime.arguments import Fixed, batches_of, check_instance, flag, integer, shown
from lt_runtime.arrays.operand import HOST, device_of, library_of
from lt_runtime.distributed.group import Group, check_group
from lt_runtime.distributed.together import merged, start_together, sums_of_all
from lt_runtime.errors import ArgumentError, DriverError
from lt_runtime.gpu.streams import stream_handle
from lt_runtime.nn.block import Block
from lt_runtime.nn.mlp import brief
from lt_runtime.ops.optimizers.optimizer import Optimizer
from lt_runtime.ops.optimizers.parameters import HeldArrays, changes
from lt_runtime.ranges import STEP, range_of
from lt_runtime.training.averages import EMA, GpuTally, HostTally, Tally, Totals, scores_of
from lt_runtime.training.body import LossName, OwnFunction, StepBody, StepLoss, step_loss


class Metrics(NamedTuple):
    """Means over the steps since the metrics were last read.

    Attributes:
        steps: the number of steps.
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
    the plans; layers and products that the plan cache does not know are then measured, see `tune`. Then the step is
    captured; the graph is launched for this batch and for every later one. The step's number, the learning
    rate, the loss scale and dropout's masks advance on the device. Only the first call of a batch size waits for the
    GPU and allocates memory.

    A step may read its batch in place until it has run. So the batch may be overwritten by later work on the step's
    stream, by work that waits for an event recorded there after the call, or once the host has waited for the step.

    With `graph=False` the same operations are launched one by one, each in a range of its own, and give the same
    results bit by bit. Models on the host always run this way.

    Args:
        model: an `MLP` or another `Block`.
        optimizer: over the model's parameters, or over some of them, which freezes the others. Its settings may change
            between steps, see `lt.AdamW` and `lt.Optimizer`. The optimizer's step number decides dropout's masks, so
            that each step has different masks. If the optimizer has a scaler, its scale multiplies the loss's gradient.
        loss: "cross_entropy" (labels (M,) int32 or int64; rows labelled -100 are left out), "mse", "huber" or
            "bce_with_logits" (targets of the outputs' shape and type), or a function, see below.
        loss_options: options of a named loss: `label_smoothing` and `class_weights` of "cross_entropy", `delta` of
            "huber", `pos_weight` of "bce_with_logits". NumPy arrays are copied to the model's device once; arrays on
            the device are read again at each step.
        batch_size: number of rows of every batch. None accepts batches of any size; each size has a separate graph, and
            the eight most recently used graphs are kept.
        graph: whether to capture the step as a graph.
        accumulate: the number of micro-batches that a batch is split into. The activations of only one micro-batch are
            in memory at a time. The gradients are summed, and the loss is the mean of the micro-batches' losses. This
            mean equals the batch's loss if all micro-batches divide by the same number; "cross_entropy" with ignored
            rows or class weights may not.
        ema: an `lt.EMA` of the model, which is updated after the optimizer, in the same graph.
        group: the processes that train the model together, from `lt.group`; None for this process alone. Each process
            makes the step and calls it with its own batch of `batch_size` rows, which must be given. N processes with
            accumulate=k compute what one process computes with accumulate=N·k on their batches one after the other:
            gradients, losses and metrics are computed over the rows of all processes. Parameters, the state of the
            optimizer and averages are copied from process 0 here. See `docs/distributed.md`.
        shard_state: whether each process keeps moments and master copies of some parameters only, updates these, and
            sends them to the others (ZeRO-1). All processes then call functions that save or load the optimizer.
        tune: whether to measure how the layers run fastest if the plan cache does not know it: about a second a layer
            on an H200, for each batch size, with a progress bar on a terminal, and otherwise a line of the logger
            "lt_runtime". Later steps and processes find the results in the cache. None measures unless
            `LT_RUNTIME_TUNE=off`; `docs/tuning.md` has a table of all combinations. A failed measurement costs a
            warning. Nothing is measured on the host, or while the stream is being captured.

    The first call of each batch size tunes and captures. Meanwhile other threads must not synchronise with the whole
    device: `torch.cuda.synchronize()`, `cupy.cuda.Device().synchronize()` and the driver's `cuCtxSynchronize` fail in
    the other thread with "operation not permitted when stream is capturing", and invalidate the capture. An invalidated
    capture is tried twice more, and then raises `GpuError`. Other threads may launch work and wait for streams and
    events; their work on the same GPU makes the measurements less accurate.

    A loss of your own is a function of (outputs, target, gradient, stream). It writes the gradient of its loss with
    respect to the outputs, an array (M, outputs) of the model's type, into `gradient`, an FP32 array of this shape that
    holds zeros, and returns the loss: one FP32 number of shape () or (1,) on the model's device. The step multiplies
    the gradient by the loss scale and the micro-batch's share of the batch, and rounds it once to the model's type. The
    target is any array of M rows whose elements are integers, floating-point numbers or bool. With CuPy (or NumPy, for
    a model on the host)::

        def cauchy(outputs, target, gradient, stream):
            error = outputs.astype("float32") - target
            gradient[...] = 2 * error / (1 + error**2) / error.size
            return cp.log1p(error**2).mean()

        step = lt.TrainStep(model, optimizer, loss=cauchy)

    The function may call a loss of this package, which needs FP32 outputs to write an FP32 gradient::

        def huber(outputs, target, gradient, stream):
            outputs = outputs.astype("float32")
            return lt.huber_loss(outputs, target, delta=0.1, out_gradient=gradient, stream=stream).loss

    On a GPU, `stream` is the handle of the step's stream, which is CuPy's current stream during the call; on the host
    it is None. The function must put all its work on this stream, wait for nothing, and write only into `gradient` and
    its own arrays. At the first batch of a size it runs three times, or four or five times if layers are measured: on
    zeros (with layers in FP8 on the batch), and last in the capture. Later steps do not call it: the graph repeats the
    work that it put on the stream. A function that computes with PyTorch needs `graph=False`, since PyTorch's memory is
    not the graph's, and `torch.cuda.stream(torch.cuda.ExternalStream(stream))`.

    Raises:
        ArgumentError: an unknown loss or option, numbers that are not positive or do not divide the batch, an optimizer
            with a parameter that is not the model's, or an EMA of another model.
        OperandError: an array among the options does not fit the model, or an array of a parameter was replaced after
            the optimizer or the EMA was made.
        GroupError: the model, the optimizer or an option differs between the processes of the group.
    """

    def __init__(
        self,
        model: Block,
        optimizer: Optimizer,
        *,
        loss: LossName | OwnFunction = "cross_entropy",
        loss_options: Mapping[str, Any] | None = None,
        batch_size: int | None = None,
        graph: bool = True,
        accumulate: int = 1,
        ema: EMA | None = None,
        tune: bool | None = None,
        group: Group | None = None,
        shard_state: bool = False,
    ) -> None:
        check_instance("model", model, Block, "an lt.MLP or another lt.Block")
        check_instance("optimizer", optimizer, Optimizer, "an lt.AdamW or an lt.Optimizer")
        graph, accumulate = flag("graph", graph), integer("accumulate", accumulate)
        tune = None if tune is None else flag("tune", tune)
        batch_size = None if batch_size is None else integer("batch_size", batch_size)
        for name, value in (("batch_size", batch_size), ("accumulate", accumulate)):
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is {shown(value)}; it must be positive")
        if batch_size is not None and batch_size % accumulate:
            raise ArgumentError(f"batch_size is {batch_size}; it must be a multiple of accumulate ({accumulate})")
        check_group(group)
        if group is not None and batch_size is None:
            raise ArgumentError("batch_size is None; a step of a group needs the number of rows of each process")
        _check_optimizer(optimizer, model)
        _check_ema(ema, model)
        if flag("shard_state", shard_state) or len({*optimizer.owners}) > 1:
            why = "shard_state is True" if shard_state else "an earlier step has divided the optimizer's state"
            _check_shardable(why, optimizer, group, ema)
        self.model: Final = model
        self.optimizer: Final = optimizer
        self.batch_size: Final = batch_size
        self.accumulate: Final = accumulate
        self.ema: Final = ema
        self.group: Final = group
        self._agreed = set[Any]()  # the kinds of batches that all processes of the group have had
        measured = step_loss(loss, loss_options, model)
        self.loss: Final = measured.name
        self._body = StepBody(model, optimizer, measured, rows=batch_size, parts=accumulate, ema=ema, group=group)
        self._gpu: GpuStep | None = None
        self._tally: Tally = HostTally()
        if model.device.ordinal is not None:
            from lt_runtime.training.captured import GpuStep

            self._gpu = GpuStep(self._body, model.device.ordinal, graph=graph, tune=tune)
            self._tally, self._is_uncopied = self._gpu.tally, True
        if group is not None:
            averages = {} if ema is None else ema.averages
            options = self._options(loss_options)
            start_together(model, optimizer, averages, group, options, shard_state=shard_state)
            self._body.sum_for_owners()
        self._held = HeldArrays(model.parameters(), "this step")
        self._is_made = True

    def __call__(self, x: Any, target: Any, row_weights: Any = None, *, stream: Any = None) -> Any:
        """Updates the model from one batch.

        Args:
            x: (batch_size, inputs), of the model's type and on its device; on a GPU with contiguous rows. There may be
                axes between the two, whose elements are rows of every layer: (batch_size, tokens, inputs). A tuple of
                arrays for a model with several inputs.
            target: labels or targets, depending on the loss; on a GPU with contiguous rows.
            row_weights: (batch_size,) FP32, factors of the rows' losses, not negative; the mean divides by the same
                number as without them, see `lt.mse_loss`. Your own loss takes none: its target may hold them.
            stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
                that the first operand comes from: PyTorch's for its tensors, CuPy's for all others.

        Returns:
            The loss before the update, shape () and FP32, on the model's device. Reading it waits for the step. On a
            GPU the next step overwrites it.

        Raises:
            ShapeError: x is not a batch of the expected shape.
            OperandError: an array has another type or device than the model; an array of a parameter has been
                replaced; or, where `lt.AdamW` checks it, data are not the rounding of their master copy.
            CaptureError: the stream is being captured, and `graph` is set.
            ArgumentError: `row_weights` for a loss of your own.
            GroupError: the processes of a group give batches of different shapes or types.
            GpuError: GPU memory is exhausted, or the driver, compiler or cuBLASLt failed. The model's values and the
                optimizer are unchanged; without a graph, the averages may lack an update.
        """
        if changes.latest is not self._held.seen:
            self._held.check()
        xs = x if x.__class__ is tuple else (x,)
        batch = (*xs, target) if row_weights is None else (*xs, target, row_weights)
        if self._body.arity != len(xs):
            self._body.set_arity(len(xs))
        if self._gpu is None:
            self._body.read(batch, 0)
            self._agree_on(batch)
            stream_handle(stream, HOST)  # refuses a `stream` that is no stream
            with range_of(STEP):
                parts = [*zip(*(np.split(each, self.accumulate) for each in batch), strict=True)]
                self._body.run(parts, self._tally, None)
            return self._tally.mean.copy()
        try:
            if not self._gpu.repeat(batch, stream):
                self._agree_on(batch)
                self._gpu.run(batch, stream)
        except DriverError as error:
            error.args = (f"{self}: {error}",)
            raise
        return self._tally.mean

    def _options(self, loss_options: Mapping[str, Any] | None) -> dict[str, Any]:
        """The options that must be equal in all processes of a group, besides those of model and optimizer."""
        options = {name: getattr(self, name) for name in ("loss", "batch_size", "accumulate")}
        options["ema.decay"] = None if self.ema is None else self.ema.decay
        return options | {f"loss_options.{name}": shown(value) for name, value in (loss_options or {}).items()}

    def _agree_on(self, batch: tuple[Any, ...]) -> None:
        """Raises `GroupError` unless all processes have a batch of the same shapes and types.

        Batches of shapes and types that have been compared before are not compared again.
        """
        if self.group is None:
            return
        kinds = [(list(getattr(each, "shape", ())), str(getattr(each, "dtype", "none"))) for each in batch]
        if str(kinds) not in self._agreed:
            self.group.agree(kinds, "the shapes and types of a batch")
            self._agreed.add(str(kinds))

    def __repr__(self) -> str:
        sizes = f"batch_size={self.batch_size}, accumulate={self.accumulate}"
        ema, optimizer = "" if self.ema is None else ", EMA", type(self.optimizer).__name__
        return f"TrainStep({brief(self.model)}, {optimizer}, loss={self.loss}, {sizes}{ema})"

    def metrics(self, *, stream: Any = None) -> Metrics:
        """Means over the steps since the last call. With a group, all processes call it, and get the same means.

        Args:
            stream: the stream of the steps, which this waits for. If None, it is the current stream of the library
                that the batches come from, as for the steps.

        Raises:
            KindError: `stream` is no stream.
            DeviceError: `stream` is one of another device.
            GpuError: work on the stream has failed.
            GroupError: a process of the group has failed or left.
        """
        try:
            totals = self._tally.read(stream) if self._gpu is None else self._gpu.totals(stream)
        except DriverError as error:
            error.args = (f"{self}: {error}",)
            raise
        if self.group is not None:
            totals = Totals(totals.steps, *sums_of_all(totals[1:], self.group))
        loss = totals.loss / totals.steps if totals.steps else math.nan
        accuracy = totals.correct / totals.rows if totals.rows else math.nan
        return Metrics(totals.steps, loss, accuracy if self._body.loss.classifies else None)

    def evaluate(self, batches: Iterable[tuple[Any, Any]], *, stream: Any = None) -> Metrics:
        """Means over batches by this step's loss and group, without dropout and without an update.

        Arguments, result and errors are those of `lt.evaluate`.
        """
        return _evaluated(self.model, batches, self._body.loss, stream, self.group)


def _check_optimizer(optimizer: Optimizer, model: Block) -> None:
    """Refuses an optimizer with a parameter of another model: its updates would not train this model."""
    known = {(id(each.data), id(each.grad)) for each in model.parameters()}
    for parameter in optimizer.parameters:
        if (id(parameter.data), id(parameter.grad)) not in known:
            raise ArgumentError(
                f"the optimizer has {parameter.name}, which is no parameter of the model; make it with "
                "model.parameters(), or with some of them to train only those"
            )
    optimizer.check_arrays()


def _check_shardable(why: str, optimizer: Optimizer, group: Group | None, ema: EMA | None) -> None:
    if group is None:
        raise ArgumentError(f"{why}, but group is None; a group's processes share the state")
    if ema is not None and any(each.master is not None for each in optimizer.parameters):
        raise ArgumentError(f"{why}, and ema averages master copies, which each process has only some of")


def _check_ema(ema: EMA | None, model: Block) -> None:
    if ema is None:
        return
    check_instance("ema", ema, EMA, "None or an lt.EMA")
    if ema.model is not model:
        raise ArgumentError("ema averages another model; make it with lt.EMA(model)")
    ema.check_arrays()


def evaluate(
    model: Block,
    batches: Iterable[tuple[Any, Any]],
    *,
    loss: LossName | OwnFunction = "cross_entropy",
    loss_options: Mapping[str, Any] | None = None,
    stream: Any = None,
    group: Group | None = None,
) -> Metrics:
    """Computes the mean loss and the accuracy of a model over batches, without dropout and without an update.

    Batches may have any sizes: nothing is captured for them. The host waits for a GPU only at the end.

    Args:
        model: an `MLP` or another `Block`.
        batches: pairs of inputs (M, inputs), of the model's type and on its device, and targets, as for `TrainStep`.
        loss, loss_options: as for `TrainStep`; a function of your own writes its gradient here too.
        stream: an int handle, or a stream of CuPy, PyTorch or cuda.core; if None, the current stream of the library
            that the first operand comes from: PyTorch's for its tensors, CuPy's for all others. The first
            operand is the first batch's inputs.
        group: processes that evaluate together. All give equal batches, of which each process computes every N-th, N
            being the number of processes; all get the same means.

    Returns:
        As `TrainStep.metrics`: the number of batches in place of steps, the loss and the accuracy. The loss is the mean
        of the batches' losses, each weighted by its rows that count; NaN if there are none.

    Raises:
        KindError: `batches` is no iterable of pairs.
        GroupError: the processes give different numbers of batches.
        LtError: as `lt.linear` and the loss do.
        Whatever `batches` raises.
    """
    check_instance("model", model, Block, "an lt.MLP or another lt.Block")
    check_group(group)
    return _evaluated(model, batches, step_loss(loss, loss_options, model), stream, group)


def _evaluated(
    model: Block, batches: Iterable[tuple[Any, Any]], measured: StepLoss, stream: Any, group: Group | None
) -> Metrics:
    device = model.device.ordinal
    if stream is not None:
        stream = stream_handle(stream, HOST if device is None else device)
    tallies, sizes = list[Tally](), list[int]()
    pair = "pair (x, target)"
    own = batches_of("batches", batches, (2,), pair, "an iterable of pairs (x, target)")
    count, rank, size = 0, *((0, 1) if group is None else (group.rank, group.size))
    for count, (x, target) in enumerate(own, 1):
        if (count - 1) % size != rank:
            continue
        first = x[0] if isinstance(x, tuple) and x else x
        device_of("x", first)  # refuses inputs that are no array
        if device is not None and stream is None:
            stream = stream_handle(None, device, library_of(first).current_stream)
        outputs = model(x, stream=stream)
        out = None if measured.classifies else outputs
        value = measured.compute(outputs, target, out_gradient=out, stream=stream).loss
        scores = scores_of(outputs, target) if measured.classifies else None
        tallies.append(HostTally() if device is None else GpuTally(device, stream))
        tallies[-1].add(value, scores, 1.0, first=True, stream=stream)
        sizes.append(int(outputs.shape[0]))
    totals = [each.read(stream) for each in tallies]
    if group is not None:
        group.agree(count, "the number of batches of an evaluation")
        rows = merged([*zip(totals, sizes, strict=True)], group)
        totals, sizes = [Totals(*each) for each, _ in rows], [size for _, size in rows]
    return _means(totals, sizes, measured.classifies)


def _means(totals: list[Totals], sizes: list[int], classifies: bool) -> Metrics:
    """The mean loss and accuracy over the rows whose label is not ignored; all rows if the loss has no classes.

    Args:
        totals: the totals of each batch; the loss is the mean over the batch's rows whose label is not ignored.
        sizes: the number of rows of each batch.
    """
    counts = [each.rows for each in totals] if classifies else sizes
    rows = sum(counts)
    # A batch in which no row counts has the loss NaN, and is left out of the sum.
    whole = sum(count * each.loss for count, each in zip(counts, totals, strict=True) if count)
    accuracy = sum(each.correct for each in totals) / rows if rows else math.nan
    return Metrics(len(totals), whole / rows if rows else math.nan, accuracy if classifies else None)
